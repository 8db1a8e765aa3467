"""A client that keeps its latest calls, and writes them to a file when one fails, and at its end.

The file has the form of PyTorch's Flight Recorder (its version 2.10), as JSON;
`worker_client.commands.doctor.dumps` reads it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reducer import __version__
from reducer.errors import MismatchError, RankLostError, ReducerLostError, ReductionTimeout
from reducer.wire.constants import ReduceOp
from worker_client.client.client import Client
from worker_client.protocol.spec import file_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from worker_client.work import Work

KEPT = 1000  # calls
SHOWN_FRAMES = 8  # of the program, from the one that made a call outwards
AGAIN_S = 1.0  # between two writings, unless it is the last one: calls fail in numbers
MOST_S = 5.0  # that the end of a client waits for the disk
TELLING = (MismatchError, RankLostError, ReducerLostError, ReductionTimeout)
ORDERED, NAMED = 0, 1  # the groups of calls in the file, as if they were process groups
_FORM = "2.10"
_PACKAGE = str(Path(__file__).parents[1])
# As PyTorch calls them there.
_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "int32": "Int",
    "int64": "Long",
    "uint8": "Byte",
}

log = logging.getLogger(__name__)


class Entry:
    """One call of this rank, of what is in `data`.

    Attributes:
        group: `ORDERED` or `NAMED`.
        number: of the call, from 0: among those without a name, or those of its name; None: it is
            not known yet, or the call was refused.
        work: its handle; None where the call was refused at this rank.
        error: what it ended with, if it did, and badly.
        ended_ns: when it ended, of the wall clock; 0 while it goes on.
    """

    __slots__ = (
        *("created_ns", "dtype", "ended_ns", "error", "frames", "group", "id", "name", "number"),
        *("op", "shape", "work"),
    )

    def __init__(self, group: int, number: int | None, name: object, data: Any, op: object) -> None:
        self.id = 0
        self.group = group
        self.number = number
        self.name = name if name is None or isinstance(name, str) else repr(name)
        self.shape = [int(length) for length in getattr(data, "shape", ())]
        self.dtype = str(getattr(data, "dtype", type(data).__name__)).removeprefix("torch.")
        self.op = op.name.lower() if isinstance(op, ReduceOp) else str(op)
        self.created_ns = time.time_ns()
        self.frames = tuple(_program())
        self.work: Work | None = None
        self.error: BaseException | None = None
        self.ended_ns = 0

    def described(self, place: int, *, scheduled: bool) -> dict[str, Any]:
        """Return it in the form of the file.

        It has `place` in the order of its group that is the same at every rank. `scheduled`: some
        rank has not made it yet, as far as is known.
        """
        well = self.ended_ns > 0 and self.error is None
        size, dtype = [self.shape], [_DTYPES.get(self.dtype, self.dtype)]
        return {
            "record_id": self.id,
            "pg_id": self.group,
            "process_group": [str(self.group), ("calls in order", "calls by name")[self.group]],
            "collective_seq_id": place,
            "p2p_seq_id": 0,
            "op_id": self.id,
            # PyTorch's analyzer knows no backend that it does not ship.
            "profiling_name": "gloo:all_reduce",
            "input_sizes": size,
            "input_dtypes": dtype,
            "output_sizes": size,
            "output_dtypes": dtype,
            "state": "completed" if well else "scheduled" if scheduled else "started",
            "time_created_ns": self.created_ns,
            "time_discovered_started_ns": self.created_ns,
            "time_discovered_completed_ns": self.ended_ns,
            "retired": self.ended_ns > 0,
            "is_p2p": False,
            "frames": [
                {"name": name, "filename": filename, "line": line}
                for name, filename, line in self.frames
            ],
            "reduction": {
                "name": self.name,
                "call": self.number,
                "op": self.op,
                "error": None if self.error is None else _told(self.error),
                "missing": [] if self.work is None or self.ended_ns else list(self.work.missing),
            },
        }


class CallLog:
    """The latest calls of one client; threads may share it, but not the children of the process.

    Args:
        directory: where files go; made when there is something to write.
        describe: returns what the file tells besides, and as ``waiting`` the names of the calls
            that not all ranks have made yet.
    """

    def __init__(self, directory: Path, describe: Callable[[], dict[str, Any]]) -> None:
        self._directory = directory
        self._describe = describe
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._made = 0
        self._began_ns = time.time_ns()
        self._written_at = -AGAIN_S
        self._finished = False
        self._pid = os.getpid()
        self._counting = threading.RLock()  # a signal handler may make a call
        self._writing = threading.RLock()

    def note(self, entry: Entry) -> None:
        """Keep a call that begins."""
        with self._counting:
            entry.id = self._made
            self._made += 1
            self._entries.append(entry)

    def follow(self, entry: Entry, work: Work) -> None:
        """Take note of the end of a call when it comes."""
        entry.work = work
        work.future().add_done_callback(lambda done: self.end(entry, done.exception()))

    def end(self, entry: Entry, error: BaseException | None) -> None:
        """Take note of the end of a call, and write all of them if it tells of other ranks."""
        entry.error = error
        entry.ended_ns = time.time_ns()
        if not isinstance(error, TELLING):
            return
        now = time.monotonic()
        if now - self._written_at >= AGAIN_S and self._pid == os.getpid():
            self._written_at = now
            # Not here: whoever waits for this call would wait for the disk, too.
            with suppress(RuntimeError):  # the interpreter ends, and `finish` writes
                self._write_apart()

    def finish(self) -> None:
        """Write all at the end of the client or program: another rank may miss a call."""
        if self._finished or self._pid != os.getpid():
            return
        for entry in tuple(self._entries):  # whoever waited may have left before it was noted
            if entry.work is not None and entry.work.done() and not entry.ended_ns:
                entry.error, entry.ended_ns = entry.work.future().exception(), time.time_ns()
        self._finished = True
        try:
            writer = self._write_apart()
        except RuntimeError:  # the interpreter starts no threads any more
            self.write()
            return
        writer.join(MOST_S)
        if writer.is_alive():
            log.warning("the latest calls are not written after %g s (REDUCTION_DUMP)", MOST_S)

    def _write_apart(self) -> threading.Thread:
        writer = threading.Thread(target=self.write, name="dump", daemon=True)
        writer.start()
        return writer

    def write(self) -> None:
        """Write the calls that are kept; a file system that refuses is no reason to fail."""
        with self._writing:
            about = self._describe()
            about["reduction"] |= {"began_ns": self._began_ns, "written_ns": time.time_ns()}
            waiting = about.pop("waiting")
            kept = tuple(self._entries)
            # Of calls with names there is no order in which every rank makes them.
            ordered = [(entry.number or 0, entry) for entry in kept if entry.group == ORDERED]
            named = sorted(
                (entry for entry in kept if entry.group == NAMED),
                key=lambda entry: (entry.number or 0, str(entry.name)),
            )
            entries = [
                entry.described(place, scheduled=not entry.ended_ns and entry.name in waiting)
                for place, entry in (*ordered, *enumerate(named))
            ]
            document = {"version": _FORM, **about, "entries": entries}
            rank = about["reduction"]["rank"]
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                _replace(self._directory / f"calls-{rank}.json", json.dumps(document).encode())
            except OSError as error:
                log.warning(
                    "the latest calls could not be written: %s; mend that, or name another "
                    "directory (REDUCTION_DUMP)",
                    error,
                )
            else:
                log.info("the latest %d calls are in %s", len(entries), self._directory)


class RecordingClient(Client):
    """A client that writes its latest calls to a file when one of them fails, and when it ends.

    Args:
        dump: a directory; its subdirectory named after the job gets a file for each rank.
        across: ranks of the job at the reducers, if all-reduces go through nodes first.
    """

    def __init__(
        self, dump: Path, across: Sequence[int] | None, *arguments: Any, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self._made = 0
        directory = file_name(self.spec.job)
        if self.spec.generation:
            directory += f"-generation-{self.spec.generation}"
        self._log = CallLog(dump / directory, self._describe)
        self._across = across
        self._joined_late = self.newcomer
        atexit.register(self._log.finish)

    def all_reduce(
        self,
        data: Any,
        op: str | ReduceOp = ReduceOp.MEAN,
        *,
        name: str | None = None,
        timeout: float | str | None = None,
        **how: Any,
    ) -> Work:
        """As of `Client`."""
        if name is not None:
            entry = Entry(NAMED, None, name, data, op)
            return self._record(entry, data, op, name=name, timeout=timeout, **how)
        with self._order:
            entry = Entry(ORDERED, self._number(), None, data, op)
            return self._record(entry, data, op, timeout=timeout, **how)

    def decline(self, why: BaseException, *, name: str | None = None) -> None:
        """As of `Client`."""
        with self._order:
            group, number = (ORDERED, self._number()) if name is None else (NAMED, None)
            entry = Entry(group, number, name, None, "declined")
            self._log.note(entry)
            self._log.end(entry, why)
            super().decline(why, name=name)

    def shutdown(self) -> None:
        """As of `Client`."""
        super().shutdown()
        self._log.finish()
        atexit.unregister(self._log.finish)

    def _number(self) -> int:
        self._made += 1
        return self._made - 1

    def _record(self, entry: Entry, data: Any, op: str | ReduceOp, **how: Any) -> Work:
        self._log.note(entry)
        try:
            work = super().all_reduce(data, op, **how)
        except BaseException as error:
            self._log.end(entry, error)
            raise
        if entry.group == NAMED:
            entry.number = getattr(work, "call", None)
        self._log.follow(entry, work)
        return work

    def _describe(self) -> dict[str, Any]:
        ranks = list(self._across or range(self.world_size))
        groups = {"0": "calls in order", "1": "calls by name"}
        straggler = self.straggler
        return {
            "pg_config": {
                at: {"name": at, "desc": desc, "ranks": str(ranks)} for at, desc in groups.items()
            },
            "pg_status": {},
            "waiting": self._fusion.waiting,
            "reduction": {
                "version": __version__,
                "job": self.spec.job,
                "generation": self.spec.generation,
                "run": self.spec.run,
                "rank": self.rank,
                "ranks": ranks,
                "present": list(self.present),
                "joined_late": self._joined_late,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "calls": self._made,
                "links": [
                    {"reducer": link.address, "state": link.state.name, "connected": link.up}
                    for link in tuple(self._ordered.links)
                ],
                "counters": self.counters._asdict(),
                "straggler": None if straggler is None else asdict(straggler),
            },
        }


def _program() -> Iterator[tuple[str, str, int]]:
    """Yield where the program is, outside of this package, from the inside out."""
    frame = sys._getframe(1)  # noqa: SLF001 (`inspect.stack` reads the sources, each time)
    shown = 0
    while frame is not None and shown < SHOWN_FRAMES:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            yield frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno
            shown += 1
        frame = frame.f_back  # type: ignore[assignment]


def _told(error: BaseException) -> dict[str, Any]:
    ranks = {name: getattr(error, name, None) for name in ("rank", "other_rank", "missing")}
    known = {name: value for name, value in ranks.items() if value is not None}
    return {"type": type(error).__name__, "message": str(error), **known}


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that whoever reads it meanwhile finds all of it, or what was there before."""
    beside = path.with_suffix(".tmp")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
