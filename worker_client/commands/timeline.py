"""`worker-client timeline`: files of ranks and reducers, put on one clock, and merged into one.

Every host has a clock of its own, and messages between hosts bound how far two of them are apart:
no contribution arrives before its rank has begun to send it, and no rank has a result before the
reducer had it. So each all-reduce that both a rank and a reducer have written down gives an upper
and a lower bound of the difference of their clocks. Bounds add up along a path of hosts, so the
tightest ones are shortest paths. The offset is taken from the middle of both bounds, and half of
what is between them is its error: the shortest way there and back, by and large.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reducer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    Events = list[dict[str, Any]]
    Key = tuple[str, int, int]  # a job, its generation, and the number of an all-reduce


class TimelineSpan(NamedTuple):
    """An all-reduce as a rank has it: when it began to be sent, and when it ended."""

    rank: int  # as the reducers call it, which changes when ranks are lost
    begun_us: float
    ended_us: float


class TimelineRound(NamedTuple):
    """An all-reduce as a reducer has it; as of `reducer.engine.slots.RoundTimes`."""

    begun_us: float
    complete_us: float
    done_us: float
    first_rank: int


@dataclass
class Process:
    """The timeline of one process."""

    path: Path
    about: Mapping[str, Any]  # what it says of itself
    events: Events
    spans: dict[Key, TimelineSpan] = field(default_factory=dict)  # a rank's that ended well
    rounds: dict[Key, TimelineRound] = field(default_factory=dict)  # a reducer's

    @property
    def host(self) -> str:
        """What tells its clock from those of others."""
        return str(self.about["boot"] or self.about["host"])

    @property
    def is_rank(self) -> bool:
        """Whether it is a rank, and no reducer."""
        return bool(self.about["kind"] == "rank")

    @property
    def order(self) -> tuple[bool, str, int, str]:
        """Where it is shown: ranks above reducers."""
        rank, job = int(self.about.get("rank", 0)), str(self.about.get("job", ""))
        return not self.is_rank, job, rank, str(self.about.get("address", ""))


class Clock(NamedTuple):
    """What is known of a host's clock."""

    host: str  # the name of a machine that has it
    offset_us: float  # to be added to its times; 0 for the first host's
    error_us: float  # how far off that may be; infinite where only the wall clocks tell
    why: str = ""  # that is so, then


class Merged(NamedTuple):
    """What has become of files."""

    clocks: list[Clock]  # of all hosts
    left_out: list[str]  # why files of a directory were, a sentence for each


