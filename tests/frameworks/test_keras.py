"""Keras: model.fit through real reducers, and a training beside one without."""

import os
import sys
from importlib.util import find_spec

import pytest

from tests.commands import run_command
from tests.frameworks.training import assert_alike, train
from tests.ranks import ROOT, case_names

# Looked for and not imported, as that takes long and warns.
if find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)

CASES = "tests.frameworks.keras_cases"
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("case", case_names(CASES))
def test_case(results, case):
    assert results[case] == [None, None], "\n".join(filter(None, results[case]))


def test_ranks_train_alike_and_as_keras_does(servers):
    ours = train("keras_digits.py", servers=servers)
    assert_alike(ours, train("keras_digits.py", "--stock"))


def test_other_backends_are_refused():
    code = "import keras, worker_client.keras as k; k.DistributedOptimizer(keras.optimizers.SGD())"
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    done = run_command(sys.executable, "-c", code, cwd=ROOT, env=environment)
    assert "ConfigError: Keras runs on jax" in done.stderr, done.stderr
