"""What timelines of ranks and reducers say of a job's time, in figures.

All times are in microseconds of the one clock that `timeline.align` finds. Where a rank has several
all-reduces in progress, an instant is spent with what the first of them does: the others' results
are of no use before. Which rank it waited for, reducers know: in each all-reduce the one for which
alone a chunk waited longest. The ranks' own questions are left out, of which ranks show nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reducer.errors import ConfigError
from reducer.wire.constants import PLACES
from reducer.wire.messages import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from worker_client.commands.timeline import Clock, Key, Process

    Span = tuple[float, float]  # when it began and ended

NOTHING, QUEUED, SENT = "no all-reduce", "queued", "sent"
FOR_A_RANK, FOR_THE_SUM = "waited for a rank", "waited for the sum"
RECEIVED, OTHERWISE = "received", "failed or elsewhere"
TIMES = ("begun_us", "alone_us", "complete_us", "done_us")  # of a round
STATES = (NOTHING, QUEUED, SENT, FOR_A_RANK, FOR_THE_SUM, RECEIVED, OTHERWISE)


class RankCall(NamedTuple):
    """An all-reduce as a rank has it; its parts have no gaps between them."""

    key: Key
    member: int  # the rank's number at the reducers
    nbytes: int
    span: Span
    failed: bool
    parts: list[tuple[str, float, float]]


class ReducerRound(NamedTuple):
    """An all-reduce as a thread of a reducer has it; as of `reducer.engine.slots.RoundTimes`."""

    key: Key
    nbytes: int
    begun_us: float
    alone_us: float
    complete_us: float
    done_us: float
    last_rank: int

    @property
    def waited_us(self) -> float:
        """How long a chunk waited for one rank alone."""
        return self.complete_us - self.alone_us


class RankFigures(NamedTuple):
    """What a rank has spent its time with.

    Attributes:
        name: what it is called.
        calls, failed: all-reduces.
        nbytes: of those that ended well.
        spent_us: microseconds by `STATES`; together they are the whole time.
        awaited_us: of those that it waited for a rank, by that rank's name.
    """

    name: str
    calls: int
    failed: int
    nbytes: int
    spent_us: Mapping[str, float]
    awaited_us: Mapping[str, float]


class SizeFigures(NamedTuple):
    """All-reduces of sizes within one octave, of all ranks, that ended well.

    Attributes:
        least, most: bytes.
        calls: how many.
        median_us, p99_us: what half and 99 % of them took at most, from their calls to their ends.
        rate: their bytes by their times, bytes a second.
    """

    least: int
    most: int
    calls: int
    median_us: float
    p99_us: float
    rate: float


class ReducerFigures(NamedTuple):
    """What a reducer did for the ranks.

    Attributes:
        name: its address.
        rounds: all-reduces in which it had a share, counted for each of its threads.
        nbytes: of each rank's contributions to these.
        busy_us: while any was in progress.
        gathered_us, waited_us, summed_us: of all of them together: until a chunk lacked one rank
            alone, while it did, and from then on until the last result was ready.
    """

    name: str
    rounds: int
    nbytes: int
    busy_us: float
    gathered_us: float
    waited_us: float
    summed_us: float

    @property
    def rate(self) -> float:
        """Bytes a second that came from each rank."""
        return 1e6 * self.nbytes / self.busy_us if self.busy_us else 0.0


class LateFigures(NamedTuple):
    """How long the others waited for a rank alone; waits at the same time count as one.

    Attributes:
        name: what it is called.
        waits: how many.
        total_us, median_us, longest_us: of these.
    """

    name: str
    waits: int
    total_us: float
    median_us: float
    longest_us: float


class Figures(NamedTuple):
    """All figures.

    Attributes:
        jobs: names of the jobs, of ranks if there are any.
        lasted_us: from the first all-reduce's call to the last one's end.
        ranks, sizes, reducers: in the order of their numbers, sizes and addresses.
        late: ranks that others waited for, the costliest first.
    """

    jobs: list[str]
    lasted_us: float
    ranks: list[RankFigures]
    sizes: list[SizeFigures]
    reducers: list[ReducerFigures]
    late: list[LateFigures]


def figures(processes: Sequence[Process], clocks: Mapping[str, Clock]) -> Figures:
    """Return what timelines say together.

    Args:
        processes: as `timeline.read` returns them.
        clocks: of their hosts, as `timeline.align` does.

    Raises:
        ConfigError: one of them is damaged, or none has an all-reduce.
    """
    calls = {name: _calls(one, clocks) for name, one in _named(processes, ranks=True)}
    rounds = {name: _rounds(one, clocks) for name, one in _named(processes, ranks=False)}
    shown = {call.key[:2] for mine in calls.values() for call in mine}
    if shown:
        rounds = {
            name: [one for one in its if one.key[:2] in shown] for name, its in rounds.items()
        }
    everything = [call.span for mine in calls.values() for call in mine]
    everything += [(one.begun_us, one.done_us) for its in rounds.values() for one in its]
    if not everything:
        raise ConfigError("there is no all-reduce in these timelines: the job has made none")
    of_ranks = [call.span for mine in calls.values() for call in mine] or everything
    window = min(begin for begin, _ in of_ranks), max(end for _, end in of_ranks)
    names = {(*call.key[:2], call.member): name for name, mine in calls.items() for call in mine}
    longest = _longest_waits(rounds, names)
    return Figures(
        sorted({key[0] for key in shown} or {one.key[0] for its in rounds.values() for one in its}),
        max(window[1] - window[0], 0.001),  # times are in whole nanoseconds
        [_spent(name, mine, longest, window) for name, mine in calls.items()],
        _by_size(call for mine in calls.values() for call in mine if not call.failed),
        [_of_reducer(name, its) for name, its in rounds.items()],
        _late(rounds, names),
    )


def _named(processes: Sequence[Process], *, ranks: bool) -> Iterator[tuple[str, Process]]:
    """Yield ranks or reducers, by names that no two of them share."""
    some = [one for one in processes if one.is_rank is ranks]
    names = [f"rank {one.order[2]}" if ranks else one.order[3] for one in some]
    for name, one in zip(names, some, strict=True):
        yield printable(name if names.count(name) == 1 else f"{name} ({one.path.name})"), one


# -- what a file says ------------------------------------------------------------------------------


def _slices(process: Process) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield the all-reduces of a process, and the parts of each, which follow it."""
    whole: dict[str, Any] | None = None
    parts: list[dict[str, Any]] = []
    for event in process.events:
        if event["ph"] != "X":
            continue
        if "args" not in event:
            parts.append(event)  # of a slice of another track, perhaps
            continue
        if whole is not None:
            yield whole, parts
        whole, parts = (event if "sequence" in event["args"] else None), []
    if whole is not None:
        yield whole, parts


