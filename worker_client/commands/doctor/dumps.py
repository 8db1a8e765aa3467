"""What files of ranks' latest calls say: which rank did not make which call.

`worker_client.client.recording` writes them. Calls without a name belong together by their number;
those with one by the name and the number of the call of that name.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pickle import dumps
from typing import TYPE_CHECKING, Any, NamedTuple

from reducer.errors import ConfigError
from worker_client.client.recording import ORDERED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

MOST_SAID = 10  # calls with a name, of a job
_FILES = "calls-*.json"


class Said(NamedTuple):
    """What all ranks must say alike of a call."""

    dtype: str
    elements: int
    op: str

    def __str__(self) -> str:
        return f"{self.op} of {self.elements} elements of {self.dtype}"


@dataclass(frozen=True)
class DumpedCall:
    """One call of one rank."""

    said: Said
    shape: tuple[int, ...]
    where: str  # it was made in the program, or nothing
    made_ns: int  # by the rank's wall clock
    open: bool  # it had not ended
    error: str  # or nothing

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "one element"
        return f"{self.said.op} of {self.said.dtype} [{shape}]{self.where and f' at {self.where}'}"


@dataclass(frozen=True)
class Dump:
    """The latest calls of one rank."""

    job: str
    generation: int
    rank: int
    ranks: tuple[int, ...]
    began_ns: int  # the client; by its wall clock, as the next
    written_ns: int
    changes: bool  # ranks have joined or left: calls have had other numbers since
    ordered: Mapping[int, DumpedCall]  # without a name, by number
    named: Mapping[tuple[str, int], DumpedCall]
    whole: bool  # no earlier call was dropped from the file


class Finding(NamedTuple):
    """One thing that the files show; what it is not about is None."""

    job: str
    rank: int | None
    call: int | None  # its number, from 0
    name: str | None
    message: str


def examine_dumps(directory: Path) -> list[Finding]:
    """Compare the files of all ranks, of each job in a directory.

    Raises:
        ConfigError: there are none, or one of them cannot be read.
    """
    by_place: dict[tuple[Path, str, int], list[Dump]] = {}
    for path in sorted(directory.rglob(_FILES)):
        dump = _read(path)
        by_place.setdefault((path.parent, dump.job, dump.generation), []).append(dump)
    if not by_place:
        raise ConfigError(
            f"there are no files calls-RANK.json in {directory}: set REDUCTION_DUMP to a directory "
            "at every rank, and copy what they have written to one place if they share none"
        )
    return [finding for dumps in by_place.values() for finding in _findings(dumps)]


def pickle_dumps(directory: Path) -> None:
    """Write each file again as `rank_RANK`, which PyTorch's ``torchfrtrace`` reads.

    Raises:
        ConfigError: one cannot be written.
    """
    for path in directory.rglob(_FILES):
        pickled = path.with_name(path.stem.replace("calls-", "rank_"))
        try:
            pickled.write_bytes(dumps(json.loads(path.read_bytes()), protocol=4))
        except OSError as error:
            raise ConfigError(f"{pickled} cannot be written: {error.strerror}") from None


def _read(path: Path) -> Dump:
    try:
        found = json.loads(path.read_bytes())
        about = found["reduction"]
        entries = found["entries"]
        ordered: dict[int, DumpedCall] = {}
        named: dict[tuple[str, int], DumpedCall] = {}
        for entry in entries:
            name, number = entry["reduction"]["name"], entry["reduction"]["call"]
            if entry["pg_id"] == ORDERED:
                ordered[int(number)] = _call(entry)
            elif number is not None:  # else it was refused at this rank
                named[str(name), int(number)] = _call(entry)
        ranks = tuple(map(int, about["ranks"]))
        return Dump(
            str(about["job"]),
            int(about["generation"]),
            int(about["rank"]),
            ranks,
            int(about["began_ns"]),
            int(about["written_ns"]),
            bool(about["joined_late"]) or len(about["present"]) < len(about["ranks"]),
            ordered,
            named,
            not entries or min(entry["record_id"] for entry in entries) == 0,
        )
    except (OSError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no file of a rank's calls: {error!r}") from None


def _call(entry: Mapping[str, Any]) -> DumpedCall:
    (shape,), (dtype,) = entry["input_sizes"], entry["input_dtypes"]
    its, frames = entry["reduction"], entry["frames"]
    where = f"{frames[0]['filename']}:{frames[0]['line']}" if frames else ""
    error = its["error"]
    return DumpedCall(
        Said(dtype, math.prod(shape), its["op"]),
        tuple(shape),
        where,
        entry["time_created_ns"],
        not entry["retired"],
        "" if error is None else f"{error['type']}: {error['message']}",
    )


def _findings(dumps: Sequence[Dump]) -> Iterator[Finding]:
    latest = _latest_run(dumps)
    ranks = {rank for dump in latest for rank in dump.ranks}
    silent = sorted(ranks - {dump.rank for dump in latest})
    if silent:
        why = "left no file: the process was killed, or its file is elsewhere"
        yield Finding(latest[0].job, None, None, None, f"{_ranks(silent)} {why}")
    found: list[Finding] = []
    if not any(dump.changes for dump in latest):  # whose calls have different numbers
        found = [*_ordered(latest), *_named(latest)]
    yield from found
    if not found:
        for dump in latest:
            yield from _unfinished(dump)


def _latest_run(dumps: Sequence[Dump]) -> list[Dump]:
    """Return the files of one run: those of an earlier one were written before it began."""
    latest: list[Dump] = []
    for dump in sorted(dumps, key=lambda one: one.began_ns):
        if latest and dump.began_ns > max(one.written_ns for one in latest):
            latest = []
        latest.append(dump)
    return sorted(latest, key=lambda one: one.rank)


def _ordered(dumps: Sequence[Dump]) -> Iterator[Finding]:
    """Find the first call without a name that not all ranks have made alike."""
    made = [dump for dump in dumps if dump.ordered or dump.whole]
    if len(made) < 2:
        return
    first = max(min(dump.ordered, default=0) for dump in made)
    last = max(max(dump.ordered, default=-1) for dump in made)
    for number in range(first, last + 1):
        said = {dump.rank: dump.ordered[number].said for dump in made if number in dump.ordered}
        if not said:
            continue
        (common, times), *others = Counter(said.values()).most_common()
        odd = [dump for dump in made if said.get(dump.rank) != common]
        if not odd:
            continue
        if len(said) == len(made) and any(times == also for _, also in others):
            yield _torn(made, number)  # nobody can say which of them is wrong
            return
        alike = [dump for dump in made if said.get(dump.rank) == common]
        for dump in odd:
            yield _odd(dump, alike[0], number, len(alike))
        return


def _torn(made: Sequence[Dump], number: int) -> Finding:
    """Say that as many ranks have made a call in one way as in another."""
    by_said: dict[Said, list[Dump]] = {}
    for dump in made:
        by_said.setdefault(dump.ordered[number].said, []).append(dump)
    told = "; ".join(
        f"{_ranks(one.rank for one in dumps)} made {dumps[0].ordered[number]}"
        for dumps in by_said.values()
    )
    message = (
        f"ranks disagree on all-reduce {number}, and it shows of none which one is wrong: {told}. "
        "One of them left a call out, or made one more, or another one"
    )
    return Finding(made[0].job, None, number, None, message)


def _odd(dump: Dump, other: Dump, number: int, others: int) -> Finding:
    theirs, mine = other.ordered[number], dump.ordered.get(number)
    who = f"{others} other ranks" if others > 1 else f"rank {other.rank}"
    made = f"all-reduce {number} ({theirs}), which {who} made"
    if mine is None:
        alike = len({call.said for call in other.ordered.values()}) == 1
        or_earlier = "; all are of one size, so it may be an earlier one" if alike else ""
        message = f"rank {dump.rank} did not make {made}: its last one is {number - 1}{or_earlier}"
    elif _follows(dump, other, number) or _has_followed(other, number, mine):
        message = f"rank {dump.rank} did not make {made}: it went on with the one after it, {mine}"
    elif _follows(other, dump, number):
        message = f"rank {dump.rank} made a call that {who} did not: all-reduce {number}, {mine}"
    else:
        message = (
            f"rank {dump.rank} made another all-reduce {number} than {who}: {mine}, not {theirs}"
        )
    return Finding(dump.job, dump.rank, number, None, message)


def _follows(one: Dump, other: Dump, number: int) -> bool:
    """Whether one rank goes on from a call as the other does from the call after it."""
    ahead = [at for at in one.ordered if at >= number and at + 1 in other.ordered]
    return bool(ahead) and all(one.ordered[at].said == other.ordered[at + 1].said for at in ahead)


def _has_followed(other: Dump, number: int, mine: DumpedCall) -> bool:
    """Whether a call like `mine` came after one like `other`'s call `number`, never before one."""
    its = other.ordered
    pairs = [(its[at].said, its[at + 1].said) for at in its if at + 1 in its]
    theirs = its[number].said
    return (theirs, mine.said) in pairs and (mine.said, theirs) not in pairs


