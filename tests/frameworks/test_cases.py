"""Adapters through real reducers: the cases of each, in two processes that import it once."""

import os
import sys
from importlib.util import find_spec

import pytest

from tests.commands import run_command
from tests.frameworks import cases
from tests.ranks import ROOT, case_names

pytestmark = pytest.mark.timeout(300)
# Modules of cases, and what they need.
MODULES = {
    "tests.frameworks.jax_cases": ("jax",),
    "tests.frameworks.tensorflow_cases": ("tensorflow",),
    "tests.frameworks.keras_cases": ("tensorflow", "keras"),
    "tests.frameworks.horovod_tensorflow_cases": ("tensorflow", "keras", "torch"),
}


@pytest.fixture(scope="module")
def results(servers):
    """Runs a module once, and returns what its cases say at each rank, by their names."""
    kept = {}

    def of(module):
        if module not in kept:
            kept[module] = {}  # a run that fails is not made again
            kept[module] = cases.run(module, servers)
        return kept[module]

    return of


@pytest.mark.parametrize(
    ("module", "case"), [(module, case) for module in MODULES for case in case_names(module)]
)
def test_case(results, module, case):
    for package in MODULES[module]:
        if find_spec(package) is None:  # not imported, as that takes long and warns
            pytest.skip(f"needs {package}")
    said = results(module)[case]
    assert said == [None, None], "\n".join(filter(None, said))


@pytest.mark.skipif(find_spec("keras") is None, reason="needs keras")
def test_other_backends_of_keras_are_refused():
    code = "import keras, worker_client.keras as k; k.DistributedOptimizer(keras.optimizers.SGD())"
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    done = run_command(sys.executable, "-c", code, cwd=ROOT, env=environment)
    assert "ConfigError: Keras runs on jax" in done.stderr, done.stderr
