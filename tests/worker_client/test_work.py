"""`Work`: waiting, asking, and what comes out when the all-reduce failed."""

import concurrent.futures
import math
import queue
import sys
import threading
import weakref
from itertools import count

import pytest

from reducer.errors import ConfigError, RankLostError, ReductionError, ReductionTimeout
from reducer.wire.constants import DType, ReduceOp
from worker_client.protocol.operation import Operation

DATA = bytearray(12)


@pytest.fixture
def work():
    return Operation(memoryview(DATA), DType.UINT8, ReduceOp.SUM, "grad", 1.0, data=DATA)


def test_the_result_is_what_was_given(work):
    called = []
    work.future().add_done_callback(called.append)
    assert not work.done()
    assert not work.future().cancel(), "what is on the wire cannot be"
    assert not called
    work.finish(None)
    assert work.done()
    assert work.wait() is DATA
    assert work.wait(timeout=0) is DATA  # as often as one likes
    assert called == [work.future()]
    assert list(concurrent.futures.as_completed(called, timeout=1)) == called
    assert work.future().result() is DATA


@pytest.mark.parametrize(("timeout", "after"), [(0, "0"), (0.01, r"0\.01"), ("10ms", r"0\.01")])
def test_a_wait_that_is_too_short_ends_nothing(work, timeout, after):
    with pytest.raises(
        ReductionTimeout, match=f"^all-reduce 'grad' .12 bytes .* progress after {after} s$"
    ) as caught:
        work.wait(timeout)
    assert isinstance(caught.value, TimeoutError)
    assert not work.done()
    work.finish(None)
    assert work.wait() is DATA


@pytest.mark.parametrize("timeout", [30, math.inf, 10**12, "2 min"])
def test_a_wait_ends_with_it_whatever_the_patience(work, timeout):
    timer = threading.Timer(0.05, work.finish, [None])
    timer.start()
    assert work.wait(timeout) is DATA
    timer.join()


@pytest.mark.parametrize("timeout", [-1, -math.inf, math.nan, "soon", "-1s", [], 10**400])
def test_what_is_no_patience_is_refused(work, timeout):
    with pytest.raises(ConfigError, match=r"^timeout: .*got "):
        work.wait(timeout)
    assert not work.done()
    work.finish(None)
    assert work.wait() is DATA


@pytest.mark.parametrize("timeout", [None, 0, 1])
@pytest.mark.parametrize(
    "error", [RankLostError("rank 3 is gone", rank=3), ReductionTimeout("late", missing=(1,))]
)
def test_the_error_of_the_all_reduce(work, error, timeout):
    work.finish(error)
    assert work.done()
    with pytest.raises(type(error)) as caught:
        work.wait(timeout)
    assert caught.value is error  # above all: not the timeout of this wait
    assert work.future().exception() is error


def test_waits_that_were_too_short_leave_nothing(work, monkeypatch):
    made, left = [], weakref.WeakSet()

    class Noted(queue.SimpleQueue):
        def __init__(self):
            made.append(1)
            left.add(self)

    monkeypatch.setattr(queue, "SimpleQueue", Noted)
    for patience_s in (0, 0.001, 0.001):
        assert not work.ends_within(patience_s)
    assert made
    assert not left


def test_an_end_that_was_interrupted_is_made_up_for(work, monkeypatch):
    """Ctrl-C came before it woke who waits."""
    begun, interrupts = threading.Event(), iter([KeyboardInterrupt])

    class Interrupted(queue.SimpleQueue):
        def get(self, **how):
            begun.set()
            return super().get(**how)

        def put(self, item):
            for error in interrupts:
                raise error
            super().put(item)

    monkeypatch.setattr(queue, "SimpleQueue", Interrupted)
    waiting = threading.Thread(target=work.wait)
    waiting.start()
    assert begun.wait(5)
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt):
        work.end(None)
    assert work.done()
    assert not work.over
    work.end(ReductionError("later"))  # as the driver does
    waiting.join(5)
    assert not waiting.is_alive()
    assert work.future().result(0) is DATA


def test_a_piece_that_ends_again_after_an_interrupt_changes_nothing(work):
    piece = Operation(memoryview(DATA), DType.UINT8, ReduceOp.SUM, None, 1.0)
    work.split([piece])
    work.piece_ended(piece, None)
    work.piece_ended(piece, RankLostError("the client failed", rank=0))
    assert work.wait() is DATA
    assert work.future().exception() is None


@pytest.mark.parametrize("line", range(1, 25))
def test_whose_wait_for_the_future_is_interrupted_learns_of_the_interrupt(work, line):
    future, lines = work.future(), count(1)

    def trace(frame, event, _):
        if frame.f_code is not threading.Condition.wait.__code__:
            return trace
        if event == "line" and next(lines) == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises((KeyboardInterrupt, TimeoutError)):
            future.result(0.01)
    finally:
        sys.settrace(before)
    other = threading.Thread(target=work.finish, args=[None], daemon=True)
    other.start()  # who waited has left the lock to it
    other.join(5)
    assert future.result(0) is DATA


def test_what_writing_back_raises_is_the_error(work):
    def refuse():
        assert not work.done()
        raise ValueError("read-only")

    work.write_back = refuse
    work.end(None)
    with pytest.raises(ValueError, match="read-only"):
        work.wait()


@pytest.mark.parametrize(
    ("error", "expected"),
    [(None, ["written", "ended well, False"]), (ReductionError("failed"), ["failed, False"])],
)
def test_it_ends_once_and_a_good_result_is_written_back_before_anybody_hears(error, expected):
    heard = []
    work = Operation(
        memoryview(DATA),
        DType.UINT8,
        ReduceOp.SUM,
        None,
        1.0,
        write_back=lambda: heard.append("written"),
        ended=lambda error: heard.append(f"{error or 'ended well'}, {work.done()}"),
    )
    work.end(error)
    work.end(ReductionError("later"))
    assert heard == expected
    assert str(work.future().exception()) == str(error)
