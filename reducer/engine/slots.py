"""What a reducer counts for the all-reduces in flight, and what it compares (sans I/O).

A round is one all-reduce as this reducer sees it; a slot is one of its chunks while contributions
are still missing. `_slots.pyx` keeps both, in the structs of `slots.h`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from reducer.errors import MismatchError
from reducer.wire.constants import PLACES, DType, ReduceOp

if TYPE_CHECKING:
    from reducer.engine import _slots
    from reducer.wire.header import Header

    # By these names the engine's annotations know what `_slots` has.
    Member: TypeAlias = _slots.Member
    Slot: TypeAlias = _slots.Slot
    Round: TypeAlias = _slots.Round
    Rounds: TypeAlias = _slots.Rounds


# Bytes that the records of an all-reduce take besides payloads, counted generously; `slots.h` says
# the same. RANK_BYTES: of a round, for each rank; LATENESS_BYTES: of a job, for each rank.
ROUND_BYTES, SLOT_BYTES, PLACE_BYTES = 640, 256, 72
RANK_BYTES, LATENESS_BYTES = 1, 1616
MOST_TIMES = 4096  # of rounds of a job that have ended, until somebody takes them
MAX_MISSING = 1024  # ranks that are named; to look for all of a huge job would take too long


class SlotsModule(Protocol):
    """What makes members and rounds for an engine: `_slots`, or its oracle in tests."""

    def Member(self, peer: bytes, header: Header) -> Member:  # noqa: N802 (a class)
        """Return a new member."""

    def Rounds(self, world_size: int) -> Rounds:  # noqa: N802 (a class)
        """Return the rounds of a new job."""


class RoundTimes(NamedTuple):
    """When what happened to a round that is over, in microseconds of the engine's clock.

    Attributes:
        sequence: its number.
        begun_us: when its first contribution came.
        alone_us, complete_us: of the chunk that has waited longest for one rank alone: since when,
            and until when; 0 if no chunk had all contributions.
        done_us: when the latest result was ready to be sent; 0 if none was.
        nbytes, chunks: what had all contributions.
        first_rank: the one whose contribution was the first.
        last_rank: the one that the chunk has waited for.
    """

    sequence: int
    begun_us: int
    alone_us: int
    complete_us: int
    done_us: int
    nbytes: int
    chunks: int
    first_rank: int
    last_rank: int


def check_agreement(header: Header, first: Header | None) -> None:
    """Compare a contribution with the one that opened its round.

    Raises:
        MismatchError: they contradict each other.
    """
    if first is None:
        return
    if header.dtype != first.dtype:  # before the size, which follows from it
        names = DType(first.dtype).name.lower(), DType(header.dtype).name.lower()
        raise _mismatch(header, "dtype", first.rank, *names)
    if header.total_bytes != first.total_bytes:
        raise _mismatch(header, "total_bytes", first.rank, first.total_bytes, header.total_bytes)
    if header.op != first.op:
        names = ReduceOp(first.op).name.lower(), ReduceOp(header.op).name.lower()
        raise _mismatch(header, "op", first.rank, *names)
    if header.window != first.window:
        raise _mismatch(header, "leaves", first.rank, first.window, header.window)
    if header.epoch != first.epoch:
        raise mismatch_of_epochs(header, first)
    if header.tag != first.tag:
        raise _mismatch(header, "name", first.rank, _tag(first), _tag(header))
    if header.since == first.since and header.history != first.history:
        raise MismatchError(
            f"all-reduce {header.sequence // PLACES}: ranks {first.rank} and {header.rank} were "
            f"asked for different calls since all-reduce {header.since}: one of them left a call "
            "out, or made one more",
            field="history",
            rank=first.rank,
            other_rank=header.rank,
            expected=first.history,
            got=header.history,
            sequence=header.sequence,
        )


def check_size(header: Header, first_rank: int, nbytes: int) -> None:
    """Compare the size of a chunk with that of the first contribution to it.

    Raises:
        MismatchError: they differ.
    """
    if header.nbytes != nbytes:
        raise _mismatch(header, "chunk_bytes", first_rank, nbytes, header.nbytes)


def _tag(header: Header) -> str:
    """Say a name as far as a reducer knows it; a worker puts the name itself in its place."""
    return f"#{header.tag:016x}" if header.tag else "no name"


def mismatch_of_epochs(header: Header, first: Header) -> MismatchError:
    """Return what ranks are told that have lost touch: they begin anew."""
    return _mismatch(header, "epoch", first.rank, first.epoch, header.epoch)


def _mismatch(
    header: Header, field: str, rank: int, expected: str | int, got: str | int
) -> MismatchError:
    what = f"all-reduce {header.sequence // PLACES}"
    one, other = (rank, expected), (header.rank, got)
    return MismatchError.between(what, field, one, other, sequence=header.sequence)
