"""`Work`: waiting, asking, and what comes out when the all-reduce failed."""

from __future__ import annotations

import concurrent.futures
import math
import threading
from typing import Any

import pytest

from reducer.errors import ConfigError, RankLostError, ReductionError, ReductionTimeout
from worker_client.work import PlainWork, Work


@pytest.fixture
def work() -> Work:
    return PlainWork("all-reduce 'grad' of 12 bytes", lambda _done, _left: None)


def test_the_result_is_what_was_given(work: Work) -> None:
    data = object()
    assert not work.done()
    work.finish(data, None)
    assert work.done()
    assert work.wait() is data
    assert work.wait(timeout=0) is data  # as often as one likes
    assert work.future().result() is data


@pytest.mark.parametrize(("timeout", "after"), [(0, "0"), (0.01, r"0\.01"), ("10ms", r"0\.01")])
def test_a_wait_that_is_too_short_ends_nothing(
    work: Work, timeout: float | str, after: str
) -> None:
    with pytest.raises(
        ReductionTimeout, match=f"^all-reduce 'grad' of 12 bytes .* progress after {after} s$"
    ) as caught:
        work.wait(timeout)
    assert isinstance(caught.value, TimeoutError)
    assert not work.done()
    work.finish("result", None)
    assert work.wait() == "result"


@pytest.mark.parametrize("timeout", [30, math.inf, 1e300, 1e10, 10**12, "30s", "2 min"])
def test_a_wait_ends_with_it_whatever_the_patience(work: Work, timeout: float | str) -> None:
    timer = threading.Timer(0.05, work.finish, ["result", None])
    timer.start()
    assert work.wait(timeout) == "result"
    timer.join()


@pytest.mark.parametrize("timeout", [-1, -math.inf, math.nan, "soon", "-1s", [], 10**400])
def test_what_is_no_patience_is_refused(work: Work, timeout: Any) -> None:
    with pytest.raises(ConfigError, match=r"^timeout: .*got "):
        work.wait(timeout)
    assert not work.done()
    work.finish("result", None)
    assert work.wait() == "result"


@pytest.mark.parametrize("timeout", [None, 0, 1])
@pytest.mark.parametrize(
    "error", [RankLostError("rank 3 is gone", rank=3), ReductionTimeout("late", missing=(1,))]
)
def test_the_error_of_the_all_reduce(
    work: Work, error: ReductionError, timeout: float | None
) -> None:
    work.finish(None, error)
    assert work.done()
    with pytest.raises(type(error)) as caught:
        work.wait(timeout)
    assert caught.value is error  # above all: not the timeout of this wait
    assert work.future().exception() is error


def test_the_future_calls_back(work: Work) -> None:
    called: list[concurrent.futures.Future[object]] = []
    work.future().add_done_callback(called.append)
    assert not called
    work.finish("result", None)
    assert called == [work.future()]
    assert list(concurrent.futures.as_completed([work.future()], timeout=1)) == called


def test_what_is_on_the_wire_cannot_be_cancelled(work: Work) -> None:
    assert not work.future().cancel()
    work.finish("result", None)
    assert work.wait() == "result"


def test_it_ends_once(work: Work) -> None:
    work.finish("result", None)
    future = work.future()
    work.finish(None, ReductionError("later"))
    assert work.wait() == future.result(0) == "result"


def test_an_end_that_was_interrupted_is_made_up_for(work: Work) -> None:
    future = work.future()
    work._ended, work._result = True, "result"  # and no more, because of Ctrl-C
    work.finish(None, ReductionError("later"))
    assert future.result(0) == "result"


def test_what_writing_back_raises_is_the_error(work: Work) -> None:
    def refuse() -> None:
        assert not work.done()
        raise ValueError("read-only")

    work.finish("result", None, refuse)
    with pytest.raises(ValueError, match="read-only"):
        work.wait()


def test_nothing_is_written_back_after_an_error(work: Work) -> None:
    written: list[str] = []
    work.finish("result", ReductionError("failed"), lambda: written.append("rubbish"))
    with pytest.raises(ReductionError, match="failed"):
        work.wait()
    assert not written
