"""The reducer's protocol logic: messages and time in, messages out (sans I/O, reads no clock).

The rules are those of `docs/protocol.md`, section 5. One engine belongs to one thread.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING

from reducer.clock import no_heartbeat
from reducer.engine.actions import Attach, Close, Dismiss, GiveUp, MarkJoined, Resume, Send, Serve
from reducer.engine.admission import Admission
from reducer.engine.limits import NO_LIMITS, Limits
from reducer.engine.membership import JoinRequest, Members, is_another
from reducer.engine.rounds import EngineCounters, Reductions
from reducer.errors import (
    AuthError,
    CapacityError,
    MembershipError,
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionError,
    RemoteProtocolError,
    StaleGenerationError,
    VersionError,
)
from reducer.wire.constants import Feature, MessageType
from reducer.wire.header import Buffer, Header
from reducer.wire.messages import (
    ALL_REDUCERS,
    MAX_NAMED_RANKS,
    Hello,
    Loss,
    Stragglers,
    Stream,
    decode,
    encode,
    encode_error,
)
from reducer.wire.states import LinkState, Role, after

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reducer.engine.actions import Action
    from reducer.engine.admission import ReducerIdentity
    from reducer.engine.allow_list import AllowList
    from reducer.engine.jobs import Job
    from reducer.engine.slots import Member, SlotsModule
    from reducer.kernels import Kernels

PING_INTERVAL_S = 0.5
CONTEST_SPARE_S = 0.5  # after a job's patience: by then it has shown whether a peer is silent
# Before a rank whose connection broke is called lost: it may live, and tell the others through
# another reducer that it cannot reach this one.
UNREACHABLE_S = 0.5
MAX_REFUSALS = 8  # of one peer in this time: one that tries on and on is dropped
REFUSALS_S = 10.0
MAX_DROPPED = 4096  # peers to remember, until their connections are closed
MAX_LINES = 16  # about workers between two PINGs: a peer that provokes them must not fill the log

_order = attrgetter("epoch", "stage", "sequence")  # of a loss: greater if it is news

log = logging.getLogger(__name__)


class Engine:
    """One reducer (or one thread of it).

    Args:
        allowed: whom to admit; None for everybody.
        secret: what workers must prove that they know; empty for nothing.

    Attributes:
        dropped: peers that broke the protocol and were told so: nothing more that they say counts.
    """

    def __init__(
        self,
        kernels: Kernels,
        slots: SlotsModule,
        identity: ReducerIdentity,
        *,
        memory_limit: int,
        limits: Limits = NO_LIMITS,
        allowed: AllowList | None = None,
        secret: bytes = b"",
    ) -> None:
        self._admission = Admission(identity, allowed, secret)
        self.members = Members(slots, memory_limit, limits)
        self._reductions = Reductions(kernels, self.members.quotas)
        self._now = 0.0
        self._next_ping = 0.0
        # By peer: HELLOs for ranks of members that may be dead, and when PINGs have shown it.
        self._contests: dict[bytes, tuple[JoinRequest, float]] = {}
        self.dropped: dict[bytes, None] = {}
        self._refusals: dict[bytes, int] = {}  # of each peer, lately
        self._unknown: set[bytes] = set()  # who was told lately that it is not known
        self._forgive = 0.0  # when these are forgotten
        self._lines = 0  # about workers, since the last PING
        self._closing: ReducerLostError | None = None  # since it was told to shut down
        self._unreachable: dict[bytes, float] = {}  # when they are given up, by peer
        self._heard: dict[bytes, float] = {}  # peers that fell silent: when they were heard last
        self._handlers: dict[
            MessageType, Callable[[Job, Member, Header, Buffer], Sequence[Action]]
        ] = {
            MessageType.CONTRIBUTION: self._reductions.contribution,
            MessageType.RETAINED: self._reductions.retained,
            MessageType.ABORT: self._reductions.abort,
            MessageType.STRAGGLERS: self._reductions.stragglers,
            MessageType.SHARD_MAP: self._lose,
            MessageType.CREDIT: self._credit,
            MessageType.GOODBYE: self._goodbye,
        }

    def demand(self, secret: bytes) -> None:
        """Have workers prove from now on that they know a secret."""
        self._admission.secret = secret

    @property
    def kernels(self) -> Kernels:
        """What sums."""
        return self._reductions.kernels

    @property
    def counters(self) -> EngineCounters:
        """What was done since the start."""
        return self._reductions.counters

    @property
    def jobs(self) -> list[Job]:
        """The jobs that are here."""
        return list(self.members.jobs.values())

    def held(self) -> int:
        """Bytes of contributions in open slots."""
        return sum(member.held for member in self.members.members())

    def receive(
        self, peer: bytes, frame: Buffer, payload: Buffer, key: str = "", *, at: float = 0.0
    ) -> list[Action]:
        """Take one message from a peer; whatever is wrong with it concerns that peer alone.

        The frames are `frame` and, empty if there was none, `payload`; `key` is the public key that
        the peer of a HELLO, STREAM or RESUME has shown, `allow_list.LOCAL` of a peer here; `at` is
        when the message has come, seconds of a monotonic clock.
        """
        if peer in self.dropped:
            self.counters.ignored += 1
            return []
        main = self._main(peer)
        try:
            header = Header.unpack(frame)
            if header.type is MessageType.HELLO:
                actions = self._hello(main, header, payload, key)
            elif header.type is MessageType.STREAM:
                actions = self._attach(peer, header, payload, key)
            elif header.type is MessageType.RESUME:
                actions = self._resume(peer, header, payload, key)
            else:
                actions = self._from_member(main, header, payload, at, further=peer != main)
        except ReductionError as error:
            actions = self._refuse(main, error)
        return actions + self._contested()

    def _from_member(
        self, peer: bytes, header: Header, payload: Buffer, at: float, *, further: bool
    ) -> list[Action]:
        """Take a message that only members may say."""
        found = self.members.find(peer)
        if found is None:
            raise MembershipError(
                "this reducer does not know you: it was restarted, or gave you up"
            )
        job, member = found
        if further and header.type is not MessageType.CONTRIBUTION:
            raise RemoteProtocolError(f"{header.type.name} goes over a link's first connection")
        state = after(member.state, Role.WORKER, header.type)
        if state is None:
            raise RemoteProtocolError(f"{header.type.name} is not allowed in {member.state.name}")
        if (header.job, header.generation, header.rank) != (job.key, job.generation, member.rank):
            raise RemoteProtocolError("job, generation and rank must be as agreed")
        member.state = state
        job.rounds.now_us = int(at * 1e6)
        actions = self._handlers[header.type](job, member, header, payload)
        return [*self._serving(job), *actions]

    def drop(self, peer: bytes, error: ReductionError) -> list[Action]:
        """Tell a peer why nothing more that it says counts, and end its part in its job."""
        actions: list[Action] = [_error(peer, error), Close(peer)]
        for each in (peer, *self.members.streams(peer)):
            if len(self.dropped) >= MAX_DROPPED:
                del self.dropped[next(iter(self.dropped))]
            self.dropped[each] = None
        self.counters.dropped += 1
        self._contests.pop(peer, None)
        found = self.members.find(peer)
        if found is not None:
            rank = found[1].rank
            lost = RankLostError(f"rank {rank} broke the protocol: {error}", rank=rank)
            actions += self._leave(*found, lost)
        return actions

    def _main(self, peer: bytes) -> bytes:
        """Return the peer of a further stream's first connection; of any other peer, itself."""
        found = self.members.find(peer)
        return peer if found is None else found[1].peer

    def _refuse(self, peer: bytes, error: ReductionError, job: str = "") -> list[Action]:
        """Answer what is not done; a peer that breaks the protocol is told so once.

        The job is the one that the peer was to join; that of a member is known.
        """
        refusals = self._refusals[peer] = self._refusals.get(peer, 0) + 1
        if type(error) is MembershipError:
            if peer in self._unknown:
                self.counters.ignored += 1  # it was said already: what comes was under way
                return []
            self._unknown.add(peer)
        self.counters.refused += 1
        self.counters.unauthenticated += isinstance(error, AuthError)
        self.counters.over_limit += isinstance(error, CapacityError)
        facts: dict[str, object] = {"job": job} if job else {}
        if (found := self.members.find(peer)) is not None:
            facts = _facts(found[0], found[1].rank)
        self._say("refused a message: %s", error, **facts)
        broken = isinstance(error, (RemoteProtocolError, VersionError)) or (
            isinstance(error, CapacityError) and error.limit == "window"
        )
        if broken or refusals >= MAX_REFUSALS:
            return self.drop(peer, error)
        return [_error(peer, error)]

    def _say(self, text: str, *arguments: object, **facts: object) -> None:
        """Log something that workers bring about, with facts, unless they do so again and again."""
        self._lines += 1
        if self._lines <= MAX_LINES:
            log.info(text, *arguments, extra=facts)

    def unreachable(self, peer: bytes) -> list[Action]:
        """Learn from the transport that a peer is gone: it died, or the network is cut.

        Who has lost a further stream is about to notice and to come back, or says GOODBYE over the
        first one, which may be on its way.
        """
        stream, peer = peer, self._main(peer)
        self._contests.pop(peer, None)
        found = self.members.find(peer)
        if found is None:
            return self._contested()
        job, member = found
        actions: list[Action] = []
        if self._reductions.closed is not None and stream == peer:
            actions += self._leave(job, member, self._lost(job, member))
        else:
            due = self._now + UNREACHABLE_S + (job.peer_timeout_s if stream != peer else 0.0)
            self._unreachable[peer] = min(due, self._unreachable.get(peer, due))
        rank = job.key, member.rank
        actions += self._decide(lambda one, _: (one.header.job, one.header.rank) == rank)
        return actions + self._contested()

    def peer_timed_out(self, peer: bytes, seconds: float) -> list[Action]:
        """Learn that nothing has come from a member for so long that its connection is ended."""
        self._heard.setdefault(peer, self._now - seconds)
        return self.unreachable(peer)

    def tick(self, now: float) -> list[Action]:
        """Do what is due at `now`, seconds of a monotonic clock; call it several times a second.

        The clock stands still while nobody can call this: who could not be heard is not late.
        """
        self._now = now
        actions: list[Action] = []
        for peer in [peer for peer, due in self._unreachable.items() if due <= now]:
            actions += self._give_up(peer)
        actions += self._ping(now)
        return actions + self._contested()

    def _ping(self, now: float) -> list[Action]:
        """Tell members that this reducer lives, and what they are to know, when it is time."""
        if now < self._next_ping:
            return []
        self._next_ping = now + PING_INTERVAL_S
        if self._lines > MAX_LINES:
            log.info("%d more lines of that kind", self._lines - MAX_LINES)
        self._lines = 0
        failed, self._reductions.failed = self._reductions.failed, {}
        for one in failed.values():
            self._say("job %r: %s", one.job, one, job=one.job, failed=one.count)
        if now >= self._forgive:
            self._forgive = now + REFUSALS_S
            self._refusals.clear()
            self._unknown.clear()
        # Every PING found these holders reachable, unless they have left: most are refused.
        actions = self._decide(lambda _, due: due <= now)
        for job in self.members.jobs.values():
            another = job.watch.look(job.rounds.lateness, job.world_size, now)
            if another is not None:
                self._say("job %r: %s", job.name, another, job=job.name, **asdict(another))
            ping = Header(MessageType.PING, watermark=job.reached()).pack()
            told = Stragglers(tuple(job.lost)[-MAX_NAMED_RANKS:], job.watch.straggler)
            body = encode(told) if told.missing or told.straggler else None
            actions += [Send(member.peer, ping, body) for member in job.members.values()]
            if job.bar_reason is not None:  # what they have asked for at other reducers fails, too
                actions += _to_all(job, job.bar_reason)
        return actions

    def allow(self, allowed: AllowList) -> list[Action]:
        """Admit others from now on; members whose keys are gone from the list are told, and lost.

        Their connections are strangers' from then on, and are closed before long.
        """
        self._admission.allowed = allowed
        peers = [
            (member.peer, rank, job.links[rank].key, job.name)
            for job in self.jobs
            for rank, member in job.members.items()
        ]
        waiting = [request for request, _ in self._contests.values()]
        peers += [(one.peer, one.header.rank, one.key, one.hello.job) for one in waiting]
        told: dict[bytes, Send] = {}
        lost: list[Action] = []
        for peer, rank, key, name in peers:
            error = allowed.refusal(key, name)
            if error is not None:
                log.warning("rank %d of job %r: %s", rank, name, error)
                told[peer] = _error(peer, error)
                if (found := self.members.find(peer)) is not None:
                    why = RankLostError(f"rank {rank}'s key was revoked", rank=rank)
                    lost += self._leave(*found, why)
        self._contests = {peer: one for peer, one in self._contests.items() if peer not in told}
        self.counters.unauthenticated += len(told)
        of_others = [one for one in lost if not (isinstance(one, Send) and one.peer in told)]
        return [*told.values(), *of_others]

    def drain(self) -> list[Action]:
        """Tell every member that this reducer shuts down; those that have no other may go on."""
        address = self._admission.identity.address
        self._closing = ReducerLostError(f"reducer {address} is shutting down", reducer=address)
        goodbye = Header(MessageType.GOODBYE).pack()
        members = self.members.members()
        for member in members:
            member.state = after(member.state, Role.REDUCER, MessageType.GOODBYE) or member.state
        return [Send(member.peer, goodbye, None) for member in members]

    def close(self) -> None:
        """Refuse new rounds from now on; open ones may still be finished."""
        self._reductions.closed = self._closing

    # -- joining and leaving ------------------------------------------------------------------

    def _hello(self, peer: bytes, header: Header, payload: Buffer, key: str) -> list[Action]:
        hello = decode(Hello, payload)
        job = self.members.jobs.get(header.job)
        if job is not None and job.name != hello.job:
            # Forged, or the same by chance: what follows would be about another's job.
            raise RemoteProtocolError("the header's job is not the one that the body names")
        request = self._admission.admit(peer, header, hello, key)
        if isinstance(request, Send):
            return [request]
        known = self.members.find(peer) is not None and peer not in self._unreachable
        if known or peer in self._contests:
            raise RemoteProtocolError("HELLO was said already")
        holder = self.members.holder(header)
        if holder is not None and holder.peer not in self._unreachable:
            due = self._now + hello.patience_ms / 1000 + CONTEST_SPARE_S
            self._contests[peer] = request, due
            return [Send(holder.peer, Header(MessageType.PING).pack(), None)]
        return self._join(request)

    def _contested(self) -> list[Action]:
        """Wait for no broken connection of a member whose rank others ask for."""
        holders = [self.members.holder(one.header) for one, _ in self._contests.values()]
        return [GiveUp(holder.peer) for holder in holders if holder is not None]

    def _join(self, request: JoinRequest) -> list[Action]:
        peer, header = request.peer, request.header
        actions = self._make_way(header, request.hello)
        if peer in self._unreachable:  # it speaks for another rank or job now
            actions += self._give_up(peer)
        known = self.members.jobs.get(header.job)
        back = known is not None and header.rank in known.lost
        try:
            if self._closing is not None:
                raise copy.copy(self._closing)
            job, member, earlier = self.members.join(request)
        except ReductionError as error:
            actions += self._refuse(peer, error, request.hello.job)
            present = self.members.jobs.get(header.job)
            if present is not None and isinstance(error, MismatchError):
                actions += self._bar(present, header.rank, error)
            return actions
        features = request.hello.features & self._admission.identity.features
        resumes, ticket = bool(features & Feature.RESUME), ""
        if features & (Feature.STREAMS | Feature.RESUME):
            ticket = self.members.give_ticket(job, member, resumes=resumes)
        actions += [
            MarkJoined(peer, resumes),
            self._admission.welcome(request, job, member, ticket),
        ]
        if earlier is not None:
            generations = (earlier.generation, job.generation)
            text = "job %r: generation %d ends, and %d begins"
            self._say(text, job.name, *generations, job=job.name)
        elif back:
            rank = member.rank
            facts = {**_facts(job, rank), "done": "back"}
            self._say("job %r: rank %d is back", job.name, rank, **facts)
        if len(job.members) == job.world_size:
            self._say("job %r: all %d ranks are here", job.name, job.world_size, job=job.name)
        job.forget()  # it may have finished what the others have, too
        actions += [_loss(job, member, loss) for loss in job.losses.values()]
        if earlier is not None:
            actions += self._supersede(earlier, header)
        return actions + self._serving(job)

    def _serving(self, job: Job) -> list[Action]:
        """Have the loop serve a job in which all is well, and no other, from now on."""
        if job.served == job.healthy:
            return []
        job.served = job.healthy
        return [Serve(job) if job.served else Dismiss(job)]

    def _attach(self, peer: bytes, header: Header, payload: Buffer, key: str) -> list[Action]:
        """Make a peer a further stream of a member; if it is refused, the link goes on without."""
        job, member, said = self._shown(peer, header, payload, key)
        self.members.attach(job, member, said.number, peer)
        return [Attach(member.peer, peer), Send(peer, Header(MessageType.STREAM).pack(), None)]

    def _resume(self, peer: bytes, header: Header, payload: Buffer, key: str) -> list[Action]:
        """Have a member's connection go on over that of a peer, who is a stranger."""
        job, member, said = self._shown(peer, header, payload, key)
        link, secret = job.links[member.rank], self._admission.secret
        broken = link.resumed(said, once=bool(secret))
        return [Resume(broken, peer, header.offset)]

    def _shown(
        self, peer: bytes, header: Header, payload: Buffer, key: str
    ) -> tuple[Job, Member, Stream]:
        """Return whose ticket a STREAM or RESUME shows, and what else that says."""
        if peer in self._contests or self.members.find(peer) is not None:
            raise RemoteProtocolError(f"{header.type.name} is the first message of a connection")
        said = decode(Stream, payload)
        job, member = self.members.shown(said, key)
        if member.peer in self._unreachable:
            raise MembershipError("the first connection of that link has ended")
        self._admission.check_connection(header, said)
        return job, member, said

    def _bar(self, job: Job, rank: int, error: MismatchError) -> list[Send]:
        """End what a job has in flight, if it lacks a rank of other settings, and tell all why."""
        if not job.bar(rank, error):
            return []
        sends: list[Send] = []
        for sequence, round_ in job.rounds.live():
            sends += self._reductions.fail(job, sequence, round_, copy.copy(error))
        return sends + _to_all(job, error)

    def _make_way(self, header: Header, hello: Hello) -> list[Action]:
        """End the earlier life of a rank whose connection broke, as it comes back."""
        job = self.members.jobs.get(header.job)
        if job is None:
            return []
        whole = all(member.peer in self._unreachable for member in job.members.values())
        dead: list[Member] = []
        if whole and job.hello.run and hello.run and job.hello.run != hello.run:
            dead = list(job.members.values())
        elif (holder := self.members.holder(header)) and holder.peer in self._unreachable:
            same = not is_another(job.links[holder.rank].process, hello)
            if same and header.watermark >= holder.watermark:
                # It is alive, and has told the others in time, or will: nobody needs to fail.
                return self._depart(job, holder, self._lost(job, holder))
            # This is another process: the earlier one is dead, and so is its job if all are away.
            dead = list(job.members.values()) if whole else [holder]
        return [action for member in dead for action in self._give_up(member.peer)]

    def _credit(self, job: Job, member: Member, header: Header, payload: Buffer) -> list[Send]:
        """Answer a member that asks for a larger window."""
        del payload
        self.members.quotas.extend(job, member, header.window)
        granted = Header(MessageType.CREDIT, window=member.window)
        return [Send(member.peer, granted.pack(), None)]

    def _lose(self, job: Job, member: Member, header: Header, payload: Buffer) -> list[Send]:
        """Pass on that a rank has lost a reducer."""
        del header
        loss = decode(Loss, payload)
        loss.check_epoch()
        if loss.reducer >= job.hello.reducers:
            raise RemoteProtocolError(f"the job has {job.hello.reducers} reducers")
        known = job.losses.get(loss.reducer)
        if known is not None and _order(loss) <= _order(known):
            return []
        job.losses[loss.reducer] = loss
        if known is None or loss.epoch > known.epoch:  # every rank may have one more stage of it
            what = "all reducers, and begins anew"
            if loss.reducer != ALL_REDUCERS:
                last = job.hello.reducers - 1
                what = f"reducer {loss.reducer} (of 0 to {last}), and goes on without it"
            rank = member.rank
            text = "job %r: rank %d has lost %s"
            self._say(text, job.name, rank, what, **_facts(job, rank))
        others = [other for other in job.members.values() if other is not member]
        return [_loss(job, other, loss) for other in others]

    def _decide(self, due: Callable[[JoinRequest, float], bool]) -> list[Action]:
        """End contests: who is still a member keeps its rank, and others are refused."""
        decided = [request for request, at in self._contests.values() if due(request, at)]
        for request in decided:
            del self._contests[request.peer]
        return [action for request in decided for action in self._join(request)]

    def _supersede(self, job: Job, header: Header) -> list[Action]:
        error = StaleGenerationError(
            f"job {job.name!r} moved on to generation {header.generation}",
            generation=job.generation,
            current=header.generation,
        )
        told = _to_all(job, error)
        job.members.clear()
        return [*told, *self._serving(job)]

    def _goodbye(self, job: Job, member: Member, header: Header, payload: Buffer) -> list[Action]:
        del header, payload
        rank = member.rank
        return self._leave(job, member, RankLostError(f"rank {rank} left the job", rank=rank))

    def _give_up(self, peer: bytes) -> list[Action]:
        """End the part of a peer whose connection broke and who did not come back."""
        del self._unreachable[peer]
        found = self.members.find(peer)
        return [] if found is None else self._leave(*found, self._lost(*found))

    def _lost(self, job: Job, member: Member) -> RankLostError:
        """Say who is lost, and how that was found out."""
        rank, heard = member.rank, self._heard.get(member.peer)
        host_name = job.links[rank].host_name
        where = f" on {host_name}" if host_name else ""
        silent = "" if heard is None else f": {no_heartbeat(self._now - heard)}"
        why = f"rank {rank}{where} died or cannot be reached{silent}"
        return RankLostError(why, rank=rank)

    def _leave(self, job: Job, member: Member, reason: RankLostError) -> list[Action]:
        """Take a member out of its job, and fail the rounds that need it."""
        actions = self._depart(job, member, reason)
        last = "" if job.members else ", the last one"
        done = "left" if member.state is LinkState.LEFT else "lost"
        facts = {**_facts(job, member.rank), "done": done, "last": not job.members}
        self._say("job %r: %s%s", job.name, reason, last, **facts)
        for sequence, round_ in job.rounds.waiting_for(member.rank):
            actions += self._reductions.fail(job, sequence, round_, reason)
        return actions

    def _depart(self, job: Job, member: Member, reason: RankLostError) -> list[Action]:
        """Take a member out of its job."""
        self._unreachable.pop(member.peer, None)
        self._heard.pop(member.peer, None)
        self.members.leave(job, member, reason)
        job.rounds.leave(member.rank, reason)
        return self._serving(job)


def _facts(job: Job, rank: int) -> dict[str, object]:
    """Return what a line on a rank has beside its text."""
    host = job.links[rank].host_name
    return {"job": job.name, "rank": rank, **({"host": host} if host else {})}


def _error(peer: bytes, error: ReductionError) -> Send:
    """Tell a peer of an error of its own."""
    return Send(peer, Header(MessageType.ERROR).pack(), encode_error(error))


def _loss(job: Job, member: Member, loss: Loss) -> Send:
    frame = Header(MessageType.SHARD_MAP, job=job.key, generation=job.generation).pack()
    return Send(member.peer, frame, encode(loss))


def _to_all(job: Job, error: ReductionError) -> list[Send]:
    """Tell all members of a job of an error that concerns no single all-reduce."""
    frame = Header(MessageType.ERROR, job=job.key, generation=job.generation).pack()
    body = encode_error(error)
    return [Send(member.peer, frame, body) for member in job.members.values()]