def merge(paths: Sequence[Path], output: Path) -> Merged:
    """Write the events of several files, and of those in directories, to one.

    Raises:
        ConfigError: as `read`, or the output cannot be written.
    """
    processes, left_out = read(paths, output)
    clocks = align(processes)
    begin_us = min(
        event["ts"] + clocks[one.host].offset_us
        for one in processes
        for event in one.events
        if event["ph"] != "M"
    )
    merged: Events = []
    for pid, one in enumerate(processes, 1):
        # In whole nanoseconds, as times are: else parts would end after what they are of.
        shift_ns = round(1000 * (clocks[one.host].offset_us - begin_us))
        merged.append(_metadata(pid, "process_sort_index", sort_index=pid))
        for event in one.events:
            event["pid"] = pid
            if event["ph"] != "M":
                event["ts"] = (round(1000 * event["ts"]) + shift_ns) / 1000
        merged += one.events
    try:
        output.write_text("[\n" + ",\n".join(map(_json, merged)) + "\n]\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
    return Merged(list(clocks.values()), left_out)


def read(paths: Sequence[Path], output: Path) -> tuple[list[Process], list[str]]:
    """Read several files, and those in directories, but for the output of an earlier time.

    Returns:
        The timelines, ranks before reducers; and why files of a directory were left out.

    Raises:
        ConfigError: there are no timelines, or one that was named cannot be read.
    """
    processes: list[Process] = []
    left_out: list[str] = []
    for path in paths:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            if file.resolve() == output.resolve():
                continue
            try:
                processes.append(_read(file))
            except ConfigError as error:
                if file is path:  # it was named
                    raise
                left_out.append(str(error))
    processes.sort(key=lambda one: one.order)
    if not processes:
        raise ConfigError(
            f"there are no timelines in {', '.join(map(str, paths))}: set REDUCTION_TIMELINE to a "
            "directory at every rank and reducer, and copy what they have written to one place"
        )
    return processes, left_out


def described(clock: Clock) -> str:
    """Return a sentence about a clock."""
    if math.isinf(clock.error_us):
        return f"host {clock.host}: {clock.why}: its clock was taken from the wall clocks"
    if not clock.error_us:
        return f"host {clock.host}: its clock is the one that all times are on"
    ahead_ms, error_ms = -clock.offset_us / 1000, clock.error_us / 1000
    ahead = f"{abs(ahead_ms):.3f} ms {'behind' if ahead_ms < 0 else 'ahead'}"
    return f"host {clock.host}: its clock is {ahead}, give or take {error_ms:.3f} ms"


def align(processes: Sequence[Process]) -> dict[str, Clock]:
    """Return the clock of each host; the first process's is the one that all are shown on."""
    hosts = list(dict.fromkeys(one.host for one in processes))
    # most[i, j]: what the clock of host j is at most ahead of that of host i.
    most = np.full((len(hosts), len(hosts)), math.inf)
    np.fill_diagonal(most, 0.0)
    for rank in (one for one in processes if one.is_rank):
        for reducer in (one for one in processes if not one.is_rank):
            here, there = hosts.index(rank.host), hosts.index(reducer.host)
            if here == there:
                continue
            for ahead_us, behind_us in _bounds(rank, reducer):
                most[here, there] = min(most[here, there], ahead_us)
                most[there, here] = min(most[there, here], behind_us)
    for via in range(len(hosts)):  # Floyd and Warshall
        most = np.minimum(most, most[:, via, None] + most[None, via, :])
    contradictory = bool((np.diag(most) < 0).any())
    clocks = {}
    for at, host in enumerate(hosts):
        one = next(process for process in processes if process.host == host)
        ahead_us, behind_us = most[0, at], most[at, 0]
        why = "all-reduces contradict each other" if contradictory else ""
        if math.isinf(ahead_us) or math.isinf(behind_us):
            why = "no all-reduce tells how its clock differs from the first host's"
        if at == 0:
            clocks[host] = Clock(one.about["host"], 0.0, 0.0)
        elif why:
            wall_us = _wall_us(one) - _wall_us(processes[0])
            clocks[host] = Clock(one.about["host"], wall_us, math.inf, why)
        else:
            error_us = (ahead_us + behind_us) / 2
            clocks[host] = Clock(one.about["host"], (behind_us - ahead_us) / 2, error_us)
    return clocks


def _bounds(rank: Process, reducer: Process) -> Iterator[tuple[float, float]]:
    """Yield how far the reducer's clock is ahead of the rank's at most, and behind it at most."""
    for key, span in rank.spans.items():
        round_ = reducer.rounds.get(key)
        if round_ is None or not round_.done_us:
            continue
        arrived_us = round_.begun_us if round_.first_rank == span.rank else round_.complete_us
        yield arrived_us - span.begun_us, span.ended_us - round_.done_us


def _wall_us(process: Process) -> float:
    begun_us = next(event["ts"] for event in process.events if event["ph"] == "i")
    return float(process.about["wall_ns"] / 1000 - begun_us)


def _read(path: Path) -> Process:
    try:
        events = json.loads(path.read_bytes())
        (about,) = (event["args"] for event in events if event["name"] == "begins")
        process = Process(path, about, events)
        _ = process.order, about["host"], process.host, float(about["wall_ns"])
        if not all(math.isfinite(event["ts"]) for event in events if event["ph"] != "M"):
            raise ValueError("a time that is no number")
        _understand(process)
    except (OSError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no timeline of a rank or reducer: {error!r}") from None
    return process


def _understand(process: Process) -> None:
    """Find the all-reduces in a process's events; the parts of each follow it."""
    key: Key | None = None
    for event in process.events:
        if event["ph"] != "X":
            continue
        round_ = event.get("args", {})
        if "sequence" in round_:
            key = round_["job"], round_["generation"], round_["sequence"]
            if not process.is_rank:
                process.rounds[key] = TimelineRound(
                    **{name: round_[name] for name in TimelineRound._fields}
                )
            elif "error" not in round_:
                process.spans[key] = TimelineSpan(
                    round_["rank"], event["ts"], event["ts"] + event["dur"]
                )
        elif event["name"] == "queued" and key in process.spans:
            span = process.spans[key]
            process.spans[key] = span._replace(begun_us=event["ts"] + event["dur"])
            key = None


def _metadata(pid: int, name: str, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}


def _json(event: Mapping[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))
