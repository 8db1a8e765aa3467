"""All-reduces at a reducer: contributions in, results or errors out (sans I/O).

The rules are those of `docs/protocol.md`, section 5. Who takes part is the engine's business.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np

from reducer.engine.actions import Send
from reducer.engine.slots import (
    LATENESS_BYTES,
    PLACE_BYTES,
    RANK_BYTES,
    ROUND_BYTES,
    SLOT_BYTES,
    check_agreement,
    check_size,
    mismatch_of_epochs,
)
from reducer.errors import (
    CapacityError,
    MismatchError,
    RankLostError,
    ReductionError,
    ReductionTimeout,
    RemoteProtocolError,
)
from reducer.wire.constants import (
    MAX_ROUNDS_AHEAD,
    NO_SEQUENCE,
    PLACES,
    DType,
    MessageType,
    ReduceOp,
)
from reducer.wire.header import Buffer, Header, check_chunk
from reducer.wire.layout import cost
from reducer.wire.leaves import check_contribution, parts, split
from reducer.wire.messages import (
    MAX_NAMED_RANKS,
    Stragglers,
    decode_error,
    encode,
    encode_error,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reducer.engine.jobs import Job
    from reducer.engine.quotas import Quotas
    from reducer.engine.slots import Member, Round, Slot
    from reducer.kernels import Kernels


@dataclass(slots=True)
class EngineCounters:
    """What an engine has done since it started; `/metrics` says of each what stands beside it."""

    contributions: Annotated[int, "Contributions taken."] = 0
    results: Annotated[int, "Results sent, one for each rank."] = 0
    bytes_in: Annotated[int, "Bytes of contributions taken."] = 0
    bytes_out: Annotated[int, "Bytes of results sent."] = 0
    duplicates: Annotated[int, "Contributions that were here already."] = 0
    late: Annotated[int, "Contributions to all-reduces that were over."] = 0
    refused: Annotated[int, "Messages refused."] = 0  # answered with an error
    rounds_failed: Annotated[int, "All-reduces that failed."] = 0
    claims: Annotated[int, "Chunks whose result a rank held from a reducer that was lost."] = 0
    supplied: Annotated[int, "Results that such ranks have sent for others."] = 0
    ignored: Annotated[int, "Messages of peers that had been told enough."] = 0
    dropped: Annotated[int, "Peers that broke the protocol."] = 0  # and were closed
    # For want of a key that allows them; on a pool with keys, every handshake that failed.
    unauthenticated: Annotated[int, "Connections, HELLOs and members that were not admitted."] = 0
    over_limit: Annotated[int, "Messages refused because of a limit."] = 0
    closed: Annotated[int, "Connections closed because of what they did, or did not do."] = 0

    def __add__(self, other: EngineCounters) -> EngineCounters:
        """Return the sum of both, counter by counter."""
        sums = (getattr(self, name) + getattr(other, name) for name in self.__slots__)
        return EngineCounters(*sums)


@dataclass(slots=True)
class FailedRounds:
    """All-reduces of a job that have failed: how many, the first one's number, and why it did."""

    job: str
    number: int
    error: ReductionError
    count: int = 0

    def __str__(self) -> str:
        """Say so."""
        what = f"all-reduce {self.number} failed"
        if self.count > 1:
            what = f"{self.count} all-reduces failed, number {self.number} first"
        return f"{what}: {self.error}"


