"""TensorFlow: gradients through real reducers, and a training beside TensorFlow's own strategy."""

from importlib.util import find_spec

import pytest

from tests.frameworks.training import assert_alike, train
from tests.ranks import case_names
from worker_client.commands.demo.ranks import free_port

# Looked for and not imported, as that takes long and warns.
if find_spec("tensorflow") is None:
    pytest.skip("needs tensorflow", allow_module_level=True)

CASES = "tests.frameworks.tensorflow_cases"
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("case", case_names(CASES))
def test_case(results, case):
    assert results[case] == [None, None], "\n".join(filter(None, results[case]))


def test_ranks_train_alike_and_as_tensorflow_does(servers):
    ours = train("tensorflow_digits.py", servers=servers)
    hosts = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    assert_alike(ours, train("tensorflow_digits.py", "--stock", hosts))
