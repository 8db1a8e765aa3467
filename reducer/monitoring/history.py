"""What a reducer did lately: samples of what it moved and held, and the events that it logged.

A thread of its own takes the samples, and asks the observer as ``/status.json`` does. A handler of
the `reducer` logger keeps the events. Serving threads do nothing for either but log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import TypeAdapter

from reducer.logs import Listener
from reducer.wire.messages import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reducer.monitoring.observer import Observer

SAMPLE_S = 5.0
MAX_SAMPLES = 121  # those of ten minutes, from the first instant to the last
MAX_EVENTS = 200
MAX_TEXT = 400  # characters of an event

Level: TypeAlias = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Sample:
    """What a reducer had done, and held, at one instant; all its threads together.

    Attributes:
        uptime_s: when, seconds since it began to serve.
        bytes_in: of contributions, since it started.
        bytes_out: of results, since it started.
        held: bytes of contributions that waited for those of other ranks.
    """

    uptime_s: float
    bytes_in: int
    bytes_out: int
    held: int


@dataclass(frozen=True)
class Event:
    """Something that the process logged: about a job, or a warning or an error.

    Attributes:
        at: when, seconds of Unix time.
        job: the job that it is about, as `JobStatus.name`; "" if it is about none.
    """

    at: float
    level: Level
    text: str
    job: str
    rank: int | None


@dataclass(frozen=True)
class ReducerHistory:
    """The latest `MAX_SAMPLES` samples and `MAX_EVENTS` events, the oldest first.

    Attributes:
        incarnation: as of `ReducerStatus`.
        now: when this was told, seconds of Unix time.
        uptime_s: the same instant, seconds since the reducer began to serve.
        samples: every `SAMPLE_S`, but for those at which a thread did not answer.
    """

    incarnation: str
    now: float
    uptime_s: float
    samples: tuple[Sample, ...]
    events: tuple[Event, ...]


_ADAPTER = TypeAdapter(ReducerHistory)


def dump(history: ReducerHistory) -> bytes:
    """Return a history as JSON."""
    return _ADAPTER.dump_json(history)


class History:
    """Remembers what one reducer does."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._events = _Events()
        self._ended = threading.Event()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Take samples, and keep events, until the end of the block."""
        logger = logging.getLogger("reducer")
        level = logger.level
        # Lines on jobs are events even where the log is to show none.
        logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
        logger.addHandler(self._events)
        thread = threading.Thread(target=self._sample, name="reducer-history", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            logger.removeHandler(self._events)
            logger.setLevel(level)

    def told(self) -> ReducerHistory:
        """Return what is remembered."""
        return ReducerHistory(
            incarnation=self._observer.incarnation,
            now=round(time.time(), 3),
            uptime_s=self._observer.uptime_s,
            samples=tuple(self._samples.copy()),
            events=self._events.all(),
        )

    def _sample(self) -> None:
        while True:
            status = self._observer.status()
            # What a silent thread has done is missing in the sums: they would seem to fall.
            if all(lane.answers for lane in status.lanes):
                bytes_in, bytes_out = (status.counters[f"bytes_{way}"] for way in ("in", "out"))
                sample = Sample(status.uptime_s, bytes_in, bytes_out, status.memory.held)
                self._samples.append(sample)
            if self._ended.wait(SAMPLE_S):
                return


class _Events(Listener):
    """Keeps records that are about jobs, or warn."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._kept: deque[Event] = deque(maxlen=MAX_EVENTS)

    def all(self) -> tuple[Event, ...]:
        """Return what is kept; other threads may log meanwhile."""
        return tuple(self._kept.copy())

    def take(self, record: logging.LogRecord, text: str) -> None:
        """Keep a record, unless it is of no interest later."""
        job, rank = getattr(record, "job", None), getattr(record, "rank", None)
        if record.levelno < logging.WARNING and job is None:
            return
        if record.exc_info and record.exc_info[0]:
            text += f" ({record.exc_info[0].__name__})"
        event = Event(
            at=round(record.created, 3),
            level=_level(record.levelno),
            text=printable(text)[:MAX_TEXT],
            job="" if job is None else printable(str(job)),
            rank=rank if isinstance(rank, int) else None,
        )
        self._kept.append(event)


def _level(number: int) -> Level:
    if number >= logging.ERROR:
        return "error"
    return "warning" if number >= logging.WARNING else "info"
