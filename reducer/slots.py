"""Rounds and slots: what a reducer holds of the all-reduces in flight (sans I/O).

A round is one all-reduce as this reducer sees it; a slot is one of its chunks while contributions
are still missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reducer.errors import MismatchError
from reducer.wire.constants import DType, ReduceOp
from reducer.wire.layout import charge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reducer.errors import RankLostError, ReductionError
    from reducer.wire.header import Buffer, Header


class Slot:
    """Contributions to one chunk, by rank, until all of them are in."""

    __slots__ = ("first_rank", "missing", "nbytes", "payloads")

    def __init__(self, header: Header, world_size: int) -> None:
        self.nbytes = header.nbytes
        self.first_rank = header.rank
        self.missing = world_size
        self.payloads: list[Buffer | None] = [None] * world_size

    def ranks(self) -> Iterator[int]:
        """Ranks whose contribution is here."""
        return (rank for rank, payload in enumerate(self.payloads) if payload is not None)


class Round:
    """One all-reduce: what its first contribution settled, its open slots, its outcome.

    Attributes:
        first: header of the contribution that opened the round, None if an ABORT did.
        slots: open slots by offset.
        done: offsets whose result was sent.
        error: why the round failed, or None.
        ranks: ranks that have said something about it.
        told: ranks that were sent `error`.
        departed: ranks that went while it was in progress, and why; what they gave stays, but
            nothing more is taken from them, not even when they come back.
    """

    __slots__ = ("departed", "done", "error", "first", "ranks", "slots", "told")

    def __init__(self, first: Header | None) -> None:
        self.first = first
        self.slots: dict[int, Slot] = {}
        self.done: set[int] = set()
        self.error: ReductionError | None = None
        self.ranks: set[int] = set()
        self.told: set[int] = set()
        self.departed: dict[int, RankLostError] = {}

    def place(self, header: Header, payload: Buffer, world_size: int) -> Slot:
        """Put a contribution, the first of its rank to this chunk, into its slot.

        Raises:
            MismatchError: it contradicts what another rank contributed to this all-reduce.
        """
        self._check_agreement(header)
        slot = self.slots.get(header.offset)
        if slot is None:
            slot = self.slots[header.offset] = Slot(header, world_size)
        if header.nbytes != slot.nbytes:
            raise _mismatch(header, "chunk_bytes", slot.first_rank, slot.nbytes, header.nbytes)
        slot.payloads[header.rank] = payload
        slot.missing -= 1
        return slot

    def holds(self, offset: int, rank: int) -> bool:
        """Whether this rank's contribution to the chunk at `offset` was counted before."""
        slot = self.slots.get(offset)
        return offset in self.done or (slot is not None and slot.payloads[rank] is not None)

    def finish(self, offset: int) -> None:
        """Forget a slot whose result is on its way."""
        del self.slots[offset]
        self.done.add(offset)

    def fail(self, error: ReductionError) -> Iterator[tuple[int, int]]:
        """Mark the round as failed and drop its slots.

        Yields:
            ``(rank, bytes)`` that each dropped contribution took of its rank's window.
        """
        self.error = error
        error.__traceback__ = None  # its frames would keep the payloads
        slots, self.slots = self.slots, {}
        for slot in slots.values():
            for rank in slot.ranks():
                yield rank, charge(slot.nbytes)

    def missing_ranks(self, world_size: int) -> tuple[int, ...]:
        """Ranks without which an open slot cannot be completed."""
        missing: set[int] = set()
        for slot in self.slots.values():
            missing.update(set(range(world_size)).difference(slot.ranks()))
        return tuple(sorted(missing))

    def lacks(self, rank: int) -> bool:
        """Whether an open slot waits for this rank."""
        return any(slot.payloads[rank] is None for slot in self.slots.values())

    def depart(self, rank: int, reason: RankLostError) -> None:
        """Take note that a rank has gone; should it come back, it is told the error anew."""
        self.departed[rank] = reason
        self.ranks.discard(rank)
        self.told.discard(rank)

    def _check_agreement(self, header: Header) -> None:
        first = self.first
        if first is None:
            return
        if header.total_bytes != first.total_bytes:
            raise _mismatch(
                header, "total_bytes", first.rank, first.total_bytes, header.total_bytes
            )
        if header.dtype != first.dtype:
            names = DType(first.dtype).name.lower(), DType(header.dtype).name.lower()
            raise _mismatch(header, "dtype", first.rank, *names)
        if header.op != first.op:
            names = ReduceOp(first.op).name.lower(), ReduceOp(header.op).name.lower()
            raise _mismatch(header, "op", first.rank, *names)
        if header.tag != first.tag:
            raise _mismatch(header, "name", first.rank, _tag(first), _tag(header))


def _tag(header: Header) -> str:
    """Say a name as far as a reducer knows it; a worker puts the name itself in its place."""
    return f"#{header.tag:016x}" if header.tag else "no name"


def _mismatch(
    header: Header, field: str, rank: int, expected: str | int, got: str | int
) -> MismatchError:
    return MismatchError(
        f"all-reduce {header.sequence}: ranks disagree on {field}: rank {rank} says {expected}, "
        f"rank {header.rank} says {got}",
        field=field,
        rank=rank,
        other_rank=header.rank,
        expected=expected,
        got=got,
        sequence=header.sequence,
    )
