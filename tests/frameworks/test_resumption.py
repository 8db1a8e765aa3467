"""Each framework: its default's losses, through reducers and from a checkpoint in the middle."""

from importlib.util import find_spec

import pytest

from tests.frameworks import resumption


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("module", "needs", "workers"),
    [
        ("transformers", "transformers", 2),
        ("lightning", "lightning", 2),
        ("accelerate", "accelerate", 2),
        ("sharded", "torch", 2),
        ("hsdp", "torch", 4),
        ("deepspeed", "deepspeed", 2),
        ("tensorflow", "tensorflow", 2),
        ("keras", "tensorflow", 2),
        ("jax", "orbax", 2),
    ],
)
def test_resumed_losses_are_those_of_the_frameworks_default(
    servers, tmp_path, module, needs, workers
):
    if find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    fresh = module in {"tensorflow", "keras", "jax"}
    trainings = resumption.run(module, servers, tmp_path, workers, fresh=fresh)
    for training, parts in trainings.items():
        # What is rounded has other losses than the default, and is compared with itself.
        rounded = training.endswith("_in_8_bits")
        for stock, begun, resumed in zip(*parts.values(), strict=True):
            # Sums of two do not depend on their order, so all bits are the same.
            assert begun.losses + resumed.losses == stock.losses, training
            assert len(set(stock.losses)) == len(stock.losses) == resumption.STEPS, training
            assert (stock.bytes_reduced > 0) == rounded, training
            assert min(begun.bytes_reduced, resumed.bytes_reduced) > 0, training
