"""The reducer's protocol logic: messages and time in, messages out (sans I/O, reads no clock).

The rules are those of `wire/README.md`, section 5. One engine belongs to one thread.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from reducer.clock import no_heartbeat
from reducer.engine.jobs import Job, Membership, is_another
from reducer.engine.limits import NO_LIMITS, Limits
from reducer.engine.rounds import Counters, Reductions, Send
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
from reducer.wire import authentication
from reducer.wire.constants import FEATURES, NONCE_DIGITS, Feature, MessageType
from reducer.wire.header import Buffer, Header
from reducer.wire.messages import (
    ALL_REDUCERS,
    MAX_NAMED_RANKS,
    Challenge,
    Hello,
    Loss,
    Stragglers,
    Stream,
    Welcome,
    decode,
    encode,
    encode_error,
)
from reducer.wire.states import Role, after

if TYPE_CHECKING:
    from collections.abc import Callable

    from reducer.engine.allow_list import AllowList
    from reducer.engine.jobs import EndedRound
    from reducer.engine.slots import Member, SlotsModule
    from reducer.kernels import Kernels

PING_INTERVAL_S = 0.5
MAX_NONCES = 4096
CONTEST_SPARE_S = 0.5  # after a job's patience: by then it has shown whether a peer is silent
# Before a rank whose connection broke is called lost: it may live, and tell the others through
# another reducer that it cannot reach this one.
AWAY_S = 1.0
MAX_REFUSALS = 8  # of one peer in this time: one that tries on and on is dropped
REFUSALS_S = 10.0
MAX_DROPPED = 4096  # peers to remember, until their connections are closed
MAX_LINES = 16  # about workers between two PINGs: whoever provokes them must not fill the log

log = logging.getLogger(__name__)


class RankContest(NamedTuple):
    """A HELLO for the rank of a member that may be dead; PINGs to it show by `due` whether."""

    peer: bytes
    header: Header
    hello: Hello
    due: float
    key: str
    challenge: str

    @property
    def said(self) -> tuple[bytes, Header, Hello, str, str]:
        """What there is to join with."""
        return self.peer, self.header, self.hello, self.key, self.challenge


class Engine:
    """One reducer (or one thread of it).

    Args:
        kernels: what sums.
        slots: the implementation of members, rounds and slots.
        memory_limit: bytes that contributions and results may take.
        incarnation: hexadecimal, another one at every start.
        address: how this reducer calls itself in errors, ``host:port``.
        lanes: ports of the reducer's other threads, told to every worker.
        limits: what one job may take, and how many there may be.
        allowed: whom to admit; None for everybody.
        secret: what workers must prove that they know; empty for nothing.
        features: what this reducer speaks.

    Attributes:
        dropped: peers that broke the protocol and were told so: nothing more that they say counts,
            and whoever owns their connections is to close these.
        closing: those of them that `newly_dropped` has not returned yet.
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
        limits: Limits = NO_LIMITS,
        allowed: AllowList | None = None,
        secret: bytes = b"",
        features: int = FEATURES,
    ) -> None:
        self._allowed = allowed
        self._secret = secret
        self._features = features
        self._nonces: dict[bytes, str] = {}  # that peers have been asked with, until they answer
        self._members = Membership(memory_limit, slots, limits)
        self._reductions = Reductions(kernels, self._members.grow, self._members.grant)
        self._incarnation = incarnation
        self._address = address
        self._lanes = lanes
        self._now = 0.0
        self._next_ping = 0.0
        self._contests: list[RankContest] = []
        self.dropped: dict[bytes, None] = {}
        self.closing: list[bytes] = []
        self._refusals: dict[bytes, int] = {}  # of each peer, lately
        self._unknown: set[bytes] = set()  # who was told lately that it is not known
        self._forgive = 0.0  # when these are forgotten
        self._lines = 0  # about workers, since the last PING
        self._closing: ReducerLostError | None = None  # since it was told to shut down
        self._unreachable: dict[bytes, float] = {}  # when they are given up, by peer
        self._resumed: list[tuple[bytes, bytes, int]] = []  # that `newly_resumed` has yet to tell
        self._heard: dict[bytes, float] = {}  # peers that fell silent: when they were heard last
        self._handlers: dict[MessageType, Callable[[Job, Member, Header, Buffer], list[Send]]] = {
            MessageType.CONTRIBUTION: self._reductions.contribution,
            MessageType.RETAINED: self._reductions.retained,
            MessageType.ABORT: self._reductions.abort,
            MessageType.STRAGGLERS: self._reductions.stragglers,
            MessageType.SHARD_MAP: self._lose,
            MessageType.CREDIT: self._credit,
            MessageType.GOODBYE: self._goodbye,
        }

    @property
    def kernels(self) -> Kernels:
        """What sums."""
        return self._reductions.kernels

    @property
    def counters(self) -> Counters:
        """What was done since the start."""
        return self._reductions.counters

    @property
    def changes(self) -> object:
        """Something that is another thing whenever a job may have begun or ceased to be healthy."""
        return self._members.changes, [len(job.given_up) for job in self._members.jobs.values()]

    @property
    def jobs(self) -> list[Job]:
        """The jobs that are here."""
        return list(self._members.jobs.values())

    @property
    def memory_limit(self) -> int:
        """Bytes that contributions and results may take."""
        return self._members.memory_limit

    def reserved(self) -> int:
        """Bytes set aside for the jobs that are here."""
        return self._members.reserved()

    def held(self) -> int:
        """Bytes of contributions in open slots."""
        return sum(member.held for member in self._members.members())

    def receive(
        self, peer: bytes, frame: Buffer, payload: Buffer, key: str = "", *, at: float = 0.0
    ) -> list[Send]:
        """Take one message from a peer; whatever is wrong with it concerns that peer alone.

        Args:
            peer: the transport's name for the connection.
            frame: frame 0.
            payload: frame 1, empty if there was none.
            key: public key that the peer of a HELLO, STREAM or RESUME has shown;
                `allow_list.LOCAL` of a peer here.
            at: when it has come, seconds of a monotonic clock.
        """
        if peer in self.dropped:
            self.counters.ignored += 1
            return []
        stream, peer = peer, self._members.main(peer)
        try:
            header = Header.unpack(frame)
            if header.type is MessageType.HELLO:
                return self._hello(peer, header, payload, key)
            if header.type is MessageType.STREAM:
                return self._tie(stream, payload, key)
            if header.type is MessageType.RESUME:
                return self._resume(stream, header, payload, key)
            found = self._members.find(peer)
            if found is None:
                raise MembershipError(
                    "this reducer does not know you: it was restarted, or gave you up"
                )
            job, member = found
            if stream != peer and header.type is not MessageType.CONTRIBUTION:
                raise RemoteProtocolError(f"{header.type.name} goes over a link's first connection")
            state = after(member.state, Role.WORKER, header.type)
            if state is None:
                raise RemoteProtocolError(
                    f"{header.type.name} is not allowed in {member.state.name}"
                )
            said = (header.job, header.generation, header.rank)
            if said != (job.key, job.generation, member.rank):
                raise RemoteProtocolError("job, generation and rank must be as agreed")
            member.state = state
            job.rounds.now_us = int(at * 1e6)
            return self._handlers[header.type](job, member, header, payload)
        except ReductionError as error:
            return self._refuse(peer, error)

    def drop(self, peer: bytes, error: ReductionError) -> list[Send]:
        """Tell a peer why nothing more that it says counts, and end its part in its job."""
        sends = [Send(peer, Header(MessageType.ERROR).pack(), encode_error(error))]
        for each in (peer, *self._members.streams(peer)):
            if len(self.dropped) >= MAX_DROPPED:
                del self.dropped[next(iter(self.dropped))]
            self.dropped[each] = None
        self.closing.append(peer)  # and those of its streams that end with it
        self.counters.dropped += 1
        self._contests = [contest for contest in self._contests if contest.peer != peer]
        found = self._members.find(peer)
        if found is not None:
            rank = found[1].rank
            lost = RankLostError(f"rank {rank} broke the protocol: {error}", rank=rank)
            sends += self._leave(peer, lost)
        return sends

    def keep_times(self) -> None:
        """Keep the times of rounds of jobs that begin from now on, for `take_times`."""
        self._members.keep_times()

    def take_times(self) -> list[EndedRound]:
        """Return the rounds that have ended since the last call."""
        return self._members.take_times()

    def streams(self, peer: bytes) -> tuple[bytes, ...]:
        """Return the peers of a member's further streams, over which it is sent results as well."""
        return self._members.streams(peer)

    def newly_tied(self) -> list[tuple[bytes, bytes]]:
        """Return peers that have become further streams since this was asked last, and of whom."""
        tied, self._members.tied = self._members.tied, []
        return tied

    def newly_resumable(self) -> list[bytes]:
        """Return members that have joined since this was asked last, and may say RESUME."""
        resumable, self._members.resumable = self._members.resumable, []
        return resumable

    def newly_resumed(self) -> list[tuple[bytes, bytes, int]]:
        """Return connections that are to go on over others, since this was asked last.

        Returns:
            The peer, that of the fresh connection, and how many bytes the worker has read of what
            was sent to the first one. The transport answers.
        """
        resumed, self._resumed = self._resumed, []
        return resumed

    def contested(self) -> list[bytes]:
        """Return members whose ranks others ask for."""
        holders = [self._members.holder(contest.header) for contest in self._contests]
        return [holder.peer for holder in holders if holder is not None]

    def newly_dropped(self) -> list[bytes]:
        """Return the peers that were dropped since this was asked last."""
        closing, self.closing = self.closing, []
        return closing

    def _refuse(self, peer: bytes, error: ReductionError) -> list[Send]:
        """Answer what is not done; a peer that breaks the protocol is told so once."""
        refusals = self._refusals[peer] = self._refusals.get(peer, 0) + 1
        if type(error) is MembershipError:
            if peer in self._unknown:
                self.counters.ignored += 1  # it was said already: what comes was under way
                return []
            self._unknown.add(peer)
        self.counters.refused += 1
        self.counters.unauthenticated += isinstance(error, AuthError)
        self.counters.over_limit += isinstance(error, CapacityError)
        self._say("refused a message: %s", error)
        broken = isinstance(error, (RemoteProtocolError, VersionError)) or (
            isinstance(error, CapacityError) and error.limit == "window"
        )
        if broken or refusals >= MAX_REFUSALS:
            return self.drop(peer, error)
        return [Send(peer, Header(MessageType.ERROR).pack(), encode_error(error))]

    def _say(self, text: str, *arguments: object, **facts: object) -> None:
        """Log something that workers bring about, unless they do so again and again.

        Args:
            text: the line, as `logging` takes it.
            arguments: what it is formatted with.
            facts: what it is about, for programs that read lines.
        """
        self._lines += 1
        if self._lines <= MAX_LINES:
            log.info(text, *arguments, extra=facts)

    def unreachable(self, peer: bytes) -> list[Send]:
        """Learn from the transport that a peer is gone: it died, or the network is cut.

        Who has lost a further stream is about to notice and to come back, or says GOODBYE over the
        first one, which may be on its way.
        """
        stream, peer = peer, self._members.main(peer)
        self._contests = [contest for contest in self._contests if contest.peer != peer]
        found = self._members.find(peer)
        if found is None:
            return []
        job, member = found
        due = self._now + AWAY_S + (job.patience_s if stream != peer else 0.0)
        if self._reductions.closed is not None and stream == peer:
            return self._leave(peer, self._lost(job, member)) + self._settle_contests(job, member)
        if peer in self._unreachable:
            self._unreachable[peer] = min(self._unreachable[peer], due)
            return []
        self._unreachable[peer] = due
        return self._settle_contests(job, member)

    def silent(self, peer: bytes, seconds: float) -> list[Send]:
        """Learn that nothing has come from a member for longer than its job's patience.

        Args:
            peer: the member, whose connection is being ended.
            seconds: since something has come.
        """
        self._heard.setdefault(peer, self._now - seconds)
        return self.unreachable(peer)

    def tick(self, now: float) -> list[Send]:
        """Do what is due at `now`; call it several times a second.

        Args:
            now: seconds of a monotonic clock, which stands still while nobody can call this: who
                could not be heard meanwhile is not late.
        """
        self._now = now
        sends: list[Send] = []
        for peer in [peer for peer, due in self._unreachable.items() if due <= now]:
            sends += self._give_up(peer)
        if now < self._next_ping:
            return sends
        self._next_ping = now + PING_INTERVAL_S
        if self._lines > MAX_LINES:
            log.info("%d more lines of that kind", self._lines - MAX_LINES)
        self._lines = 0
        if now >= self._forgive:
            self._forgive = now + REFUSALS_S
            self._refusals.clear()
            self._unknown.clear()
        # Every PING found these holders reachable, unless they have left: most are refused.
        sends += self._decide(lambda contest: contest.due <= now)
        for job in self._members.jobs.values():
            another = job.watch.look(job.rounds.lateness, job.world_size, now)
            if another is not None:
                self._say("job %r: %s", job.name, another, job=job.name, **asdict(another))
            ping = Header(MessageType.PING, watermark=job.reached()).pack()
            told = Stragglers(tuple(job.lost)[-MAX_NAMED_RANKS:], job.watch.straggler)
            body = encode(told) if told.missing or told.straggler else None
            sends += [Send(member.peer, ping, body) for member in job.members.values()]
            if job.bar_reason is not None:  # what they have asked for at other reducers fails, too
                sends += _to_all(job, job.bar_reason)
        return sends

    def allow(self, allowed: AllowList) -> list[Send]:
        """Admit others from now on; members whose keys are gone from the list are told, and lost.

        Their connections are strangers' from then on, and are closed before long.
        """
        self._allowed = allowed
        peers = [
            (member.peer, rank, job.keys[rank], job.name)
            for job in self.jobs
            for rank, member in job.members.items()
        ]
        peers += [
            (contest.peer, contest.header.rank, contest.key, contest.hello.job)
            for contest in self._contests
        ]
        told: dict[bytes, bytes] = {}
        lost: list[Send] = []
        for peer, rank, key, name in peers:
            error = allowed.refusal(key, name)
            if error is not None:
                log.warning("rank %d of job %r: %s", rank, name, error)
                told[peer] = encode_error(error)
                why = RankLostError(f"rank {rank}'s key was revoked", rank=rank)
                lost += self._leave(peer, why)
        self._contests = [contest for contest in self._contests if contest.peer not in told]
        self.counters.unauthenticated += len(told)
        frame = Header(MessageType.ERROR).pack()
        sends = [Send(peer, frame, body) for peer, body in told.items()]
        return sends + [send for send in lost if send.peer not in told]

    def drain(self) -> list[Send]:
        """Tell every member that this reducer shuts down; those that have no other may go on."""
        self._closing = ReducerLostError(
            f"reducer {self._address} is shutting down", reducer=self._address
        )
        goodbye = Header(MessageType.GOODBYE).pack()
        members = self._members.members()
        for member in members:
            member.state = after(member.state, Role.REDUCER, MessageType.GOODBYE) or member.state
        return [Send(member.peer, goodbye, None) for member in members]

    def close(self) -> None:
        """Refuse new rounds from now on; open ones may still be finished."""
        self._reductions.closed = self._closing

    # -- joining and leaving ------------------------------------------------------------------

    def _hello(self, peer: bytes, header: Header, payload: Buffer, key: str) -> list[Send]:
        hello = decode(Hello, payload)
        job = self._members.jobs.get(header.job)
        if job is not None and job.name != hello.job:
            # Forged, or the same by chance: what follows would be about another's job.
            raise RemoteProtocolError("the header's job is not the one that the body names")
        refusal = None if self._allowed is None else self._allowed.refusal(key, hello.job)
        if refusal is not None:
            raise refusal
        challenge = ""
        if self._secret:
            challenge = self._nonces.pop(peer, "")
            if not self._proven(header, hello, challenge):
                return [self._challenge(peer, header)]
        known = self._members.find(peer) is not None and peer not in self._unreachable
        if known or any(peer == contest.peer for contest in self._contests):
            raise RemoteProtocolError("HELLO was said already")
        holder = self._members.holder(header)
        if holder is not None and holder.peer not in self._unreachable:
            due = self._now + hello.patience_ms / 1000 + CONTEST_SPARE_S
            self._contests.append(RankContest(peer, header, hello, due, key, challenge))
            return [Send(holder.peer, Header(MessageType.PING).pack(), None)]
        return self._join(peer, header, hello, key, challenge)

    def _challenge(self, peer: bytes, header: Header) -> Send:
        """Ask for a proof, with a nonce for one HELLO."""
        if len(self._nonces) >= MAX_NONCES:
            del self._nonces[next(iter(self._nonces))]  # who has it is asked again
        nonce = self._nonces[peer] = authentication.nonce()
        ask = header._replace(type=MessageType.CHALLENGE, watermark=0, window=0)
        return Send(peer, ask.pack(), encode(Challenge(nonce)))

    def _prove(self, speaker: Role, header: Header, hello: Hello, challenge: str) -> str:
        return authentication.prove(self._secret, speaker, header, hello, challenge, self._address)

    def _proven(self, header: Header, hello: Hello, challenge: str) -> bool:
        """Whether a HELLO shows that its sender knows the secret; False: it has yet to be asked.

        Raises:
            AuthError: it shows that its sender does not.
        """
        shown = hello.auth[NONCE_DIGITS:]
        if hello.auth and not (shown and challenge):
            return False
        expected = self._prove(Role.WORKER, header, hello, challenge)
        if not authentication.proves(shown, expected):
            raise AuthError(
                "this reducer belongs to a job whose secret this worker does not know: ranks that "
                "host reducers learn it from the store of their own process group. Another program "
                "needs reducers of a pool: name these in REDUCTION_SERVERS"
            )
        return True

    def _join(
        self, peer: bytes, header: Header, hello: Hello, key: str, challenge: str
    ) -> list[Send]:
        sends = self._make_way(header, hello)
        if peer in self._unreachable:  # it speaks for another rank or job now
            sends += self._give_up(peer)
        known = self._members.jobs.get(header.job)
        back = known is not None and header.rank in known.lost
        try:
            if self._closing is not None:
                raise copy.copy(self._closing)
            job, member, earlier = self._members.join(peer, header, hello, key)
        except ReductionError as error:
            sends += self._refuse(peer, error)
            present = self._members.jobs.get(header.job)
            if present is not None and isinstance(error, MismatchError):
                sends += self._bar(present, header.rank, error)
            return sends
        welcome = Header(
            MessageType.WELCOME,
            job=header.job,
            generation=header.generation,
            rank=member.rank,
            window=member.window,
        )
        features = hello.features & self._features
        body = Welcome(
            incarnation=self._incarnation,
            max_chunk_bytes=job.max_chunk_bytes,
            lanes=self._lanes if hello.lane == 0 else (),
            auth=self._prove(Role.REDUCER, header, hello, challenge) if self._secret else "",
            ticket=self._ticket(peer, features),
            features=features,
        )
        sends.append(Send(peer, welcome.pack(), encode(body)))
        if earlier is not None:
            generations = (earlier.generation, job.generation)
            text = "job %r: generation %d ends, and %d begins"
            self._say(text, job.name, *generations, job=job.name)
        elif back:
            rank = member.rank
            self._say("job %r: rank %d is back", job.name, rank, job=job.name, rank=rank)
        if len(job.members) == job.world_size:
            self._say("job %r: all %d ranks are here", job.name, job.world_size, job=job.name)
        job.forget()  # it may have finished what the others have, too
        sends += [self._loss(job, member, loss) for loss in job.losses.values()]
        if earlier is not None:
            sends += self._supersede(earlier, header)
        return sends

    def _ticket(self, peer: bytes, features: int) -> str:
        """Return what a new member's further connections have to show, if it may have some."""
        if not features & (Feature.STREAMS | Feature.RESUME):
            return ""
        return self._members.give_ticket(peer, resumes=bool(features & Feature.RESUME))

    def _tie(self, peer: bytes, payload: Buffer, key: str) -> list[Send]:
        """Make a peer a further stream of a member.

        Raises:
            ReductionError: it is refused, and the link goes on without it.
        """
        main, stream = self._shown(MessageType.STREAM, peer, payload)
        self._members.tie(peer, main, stream.number, key)
        return [Send(peer, Header(MessageType.STREAM).pack(), None)]

    def _resume(self, peer: bytes, header: Header, payload: Buffer, key: str) -> list[Send]:
        """Have a member's connection go on over that of a peer, who is a stranger.

        Raises:
            ReductionError: it is refused.
        """
        main, stream = self._shown(MessageType.RESUME, peer, payload, header.offset)
        broken = self._members.stream(main, stream.number, key)
        if self._secret and not self._members.is_new_attempt(main, stream):
            raise AuthError("this RESUME, or a later one, was said before")
        self._resumed.append((broken, peer, header.offset))
        return []

    def _shown(
        self, kind: MessageType, peer: bytes, payload: Buffer, offset: int = 0
    ) -> tuple[bytes, Stream]:
        """Return the member's peer whose ticket a STREAM or RESUME shows, and what that says."""
        joins = any(peer == contest.peer for contest in self._contests)
        if joins or self._members.find(self._members.main(peer)) is not None:
            raise RemoteProtocolError(f"{kind.name} is the first message of a connection")
        stream = decode(Stream, payload)
        main = self._members.ticket_holder(stream.ticket)
        if main in self._unreachable:
            raise MembershipError("the first connection of that link has ended")
        if self._secret:
            said = (self._secret, stream.ticket, stream.number)
            if kind is MessageType.STREAM:
                expected = authentication.prove_stream(*said)
            else:
                expected = authentication.prove_resume(*said, stream.attempt, offset)
            if not authentication.proves(stream.auth, expected):
                raise AuthError(f"who says {kind.name} has to prove that it knows the secret")
        return main, stream

    def _bar(self, job: Job, rank: int, error: MismatchError) -> list[Send]:
        """End what a job has in flight, if it lacks a rank of other settings, and tell all why."""
        sends: list[Send] = []
        if not job.bar(rank, error):
            return sends
        for sequence, round_ in job.rounds.live():
            sends += self._reductions.fail(job, sequence, round_, copy.copy(error))
        return sends + _to_all(job, error)

    def _make_way(self, header: Header, hello: Hello) -> list[Send]:
        """End the earlier life of a rank whose connection broke, as it comes back."""
        job = self._members.jobs.get(header.job)
        if job is None:
            return []
        whole = all(member.peer in self._unreachable for member in job.members.values())
        if whole and job.hello.run and hello.run and job.hello.run != hello.run:
            return [s for member in list(job.members.values()) for s in self._give_up(member.peer)]
        holder = self._members.holder(header)
        if holder is None or holder.peer not in self._unreachable:
            return []
        same = not is_another(job.processes[holder.rank], hello)
        if same and header.watermark >= holder.watermark:
            # It is alive, and has told the others in time, or will: nobody needs to fail.
            del self._unreachable[holder.peer]
            self._depart(holder.peer, self._lost(job, holder))
            return []
        # This is another process: the earlier one is dead, and so is its job if all are away.
        dead = list(job.members.values()) if whole else [holder]
        return [send for member in dead for send in self._give_up(member.peer)]

    def _credit(self, job: Job, member: Member, header: Header, payload: Buffer) -> list[Send]:
        """Answer a member that asks for a larger window."""
        del payload
        self._members.extend(job, member, header.window)
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
            self._say_loss(job, member, loss)
        others = [other for other in job.members.values() if other is not member]
        return [self._loss(job, other, loss) for other in others]

    def _say_loss(self, job: Job, member: Member, loss: Loss) -> None:
        what = f"reducer {loss.reducer} (of 0 to {job.hello.reducers - 1}), and goes on without it"
        if loss.reducer == ALL_REDUCERS:
            what = "all reducers, and begins anew"
        rank = member.rank
        self._say("job %r: rank %d has lost %s", job.name, rank, what, job=job.name, rank=rank)

    def _loss(self, job: Job, member: Member, loss: Loss) -> Send:
        frame = Header(MessageType.SHARD_MAP, job=job.key, generation=job.generation).pack()
        return Send(member.peer, frame, encode(loss))

    def _settle_contests(self, job: Job, lost: Member) -> list[Send]:
        return self._decide(lambda c: (c.header.job, c.header.rank) == (job.key, lost.rank))

    def _decide(self, due: Callable[[RankContest], bool]) -> list[Send]:
        decided = [contest for contest in self._contests if due(contest)]
        self._contests = [contest for contest in self._contests if not due(contest)]
        sends: list[Send] = []
        for contest in decided:
            sends += self._join(*contest.said)
        return sends

    def _supersede(self, job: Job, header: Header) -> list[Send]:
        error = StaleGenerationError(
            f"job {job.name!r} moved on to generation {header.generation}",
            generation=job.generation,
            current=header.generation,
        )
        return _to_all(job, error)

    def _goodbye(self, job: Job, member: Member, header: Header, payload: Buffer) -> list[Send]:
        del job, header, payload
        rank = member.rank
        return self._leave(member.peer, RankLostError(f"rank {rank} left the job", rank=rank))

    def _give_up(self, peer: bytes) -> list[Send]:
        """End the part of a peer whose connection broke and who did not come back."""
        del self._unreachable[peer]
        found = self._members.find(peer)
        return [] if found is None else self._leave(peer, self._lost(*found))

    def _lost(self, job: Job, member: Member) -> RankLostError:
        """Say who is lost, and how that was found out."""
        rank, heard = member.rank, self._heard.get(member.peer)
        where = f" on {job.host_names[rank]}" if job.host_names[rank] else ""
        silent = "" if heard is None else f": {no_heartbeat(self._now - heard)}"
        why = f"rank {rank}{where} died or cannot be reached{silent}"
        return RankLostError(why, rank=rank)

    def _leave(self, peer: bytes, reason: RankLostError) -> list[Send]:
        """Take a peer out of its job, and fail the rounds that need it."""
        found = self._depart(peer, reason)
        if found is None:
            return []
        job, member = found
        last = "" if job.members else ", the last one"
        self._say("job %r: %s%s", job.name, reason, last, job=job.name, rank=member.rank)
        sends: list[Send] = []
        for sequence, round_ in job.rounds.waiting_for(member.rank):
            sends += self._reductions.fail(job, sequence, round_, reason)
        return sends

    def _depart(self, peer: bytes, reason: RankLostError) -> tuple[Job, Member] | None:
        self._unreachable.pop(peer, None)
        self._heard.pop(peer, None)
        found = self._members.leave(peer, reason)
        if found is not None:
            job, member = found
            job.rounds.leave(member.rank, reason)
        return found


def _order(loss: Loss) -> tuple[int, int, int]:
    """Return what is greater for a loss that is news."""
    return loss.epoch, loss.stage, loss.sequence


def _to_all(job: Job, error: ReductionError) -> list[Send]:
    """Tell all members of a job of an error that concerns no single all-reduce."""
    frame = Header(MessageType.ERROR, job=job.key, generation=job.generation).pack()
    body = encode_error(error)
    return [Send(member.peer, frame, body) for member in job.members.values()]
