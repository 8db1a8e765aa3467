"""A Horovod script through reducers, and the same training over Gloo."""

import pytest

from tests.frameworks.training import assert_alike, train

pytest.importorskip("sklearn", reason="needs scikit-learn")
pytest.importorskip("torch", reason="needs torch")


@pytest.mark.timeout(300)
def test_a_horovod_script_trains_as_over_gloo(servers):
    ours = train("horovod_digits.py", servers=servers)
    assert_alike(ours, train("horovod_digits.py", "--stock"))
