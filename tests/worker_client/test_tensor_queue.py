"""What is done with every named tensor: accepted or refused, packed, ended."""

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from reducer.errors import ConfigError, LocalProtocolError, ReductionTimeout
from reducer.wire.constants import DType, ReduceOp
from worker_client.fusion import negotiation
from worker_client.fusion._tensor_queue import pack, unpack
from worker_client.fusion.negotiation import Tensor
from worker_client.fusion.tensor_queue import TensorQueue
from worker_client.work import Work

Submit = Callable[..., Any]

THRESHOLD = 1000
TIMEOUT_S = 60.0


@pytest.fixture
def queue():
    return TensorQueue(lambda _done, _until: None, TIMEOUT_S, THRESHOLD, cycle_s=0.0)


@pytest.fixture
def submit(queue):
    def submit(data, op="sum", name="x", timeout=None, exact=False):
        return queue.submit(data, op, name, timeout, exact)

    return submit


ARRAYS = {
    DType.FLOAT32: np.arange(5, dtype=np.float32),
    DType.FLOAT64: np.arange(5, dtype=np.float64).reshape(5, 1),
    DType.FLOAT16: np.arange(4, dtype=np.float16).reshape(2, 2),
    DType.BFLOAT16: np.arange(3).astype(ml_dtypes.bfloat16),
    DType.INT8: np.arange(0, dtype=np.int8),
    DType.INT32: np.array(7, np.int32),
    DType.INT64: np.arange(5, dtype=np.longlong),
    DType.UINT8: np.arange(5, dtype=np.uint8),
}


@pytest.mark.parametrize("dtype", ARRAYS)
def test_what_an_array_is(queue, submit, dtype):
    array = ARRAYS[dtype].copy()
    for call in range(2):  # the second time the name is known
        request = submit(array, ReduceOp.MAX, "grad")
        assert request.tensor == Tensor("grad", dtype, ReduceOp.MAX, array.nbytes)
        assert request.key == (request.tensor, call)
        assert bytes(request.view) == array.tobytes()
        assert not request.done()
        assert str(request) == (f"all-reduce 'grad' ({array.nbytes} bytes of {dtype.name})")
        queue.take(list(queue.requests))


def test_the_memory_is_what_was_accepted(submit):
    array = np.arange(4, dtype=np.float32)
    request = submit(array)
    array.flags.writeable = False
    array.dtype = np.dtype(complex)
    request.view[:4] = np.float32(7).tobytes()
    assert request.view.nbytes == 16
    assert array.view(np.float32).tolist() == [7, 1, 2, 3]
    view = request.view
    del request  # whoever has the memory keeps it
    gc.collect()
    assert view.tobytes() == array.tobytes()


def test_a_name_may_stand_for_something_else_later(queue):
    for data, op, exact, shape, kind in [
        (np.ones(4, np.float32), "sum", False, "", (DType.FLOAT32, ReduceOp.SUM, 16)),
        (np.ones(4, np.float32), "mean", False, "", (DType.FLOAT32, ReduceOp.MEAN, 16)),
        (np.ones(4, np.int32), "sum", False, "", (DType.INT32, ReduceOp.SUM, 16)),
        (np.ones(5, np.int32), "sum", True, "", (DType.INT32, ReduceOp.SUM, 20)),
        (np.ones(5, np.int32), "sum", True, "(5, 1)", (DType.INT32, ReduceOp.SUM, 20)),
        (np.ones(5, np.int32), "sum", True, "(1, 5)", (DType.INT32, ReduceOp.SUM, 20)),
        (np.ones(10, np.float32)[::2], "sum", False, "", (DType.FLOAT32, ReduceOp.SUM, 20)),
    ]:
        for _ in range(2):
            tensor = queue.submit(data, op, "x", None, exact, shape).tensor
            assert tensor == Tensor("x", *kind, exact, shape)
            queue.take(list(queue.requests))
    assert queue.calls == {"x": 14}


def test_as_many_names_as_one_likes(submit):
    array = np.ones(1, np.float32)
    for number in range(negotiation.MOST_KNOWN + 10):
        assert submit(array, "sum", f"{number}").tensor.name == f"{number}"


def test_torchs_reductions_are_taken(submit):
    ops = pytest.importorskip("torch.distributed", reason="needs torch").ReduceOp
    for at, (op, ours) in enumerate({ops.SUM: "SUM", ops.AVG: "MEAN", ops.MAX: "MAX"}.items()):
        assert submit(np.ones(3), op, f"{at}").tensor.op.name == ours
    with pytest.raises(ConfigError, match="unknown op"):
        submit(np.ones(3), ops.BXOR)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data": np.ones(3, complex)}, "dtype complex128 cannot be reduced"),
        ({"data": np.ones(3, ">f4")}, "byte order"),
        ({"data": np.broadcast_to(np.float32(1), 3)}, "read-only"),
        ({"data": np.ma.ones(3)}, "masked"),
        ({"data": [1.0]}, "got list"),
        ({"op": "median"}, "unknown op 'median'"),
        ({"data": np.ones(3, int), "op": "mean"}, "mean of int64"),
        ({"name": 5}, "name must be a string, got 5"),
        ({"name": "\ud800"}, r"UTF-8 can express, got '\\ud800'"),
        ({"timeout": "soon"}, "timeout"),
    ],
)
def test_what_is_refused_leaves_nothing(queue, submit, arguments, words):
    good = np.ones(3, np.float32)
    submit(good)  # so that the name is known
    queue.take(list(queue.requests))
    with pytest.raises(ConfigError, match=words):
        submit(**{"data": good, **arguments})
    assert not queue.requests
    assert queue.calls == {"x": 1}
    assert queue.news_bytes == 12