def _calls(process: Process, clocks: Mapping[str, Clock]) -> list[RankCall]:
    """Return a rank's all-reduces in the order of their calls."""
    shift_us = clocks[process.host].offset_us
    found = []
    try:
        for event, parts in _slices(process):
            its = event["args"]
            spans = [_span(one, shift_us) for one in (event, *parts)]
            named = [(str(one["name"]), *span) for one, span in zip(parts, spans[1:], strict=True)]
            failed = "error" in its
            key, nbytes = _key(its), int(its["bytes"])
            found.append(RankCall(key, int(its["rank"]), nbytes, spans[0], failed, named))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise _damaged(process, error) from None
    return sorted(found, key=lambda one: one.span)


def _rounds(process: Process, clocks: Mapping[str, Clock]) -> list[ReducerRound]:
    """Return a reducer's all-reduces that ended well, but for the ranks' own questions."""
    shift_us = clocks[process.host].offset_us
    found = []
    try:
        for event, _ in _slices(process):
            its = event["args"]
            if its["sequence"] % PLACES == 0:
                continue
            times_us = {name: shift_us + _number(its[name]) for name in TIMES}
            key, nbytes, late = _key(its), int(its["nbytes"]), int(its["last_rank"])
            found.append(ReducerRound(key, nbytes, last_rank=late, **times_us))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise _damaged(process, error) from None
    return found


def _key(its: Mapping[str, Any]) -> Key:
    return printable(str(its["job"])), int(its["generation"]), int(its["sequence"])


def _span(event: Mapping[str, Any], shift_us: float) -> Span:
    begun_us = _number(event["ts"]) + shift_us
    return begun_us, begun_us + _number(event["dur"])


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r:.80} is no number")
    return float(value)


def _damaged(process: Process, error: Exception) -> ConfigError:
    return ConfigError(f"{process.path} is damaged: an all-reduce in it lacks something: {error!r}")


# -- what they say together ------------------------------------------------------------------------


