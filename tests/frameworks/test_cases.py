"""Adapters through real reducers: the cases of each, in two processes that import it once."""

import os
import sys
from importlib.util import find_spec

import pytest

from tests.commands import run_command
from tests.ranks import ROOT, case_names, environments, ranks

pytestmark = pytest.mark.timeout(300)
# Modules of cases, and what they need.
MODULES = {
    "tests.frameworks.jax_cases": ("jax",),
    "tests.frameworks.mlx_cases": ("mlx", "ml_dtypes"),
    "tests.frameworks.tensorflow_cases": ("tensorflow",),
    "tests.frameworks.keras_cases": ("tensorflow", "keras"),
    "tests.frameworks.fsdp_cases": ("torch",),
    "tests.frameworks.horovod_tensorflow_cases": ("tensorflow", "keras", "torch"),
}


@pytest.fixture(scope="module")
def went(request, servers):
    """What went wrong with each case of a module, at both ranks."""
    module = request.param
    for package in MODULES[module]:
        if find_spec(package) is None:  # not imported, as that takes long and warns
            pytest.skip(f"needs {package}")
    # One rank may import its framework long after another.
    settings = {"REDUCTION_JOB": module, "REDUCTION_TIMEOUT": "60s"}
    # Forks would have torch, and cases check that the adapters do without it.
    with ranks(environments(2, servers, **settings), "-m", module, fresh=True) as job:
        return job.results(240)


@pytest.mark.parametrize(
    ("went", "case"),
    [(module, case) for module in MODULES for case in case_names(module)],
    indirect=["went"],
    scope="module",  # of the run, in which all its cases are
)
def test_case(went, case):
    assert [rank[case] for rank in went] == ["", ""]


@pytest.mark.skipif(find_spec("keras") is None, reason="needs keras")
def test_other_backends_of_keras_are_refused():
    code = "import keras, worker_client.keras as k; k.DistributedOptimizer(keras.optimizers.SGD())"
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    done = run_command(sys.executable, "-c", code, cwd=ROOT, env=environment)
    assert "ConfigError: Keras runs on jax" in done.stderr, done.stderr
