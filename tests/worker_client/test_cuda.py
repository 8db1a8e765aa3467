"""CUDA: what is asked of torch, anywhere; and what only a real GPU shows, where there is one.

`test_device_copies.py` has what staging does, over a device of the tests' own and over a GPU.
"""

import time
from unittest import mock

import numpy as np
import pytest
import torch

from reducer.errors import ConfigError, DeviceError
from tests.waits import within_s
from tests.worker_client.slow_device import reduce_all
from worker_client.staging import cuda, device
from worker_client.staging.cuda import CudaDevice
from worker_client.staging.host_buffer import STAGED, is_on_device

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
A_SECOND = 2_000_000_000  # cycles; about


@pytest.fixture
def asked(monkeypatch):
    """Stands in for torch, as the CUDA device sees it; what exists there has torch's signature."""
    stand_in = mock.MagicMock()
    stand_in.cuda = mock.create_autospec(torch.cuda)
    stand_in.cuda.is_current_stream_capturing.return_value = False
    stand_in.cuda.Stream.side_effect = [stand_in.to_host, stand_in.to_device]
    stand_in.attach_mock(stand_in.cuda, "cuda")
    monkeypatch.setattr(cuda, "torch", stand_in)
    return stand_in


def test_copies_wait_for_the_callers_stream(asked):
    opened = CudaDevice(torch.device("cuda:0"))
    opened.follow(asked.tensor)
    current = asked.cuda.current_stream
    current.assert_called_once_with(torch.device("cuda:0"))
    event = asked.cuda.Event.return_value
    event.record.assert_called_once_with(current.return_value)
    asked.to_host.wait_event.assert_called_once_with(event)
    assert asked.tensor.record_stream.mock_calls == [
        mock.call(asked.to_host),
        mock.call(asked.to_device),
    ]


def test_what_leaves_a_device_follows_a_mark(asked):
    opened = CudaDevice(torch.device("cuda:0"))
    asked.reset_mock()
    with opened.leaving(opened.mark(asked.tensor)):
        asked.fold()
    order = [call[0] for call in asked.mock_calls]
    assert order.index("cuda.Event().record") < order.index("cuda.stream().__enter__")
    assert order.index("to_host.wait_event") < order.index("fold")
    assert order.index("fold") < len(order) - 1 - order[::-1].index("cuda.stream().__exit__")
    asked.cuda.stream.assert_called_once_with(asked.to_host)
    assert asked.tensor.record_stream.call_count == 2


@pytest.mark.parametrize("way", ["to_host", "to_device"])
def test_a_copy_is_made_by_its_stream_and_an_event_follows(asked, way):
    opened = CudaDevice(torch.device("cuda:0"))
    asked.reset_mock()
    copy = getattr(opened, way)(asked.target, asked.source)
    stream, event = getattr(asked, way), asked.cuda.Event.return_value
    asked.cuda.stream.assert_called_once_with(stream)
    asked.target.copy_.assert_called_once_with(asked.source, non_blocking=True)
    asked.cuda.Event.assert_called_once_with(blocking=True)
    event.record.assert_called_once_with(stream)
    order = [call[0] for call in asked.mock_calls]
    assert order.index("cuda.stream().__enter__") < order.index("target.copy_")
    assert order.index("target.copy_") < order.index("cuda.Event().record")
    assert order[-1] == "cuda.stream().__exit__"
    event.synchronize.assert_not_called()
    copy.wait()
    event.synchronize.assert_called_once_with()
    event.query.side_effect = [False, True]
    assert [copy.done(), copy.done()] == [False, True]
    assert opened.returning() is asked.cuda.stream.return_value
    asked.cuda.stream.assert_called_with(asked.to_device)


def test_page_locked_memory(asked):
    assert CudaDevice(torch.device("cuda:0")).pinned(100) is asked.empty.return_value
    asked.empty.assert_called_once_with(100, dtype=asked.uint8, pin_memory=True)


def test_errors_of_cuda_are_typed(asked):
    opened = CudaDevice(torch.device("cuda:3"))
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    copy = opened.to_host(asked.target, asked.source)
    asked.target.copy_.side_effect = error
    asked.cuda.Event.return_value.synchronize.side_effect = error
    asked.cuda.Event.return_value.query.side_effect = error
    asked.empty.side_effect = error
    asked.to_host.wait_event.side_effect = error
    for call in (
        copy.wait,
        copy.done,
        lambda: opened.to_host(asked.target, asked.source),
        lambda: opened.to_device(asked.target, asked.source),
        lambda: opened.pinned(10),
        opened.follow,
    ):
        with pytest.raises(DeviceError, match=r"cuda:3 failed: .*illegal memory") as caught:
            call()
        assert caught.value.device == "cuda:3"


def test_a_stream_that_is_captured_is_refused(asked):
    asked.cuda.is_current_stream_capturing.return_value = True
    with pytest.raises(ConfigError, match="CUDA graph"):
        CudaDevice(torch.device("cuda:0")).follow(asked.tensor)


def test_what_is_on_a_device(asked):
    del asked
    assert all(device.open_device(torch.device(kind)) for kind in STAGED)
    assert not is_on_device(np.ones(3))
    assert not is_on_device([1.0])
    assert not is_on_device(torch.ones(3))
    assert not is_on_device(torch.ones(3, device="meta"))


@on_a_gpu
def test_copies_follow_the_callers_stream_and_work_follows_the_copies(job):
    (client,) = job(1)
    late = torch.zeros(3_000_000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(A_SECOND // 2)
        late.fill_(7.0)
        begun = time.monotonic()
        work = client.all_reduce(late, "sum")
        within_s(0.2, begun)
        assert not work.done()
    work.wait(30)
    with torch.cuda.stream(torch.cuda.Stream()):  # any stream may go on
        assert torch.equal(late, torch.full_like(late, 7.0))


@on_a_gpu
def test_a_residual_on_a_device_is_refused(job):
    (client,) = job(1, wire_dtype="int8")
    one = torch.ones(5000, device="cuda")
    with pytest.raises(ConfigError, match="in host memory"):
        client.all_reduce(one, residual=torch.zeros_like(one))


@on_a_gpu
def test_a_graph_is_refused(job):
    (client,) = job(1)
    one = torch.ones(3, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        one * 2  # a graph must not be empty
        with pytest.raises(ConfigError, match="CUDA graph"):
            client.all_reduce(one)
    reduce_all([client], [one], op="sum")


@on_a_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_one_rank_may_have_several_devices(job):
    (client,) = job(1)
    ones = [torch.full((3_000_000,), 3.0, device=f"cuda:{index}") for index in (0, 1, 0, 1)]
    for work in [client.all_reduce(one, "sum") for one in ones]:
        assert (work.wait(30) == 3.0).all()
