"""Each framework: its default's losses, through reducers and from a checkpoint in the middle."""

from importlib.util import find_spec

import pytest

from tests.frameworks.resumption import PARTS, STEPS, Trained
from tests.ranks import environments, run


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("module", "needs", "workers"),
    [
        ("transformers", "transformers", 2),
        ("sharded", "torch", 2),
        ("hsdp", "torch", 4),
        ("deepspeed", "deepspeed", 2),
    ],
)
def test_resumed_losses_are_those_of_the_frameworks_default(
    servers, tmp_path, module, needs, workers
):
    if find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    command = ("-m", f"tests.frameworks.trainings.{module}")
    parts = [
        run(environments(workers, servers, REDUCTION_TIMEOUT="60s"), *command, part, tmp_path)
        for part in PARTS
    ]
    for of_rank in zip(*parts, strict=True):
        for training in of_rank[0]:
            stock, begun, resumed = (Trained(*part[training]) for part in of_rank)
            # Sums of two do not depend on their order, so all bits are the same.
            assert begun.losses + resumed.losses == stock.losses, training
            assert len(set(stock.losses)) == len(stock.losses) == STEPS, training
            assert (stock.bytes_reduced > 0, begun.bytes_reduced > 0) == (False, True), training
            assert resumed.bytes_reduced > 0, training
