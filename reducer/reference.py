"""The reference reducer: the specification (`docs/protocol.md`) as a program, to be read beside it.

It shares no rule with the reducer that serves, and its sockets are libzmq's. What both take from
`reducer.wire` are the specification's tables, which a test compares with the text, and
`examples/stranger.py` proves, which imports nothing of ours. Numbers in brackets are sections.

It has one thread, no keys [10], no feature but LEAVES, no limits but those that protect other
ranks, and no memory of jobs that have ended. So it is for conformance, on loopback and private
networks:

    reducer serve --impl plain
"""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import zmq

from reducer import errors
from reducer.errors import MismatchError, RankLostError, ReductionError, RemoteProtocolError
from reducer.kernels.plain import PlainKernels
from reducer.wire import messages
from reducer.wire.constants import (
    MAX_ROUNDS_AHEAD,
    NO_SEQUENCE,
    PLACES,
    DType,
    Feature,
    ReduceOp,
)
from reducer.wire.constants import MessageType as M
from reducer.wire.header import Header, check_chunk, fingerprint
from reducer.wire.layout import LARGEST_CHUNK, cost
from reducer.wire.messages import Hello, Loss, Stragglers, decode, encode, encode_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Event

# -- what is here [5] -----------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Member:
    """One rank of a job, from its WELCOME to its end."""

    peer: bytes
    job: Job
    rank: int
    window: int
    watermark: int
    hello: Hello
    leaves_at: float | None = None  # if its connection has ended

    def lost(self, how: str = "died or cannot be reached") -> RankLostError:
        """Return the error of all-reduces that need it."""
        return RankLostError(f"rank {self.rank} {how}", rank=self.rank)

    def goes_on(self, header: Header, hello: Hello) -> bool:
        """Whether who says this HELLO is the same process, and has missed nothing."""
        return header.watermark >= self.watermark and not _differ(self.hello.process, hello.process)


@dataclass(slots=True)
class Slot:
    """One chunk, until all ranks have contributed, or claimed that they have the result."""

    first: Header
    parts: dict[int, tuple[Member, bytes | None]] = field(default_factory=dict)  # None: a claim
    asked: int | None = None  # the rank that was asked for the result

    def waits_for(self, rank: int) -> bool:
        """Whether it lacks something of this rank, or the result that it was asked for."""
        return rank not in self.parts or self.asked == rank


@dataclass(slots=True)
class Round:
    """One all-reduce."""

    sequence: int
    first: Header | None  # of the contribution that opened it; None if an ABORT did
    error: ReductionError | None = None
    slots: dict[int, Slot] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)  # offsets whose result was sent
    spoke: set[Member] = field(default_factory=set)  # who has said something about it
    told: set[Member] = field(default_factory=set)

    def waits_for(self, rank: int) -> bool:
        """Whether it lacks something of this rank, or the result that it was asked for."""
        return any(slot.waits_for(rank) for slot in self.slots.values())