def _longest_waits(
    rounds: Mapping[str, Iterable[ReducerRound]], names: Mapping[tuple[str, int, int], str]
) -> dict[Key, tuple[str, float, float]]:
    """Return of each all-reduce the rank that a chunk waited for longest, since and until when."""
    longest: dict[Key, ReducerRound] = {}
    for one in (one for its in rounds.values() for one in its):
        if one.key not in longest or one.waited_us > longest[one.key].waited_us:
            longest[one.key] = one
    return {key: (_name(one, names), one.alone_us, one.complete_us) for key, one in longest.items()}


def _name(one: ReducerRound, names: Mapping[tuple[str, int, int], str]) -> str:
    """Return what the rank is called that a round waited for."""
    return names.get((*one.key[:2], one.last_rank), f"rank {one.last_rank}")


def _spent(
    name: str,
    calls: Sequence[RankCall],
    longest: Mapping[Key, tuple[str, float, float]],
    window: Span,
) -> RankFigures:
    """Return what a rank has spent the time with."""
    spent = dict.fromkeys(STATES, 0.0)
    awaited: dict[str, float] = defaultdict(float)
    until_us = window[0]
    for call in calls:
        late, alone_us, complete_us = longest.get(call.key, (name, 0.0, 0.0))
        for part, begun_us, ended_us in call.parts:
            since_us = max(begun_us, until_us)
            left_us = max(0.0, ended_us - since_us)
            if part != "waited":
                spent[part if part in STATES else OTHERWISE] += left_us
                continue
            alone_us, complete_us = max(alone_us, since_us), min(complete_us, ended_us)
            for_a_rank_us = 0.0 if late == name else max(0.0, complete_us - alone_us)
            awaited[late] += for_a_rank_us
            spent[FOR_A_RANK] += for_a_rank_us
            spent[FOR_THE_SUM] += left_us - for_a_rank_us
        until_us = max(until_us, call.span[1])
    spent[NOTHING] = window[1] - window[0] - sum(spent.values())
    awaited = {late: us for late, us in awaited.items() if us}
    good = [call for call in calls if not call.failed]
    failed, nbytes = len(calls) - len(good), sum(call.nbytes for call in good)
    return RankFigures(name, len(calls), failed, nbytes, spent, awaited)


def _by_size(calls: Iterable[RankCall]) -> list[SizeFigures]:
    octaves: dict[int, list[RankCall]] = defaultdict(list)
    for call in calls:
        octaves[call.nbytes.bit_length()].append(call)
    found = []
    for _, its in sorted(octaves.items()):
        sizes = [call.nbytes for call in its]
        took_us = [call.span[1] - call.span[0] for call in its]
        median_us, p99_us = np.quantile(took_us, (0.5, 0.99), method="inverted_cdf")
        rate = 1e6 * sum(sizes) / sum(took_us) if sum(took_us) else 0.0
        known = float(median_us), float(p99_us), rate
        found.append(SizeFigures(min(sizes), max(sizes), len(its), *known))
    return found


def _of_reducer(name: str, rounds: Sequence[ReducerRound]) -> ReducerFigures:
    busy = _together((one.begun_us, one.done_us) for one in rounds)
    return ReducerFigures(
        name,
        len(rounds),
        sum(one.nbytes for one in rounds),
        sum(end - begin for begin, end in busy),
        sum(one.alone_us - one.begun_us for one in rounds),
        sum(one.waited_us for one in rounds),
        sum(one.done_us - one.complete_us for one in rounds),
    )


def _late(
    rounds: Mapping[str, Iterable[ReducerRound]], names: Mapping[tuple[str, int, int], str]
) -> list[LateFigures]:
    waits: dict[str, list[Span]] = defaultdict(list)
    for one in (one for its in rounds.values() for one in its):
        if one.waited_us > 0:
            waits[_name(one, names)].append((one.alone_us, one.complete_us))
    found = []
    for name, spans in waits.items():
        lengths_us = [end - begin for begin, end in _together(spans)]
        median_us = float(np.quantile(lengths_us, 0.5, method="inverted_cdf"))
        total_us, longest_us = sum(lengths_us), max(lengths_us)
        found.append(LateFigures(name, len(lengths_us), total_us, median_us, longest_us))
    return sorted(found, key=lambda one: (-one.total_us, one.name))


def _together(spans: Iterable[Span]) -> list[Span]:
    """Return spans with those as one that overlap or touch."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found
