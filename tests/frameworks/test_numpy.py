"""A training loop in NumPy alone."""

import pytest

from tests.frameworks.training import assert_alike, train

pytest.importorskip("sklearn", reason="needs scikit-learn's digits")


@pytest.mark.timeout(300)
def test_ranks_train_alike_and_as_one_does(servers):
    assert_alike(train("numpy_digits.py", servers=servers), train("numpy_digits.py", "--stock"))