@dataclass(slots=True)
class Job:
    """One generation of a job."""

    first: Header  # of the HELLO that began it
    hello: Hello
    chunk_bytes: int  # the size of the largest chunk [8]
    members: dict[int, Member] = field(default_factory=dict)
    lost: dict[int, tuple[Member, RankLostError]] = field(default_factory=dict)
    rounds: dict[int, Round] = field(default_factory=dict)
    given_up: list[tuple[int, int, ReductionError]] = field(default_factory=list)
    losses: dict[int, Loss] = field(default_factory=dict)  # the latest of each reducer
    barred: dict[int, MismatchError] = field(default_factory=dict)  # why lacking ranks were refused

    def live(self) -> list[Round]:
        """Return the rounds that have not failed."""
        return [round_ for round_ in self.rounds.values() if round_.error is None]

    def missing(self, round_: Round) -> tuple[int, ...]:
        """Return the ranks that a round's first chunk waits for, as many as are told [8]."""
        ranks = range(self.hello.world_size) if round_.slots else ()
        first = min(round_.slots, default=0)
        return tuple(rank for rank in ranks if round_.slots[first].waits_for(rank))[:128]

    def held(self, member: Member) -> int:
        """Return what contributions in open slots take of a window, bytes."""
        slots = [slot for round_ in self.live() for slot in round_.slots.values()]
        parts = [slot.parts.get(member.rank, (None, None)) for slot in slots]
        return sum(cost(len(data)) for one, data in parts if one is member and data is not None)

    def reached(self) -> int:
        """Every all-reduce below this number is finished at every rank."""
        known = [*self.members.values(), *(member for member, _ in self.lost.values())]
        return min(one.watermark for one in known) if len(known) == self.hello.world_size else 0

    def forget(self) -> None:
        """Forget what no rank will ask about any more."""
        self.given_up = [given for given in self.given_up if given[1] >= self.reached()]
        passed = min(member.watermark for member in self.members.values())
        if len(self.members) + len(self.lost) < self.hello.world_size:
            passed -= MAX_ROUNDS_AHEAD
        self.rounds = {at: round_ for at, round_ in self.rounds.items() if at >= passed}

    def header(self, kind: M, sequence: int = NO_SEQUENCE) -> Header:
        """Return what a message to its members begins with."""
        key, generation = self.first.job, self.first.generation
        return Header(kind, job=key, generation=generation, sequence=sequence)

    def stale(self, generation: int) -> errors.StaleGenerationError:
        """Return the error of a rank of another generation."""
        current = self.first.generation
        text = f"job {self.hello.job!r} is in generation {current}, and members of it are here"
        return errors.StaleGenerationError(text, generation=generation, current=current)


# -- who may say what, and what comes of it [5, 6] ------------------------------------------------

# Before a rank whose connection broke is lost, and for a member to show that it lives.
UNREACHABLE_S, CONTEST_S = 0.5, 0.5
MAX_LEAVES = 65536
PING_S, FORGIVE_S, FAREWELL_S, UNJOINED_S, DRAIN_S = 0.5, 10.0, 1.0, 90.0, 2.0
FROM_MEMBERS = (M.CONTRIBUTION, M.RETAINED, M.ABORT, M.STRAGGLERS, M.SHARD_MAP, M.GOODBYE)
_EQUAL = ("world_size", "reducers", "reducer_index", "lane", "chunk_bytes", "patience_ms")


