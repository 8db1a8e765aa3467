"""All-reduces at a reducer: contributions in, results or errors out (sans I/O).

The rules are those of `wire/README.md`, section 5. Who takes part is the engine's business.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reducer.errors import (
    CapacityError,
    RankLostError,
    ReductionError,
    ReductionTimeout,
    RemoteProtocolError,
)
from reducer.wire.constants import (
    MAX_ROUNDS_AHEAD,
    NO_SEQUENCE,
    DType,
    MessageType,
    ReduceOp,
)
from reducer.wire.header import Buffer, Header, check_chunk
from reducer.wire.layout import charge
from reducer.wire.messages import decode_error, encode_error

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reducer.kernels import Kernels
    from reducer.membership import Job
    from reducer.slots import Member, Round, Slot


class Send(NamedTuple):
    """The one thing an engine asks for: hand this message to that peer."""

    peer: bytes
    header: bytes
    payload: Buffer | np.ndarray | None


@dataclass(slots=True)
class Counters:
    """What an engine has done since it started."""

    contributions: int = 0
    results: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    duplicates: int = 0
    late: int = 0
    refused: int = 0
    rounds_failed: int = 0

    def __add__(self, other: Counters) -> Counters:
        """Return the sum of both, counter by counter."""
        sums = (getattr(self, name) + getattr(other, name) for name in self.__slots__)
        return Counters(*sums)


class Reductions:
    """The all-reduces of all jobs.

    Args:
        kernels: what sums.

    Attributes:
        counters: what was done since the start.
        closed: why new rounds are refused, or None.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.counters = Counters()
        self.closed: ReductionError | None = None

    def contribution(self, job: Job, member: Member, header: Header, payload: Buffer) -> list[Send]:
        """Take a member's CONTRIBUTION.

        Raises:
            ReductionError: it is refused, and concerns its sender alone.
        """
        check_chunk(header, len(payload), job.max_chunk_bytes)
        _check_sequence(header, member)
        sends = self._advance(job, member, header.watermark)
        if header.sequence < member.watermark:
            self.counters.late += 1
            return sends
        round_ = self._round(job, member, header)
        if round_.error is not None:
            self.counters.late += 1
            return sends + self._tell(job, header.sequence, round_, [member])
        if member.rank in round_.departed:
            reason = round_.departed[member.rank]
            return sends + self.fail(job, header.sequence, round_, reason)
        if round_.holds(header.offset, member.rank):
            self.counters.duplicates += 1
            return sends
        try:
            slot = self._place(job, member, round_, header, payload)
        except ReductionError as error:
            return sends + self.fail(job, header.sequence, round_, error)
        if slot.missing == 0:
            sends += self._reduce(job, round_, slot, header)
        return sends

    def _round(self, job: Job, member: Member, header: Header) -> Round:
        round_ = job.rounds.get(header.sequence)
        if round_ is None:
            first = header if header.type is MessageType.CONTRIBUTION else None
            round_ = job.rounds.open(header.sequence, first)
            if self.closed is not None:
                round_.fail(copy.copy(self.closed))
        round_.hear(member.rank)
        return round_

    def _place(
        self, job: Job, member: Member, round_: Round, header: Header, payload: Buffer
    ) -> Slot:
        if not round_.is_open(header.offset):
            _check_presence(job, round_, header.sequence)
        if member.held and member.held + charge(header.nbytes) > member.window:
            raise CapacityError(
                f"rank {member.rank} exceeded its window of {member.window} bytes", limit="window"
            )
        slot = round_.place(header, payload)
        member.held += charge(header.nbytes)
        self.counters.contributions += 1
        self.counters.bytes_in += header.nbytes
        return slot

    def _reduce(self, job: Job, round_: Round, slot: Slot, header: Header) -> list[Send]:
        result = np.empty(slot.nbytes, np.uint8)
        contributions = [payload for payload in slot.payloads if payload is not None]
        self.kernels.reduce(contributions, result, DType(header.dtype), ReduceOp(header.op))
        round_.finish(header.offset)
        members = list(job.members.values())
        for member in members:
            member.held -= charge(slot.nbytes)
        self.counters.results += len(members)
        self.counters.bytes_out += len(members) * slot.nbytes
        frame = header._replace(type=MessageType.RESULT, watermark=0, rank=0).pack()
        # All peers are sent the one buffer, and each rank's machine a fair share of first places.
        turn = header.offset // max(slot.nbytes, 1) % len(members)
        return [Send(member.peer, frame, result) for member in members[turn:] + members[:turn]]

    def abort(self, job: Job, member: Member, header: Header, payload: Buffer) -> list[Send]:
        """Take a member's ABORT.

        Raises:
            ReductionError: it is refused, and concerns its sender alone.
        """
        if header.sequence == NO_SEQUENCE:
            raise RemoteProtocolError("ABORT needs a sequence number")
        error = decode_error(payload, header.sequence)
        if header.sequence < member.watermark:
            return []
        _check_sequence(header, member)
        round_ = self._round(job, member, header)
        if round_.error is not None:
            sends = self._tell(job, header.sequence, round_, [member])
        else:
            if isinstance(error, ReductionTimeout) and not error.missing:
                error = self._explain_timeout(job, round_, error)
            sends = self.fail(job, header.sequence, round_, error)
        # Afterwards: the sender is done with this all-reduce, so its watermark may have passed it.
        return sends + self._advance(job, member, header.watermark)

    def _explain_timeout(
        self, job: Job, round_: Round, error: ReductionTimeout
    ) -> ReductionTimeout:
        missing = round_.missing_ranks()
        if not missing:
            return error
        absent = set(job.absent())
        who = ", ".join(f"{rank}{' (never joined)' if rank in absent else ''}" for rank in missing)
        return ReductionTimeout(
            f"{error}: no contribution from rank {who}", missing=missing, sequence=error.sequence
        )

    def _advance(self, job: Job, member: Member, watermark: int) -> list[Send]:
        """Learn that a worker has finished every all-reduce below `watermark`."""
        if watermark <= member.watermark:
            return []
        member.watermark = watermark
        return self.give_up(job, member)

    def give_up(self, job: Job, member: Member) -> list[Send]:
        """Fail the rounds that a worker's watermark has passed without it; forget old ones."""
        sends: list[Send] = []
        for sequence, round_ in job.rounds.items():
            if sequence < member.watermark and round_.error is None and round_.lacks(member.rank):
                sends += self.fail(job, sequence, round_, _gave_up(sequence, member.rank))
        for sequence in job.forgettable():
            job.rounds.discard(sequence)
        return sends

    def fail(self, job: Job, sequence: int, round_: Round, error: ReductionError) -> list[Send]:
        """End a round badly and tell those who know of it."""
        self.counters.rounds_failed += 1
        for rank, nbytes in round_.fail(error):
            if rank in job.members and rank not in round_.departed:
                job.members[rank].held -= nbytes
        return self._tell(job, sequence, round_, job.members.values())

    def _tell(
        self, job: Job, sequence: int, round_: Round, members: Iterable[Member]
    ) -> list[Send]:
        """Send a failed round's error to those who take part in it and were not sent it yet.

        Others are told with their first contribution: before, they do not know what it is about.
        """
        assert round_.error is not None
        frame = Header(
            MessageType.ERROR, job=job.key, generation=job.generation, sequence=sequence
        ).pack()
        body = encode_error(round_.error)
        due = round_.untold()
        untold = [member for member in members if member.rank in due]
        for member in untold:
            round_.tell(member.rank)
        return [Send(member.peer, frame, body) for member in untold]


def _check_sequence(header: Header, member: Member) -> None:
    if header.sequence >= max(header.watermark, member.watermark) + MAX_ROUNDS_AHEAD:
        raise CapacityError(
            f"at most {MAX_ROUNDS_AHEAD} all-reduces may be in flight", limit="rounds"
        )


def _check_presence(job: Job, round_: Round, sequence: int) -> None:
    """Refuse to open a slot that could never be completed.

    Raises:
        RankLostError: a rank is gone, or will not contribute to this round any more.
    """
    for reason in round_.departed.values():
        raise reason
    for _, reason in job.gone.values():
        raise reason
    for member in job.members.values():
        if member.watermark > sequence:
            raise _gave_up(sequence, member.rank)


def _gave_up(sequence: int, rank: int) -> RankLostError:
    return RankLostError(f"all-reduce {sequence}: rank {rank} gave it up", rank=rank)
