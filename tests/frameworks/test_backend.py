"""The process-group backend under scripts as users write them, and under DeepSpeed."""

import pytest

from tests.frameworks.training import assert_alike, train

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("sklearn", reason="needs scikit-learn")


@pytest.mark.timeout(600)
def test_ddp_trains_when_only_the_name_of_its_backend_is_changed(servers):
    stock = train("backend.py", "--stock")
    assert_alike(train("backend.py", servers=servers), stock)
    assert_alike(train("backend.py"), stock)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", ["0", "3"])
def test_deepspeed(servers, stage):
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    arguments = ("deepspeed_digits.py", "--zero", stage)
    # The first one ever compiles an extension of DeepSpeed's.
    stock = train(*arguments, "--stock", timeout_s=600, DS_ACCELERATOR="cpu")
    assert_alike(train(*arguments, servers=servers, DS_ACCELERATOR="cpu"), stock)