class Reducer:
    """The rules: messages and time in, messages out. It performs no I/O.

    Attributes:
        out: what is to be sent: to whom, and the frames.
        ending: peers that are not listened to any more, and when to close their connections.
    """

    def __init__(self) -> None:
        self.out: list[tuple[bytes, list[bytes]]] = []
        self.ending: dict[bytes, float] = {}
        self.members: dict[bytes, Member] = {}
        self._incarnation = os.urandom(8).hex()
        self._jobs: dict[int, Job] = {}
        self._now = self._ping_at = 0.0
        self._waiting: dict[bytes, tuple[float, Header, Hello]] = {}  # for another member's rank
        self._closing: ReductionError | None = None  # why nobody is admitted
        self._unknown: dict[bytes, float] = {}  # until when a stranger is not told so again
        self._handlers = {kind: getattr(self, f"_{kind.name.lower()}") for kind in FROM_MEMBERS}

    def receive(self, peer: bytes, frames: list[bytes], now: float) -> None:
        """Take one message; whatever is wrong with it concerns its sender alone."""
        self._now = now
        if peer in self.ending:
            return
        try:
            if not 1 <= len(frames) <= 2:
                raise RemoteProtocolError("a message has one or two frames")
            header, payload = Header.unpack(frames[0]), b"".join(frames[1:])
            if header.type is M.HELLO:
                self._hello(peer, header, decode(Hello, payload))
                return
            member = self.members.get(peer)
            if member is None:
                raise errors.MembershipError("this reducer does not know you: say HELLO first")
            if header.type not in self._handlers:
                raise RemoteProtocolError(f"a member does not say {header.type.name}")
            known = member.job.first.job, member.job.first.generation, member.rank
            if (header.job, header.generation, header.rank) != known:
                raise RemoteProtocolError("job, generation and rank are those of the HELLO")
            beyond = max(header.watermark, member.watermark) + MAX_ROUNDS_AHEAD
            if beyond <= header.sequence != NO_SEQUENCE:
                raise errors.CapacityError("too many all-reduces are in flight", limit="rounds")
            if not member.hello.features & Feature.LEAVES:
                header = header._replace(window=0)
            self._handlers[header.type](member, header, payload)
        except ReductionError as error:
            self._refuse(peer, error)

    def gone(self, peer: bytes) -> None:
        """Learn that a connection has ended."""
        self._waiting.pop(peer, None)
        member = self.members.get(peer)
        if member is not None and member.leaves_at is None:
            member.leaves_at = self._now + UNREACHABLE_S

    def tick(self, now: float) -> None:
        """Do what is due; called several times a second."""
        self._now = now
        for member in list(self.members.values()):
            if member.leaves_at is not None and member.leaves_at <= now:
                self._leave(member, member.lost())
        for peer, (_, header, hello) in list(self._waiting.items()):
            self._try(peer, header, hello)
        if now < self._ping_at:
            return
        self._ping_at = now + PING_S
        for job in self._jobs.values():
            lost = [encode(Stragglers(tuple(job.lost)[:128]))] if job.lost else []
            for member in job.members.values():
                self._say(member.peer, Header(M.PING, watermark=job.reached()), *lost)
            for why in [*job.barred.values()][:1]:
                self._send_error_to_all(job, why)

    def drain(self, address: str) -> None:
        """Tell every member that this reducer shuts down, and admit no other."""
        self._closing = errors.ReducerLostError("this reducer is shutting down", reducer=address)
        for peer in self.members:
            self._say(peer, Header(M.GOODBYE))

    def _hello(self, peer: bytes, header: Header, hello: Hello) -> None:
        if header.job != fingerprint(hello.job) or header.rank >= hello.world_size:
            raise RemoteProtocolError("the header's job is not the body's, or its rank none of it")
        if peer in self._waiting or peer in self.members:
            raise RemoteProtocolError("HELLO was said already")
        self._waiting[peer] = self._now + hello.patience_ms / 1000 + CONTEST_S, header, hello
        self._try(peer, header, hello)

    def _try(self, peer: bytes, header: Header, hello: Hello) -> None:
        """Answer a HELLO, unless a live member has its rank and may turn out to be gone."""
        job = self._jobs.get(header.job)
        if job is not None and job.first.generation == header.generation:
            holder = job.members.get(header.rank)
            lives = holder is not None and holder.leaves_at is None
            if lives and self._now < self._waiting[peer][0]:
                return
        del self._waiting[peer]
        try:
            self._join(peer, header, hello)
        except ReductionError as error:
            self._refuse(peer, error)

    def _join(self, peer: bytes, header: Header, hello: Hello) -> None:
        if self._closing is not None:
            raise self._closing
        if (known := self._jobs.get(header.job)) and known.first.generation == header.generation:
            self._make_way(known, header, hello)
        job, earlier = self._jobs.get(header.job), None
        if job is None or job.first.generation < header.generation:
            earlier, largest = job, hello.chunk_bytes or LARGEST_CHUNK
            job = self._jobs[header.job] = Job(header, hello, largest)
        else:
            self._check_rejoin(job, header, hello)
        member = Member(peer, job, header.rank, header.window, header.watermark, hello)
        job.members[header.rank] = self.members[peer] = member
        job.lost.pop(header.rank, None)
        if len(job.members) == hello.world_size:
            job.barred.clear()
        agreed = hello.features & Feature.LEAVES
        body = messages.Welcome(self._incarnation, max_chunk_bytes=job.chunk_bytes, features=agreed)
        self._say(peer, header._replace(type=M.WELCOME, watermark=0), encode(body))
        job.forget()
        for loss in job.losses.values():
            self._say(peer, job.header(M.SHARD_MAP), encode(loss))
        if earlier is not None:
            self._send_error_to_all(earlier, job.stale(earlier.first.generation))
            for one in earlier.members.values():
                del self.members[one.peer]

    def _make_way(self, job: Job, header: Header, hello: Hello) -> None:
        """End the earlier life of a rank whose connection broke, as it comes back."""
        unreachable = [member for member in job.members.values() if member.leaves_at is not None]
        back = [member for member in unreachable if member.rank == header.rank]
        whole, other = len(unreachable) == len(job.members), _differ(job.hello.run, hello.run)
        if back and back[0].goes_on(header, hello) and not other:
            self._depart(back[0], back[0].lost())  # it lives, so nobody needs to fail
        elif back or (whole and other):
            for member in unreachable if whole else back:
                self._leave(member, member.lost())

    def _check_rejoin(self, job: Job, header: Header, hello: Hello) -> None:
        stale = job.stale(header.generation)
        if header.generation < job.first.generation or _differ(job.hello.run, hello.run):
            raise stale
        ours = {name: getattr(job.hello, name) for name in _EQUAL} | job.hello.settings
        theirs = {name: getattr(hello, name) for name in _EQUAL} | hello.settings
        for name in ours:
            if name in theirs and ours[name] != theirs[name]:
                one, other = (job.first.rank, ours[name]), (header.rank, theirs[name])
                error = MismatchError.between(f"job {hello.job!r}", name, one, other)
                if len(job.members) < job.hello.world_size:  # or else it is somebody else
                    job.barred[header.rank] = error
                    for round_ in job.live():
                        self._fail(job, round_, error)
                    self._send_error_to_all(job, error)
                raise error
        if header.rank in job.members:
            raise errors.DuplicateRankError("a live worker has this rank", rank=header.rank)
        if header.rank in job.lost and not job.lost[header.rank][0].goes_on(header, hello):
            raise stale

    def _goodbye(self, member: Member, _header: Header, _payload: bytes) -> None:
        self._leave(member, member.lost("left the job"))

    def _leave(self, member: Member, why: RankLostError) -> None:
        """Take a member out of its job, and fail the rounds that need it."""
        self._depart(member, why)
        for round_ in member.job.live():
            if round_.waits_for(member.rank):
                self._fail(member.job, round_, why)

    def _depart(self, member: Member, why: RankLostError) -> None:
        job = member.job
        del self.members[member.peer], job.members[member.rank]
        job.lost[member.rank] = member, why
        if not job.members:
            del self._jobs[job.first.job]

    def _contribution(self, member: Member, header: Header, payload: bytes) -> None:
        leaves, job = header.window, member.job
        check_chunk(header, header.nbytes if leaves else len(payload), job.chunk_bytes)
        if leaves:
            if not job.hello.world_size <= leaves <= MAX_LEAVES or DType(header.dtype).is_block:
                raise RemoteProtocolError(f"{leaves} leaves of {job.hello.world_size} ranks")
            nbytes = header.nbytes * len(nodes(leaves, job.hello.world_size, member.rank))
            if len(payload) != nbytes or nbytes > job.chunk_bytes:
                raise RemoteProtocolError(f"a contribution of {len(payload)} bytes, not {nbytes}")
        self._advance(member, header)
        if header.sequence >= member.watermark:
            self._offer(member, header, payload)

    def _retained(self, member: Member, header: Header, payload: bytes) -> None:
        """Take a claim, or the result that a member was asked for."""
        job = member.job
        check_chunk(header, len(payload) or header.nbytes, job.chunk_bytes)
        self._advance(member, header)
        round_ = job.rounds.get(header.sequence)
        slot = round_.slots.get(header.offset) if round_ else None
        if not payload and header.sequence >= job.reached():
            self._offer(member, header, None)
        elif payload and round_ and slot and slot.asked == member.rank:
            if (error := _disagreement(header, round_, slot)) is not None:
                self._fail(job, round_, error)
            else:
                self._deliver(job, round_, slot, payload)

    def _offer(self, member: Member, header: Header, payload: bytes | None) -> None:
        job, sequence, rank = member.job, header.sequence, member.rank
        round_ = self._round(member, header)
        slot = round_.slots.get(header.offset)
        if round_.error is not None:
            self._send_error(job, round_)
            return
        if any(one.rank == rank and one is not member for one in round_.spoke):
            self._fail(job, round_, member.lost())  # it had begun before it came back
            return
        if (slot is not None and rank in slot.parts) or header.offset in round_.done:
            return
        most = member.window + 4 * cost(job.chunk_bytes)
        if payload is not None and job.held(member) + cost(len(payload)) > most:
            raise errors.CapacityError(f"rank {rank} exceeded its window", limit="window")
        error: ReductionError | None = _disagreement(header, round_, slot)
        if slot is None:
            error = error or next((why for _, why in job.lost.values()), None)
        if error is not None:
            self._fail(job, round_, error)
            return
        slot = round_.slots.setdefault(header.offset, Slot(header))
        slot.parts[rank] = member, payload
        if len(slot.parts) == job.hello.world_size:
            self._complete(job, round_, slot)
        if sequence % PLACES <= 1:
            self._end_agreement(job, sequence - sequence % PLACES)

    def _round(self, member: Member, header: Header) -> Round:
        job, sequence = member.job, header.sequence
        round_ = job.rounds.get(sequence)
        if round_ is None:
            # An ABORT for place 1 says which epoch its sender is in: for the ranks' question [8].
            settles = header.type is not M.ABORT or sequence % PLACES == 1
            given_up = (why for low, high, why in job.given_up if low <= sequence <= high)
            round_ = job.rounds[sequence] = Round(sequence, header if settles else None)
            round_.error = next(iter(job.barred.values()), None) or next(given_up, None)
        round_.spoke.add(member)
        return round_

    def _complete(self, job: Job, round_: Round, slot: Slot) -> None:
        """Bring the result to all that lack it: by a sum, or from a rank that has claimed it."""
        parts = [slot.parts[rank] for rank in sorted(slot.parts)]
        given = [data for _, data in parts if data is not None]
        here = [one for one, data in parts if data is None and job.members.get(one.rank) is one]
        first = slot.first
        if len(given) == len(parts):
            result = np.empty(first.nbytes, np.uint8)
            how = result, DType(first.dtype), ReduceOp(first.op)
            if first.window:
                of = [nodes(first.window, len(parts), rank) for rank in range(len(parts))]
                ends = [node.stop for own in of for node in own]
                PlainKernels().reduce_leaves(_cut(given, first.nbytes, of), ends, *how)
            else:
                PlainKernels().reduce(given, *how)
            self._deliver(job, round_, slot, result.tobytes())
        elif not given or not first.nbytes:
            self._deliver(job, round_, slot, b"")
        elif here:
            slot.asked = here[0].rank
            self._say(here[0].peer, _to_rank(first, M.RETAINED))
        else:
            self._fail(job, round_, next(one.lost() for one, data in parts if data is None))

    def _deliver(self, job: Job, round_: Round, slot: Slot, result: bytes) -> None:
        """Send a result to all that have contributed."""
        del round_.slots[slot.first.offset]
        round_.done.add(slot.first.offset)
        header = _to_rank(slot.first, M.RESULT)._replace(watermark=job.reached())
        for member, data in slot.parts.values():
            if data is not None and job.members.get(member.rank) is member:
                self._say(member.peer, header, result)

    def _abort(self, member: Member, header: Header, payload: bytes) -> None:
        if header.sequence == NO_SEQUENCE:
            raise RemoteProtocolError("ABORT needs a sequence number")
        job, first, last = member.job, header.sequence, header.sequence + header.nbytes
        error = messages.decode_error(payload, first)
        if header.nbytes:
            job.given_up.append((first, last, error))
            for round_ in job.live():
                if first <= round_.sequence <= last:
                    self._fail(job, round_, error)
        elif first >= job.reached():
            round_ = self._round(member, header)
            if isinstance(error, errors.ReductionTimeout) and not error.missing:
                error.missing = job.missing(round_)
            self._fail(job, round_, round_.error or error)
            self._end_agreement(job, first - 1)
        self._advance(member, header)  # afterwards: the sender is done with this all-reduce

    def _end_agreement(self, job: Job, sequence: int) -> None:
        """End a question if a rank has gone on without it, or in another epoch [8]."""
        agreement, call = job.rounds.get(sequence), job.rounds.get(sequence + 1)
        if not (agreement and call and agreement.first and call.first) or agreement.error:
            return
        asked, begun = agreement.first, call.first
        if begun.epoch != asked.epoch + 1 and agreement.waits_for(begun.rank):
            same, what = begun.epoch == asked.epoch, f"all-reduce {sequence // PLACES}"
            one = asked.rank, "asked" if same else asked.epoch
            other = begun.rank, "not asked" if same else begun.epoch
            name = "question" if same else "epoch"
            self._fail(job, agreement, MismatchError.between(what, name, one, other))

    def _stragglers(self, member: Member, header: Header, _payload: bytes) -> None:
        job, round_ = member.job, member.job.rounds.get(header.sequence)
        if round_ is not None and (missing := job.missing(round_)):
            answer = job.header(M.STRAGGLERS, header.sequence)
            self._say(member.peer, answer, encode(Stragglers(missing)))

    def _shard_map(self, member: Member, _header: Header, payload: bytes) -> None:
        """Pass on that a rank has lost a reducer [6]."""
        job, loss = member.job, decode(Loss, payload)
        loss.check_epoch()
        if loss.reducer >= job.hello.reducers:
            raise RemoteProtocolError(f"the job has {job.hello.reducers} reducers")
        known = job.losses.get(loss.reducer)
        order = loss.epoch, loss.stage, loss.sequence
        if known is None or order > (known.epoch, known.stage, known.sequence):
            job.losses[loss.reducer] = loss
            for other in job.members.values():
                if other is not member:
                    self._say(other.peer, job.header(M.SHARD_MAP), encode(loss))

    def _advance(self, member: Member, header: Header) -> None:
        if header.watermark > member.watermark:
            member.watermark = header.watermark
            member.job.forget()

    def _fail(self, job: Job, round_: Round, error: ReductionError) -> None:
        round_.error = error
        round_.slots.clear()
        self._send_error(job, round_)

    def _send_error(self, job: Job, round_: Round) -> None:
        assert round_.error is not None
        header = job.header(M.ERROR, round_.sequence)
        for member in job.members.values():
            if member in round_.spoke and member not in round_.told:
                round_.told.add(member)
                self._say(member.peer, header, encode_error(round_.error))

    def _send_error_to_all(self, job: Job, error: ReductionError) -> None:
        for member in job.members.values():
            self._say(member.peer, job.header(M.ERROR), encode_error(error))

    def _refuse(self, peer: bytes, error: ReductionError) -> None:
        """Answer what is not done; a peer that breaks the protocol is told so once."""
        if type(error) is errors.MembershipError:
            if self._now < self._unknown.get(peer, 0.0):
                return
            self._unknown[peer] = self._now + FORGIVE_S
        self._say(peer, Header(M.ERROR), encode_error(error))
        window = isinstance(error, errors.CapacityError) and error.limit == "window"
        if window or isinstance(error, (RemoteProtocolError, errors.VersionError)):
            self.ending[peer] = self._now + FAREWELL_S
            self._waiting.pop(peer, None)
            if (member := self.members.get(peer)) is not None:
                self._leave(member, member.lost(f"broke the protocol: {error}"))

    def _say(self, peer: bytes, header: Header, *payload: bytes) -> None:
        self.out.append((peer, [header.pack(), *payload]))


