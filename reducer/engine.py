"""The reducer's protocol logic: messages and time in, messages out (sans I/O, reads no clock).

The rules are those of `wire/README.md`, section 5. One engine belongs to one thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reducer.errors import (
    CapacityError,
    MembershipError,
    RankLostError,
    ReducerLostError,
    ReductionError,
    ReductionTimeout,
    RemoteProtocolError,
    StaleGenerationError,
)
from reducer.membership import Job, Membership
from reducer.wire.constants import (
    MAX_ROUNDS_AHEAD,
    NO_SEQUENCE,
    DType,
    MessageType,
    ReduceOp,
)
from reducer.wire.header import Buffer, Header, check_chunk
from reducer.wire.layout import charge
from reducer.wire.messages import Hello, Welcome, decode, decode_error, encode, encode_error
from reducer.wire.states import Role, after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reducer.kernels import Kernels
    from reducer.slots import Member, Round, Slot, SlotsModule

PING_INTERVAL_S = 0.5
CLAIM_PATIENCE_S = 1.5  # by then the transport's heartbeats have shown that a peer is gone

log = logging.getLogger(__name__)


class Send(NamedTuple):
    """The one thing an engine asks for: hand this message to that peer."""

    peer: bytes
    header: bytes
    payload: Buffer | np.ndarray | None


class Claim(NamedTuple):
    """A HELLO for the rank of a member that may be dead; PINGs to it show by `due` whether."""

    peer: bytes
    header: Header
    hello: Hello
    due: float


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


class Engine:
    """One reducer (or one thread of it).

    Args:
        kernels: what sums.
        slots: the implementation of members, rounds and slots.
        memory_limit: bytes that contributions and results may take.
        incarnation: hexadecimal, another one at every start.
        address: how this reducer calls itself in errors, ``host:port``.
        lanes: ports of the reducer's other threads, told to every worker.
    """

    def __init__(
        self,
        kernels: Kernels,
        slots: SlotsModule,
        *,
        memory_limit: int,
        incarnation: str,
        address: str,
        lanes: tuple[int, ...] = (),
    ) -> None:
        self.counters = Counters()
        self.draining = False
        self.kernels = kernels
        self._members = Membership(memory_limit, slots)
        self._incarnation = incarnation
        self._address = address
        self._lanes = lanes
        self._now = 0.0
        self._next_ping = 0.0
        self._claims: list[Claim] = []
        self._handlers: dict[MessageType, Callable[[Job, Member, Header, Buffer], list[Send]]] = {
            MessageType.CONTRIBUTION: self._contribution,
            MessageType.ABORT: self._abort,
            MessageType.GOODBYE: self._goodbye,
        }

    @property
    def changes(self) -> int:
        """How often a member has come or gone."""
        return self._members.changes

    @property
    def jobs(self) -> list[Job]:
        """The jobs that are here."""
        return list(self._members.jobs.values())

    def held(self) -> int:
        """Bytes of contributions in open slots."""
        return sum(member.held for member in self._members.members())

    def receive(self, peer: bytes, frame: Buffer, payload: Buffer) -> list[Send]:
        """Take one message from a peer; whatever is wrong with it concerns that peer alone.

        Args:
            peer: the transport's name for the connection.
            frame: frame 0.
            payload: frame 1, empty if there was none.
        """
        try:
            header = Header.unpack(frame)
            if header.type is MessageType.HELLO:
                return self._hello(peer, header, payload)
            found = self._members.find(peer)
            if found is None:
                raise MembershipError(
                    "this reducer does not know you: it was restarted, or gave you up"
                )
            job, member = found
            state = after(member.state, Role.WORKER, header.type)
            if state is None:
                raise RemoteProtocolError(
                    f"{header.type.name} is not allowed in {member.state.name}"
                )
            said = (header.job, header.generation, header.epoch, header.rank)
            if said != (job.key, job.generation, 0, member.rank):
                raise RemoteProtocolError("job, generation, epoch and rank must be as agreed")
            member.state = state
            return self._handlers[header.type](job, member, header, payload)
        except ReductionError as error:
            self.counters.refused += 1
            log.info("refused a message: %s", error)
            return [Send(peer, Header(MessageType.ERROR).pack(), encode_error(error))]

    def unreachable(self, peer: bytes) -> list[Send]:
        """Learn from the transport that a peer is gone: it died, or the network is cut."""
        found = self._members.find(peer)
        self._claims = [claim for claim in self._claims if claim.peer != peer]
        if found is None:
            return []
        job, member = found
        reason = RankLostError(f"rank {member.rank} died or cannot be reached", rank=member.rank)
        return self._leave(peer, reason) + self._settle_claims(job, member)

    def tick(self, now: float) -> list[Send]:
        """Do what is due at `now`, seconds of a monotonic clock; call it several times a second."""
        self._now = now
        if now < self._next_ping:
            return []
        self._next_ping = now + PING_INTERVAL_S
        # Every PING found these holders reachable, unless they have left: most are refused.
        sends = self._decide(lambda claim: claim.due <= now)
        ping = Header(MessageType.PING).pack()
        sends += [Send(member.peer, ping, None) for member in self._members.members()]
        return sends

    def drain(self) -> list[Send]:
        """Tell every member that this reducer shuts down; open rounds may still be finished."""
        self.draining = True
        goodbye = Header(MessageType.GOODBYE).pack()
        members = self._members.members()
        for member in members:
            member.state = after(member.state, Role.REDUCER, MessageType.GOODBYE) or member.state
        return [Send(member.peer, goodbye, None) for member in members]

    # -- joining and leaving ------------------------------------------------------------------

    def _hello(self, peer: bytes, header: Header, payload: Buffer) -> list[Send]:
        hello = decode(Hello, payload)
        if self._members.find(peer) is not None or any(peer == c.peer for c in self._claims):
            raise RemoteProtocolError("HELLO was said already")
        holder = self._members.holder(header)
        if holder is not None:
            self._claims.append(Claim(peer, header, hello, self._now + CLAIM_PATIENCE_S))
            return [Send(holder.peer, Header(MessageType.PING).pack(), None)]
        return self._join(peer, header, hello)

    def _join(self, peer: bytes, header: Header, hello: Hello) -> list[Send]:
        try:
            if self.draining:
                raise self._shutting_down()
            job, member, earlier = self._members.join(peer, header, hello)
        except ReductionError as error:
            self.counters.refused += 1
            return [Send(peer, Header(MessageType.ERROR).pack(), encode_error(error))]
        welcome = Header(
            MessageType.WELCOME,
            job=header.job,
            generation=header.generation,
            rank=member.rank,
            window=member.window,
        )
        body = Welcome(
            incarnation=self._incarnation,
            max_chunk_bytes=job.max_chunk_bytes,
            lanes=self._lanes if hello.lane == 0 else (),
        )
        sends = [Send(peer, welcome.pack(), encode(body))]
        if earlier is not None:
            sends += self._supersede(earlier, header)
        for sequence, round_ in job.rounds.items():
            if round_.error is None and round_.open and member.rank in round_.departed:
                sends += self._fail(job, sequence, round_, round_.departed[member.rank])
        return sends + self._give_up(job, member)

    def _settle_claims(self, job: Job, lost: Member) -> list[Send]:
        return self._decide(lambda c: (c.header.job, c.header.rank) == (job.key, lost.rank))

    def _decide(self, due: Callable[[Claim], bool]) -> list[Send]:
        decided = [claim for claim in self._claims if due(claim)]
        self._claims = [claim for claim in self._claims if not due(claim)]
        sends: list[Send] = []
        for claim in decided:
            sends += self._join(claim.peer, claim.header, claim.hello)
        return sends

    def _supersede(self, job: Job, header: Header) -> list[Send]:
        error = StaleGenerationError(
            f"job {job.name!r} moved on to generation {header.generation}",
            generation=job.generation,
            current=header.generation,
        )
        body = encode_error(error)
        frame = Header(MessageType.ERROR, job=job.key, generation=job.generation).pack()
        return [Send(member.peer, frame, body) for member in job.members.values()]

    def _goodbye(self, job: Job, member: Member, header: Header, payload: Buffer) -> list[Send]:
        del job, header, payload
        rank = member.rank
        return self._leave(member.peer, RankLostError(f"rank {rank} left the job", rank=rank))

    def _leave(self, peer: bytes, reason: RankLostError) -> list[Send]:
        found = self._members.leave(peer, reason)
        if found is None:
            return []
        job, member = found
        sends: list[Send] = []
        for sequence, round_ in job.rounds.items():
            round_.depart(member.rank, reason)
            if round_.error is None and round_.lacks(member.rank):
                sends += self._fail(job, sequence, round_, reason)
        return sends

    # -- all-reduces --------------------------------------------------------------------------

    def _contribution(
        self, job: Job, member: Member, header: Header, payload: Buffer
    ) -> list[Send]:
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
            return sends + self._fail(job, header.sequence, round_, reason)
        if round_.holds(header.offset, member.rank):
            self.counters.duplicates += 1
            return sends
        try:
            slot = self._place(job, member, round_, header, payload)
        except ReductionError as error:
            return sends + self._fail(job, header.sequence, round_, error)
        if slot.missing == 0:
            sends += self._reduce(job, round_, slot, header)
        return sends

    def _round(self, job: Job, member: Member, header: Header) -> Round:
        round_ = job.rounds.get(header.sequence)
        if round_ is None:
            first = header if header.type is MessageType.CONTRIBUTION else None
            round_ = job.rounds.open(header.sequence, first)
            if self.draining:
                round_.fail(self._shutting_down())
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

    def _abort(self, job: Job, member: Member, header: Header, payload: Buffer) -> list[Send]:
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
            sends = self._fail(job, header.sequence, round_, error)
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
        return self._give_up(job, member)

    def _give_up(self, job: Job, member: Member) -> list[Send]:
        """Fail the rounds that a worker's watermark has passed without it; forget old ones."""
        sends: list[Send] = []
        for sequence, round_ in job.rounds.items():
            if sequence < member.watermark and round_.error is None and round_.lacks(member.rank):
                sends += self._fail(job, sequence, round_, _gave_up(sequence, member.rank))
        for sequence in job.forgettable():
            job.rounds.discard(sequence)
        return sends

    def _fail(self, job: Job, sequence: int, round_: Round, error: ReductionError) -> list[Send]:
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

    def _shutting_down(self) -> ReducerLostError:
        return ReducerLostError(f"reducer {self._address} is shutting down", reducer=self._address)


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
