"""JAX: pytrees through real reducers, and a training beside that of JAX's own collectives."""

import pytest

from tests.frameworks.training import assert_alike, train
from tests.ranks import case_names
from worker_client.commands.demo.ranks import free_port

pytest.importorskip("jax", reason="needs jax")

CASES = "tests.frameworks.jax_cases"
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("case", case_names(CASES))
def test_case(results, case):
    assert results[case] == [None, None], "\n".join(filter(None, results[case]))


def test_ranks_train_alike_and_as_jax_does(servers):
    ours = train("jax_digits.py", servers=servers)
    assert_alike(ours, train("jax_digits.py", "--stock", f"127.0.0.1:{free_port()}"))