def nodes(leaves: int, ranks: int, rank: int) -> list[range]:
    """Return the largest nodes that have leaves of a rank alone, each as its leaves [4]."""
    each, more = divmod(leaves, ranks)
    first = rank * each + min(rank, more)
    last = first + each + (rank < more)

    def largest(begin: int, size: int) -> list[range]:
        node = range(begin, min(begin + size, leaves))
        if node.stop <= first or last <= begin:
            return []
        if first <= begin and node.stop <= last:
            return [node]
        return largest(begin, size // 2) + largest(begin + size // 2, size // 2)

    return largest(0, 1 << (leaves - 1).bit_length())


def _cut(given: list[bytes], nbytes: int, of: list[list[range]]) -> list[bytes]:
    """Return the values of nodes that contributions have one after another."""
    counts = [len(own) for own in of]
    return [
        data[nbytes * at : nbytes * (at + 1)]
        for data, count in zip(given, counts, strict=True)
        for at in range(count)
    ]


def _to_rank(contribution: Header, kind: M) -> Header:
    """Return a contribution's header without what only its sender says."""
    return contribution._replace(type=kind, watermark=0, rank=0, since=0, history=0)


def _differ(one: str, other: str) -> bool:
    return bool(one and other) and one != other


def _disagreement(header: Header, round_: Round, slot: Slot | None) -> MismatchError | None:
    """Return what is wrong if a contribution contradicts an earlier one."""
    compared = []
    if (first := round_.first) is not None:
        compared += [(name, name, first) for name in ("dtype", "total_bytes", "op")]
        compared += [("leaves", "window", first), ("epoch", "epoch", first), ("name", "tag", first)]
        compared += [("history", "history", first)] if first.since == header.since else []
    if slot is not None:
        compared += [("chunk_bytes", "nbytes", slot.first)]
    for name, of_header, other in compared:
        ours, theirs = getattr(other, of_header), getattr(header, of_header)
        if ours != theirs:
            what = f"all-reduce {header.sequence // PLACES}"
            return MismatchError.between(what, name, (other.rank, ours), (header.rank, theirs))
    return None


# -- libzmq's sockets -----------------------------------------------------------------------------

LAST_DATA_RECV = 52  # in Linux's tcp_info: for how many milliseconds nothing has come
Lines = dict[bytes, tuple[socket.socket, float]]  # connections of peers, and since when


def serve(bind: str, stop: Event, ready: Callable[[str], object], io_threads: int = 1) -> None:
    """Serve at ``tcp://HOST:PORT`` until `stop` is set; `ready` is called with ``host:port``."""
    with zmq.Context(io_threads) as context, context.socket(zmq.ROUTER) as router:
        for option, value in (
            *((zmq.ROUTER_MANDATORY, 1), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 500)),
            *((zmq.MAXMSGSIZE, 4 << 20), (zmq.HANDSHAKE_IVL, 5000), (zmq.IPV6, int("[" in bind))),
            *((zmq.HEARTBEAT_IVL, 200), (zmq.HEARTBEAT_TIMEOUT, 60_000)),
        ):
            router.setsockopt(option, value)
        try:
            router.bind(bind)
        except zmq.ZMQError as error:
            raise errors.ConfigError(f"cannot listen on {bind}: {error.strerror}") from None
        address = router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        reducer, lines, end = Reducer(), Lines(), 0.0
        ready(address)
        while not end or (reducer.members and time.monotonic() < end):
            if stop.is_set() and not end:
                end = time.monotonic() + DRAIN_S
                reducer.drain(address)
            _step(router, reducer, lines)
        for line, _ in lines.values():
            line.close()


