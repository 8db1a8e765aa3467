"""Keeps a client's latest calls, and writes them to a file when one fails, and at its end.

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
from worker_client.protocol.spec import file_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from worker_client.client.client import Client
    from worker_client.client.membership_change import Resources
    from worker_client.communicators.communicator import Communicator
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


class RecordedCall:
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

    @property
    def missing(self) -> list[int]:
        """The ranks that have not made it, as far as is known: to whose lack it may have ended."""
        if self.ended_ns:
            lost = [self.error.rank] if isinstance(self.error, RankLostError) else []
            return lost or list(getattr(self.error, "missing", ()))
        return [] if self.work is None else list(self.work.missing)

    def described(self, place: int, *, waits: bool) -> dict[str, Any]:
        """Return it in the form of the file.

        It has `place` in the order of its group that is the same at every rank. `waits`: for ranks
        that have not made it, whichever.
        """
        well = self.ended_ns > 0 and self.error is None
        scheduled = waits or bool(self.missing)
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
                "missing": [] if self.ended_ns else self.missing,
            },
        }


class CallLog:
    """The latest calls of one client; threads may share it, but not the children of the process.

    A subdirectory of `dump`, named after the job, gets a file for each rank. With all-reduces
    through nodes, `across` are the ranks of the job at the reducers, `ordered` and `resources` what
    the client is made of.
    """

    def __init__(
        self,
        dump: Path,
        client: Client,
        ordered: Communicator,
        resources: Resources,
        across: Sequence[int] | None,
    ) -> None:
        generation = f"-generation-{client.spec.generation}" if client.spec.generation else ""
        self._directory = dump / f"{file_name(client.spec.job)}{generation}"
        self._client = client
        self._ordered = ordered
        self._resources = resources
        self._across = across
        self._joined_late = client.newcomer
        self._in_order = 0  # calls without a name so far
        self._entries: deque[RecordedCall] = deque(maxlen=KEPT)
        self._made = 0
        self._began_ns = time.time_ns()
        self._written_at = -AGAIN_S
        self._finished = False
        self._pid = os.getpid()
        self._counting = threading.RLock()  # a signal handler may make a call
        self._writing = threading.RLock()
        atexit.register(self.finish)

    def begun(self, name: object, data: Any, op: object, work: Work | None = None) -> RecordedCall:
        """Keep a call that is made, or refused."""
        group, number = (ORDERED, self._in_order) if name is None else (NAMED, None)
        entry = RecordedCall(group, number, name, data, op)
        with self._counting:
            self._in_order += name is None
            entry.id = self._made
            self._made += 1
            self._entries.append(entry)
        if work is not None:
            entry.work = work
            if name is not None:
                entry.number = getattr(work, "call", None)
            work.future().add_done_callback(lambda done: self.ended(entry, done.exception()))
        return entry

    def ended(self, entry: RecordedCall, error: BaseException | None) -> None:
        """Record the end of a call, and write all of them if it tells of other ranks."""
        entry.error = error
        entry.ended_ns = time.time_ns()
        if not isinstance(error, TELLING):
            return
        now = time.monotonic()
        if now - self._written_at >= AGAIN_S and self._pid == os.getpid():
            self._written_at = now
            # Not here: a thread that waits for this call would wait for the disk, too.
            with suppress(RuntimeError):  # the interpreter ends, and `finish` writes
                self._write_apart()

    def finish(self) -> None:
        """Write all at the end of the client or program: another rank may miss a call."""
        atexit.unregister(self.finish)
        if self._finished or self._pid != os.getpid():
            return
        for entry in tuple(self._entries):  # its caller may have left before it was noted
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
            about, waiting = self._about(), self._resources.fusion.waiting
            kept = tuple(self._entries)
            # Of calls with names there is no order in which every rank makes them.
            ordered = [(entry.number or 0, entry) for entry in kept if entry.group == ORDERED]
            named = sorted(
                (entry for entry in kept if entry.group == NAMED),
                key=lambda entry: (entry.number or 0, str(entry.name)),
            )
            entries = [
                entry.described(place, waits=not entry.ended_ns and entry.name in waiting)
                for place, entry in (*ordered, *enumerate(named))
            ]
            status = {str(group): _progress(entries, group) for group in (ORDERED, NAMED)}
            document = {"version": _FORM, "pg_status": status, **about, "entries": entries}
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

    def _about(self) -> dict[str, Any]:
        client = self._client
        ranks = list(self._across or range(client.world_size))
        groups = {"0": "calls in order", "1": "calls by name"}
        straggler = client.straggler
        return {
            "pg_config": {
                at: {"name": at, "desc": desc, "ranks": str(ranks)} for at, desc in groups.items()
            },
            "reduction": {
                "version": __version__,
                "job": client.spec.job,
                "generation": client.spec.generation,
                "run": client.spec.run,
                "rank": client.rank,
                "ranks": ranks,
                "present": list(client.present),
                "joined_late": self._joined_late,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "began_ns": self._began_ns,
                "written_ns": time.time_ns(),
                "calls": self._in_order,
                "links": [
                    {"reducer": link.address, "state": link.state.name, "connected": link.up}
                    for link in tuple(self._ordered.links)
                ],
                "counters": client.counters._asdict(),
                "straggler": None if straggler is None else asdict(straggler),
            },
        }


def _progress(entries: Sequence[Mapping[str, Any]], group: int) -> dict[str, int]:
    """Return the last calls of a group, as PyTorch says how far one has come; -1 for none."""
    last = {"scheduled": -1, "started": -1, "completed": -1}
    for entry in entries:
        if entry["pg_id"] == group:
            last[entry["state"]] = max(last[entry["state"]], entry["collective_seq_id"])
    return {
        "last_enqueued_collective": max(last.values()),
        "last_started_collective": max(last["started"], last["completed"]),
        "last_completed_collective": last["completed"],
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
    """Write a file so that its readers find all of it meanwhile, or what was there before."""
    beside = path.with_suffix(".tmp")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
