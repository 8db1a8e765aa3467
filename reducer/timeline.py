"""A file of what happened when, as Perfetto and chrome://tracing open it.

It holds an array of events of Google's trace event format. Times are microseconds of the process's
monotonic clock; `worker_client.commands.timeline` joins several files on one clock. The file is
complete after every write, which puts the array's end anew behind the new events; who reads it
during a write may find the array without its end.
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import ConfigError
from reducer.logs import Listener

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Part = tuple[str, float, float]  # its name, when it began and ended

MOST_BYTES = 64 << 20  # of a file: about 100,000 all-reduces
MOST_WAITING = 1 << 16  # events that have yet to be written
FLUSH_S = 0.5
LANES = 100  # of a track: what overlaps there
_END = b"\n]\n"
_JSON = json.JSONEncoder(separators=(",", ":"), default=str).encode
_BOOT = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger(__name__)


class _TraceEvent(NamedTuple):
    """One slice, or an instant if it has no end; times in seconds of the monotonic clock."""

    track: str
    name: str
    begin_s: float
    end_s: float | None
    args: Mapping[str, object]
    parts: Sequence[Part]


class Timeline:
    """The file of one process; threads may share it.

    Args:
        path: of the file, which is replaced.
        process: what the process is called there.
        about: what `merge` must know of it.
        most_bytes: size of the file, from which on nothing more is written.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        process: str,
        about: Mapping[str, object],
        *,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._pid = os.getpid()
        # By track: the number of its first lane, and when each lane was last in use.
        self._tracks: dict[str, tuple[int, list[float]]] = {}
        self._waiting: deque[_TraceEvent] = deque()
        self._dropped = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"no timeline can be written to {path}: {error.strerror}: name a directory that "
                "can be written to"
            ) from None
        self._size = 0  # up to the array's end
        self._full = False
        self._closed = False
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._write([self._metadata("process_name", 0, name=process)])
        clock = {"boot": _boot(), "host": socket.gethostname(), "wall_ns": time.time_ns()}
        self.instant("events", "begins", time.monotonic(), {**about, **clock})
        self._flush()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def slice(
        self,
        track: str,
        name: str,
        span: tuple[float, float],
        args: Mapping[str, object],
        parts: Sequence[Part] = (),
    ) -> None:
        """Add something that lasted, in seconds of the monotonic clock, and what it consisted of.

        What overlaps on a track is shown in lines below each other. Parts follow one another.
        """
        self._add(_TraceEvent(track, name, *span, args, parts))

    def instant(self, track: str, name: str, at_s: float, args: Mapping[str, object]) -> None:
        """Add something that happened at a moment, in seconds of the monotonic clock."""
        self._add(_TraceEvent(track, name, at_s, None, args, ()))

    def close(self) -> None:
        """Write the rest. May be called again, or by a child that has none of it."""
        if self._pid != os.getpid() or self._closed:
            return
        self._ended.set()
        self._thread.join()  # an interrupt here leaves the rest to the next call
        self._flush()
        self._closed = True
        os.close(self._file)
        atexit.unregister(self.close)

    def _add(self, event: _TraceEvent) -> None:
        if self._full:
            return
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(event)
        else:
            self._dropped += 1

    def _run(self) -> None:
        while not self._ended.wait(FLUSH_S):
            self._flush()

    # -- what one thread at a time does -------------------------------------------------------

    def _flush(self) -> None:
        lines: list[str] = []
        with self._writing:
            for _ in range(len(self._waiting)):
                lines += self._lines(self._waiting.popleft())
            dropped, self._dropped = self._dropped, 0
            if dropped:
                lost = _TraceEvent(
                    "events", f"{dropped} events are missing", time.monotonic(), None, {}, ()
                )
                lines += self._lines(lost)
            if lines and not self._full:
                self._write(lines)

    def _write(self, lines: Sequence[str]) -> None:
        data = ",\n".join(lines).encode()
        if self._size + len(data) > self._most_bytes:
            self._full = True
            full = _TraceEvent("events", "the file is full", time.monotonic(), None, {}, ())
            data = ",\n".join(self._lines(full)).encode()
            log.warning("the timeline %s is full: what follows is left out", self._path)
        data = (b",\n" if self._size else b"[\n") + data
        try:
            if os.pwrite(self._file, data + _END, self._size) < len(data + _END):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._full = True
            log.warning(
                "the timeline %s ends here: %s; mend that, or name another directory "
                "(REDUCTION_TIMELINE)",
                *(self._path, error.strerror),
            )
            with suppress(OSError):  # there was room for this before
                os.ftruncate(self._file, self._size)
                os.pwrite(self._file, _END, self._size)
            return
        self._size += len(data)

    def _lines(self, event: _TraceEvent) -> list[str]:
        track, name, begin_s, end_s, args, parts = event
        if track not in self._tracks:
            self._tracks[track] = LANES * (1 + len(self._tracks)), []
        first, lanes = self._tracks[track]
        begin = 0.0 if end_s is None else begin_s
        lane = next((at for at, until in enumerate(lanes) if until <= begin), len(lanes))
        if end_s is None:
            lane = 0
        lines: list[str] = []
        if lane >= LANES:
            self._dropped += 1
            return lines
        tid = first + lane
        if lane == len(lanes):
            lanes.append(0.0)
            called = track if lane == 0 else f"{track} {lane + 1}"
            lines.append(self._metadata("thread_name", tid, name=called))
            lines.append(self._metadata("thread_sort_index", tid, sort_index=tid))
        where = f'"pid":{self._pid},"tid":{tid}'
        said = f'"name":{_JSON(name)},"args":{_JSON(args)}'
        if end_s is None:
            at = f'"ts":{int(begin_s * 1e9) / 1000:.3f}'
            lines.append(f'{{"ph":"i","s":"t",{at},{where},{said}}}')
            return lines
        lanes[lane] = end_s
        shown = [(f'"name":"{part}"', since_s, until_s) for part, since_s, until_s in parts]
        for what, since_s, until_s in ((said, begin_s, end_s), *shown):
            # In whole nanoseconds, so that parts lie within what they are of.
            begin_ns, end_ns = int(since_s * 1e9), int(until_s * 1e9)
            times = f'"ts":{begin_ns / 1000:.3f},"dur":{(end_ns - begin_ns) / 1000:.3f}'
            lines.append(f'{{"ph":"X",{times},{where},{what}}}')
        return lines

    def _metadata(self, what: str, tid: int, **args: object) -> str:
        event = {"ph": "M", "name": what, "pid": self._pid, "tid": tid, "args": args}
        return _JSON(event)


class LogEvents(Listener):
    """Puts what is logged on a timeline, from a level on."""

    def __init__(self, timeline: Timeline, level: int) -> None:
        super().__init__(level)
        self._timeline = timeline

    def take(self, record: logging.LogRecord, text: str) -> None:
        """Add a record as an instant."""
        args = {"level": record.levelname.lower(), "logger": record.name}
        self._timeline.instant("events", text, time.monotonic(), args)


def _boot() -> str:
    """Return what tells the kernel's run, whose monotonic clock all processes share; or ""."""
    with suppress(OSError):
        return _BOOT.read_text(encoding="ascii").strip()
    return ""
