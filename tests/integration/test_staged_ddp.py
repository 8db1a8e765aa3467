"""Real DDP in real processes, with gradients on a device: the tests' own, or a GPU for two."""

import pytest

from tests.ranks import environments, run

torch = pytest.importorskip("torch", reason="needs torch")

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.extended("tests/worker_client/test_device_copies.py", "tests/integration/test_ddp.py")
@pytest.mark.parametrize("kind", ["halting", pytest.param("cuda", marks=on_a_gpu)])
def test_trains_as_gloo_does(pool, kind):
    given = environments(2, pool)
    for rank in run(given, "-m", "tests.integration.wire_ddp", "staged_", kind):
        assert set(rank.values()) == {""}