def _step(router: zmq.Socket[bytes], reducer: Reducer, lines: Lines) -> None:
    router.poll(50)
    now = time.monotonic()
    for _ in range(64):
        if not router.poll(0):
            break
        peer, *frames = router.recv_multipart(copy=False)
        if peer.bytes not in lines:
            with suppress(OSError):  # these may be its last words
                lines[peer.bytes] = socket.socket(fileno=os.dup(int(frames[0].get("__fd")))), now
        reducer.receive(peer.bytes, [frame.bytes for frame in frames], now)
    reducer.tick(now)
    ended = {peer: True for peer in lines if _ends(peer, reducer, lines, now)}
    for to, message in reducer.out:
        try:
            router.send_multipart([to, *message], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it reads nothing, or has gone, as may its descriptor
            ended[to] = isinstance(error, zmq.Again)
    reducer.out.clear()
    for peer_, is_open in ended.items():
        reducer.gone(peer_)
        if peer_ in lines:
            with lines.pop(peer_)[0] as line, suppress(OSError):
                if is_open:
                    line.shutdown(socket.SHUT_RDWR)  # libzmq closes it then


def _ends(peer: bytes, reducer: Reducer, lines: Lines, now: float) -> bool:
    """Whether a connection is to be ended: it is silent, was dropped, or is nobody's for long."""
    line, since = lines[peer]
    member = reducer.members.get(peer)
    if member is None:
        return reducer.ending.get(peer, since + UNJOINED_S) <= now
    lines[peer] = line, now
    info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    (silent_ms,) = struct.unpack_from("I", info, LAST_DATA_RECV)
    return bool(silent_ms > member.hello.patience_ms)