def _named(dumps: Sequence[Dump]) -> Iterator[Finding]:
    """Find the calls with a name that ranks have not made, or not alike."""
    unfinished = [
        (call.made_ns, key, dump)
        for dump in dumps
        for key, call in dump.named.items()
        if call.open or call.error
    ]
    said = 0
    seen: set[tuple[str, int]] = set()
    for _, key, dump in sorted(unfinished, key=lambda one: one[:2]):
        if key in seen:
            continue
        seen.add(key)
        name, number = key
        call = dump.named[key]
        lacking = [other.rank for other in dumps if key not in other.named and other.whole]
        having = [other for other in dumps if key in other.named]
        differing = [other for other in having if other.named[key].said != call.said]
        what = f"call {number + 1} of {name!r} ({call})"
        if lacking and len(lacking) <= len(having):  # others wait for an earlier one perhaps
            message = f"{_ranks(lacking)} did not make {what}, which rank {dump.rank} made"
        elif differing:
            theirs = differing[0].named[key]
            message = f"rank {differing[0].rank} made {what} of rank {dump.rank} as {theirs}"
        else:
            continue
        said += 1
        if said <= MOST_SAID:
            rank = (lacking or [differing[0].rank])[0]
            yield Finding(dump.job, rank, number, name, message)
    if said > MOST_SAID:
        more = f"... and {said - MOST_SAID} more calls with a name"
        yield Finding(dumps[0].job, None, None, None, more)


def _unfinished(dump: Dump) -> Iterator[Finding]:
    """Say what failed first at a rank, where all that is known fits together."""
    calls = [*((f"all-reduce {at}", call) for at, call in dump.ordered.items())]
    calls += [(f"call {at + 1} of {name!r}", call) for (name, at), call in dump.named.items()]
    what, call = next(((what, call) for what, call in calls if call.error), ("", None))
    if call is not None:
        message = f"rank {dump.rank}: {what} ({call}) failed: {call.error}"
        yield Finding(dump.job, dump.rank, None, None, message)


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed))}"
