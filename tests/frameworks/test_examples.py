"""Each example through reducers, and the same training over its framework's own backend."""

import math
from importlib.util import find_spec

import pytest

from tests.frameworks.training import assert_alike, train
from worker_client.commands.demo.ranks import free_port

# The first DeepSpeed ever compiles an extension.
pytestmark = pytest.mark.timeout(900)
DEEPSPEED = {"DS_ACCELERATOR": "cpu", "timeout_s": 600.0}
# The example and its arguments, what it needs besides scikit-learn, and what it is run with.
EXAMPLES = {
    "numpy": ("numpy_digits.py", (), {}),
    "backend": ("backend.py", ("torch",), {}),
    "fsdp": ("fsdp_digits.py", ("torch",), {}),
    "gpt": ("gpt_text.py --steps 40", ("torch",), {}),
    "horovod": ("horovod_digits.py", ("torch",), {}),
    "accelerate": ("accelerate_digits.py", ("torch", "accelerate"), {}),
    "transformers": ("transformers_digits.py", ("torch", "accelerate", "transformers"), {}),
    "lightning": ("lightning_digits.py", ("torch", "lightning"), {}),
    "deepspeed": ("deepspeed_digits.py --zero 0", ("torch", "deepspeed"), DEEPSPEED),
    "deepspeed_3": ("deepspeed_digits.py --zero 3", ("torch", "deepspeed"), DEEPSPEED),
    "jax": ("jax_digits.py", ("jax",), {}),
    "mlx": ("mlx_digits.py", ("mlx",), {}),
    "keras": ("keras_digits.py", ("keras",), {}),
    "tensorflow": ("tensorflow_digits.py", ("tensorflow",), {}),
}
# How many ports a framework's own runtime is told of, behind `--stock`.
PORTS = {"jax": 1, "mlx": 2, "tensorflow": 2}


def need(*packages):
    """Skip a test where a package is missing; it is not imported, as that takes long and warns."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_trains_as_without_reducers(servers, name):
    command, packages, options = EXAMPLES[name]
    need("sklearn", *packages)
    arguments = command.split()
    ports = ",".join(f"127.0.0.1:{free_port()}" for _ in range(PORTS.get(name, 0)))
    stock = train(*arguments, "--stock", *filter(None, [ports]), **options)
    assert_alike(train(*arguments, servers=servers, **options), stock)


def test_a_change_of_the_backends_name_is_enough_without_servers(servers):
    need("sklearn", "torch")
    assert_alike(train("backend.py"), train("backend.py", "--stock"))


def test_sites_train_by_themselves_and_end_alike(servers):
    need("torch")
    arguments = ("diloco_gpt.py", "--steps", "60", "--every", "20", "--delay", "8", "--seed", "3")
    # Three outer steps of two fragments, one more at the end, and the weights to begin with.
    often = train(*arguments, servers=servers, REDUCTION_WIRE_DTYPE="int8")
    alone = train(*arguments, "--alone", servers=servers)
    for ends in (often, alone):
        assert len({end.weights for end in ends}) == 1
    assert alone[0].bytes_reduced < often[0].bytes_reduced < 3 * alone[0].bytes_reduced
    assert max(often[0].loss, alone[0].loss) < math.log(100) - 1  # as one who knows nothing
