"""Real reducers, and clients of them whose callers may lead."""

import math
import time

import pytest

from tests.conftest import local_pool
from worker_client.client import bootstrap
from worker_client.runtime import _loop
from worker_client.staging import device, split_call


@pytest.fixture(scope="module")
def pool():
    with local_pool(2) as servers:
        yield servers


@pytest.fixture
def make(request, pool):
    made = []

    def one(rank=0, world_size=1):
        job = f"{request.node.name}-{time.monotonic_ns() if world_size == 1 else ''}"
        made.append(
            bootstrap.connect(servers=pool, rank=rank, world_size=world_size, job=job, timeout=20)
        )
        return made[-1]

    yield one
    for client in made:
        client.shutdown()


@pytest.fixture
def client(make):
    """A job of one rank: its all-reduces end as soon as the reducer has answered."""
    return make()


@pytest.fixture
def eager(monkeypatch):
    """Whoever waits asks to lead, until it does."""
    monkeypatch.setattr(_loop, "OFTEN_S", math.inf)
    monkeypatch.setattr(_loop, "ASKING_S", 10.0)


@pytest.fixture
def devices(monkeypatch):
    """Torch's tensors are on a slow device, and their pieces are small."""
    torch = pytest.importorskip("torch", reason="needs torch")
    from tests.worker_client import slow_device  # noqa: PLC0415 (it imports torch)

    made = slow_device.Devices()
    asked = "worker_client.client.client.is_on_device"
    monkeypatch.setattr(asked, lambda data: isinstance(data, torch.Tensor))
    monkeypatch.setattr(device, "open_device", made.open)
    monkeypatch.setattr(split_call, "PIECE_BYTES", slow_device.PIECE)
    yield made
    for one in made.opened:
        one.close()


@pytest.fixture(params=["slow", "cuda"])
def device_of_any_kind(request):
    """The tests' slow device, or a GPU where there is one."""
    if request.param == "slow":
        return request.getfixturevalue("devices")
    torch = pytest.importorskip("torch", reason="needs torch")
    from tests.worker_client.slow_device import Gpu  # noqa: PLC0415 (it imports torch)

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return Gpu()