def test_one_of_a_name_at_a_time(queue, submit):
    first = submit(np.ones(3))
    with pytest.raises(ConfigError, match="'x' is in progress: wait for it"):
        submit(np.ones(3))
    assert queue.requests == {"x": first}
    assert queue.calls == {"x": 1}


def test_nothing_is_accepted_after_the_end(queue, submit):
    queue.close(LocalProtocolError("it was shut down"))
    with pytest.raises(LocalProtocolError, match="it was shut down") as raised:
        submit(np.ones(3))
    assert raised.value is not queue.refusal  # each gets a traceback of its own
    assert not queue.requests


def test_deadlines(submit):
    now = time.monotonic()
    assert 0 <= submit(np.ones(3)).deadline - now - TIMEOUT_S < 30
    assert 0 <= submit(np.ones(3), name="y", timeout="500s").deadline - now - 500 < 30


def test_news_are_told_when_they_begin_and_when_they_are_enough(queue, submit, monkeypatch):
    notified, notify_all = [], queue.changed.notify_all
    told = {"notify_all": lambda: (notify_all(), notified.append(1))}  # it is ours, or that raises
    monkeypatch.setattr(queue, "changed", SimpleNamespace(**told))
    assert queue.news_since is None
    for number, times in [(0, 1), (1, 1), (2, 2), (3, 3)]:
        submit(np.ones(100, np.float32), name=f"{number}")
        assert len(notified) == times
    assert queue.news_bytes == 1600
    assert queue.news_since is not None
    assert queue.news_since < queue.news_until
    monkeypatch.undo()
    queue.begin_round()
    submit(np.ones(1, np.float32), name="later")
    assert queue.news_since == queue.news_until


# -- packing ------------------------------------------------------------------------------------


def test_packed_reduced_and_ended(queue, submit):
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    columns = grid[:, ::2]  # a copy is reduced, and written back
    arrays = [
        np.arange(5, dtype=np.float32),
        columns,
        np.ones(0, np.float32),
        np.ones(3, np.float32),
    ]
    requests = [submit(array, name=f"{at}") for at, array in enumerate(arrays)]
    future = requests[0].future()
    packed = np.zeros(14 + 2, np.float32)
    pack(requests, packed.view(np.uint8).data)
    assert packed.tolist() == [0, 1, 2, 3, 4, 0, 2, 4, 6, 8, 10, 1, 1, 1, 0, 0]
    packed *= 2
    assert not any(request.done() for request in requests)
    unpack(requests, packed[:14].view(np.uint8).data)
    assert all(request.wait(0) is data for request, data in zip(requests, arrays, strict=True))
    assert future.result(0) is arrays[0]
    assert requests[3].future().result(0) is arrays[3]
    assert arrays[0].tolist() == [0, 2, 4, 6, 8]
    assert grid.tolist() == [[0, 1, 4, 3], [8, 5, 12, 7], [16, 9, 20, 11]]
    assert arrays[3].tolist() == [2, 2, 2]


def test_one_that_has_failed_before_stays_so(queue, submit):
    request, other = submit(np.ones(1)), submit(np.ones(1), name="y")
    request.end(ReductionTimeout("too late"))
    unpack([request, other], memoryview(bytearray(16)))
    with pytest.raises(ReductionTimeout, match="too late") as raised:
        request.wait(0)
    assert raised.value.name == "x"
    assert other.done()


@pytest.mark.parametrize("line", range(12))
def test_a_future_that_is_asked_for_while_all_ends(queue, submit, line):
    request = submit(np.ones(1))
    end = threading.Thread(target=unpack, args=([request], memoryview(bytearray(8))))
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_code is Work.future.__code__ and event == "line":
            if lines == line:
                end.start()
                end.join(0.05)  # by then it has ended, or waits for the lock
            lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        future = request.future()
    finally:
        sys.settrace(before)
    if not end.ident:
        end.start()  # there are fewer lines
    end.join()
    assert future.done()
    assert request.future() is future


def test_memory_is_free_when_nobody_holds_the_handle(queue, submit):
    array = np.ones(10, np.float32)
    request = submit(array)
    queue.end(queue.take("x"), None, np.zeros(10, np.float32).view(np.uint8).data)
    ended = weakref.ref(array)
    del array, request
    gc.collect()
    assert ended() is None


def test_a_handle_that_its_own_callback_holds_is_collected(queue, submit):
    request = submit(np.ones(10, np.float32)[::2])  # of which a copy is lent
    request.future().add_done_callback(lambda _, held=request: held)
    queue.requests.clear()
    gone = weakref.ref(request.future())
    del request
    gc.collect()  # what cannot be told here is an error of pytest's
    assert gone() is None