class Reductions:
    """The all-reduces of all jobs. A message that is refused concerns its sender alone.

    Attributes:
        counters: what was done since the start.
        closed: why new rounds are refused, or None.
        failed: all-reduces of each job that failed, and are yet to be reported.
    """

    def __init__(self, kernels: Kernels, quotas: Quotas) -> None:
        self.kernels = kernels
        self._quotas = quotas
        self.counters = EngineCounters()
        self.closed: ReductionError | None = None
        self.failed: dict[int, FailedRounds] = {}

    def contribution(self, job: Job, member: Member, header: Header, payload: Buffer) -> list[Send]:
        """Take a member's CONTRIBUTION."""
        check_contribution(header, len(payload), job.world_size, job.max_chunk_bytes)
        _check_sequence(header, member)
        self._advance(job, member, header.watermark)
        if header.sequence < member.watermark:
            self.counters.late += 1
            return []
        ended = self._end_agreement(job, member, header) if header.sequence % PLACES == 1 else []
        return ended + self._offer(job, member, header, payload)

    def retained(self, job: Job, member: Member, header: Header, payload: Buffer) -> list[Send]:
        """Take a member's RETAINED: it holds a chunk's result, or sends one that was asked for."""
        check_chunk(header, len(payload) or header.nbytes, job.max_chunk_bytes)
        _check_sequence(header, member)
        self._advance(job, member, header.watermark)
        if header.sequence < job.reached():
            self.counters.late += 1
            return []
        if not payload:
            return self._offer(job, member, header, None)
        round_ = job.rounds.get(header.sequence)
        slot = None if round_ is None else round_.asked(header.offset)
        if round_ is None or slot is None or slot.asked != member.rank:
            self.counters.duplicates += 1
            return []
        try:
            check_agreement(header, round_.first)
            check_size(header, slot.first_rank, slot.nbytes)
        except ReductionError as error:
            return self.fail(job, header.sequence, round_, error)
        self.counters.supplied += 1
        return self._deliver(job, round_, slot, header, np.frombuffer(payload, np.uint8).copy())

    def _offer(
        self, job: Job, member: Member, header: Header, payload: Buffer | None
    ) -> list[Send]:
        round_ = self._round(job, member, header)
        if round_.error is not None:
            self.counters.late += 1
            return self._send_error(job, header.sequence, round_, [member])
        if (left := round_.left_since(member.rank)) is not None:
            return self.fail(job, header.sequence, round_, left)
        if round_.holds(header.offset, member.rank):
            self.counters.duplicates += 1
            return []
        call = None if header.sequence % PLACES else job.rounds.get(header.sequence + 1)
        if call is not None and call.first is not None:
            error = _skipped_agreement(header, call.first)
            if error is not None:
                return self.fail(job, header.sequence, round_, error)
        if payload is not None:
            _check_window(job, member, len(payload))
        try:
            slot = self._place(job, member, round_, header, payload)
        except ReductionError as error:
            return self.fail(job, header.sequence, round_, error)
        return [] if slot.missing else self._complete(job, round_, slot, header)

    def _end_agreement(self, job: Job, member: Member, header: Header) -> list[Send]:
        """End the question before a call that a rank has begun without asking it."""
        sequence = header.sequence - header.sequence % PLACES
        agreement = job.rounds.get(sequence)
        if agreement is None or agreement.first is None or agreement.error is not None:
            return []
        error = (
            _skipped_agreement(agreement.first, header)
            if agreement.waits_for(member.rank)
            else None
        )
        return [] if error is None else self.fail(job, sequence, agreement, error)

    def _round(self, job: Job, member: Member, header: Header) -> Round:
        round_ = job.rounds.get(header.sequence)
        if round_ is None:
            if len(job.rounds) >= job.rounds.limit:
                self._quotas.raise_limit(job)
            each = RANK_BYTES + (0 if job.rounds.used() else LATENESS_BYTES)
            self._make_room(job, ROUND_BYTES + job.world_size * each)
            # That of an ABORT says which epoch its sender was in: for the question before the call.
            settles = header.type is not MessageType.ABORT or header.sequence % PLACES == 1
            first = header if settles else None
            round_ = job.rounds.open(header.sequence, first)
            given_up = (e for low, high, e in job.given_up if low <= header.sequence <= high)
            error = self.closed or job.bar_reason or next(given_up, None)
            if error is not None:
                round_.fail(copy.copy(error))
        round_.note_message(member.rank)
        return round_

    def _make_room(self, job: Job, nbytes: int) -> None:
        held = sum(member.held for member in job.members.values())
        more = held + job.rounds.used() + nbytes - job.rounds.reserved
        if more > 0:
            self._quotas.reserve_more(job, more)

    def _place(
        self, job: Job, member: Member, round_: Round, header: Header, payload: Buffer | None
    ) -> Slot:
        if not round_.is_open(header.offset):
            _check_presence(job)
            taken = cost(len(payload or b""))
            self._make_room(job, SLOT_BYTES + job.world_size * PLACE_BYTES + taken)
        if payload is None:
            self.counters.claims += 1
            return round_.place(header, None)
        slot = round_.place(header, payload)
        member.held += cost(len(payload))
        self.counters.contributions += 1
        self.counters.bytes_in += len(payload)
        return slot

    def _complete(self, job: Job, round_: Round, slot: Slot, header: Header) -> list[Send]:
        """Bring the result of a slot to all that lack it, by a sum or from a rank that has it."""
        if slot.holders:
            return self._ask(job, round_, slot, header)
        return self._reduce(job, round_, slot, header)

    def _ask(self, job: Job, round_: Round, slot: Slot, header: Header) -> list[Send]:
        """Ask a rank that holds a chunk's result for it, if there is one that does not."""
        if len(slot.holders) == job.world_size or header.nbytes == 0:
            return self._deliver(job, round_, slot, header, np.empty(0, np.uint8))
        holders = (rank for rank in slot.holders if rank in job.members)
        holder = next((rank for rank in holders if round_.left_since(rank) is None), None)
        if holder is None:
            rank = slot.holders[0]
            lost = RankLostError(f"rank {rank} left with the result of a chunk", rank=rank)
            return self.fail(job, header.sequence, round_, lost)
        round_.ask(header.offset, holder)
        frame = _without_sender(header)._replace(type=MessageType.RETAINED).pack()
        return [Send(job.members[holder].peer, frame, None)]

    def _reduce(self, job: Job, round_: Round, slot: Slot, header: Header) -> list[Send]:
        result = np.empty(slot.nbytes, np.uint8)
        contributions = [payload for payload in slot.payloads if payload is not None]
        dtype, op = DType(header.dtype), ReduceOp(header.op)
        if header.window:
            ranks = (parts(header.window, job.world_size, rank) for rank in range(job.world_size))
            ends = [subtree.stop for subtrees in ranks for subtree in subtrees]
            subtrees = split(contributions, slot.nbytes, len(ends))
            self.kernels.reduce_leaves(subtrees, ends, result, dtype, op)
        else:
            self.kernels.reduce(contributions, result, dtype, op)
        return self._deliver(job, round_, slot, header, result)

    def _deliver(
        self, job: Job, round_: Round, slot: Slot, header: Header, result: np.ndarray
    ) -> list[Send]:
        """Send a result to all that have contributed."""
        members = [job.members[rank] for rank in slot.ranks() if rank in job.members]
        nbytes, payloads = slot.nbytes, slot.payloads
        taken = [len(payloads[member.rank] or b"") for member in members]
        round_.finish(header.offset, len(members))
        for member, held in zip(members, taken, strict=True):
            if round_.left_since(member.rank) is None:
                member.held -= cost(held)
        self.counters.results += len(members)
        self.counters.bytes_out += len(members) * nbytes
        frame = (
            _without_sender(header)
            ._replace(type=MessageType.RESULT, watermark=job.reached())
            .pack()
        )
        # All peers are sent the one buffer, and each rank's machine a fair share of first places.
        turn = header.offset // max(nbytes, 1) % max(len(members), 1)
        return [Send(member.peer, frame, result) for member in members[turn:] + members[:turn]]

    def abort(self, job: Job, member: Member, header: Header, payload: Buffer) -> list[Send]:
        """Take a member's ABORT."""
        if header.sequence == NO_SEQUENCE:
            raise RemoteProtocolError("ABORT needs a sequence number")
        error = decode_error(payload, header.sequence)
        _check_sequence(header, member)
        last = header.sequence + header.nbytes
        sends: list[Send] = []
        if header.nbytes:
            for low, high in job.give_up(header.sequence, last, error):
                for sequence, round_ in job.rounds.between(low, high):
                    sends += self.fail(job, sequence, round_, copy.copy(error))
        elif header.sequence >= job.reached():
            if header.sequence % PLACES == 1:
                sends = self._end_agreement(job, member, header)
            sends += self._give_up(job, member, header, error)
        # Afterwards: the sender is done with this all-reduce, so its watermark may have passed it.
        self._advance(job, member, header.watermark)
        return sends

    def _give_up(
        self, job: Job, member: Member, header: Header, error: ReductionError
    ) -> list[Send]:
        round_ = self._round(job, member, header)
        if round_.error is not None:
            return self._send_error(job, header.sequence, round_, [member])
        if isinstance(error, ReductionTimeout) and not error.missing:
            error = self._explain_timeout(job, round_, error)
        return self.fail(job, header.sequence, round_, error)

    def stragglers(self, job: Job, member: Member, header: Header, payload: Buffer) -> list[Send]:
        """Tell a member which ranks an all-reduce waits for; nothing if there are none."""
        del payload
        round_ = job.rounds.get(header.sequence)
        missing = () if round_ is None else round_.missing_ranks()
        if not missing:
            return []
        frame = Header(
            MessageType.STRAGGLERS,
            job=job.key,
            generation=job.generation,
            sequence=header.sequence,
        ).pack()
        return [Send(member.peer, frame, encode(Stragglers(missing[:MAX_NAMED_RANKS])))]

    def _explain_timeout(
        self, job: Job, round_: Round, error: ReductionTimeout
    ) -> ReductionTimeout:
        missing = round_.missing_ranks()
        if not missing:
            return error
        nonmembers = set(job.nonmembers())
        who = ", ".join(
            f"{rank}{' (never joined)' if rank in nonmembers else ''}" for rank in missing
        )
        return ReductionTimeout(
            f"{error}: no contribution from rank {who}", missing=missing, sequence=error.sequence
        )

    def _advance(self, job: Job, member: Member, watermark: int) -> None:
        """Learn that a worker has finished every all-reduce below `watermark`."""
        if watermark > member.watermark:
            member.watermark = watermark
            job.forget()

    def fail(self, job: Job, sequence: int, round_: Round, error: ReductionError) -> list[Send]:
        """End a round badly and tell those who know of it."""
        self.counters.rounds_failed += 1
        first = FailedRounds(job.name, sequence // PLACES, error)
        self.failed.setdefault(job.key, first).count += 1
        job.release(round_, round_.fail(error))
        return self._send_error(job, sequence, round_, job.members.values())

    def _send_error(
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
        due = round_.without_error()
        untold = [member for member in members if member.rank in due]
        for member in untold:
            round_.note_error_sent(member.rank)
        return [Send(member.peer, frame, body) for member in untold]


def _skipped_agreement(agreement: Header, call: Header) -> MismatchError | None:
    """Return what becomes of a question if this call has begun; None if with its answer."""
    if call.epoch == agreement.epoch + 1:
        return None
    if call.epoch != agreement.epoch:
        return mismatch_of_epochs(call, agreement)
    return MismatchError(
        f"rank {call.rank} has gone on without the question that rank {agreement.rank} asks",
        field="question",
        rank=agreement.rank,
        other_rank=call.rank,
        expected="asked",
        got="not asked",
        sequence=agreement.sequence,
    )


def _without_sender(header: Header) -> Header:
    """Return a contribution's header without what only its sender says."""
    return header._replace(watermark=0, rank=0, since=0, history=0)


def _check_window(job: Job, member: Member, nbytes: int) -> None:
    # An ABORT that has made room comes over the first connection of a link, and may be overtaken.
    windows = 2 if len(job.links[member.rank].peers) > 1 else 1
    if member.held + cost(nbytes) > windows * member.window + job.spare:
        raise CapacityError(
            f"rank {member.rank} exceeded its window of {member.window} bytes", limit="window"
        )


def _check_sequence(header: Header, member: Member) -> None:
    if header.sequence >= max(header.watermark, member.watermark) + MAX_ROUNDS_AHEAD:
        raise CapacityError(
            f"at most {MAX_ROUNDS_AHEAD} all-reduces may be in flight", limit="rounds"
        )


def _check_presence(job: Job) -> None:
    """Refuse to open a slot that could never be completed, as a rank is lost.

    A rank that came back contributes to no round from before; but it lives, and the others will
    leave this reducer as well.
    """
    for _, reason in job.lost.values():
        raise reason
