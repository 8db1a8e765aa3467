"""What becomes of a client's all-reduces, on a timeline while there is one."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from reducer.timeline import LogEvents, Timeline
from reducer.wire.constants import PLACES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from reducer.timeline import Part
    from worker_client.protocol.operation import Operation
    from worker_client.protocol.spec import JobSpec

    Ended = Callable[[Exception | None], object]
    Show = Callable[[Timeline, float, dict[str, str]], None]

ALL_REDUCES = "all-reduces"
TENSORS = "tensors with names"
DEVICE = "tensors on devices"
# Names of an all-reduce's slices, by how many of its timestamps are known: none if a process
# group has made it, one if it has failed.
_PARTS: tuple[tuple[str, ...], ...] = (
    ("elsewhere",),
    ("queued", "unfinished"),
    (),
    ("queued", "sent", "waited", "received"),
)


class Trace:
    """The timeline of one client, if there is one; threads may share it.

    Attributes:
        timeline: what is written to; None: nothing is.
    """

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self._opened = ExitStack()
        self._changing = threading.RLock()  # a signal handler may stop it

    def start(self, path: Path, spec: JobSpec) -> None:
        """Write what happens from now on, at the rank of `spec`, to a file, which is replaced.

        Raises:
            ConfigError: it cannot be written.
        """
        with self._changing:
            self.stop()
            about = {
                "kind": "rank",
                "job": spec.job,
                "generation": spec.generation,
                "rank": spec.rank,
            }
            timeline = Timeline(path, f"rank {spec.rank} of {spec.world_size}, {spec.job}", about)
            self._opened.callback(timeline.close)
            handler, mine = LogEvents(timeline, logging.WARNING), logging.getLogger("worker_client")
            mine.addHandler(handler)
            self._opened.callback(mine.removeHandler, handler)
            self.timeline = timeline

    def stop(self) -> None:
        """Write the rest, and nothing more. May be called again."""
        with self._changing:
            self.timeline = None
            self._opened.close()

    def follow(self, operation: Operation, spec: JobSpec) -> None:
        """Show an all-reduce that is submitted now, once it ends; its `ended` is set already.

        `spec` is of the membership that it is submitted to, which may number ranks otherwise.
        """
        submitted_s = time.monotonic()

        def show(timeline: Timeline, now: float, failure: dict[str, str]) -> None:
            if operation.over:
                return
            number = operation.sequence
            args = {
                "bytes": operation.view.nbytes,
                "dtype": operation.dtype.name.lower(),
                "op": operation.op.name.lower(),
                "job": spec.job,
                "generation": spec.generation,
                "rank": spec.rank,
                "sequence": number,
                **failure,
            }
            name = operation.name or f"all-reduce {number // PLACES}"
            parts = _parts(operation, submitted_s, now)
            timeline.slice(ALL_REDUCES, name, (submitted_s, now), args, parts)

        operation.ended = self.observed(operation.ended, show)

    def fused(self, names: Sequence[str], asked_s: float, ended: Ended) -> Ended:
        """Show tensors that are reduced together from now on, once they are.

        The first of them was asked for at `asked_s`, in seconds of the monotonic clock. Return what
        is to be called in place of `ended`.
        """
        begun_s = time.monotonic()

        def show(timeline: Timeline, now: float, failure: dict[str, str]) -> None:
            title = names[0] if len(names) == 1 else f"{len(names)} tensors"
            parts = (("negotiated", asked_s, begun_s), ("reduced", begun_s, now))
            args = {"tensors": list(names), **failure}
            timeline.slice(TENSORS, title, (asked_s, now), args, parts)

        return self.observed(ended, show)

    def observed(self, ended: Ended | None, show: Show) -> Ended:
        """Return what is to be called in place of `ended`: it shows the end first, at its time."""

        def traced(error: Exception | None) -> None:
            timeline = self.timeline
            if timeline is not None:
                failure = {} if error is None else {"error": f"{type(error).__name__}: {error}"}
                show(timeline, time.monotonic(), failure)
            if ended is not None:
                ended(error)

        return traced


class CopyTimings:
    """When what happened to a tensor of so many bytes on a device, for the timeline."""

    def __init__(self, trace: Trace, nbytes: int) -> None:
        self._trace = trace
        self._nbytes = nbytes
        self._asked_s = self._copied_s = self._reduced_s = time.monotonic()

    def copied(self, wait: Callable[[], object] | None) -> Callable[[], None]:
        """Return what waits for a piece in host memory, and records when it was there."""

        def traced() -> None:
            if wait is not None:
                wait()
            self._copied_s = time.monotonic()

        return traced

    def reduced(self, ended: Ended) -> Ended:
        """Return what is to be called at a piece's end, which records it."""

        def traced(error: Exception | None) -> None:
            self._reduced_s = time.monotonic()
            ended(error)

        return traced

    def finished(self, ended: Ended | None) -> Ended:
        """Return what is to be called at the end of all, which shows it."""

        def show(timeline: Timeline, now: float, failure: dict[str, str]) -> None:
            copied_s = min(self._copied_s, now)
            reduced_s = min(max(self._reduced_s, copied_s), now)
            parts = (
                ("copied from the device", self._asked_s, copied_s),
                ("reduced", copied_s, reduced_s),
                ("copied to the device", reduced_s, now),
            )
            args = {"bytes": self._nbytes, **failure}
            timeline.slice(DEVICE, "all-reduce", (self._asked_s, now), args, parts)

        return self._trace.observed(ended, show)


def _parts(operation: Operation, submitted_s: float, now: float) -> list[Part]:
    """Return what an all-reduce was doing, without gaps, from its submission to its end."""
    known = (operation.begun, operation.sent, operation.answered)
    times = [submitted_s]
    for moment in filter(None, known):
        times.append(min(max(moment, times[-1]), now))
    names = _PARTS[len(times) - 1]
    return list(zip(names, times, (*times[1:], now), strict=True))
