"""Real DDP in real processes, with gradients on a device: the tests' own, or a GPU for two."""

import pytest

from tests.conftest import local_pool
from tests.ranks import environments, run

torch = pytest.importorskip("torch", reason="needs torch")

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.extended("tests/worker_client/test_device_staging.py", "tests/integration/test_ddp.py")
@pytest.mark.parametrize("kind", ["slow", pytest.param("cuda", marks=on_a_gpu)])
def test_trains_as_gloo_does(kind):
    with local_pool(2) as servers:
        given = environments(2, servers)
        ends = run(given, "-m", "tests.integration.staged_ddp", kind)
    for end in ends:
        assert end["ours"] == pytest.approx(end["stock"], rel=1e-4, abs=1e-6)
        assert end["late"] == ["ok", "ok", "ReductionTimeout", "ok"]
        assert end["threads"] == ["to-host", "to-device"]  # it was staged
        if kind == "slow":
            assert "an illegal memory access" in end["broken"]  # somehow: DDP loses its type
    steps = 20  # of which each rank has its own losses; all after that are weights
    assert ends[0]["ours"][steps:] == ends[1]["ours"][steps:]
    assert ends[0]["ours"][:steps] != ends[1]["ours"][:steps]
