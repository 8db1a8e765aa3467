"""What a reducer did lately: samples of what it moved and held, ranks' strips, and events.

A thread of its own takes the samples, and asks the observer as ``/status.json`` does. A handler of
the `reducer` logger keeps the events. Serving threads do nothing for either but log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import TypeAdapter

from reducer.logs import Listener
from reducer.monitoring.status import ranges
from reducer.monitoring.strips import JobStrips, Strips
from reducer.wire.messages import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reducer.monitoring.observer import Observer

SAMPLE_S = 5.0
MAX_SAMPLES = 121  # those of ten minutes, from the first instant to the last
MAX_EVENTS = 200
MAX_TEXT = 400  # characters of an event
TOGETHER_S = 3.0  # what ranks of a job do within this time after each other is one event
NAMED_HOSTS = 3
_DONE = {  # what several ranks have done, by what a record says of one
    "left": "left the job",
    "lost": "died or cannot be reached",
    "back": "are back",
}

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

    What ranks of a job do one after another, such as leave it, is one event.

    Attributes:
        at: when, seconds of Unix time; of several ranks, when the first one did so.
        level: the log's; a warning if all-reduces failed, of which a log has a line on the job.
        job: the job that it is about, as `JobStatus.name`; "" if it is about none.
        rank: the one that it is about; None if there is none, or several.
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
        strips: one for each job at the latest sample (`reducer.monitoring.strips`).
    """

    incarnation: str
    now: float
    uptime_s: float
    samples: tuple[Sample, ...]
    events: tuple[Event, ...]
    strips: tuple[JobStrips, ...] = ()


_ADAPTER = TypeAdapter(ReducerHistory)


def dump(history: ReducerHistory) -> bytes:
    """Return a history as JSON."""
    return _ADAPTER.dump_json(history)


class History:
    """Remembers what one reducer does."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._strips = Strips()
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
            strips=self._strips.told,
        )

    def _sample(self) -> None:
        while True:
            status = self._observer.status()
            # What a silent thread has done is missing in the sums: they would seem to fall.
            if all(lane.answers for lane in status.lanes):
                bytes_in, bytes_out = (status.counters[f"bytes_{way}"] for way in ("in", "out"))
                sample = Sample(status.uptime_s, bytes_in, bytes_out, status.memory.held)
                self._samples.append(sample)
                self._strips.take(status, SAMPLE_S)
            if self._ended.wait(SAMPLE_S):
                return


@dataclass
class _Together:
    """What ranks of a job have done one after another, as one event.

    Attributes:
        done: what, as `_DONE` has it.
        until: when the latest one did, seconds of Unix time.
        last: the job had no other ranks then.
    """

    event: Event
    done: str
    until: float
    ranks: set[int] = field(default_factory=set)
    hosts: dict[str, None] = field(default_factory=dict)
    last: bool = False

    def add(self, record: logging.LogRecord, rank: int) -> Event:
        """Add what one more rank has done; return the event of all."""
        self.ranks.add(rank)
        self.until = record.created
        self.last |= getattr(record, "last", False)
        if host := getattr(record, "host", ""):
            self.hosts[printable(host)] = None
        if len(self.ranks) > 1:
            hosts = ", ".join(self.hosts)
            if len(self.hosts) > NAMED_HOSTS:
                hosts = f"{len(self.hosts)} hosts"
            text = f"job {self.event.job!r}: ranks {ranges(sorted(self.ranks))}"
            text += f" on {hosts} " if hosts else " "
            text += _DONE[self.done] + (", the last ones" if self.last else "")
            self.event = replace(self.event, text=text[:MAX_TEXT], rank=None)
        return self.event


class _Events(Listener):
    """Keeps records that are about jobs, or warn."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._kept: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._together: dict[str, _Together] = {}  # the latest event of each job, if it may grow

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
            level=_level(record),
            text=printable(text)[:MAX_TEXT],
            job="" if job is None else printable(str(job)),
            rank=rank if isinstance(rank, int) else None,
        )
        if event.job:
            event = self._joined(event, record)
        self._kept.append(event)

    def _joined(self, event: Event, record: logging.LogRecord) -> Event:
        """Return an event of a job, joined with the one before if both are of one kind."""
        done, together = getattr(record, "done", ""), self._together.pop(event.job, None)
        if done not in _DONE or event.rank is None:
            return event
        if together and together.done == done and record.created <= together.until + TOGETHER_S:
            with suppress(ValueError):  # newer ones have taken its place
                self._kept.remove(together.event)
        else:
            together = _Together(event, done, record.created)
        self._together[event.job] = together
        while len(self._together) > MAX_EVENTS:
            del self._together[next(iter(self._together))]
        return together.add(record, event.rank)


def _level(record: logging.LogRecord) -> Level:
    if record.levelno >= logging.ERROR:
        return "error"
    failed = record.levelno >= logging.WARNING or hasattr(record, "failed")
    return "warning" if failed else "info"
