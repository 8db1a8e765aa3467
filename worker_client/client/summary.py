"""What a client has gone through; the lines in a job's output when a worker begins, and ends.

They are records of level INFO if the program has set up logging, which decides where they go; else
lines on standard error, unless the program wants to hear less of us.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

from reducer.logs import program_shows
from worker_client.communicators.communicator import LinkTraffic
from worker_client.protocol import _flight

if TYPE_CHECKING:
    from reducer.wire.messages import Straggler
    from worker_client.protocol.spec import JobSpec

_NAMED = 3  # addresses of reducers in a line; of more, their number
_LATE = 2  # ranks in a line that the others waited for most, ...
_LATE_S = 0.05  # ... if they did for as long
_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_OURS = logging.getLogger("worker_client")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Summary:
    """What a client has gone through so far; as text, a line.

    Attributes:
        rank, world_size: who it is.
        present: ranks that take part.
        calls, bytes_reduced, waited_s, losses: as of `Client`.
        fallbacks: all-reduces that the process group did, as no reducer was left.
        straggler: the rank that the others wait for again and again, and why, if there is one.
        failure: class and text of the error of the all-reduce that has ended last, named ones
            apart; "" if it ended well.
        traffic: what links have carried, and how long ranks were waited for.
        carries: as of `Client`.
        durations: of all-reduces that ended well, from their calls to their ends.
    """

    rank: int
    world_size: int
    present: tuple[int, ...]
    calls: int
    bytes_reduced: int
    waited_s: float
    losses: int
    fallbacks: int
    straggler: Straggler | None
    failure: str = ""
    traffic: LinkTraffic = field(default_factory=LinkTraffic)
    carries: float = 0.0
    durations: _flight.Durations = field(default_factory=_flight.Durations)

    @property
    def rate(self) -> float:
        """As of `LinkTraffic`; by what `carries` is above it, links waited for ranks, or rested."""
        return self.traffic.rate

    @property
    def median_s(self) -> float:
        """Seconds that half of the all-reduces took at most, right to a sixteenth; 0: no call."""
        return self.durations.quantile(0.5)

    @property
    def p99_s(self) -> float:
        """Seconds that 99 % of them took at most, likewise."""
        return self.durations.quantile(0.99)

    def __str__(self) -> str:
        """Say all of it."""
        took = measured(self.traffic, self.carries, self.durations)
        said = [
            f"{count(self.calls, 'all-reduce')}, {size(self.bytes_reduced)}{took}",
            f"waited {self.waited_s:.1f} s",
            lost(self.losses),
        ]
        if self.fallbacks:
            said.append(f"{count(self.fallbacks, 'all-reduce')} by the process group")
        if gone := sorted({*range(self.world_size)} - {*self.present}):
            said.append(f"went on without rank {', '.join(map(str, gone))}")
        if self.rank == self.present[0]:  # once a job
            waits = sorted(self.traffic.waited_for_s.items(), key=itemgetter(1), reverse=True)
            late = [f"{seconds:.1f} s for rank {rank}" for rank, seconds in waits[:_LATE]]
            if late and waits[0][1] >= _LATE_S:
                said.append(f"ranks waited {' and '.join(late)}")
            if self.straggler is not None:
                said.append(f"{self.straggler}")
        if self.failure:
            said.append(f"the last one failed: {self.failure}")
        return ", ".join(said)


def lost(times: int) -> str:
    """Say how often a reducer was lost, which may have been the same one."""
    return f"reducers lost {times} times" if times > 1 else f"{times or 'no'} reducer lost"


def count(number: int, noun: str) -> str:
    """Return a number of things, in words."""
    return f"{number} {noun}{'s' * (number != 1)}"


def size(count: float) -> str:
    """Return bytes, in words."""
    one, unit = _unit(count)
    return f"{count:.0f} bytes" if unit == "bytes" else f"{count / one:.1f} {unit}"


def measured(traffic: LinkTraffic, carries: float, durations: _flight.Durations) -> str:
    """Say what was measured of all-reduces, behind what they were; "" if none was made."""
    said = ""
    if traffic.rate:
        said += f" ({size(traffic.bytes_sent)} out, {size(traffic.bytes_received)} in)"
    if durations.count:
        median_s, p99_s = (durations.quantile(share) for share in (0.5, 0.99))
        said += f", {lasting(median_s)} (p99 {lasting(p99_s)})"
    if traffic.rate:
        said += f", {speed(traffic.rate, carries)}"
    return said


def speed(rate: float, carries: float) -> str:
    """Return a rate, of what links carry if that is known, both in bytes a second, in words."""
    one, unit = _unit(max(rate, carries))
    of = f" of {carries / one:.3g}" if carries >= rate else ""
    return f"{rate / one:.3g}{of} {unit}/s"


def lasting(seconds: float, digits: int = 2) -> str:
    """Return a duration in so many digits."""
    said = float(f"{seconds:.{digits}g}")  # 0.9996 s are 1 s, not 1000 ms
    one, unit = next(((one, unit) for one, unit in _TIMES if said >= one), _TIMES[-1])
    return f"{said / one:g} {unit}"


def _unit(count: float) -> tuple[float, str]:
    """Return the unit that bytes are said in, and how many bytes it is."""
    return next(((one, unit) for one, unit in _SIZES if count >= one), _SIZES[-1])


def begins(summary: Summary, spec: JobSpec, impl: str) -> None:
    """Say who takes part in what, with which implementation."""
    say(f"{_who(summary, spec)}: {reducers(spec)}, {impl} implementation")


def ends(summary: Summary, spec: JobSpec) -> None:
    """Say what a client has gone through."""
    say(f"{_who(summary, spec)}, ends: {summary}")


def _who(summary: Summary, spec: JobSpec) -> str:
    generation = f" (generation {spec.generation})" if spec.generation else ""
    return f"rank {summary.rank} of {summary.world_size}, job {spec.job}{generation}"


def reducers(spec: JobSpec) -> str:
    """Say which reducers a job uses."""
    pool = [address for at, address in enumerate(spec.reducers) if at not in spec.hosts]
    said = []
    if pool:
        listed = f" ({', '.join(pool)})" if len(pool) <= _NAMED else ""
        said.append(f"{count(len(pool), 'reducer')}{listed}")
    if spec.hosts:
        said.append("a reducer in every rank")
    return " and ".join(said)


def say(line: str) -> None:
    """Say a line of a job's, as the program wants to hear it."""
    if program_shows(log):
        log.info("%s", line)
    elif not (_OURS.level > logging.INFO or log.manager.disable >= logging.INFO or log.disabled):
        sys.stderr.write(f"reduction: {line}\n")  # in one piece: all ranks write to one terminal
        sys.stderr.flush()
