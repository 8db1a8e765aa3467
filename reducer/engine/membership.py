"""Which peer speaks for which rank of which job (sans I/O)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from reducer.engine.allow_list import LOCAL
from reducer.engine.jobs import Job, Link
from reducer.engine.quotas import Quotas
from reducer.errors import (
    AuthError,
    DuplicateRankError,
    MembershipError,
    MismatchError,
    RankLostError,
    RemoteProtocolError,
    StaleGenerationError,
)
from reducer.wire.authentication import nonce
from reducer.wire.header import fingerprint
from reducer.wire.states import LinkState

if TYPE_CHECKING:
    from reducer.engine.limits import Limits
    from reducer.engine.slots import Member, RoundTimes, SlotsModule
    from reducer.wire.header import Header
    from reducer.wire.messages import Hello, Stream

MAX_ABANDONED = 4096  # ranks that are remembered after their jobs
SETTINGS = {  # equal at every rank: what people know them as
    "world_size": "the number of ranks",
    "reducers": "REDUCTION_SERVERS (how many there are)",
    "reducer_index": "REDUCTION_SERVERS (the place of this reducer among them)",
    "lane": "REDUCTION_SERVERS (the port of this reducer)",
    "chunk_bytes": "REDUCTION_CHUNK_BYTES",
    "patience_ms": "REDUCTION_PATIENCE (in milliseconds)",
}


class JoinRequest(NamedTuple):
    """A HELLO whose sender may join.

    Attributes:
        key: public key that it has shown, if it has; `LOCAL` of a peer in this process.
        challenge: the nonce that it was asked with for its proof; "" if it was not.
    """

    peer: bytes
    header: Header
    hello: Hello
    key: str
    challenge: str


class EndedRound(NamedTuple):
    """A round that has ended, and the job and generation that it was of."""

    job: str
    generation: int
    times: RoundTimes


class Farewell(NamedTuple):
    """What a rank has left behind that said GOODBYE, for one that comes back after the job."""

    generation: int
    rank: int
    process: str
    watermark: int
    reason: RankLostError


class Members:
    """All jobs of one reducer, and which peer speaks for which rank.

    Attributes:
        changes: by the keys of jobs, how often a rank, or a stream of one, has come or gone.
    """

    def __init__(self, slots: SlotsModule, memory_limit: int, limits: Limits) -> None:
        self._slots = slots
        self.jobs: dict[int, Job] = {}
        self.quotas = Quotas(self.jobs, memory_limit, limits)
        self._tickets: dict[str, tuple[Job, Member]] = {}
        self._by_peer: dict[bytes, tuple[Job, Member]] = {}
        # Of ranks that were given up, by job and process, in jobs that others have left for good.
        self._abandoned: dict[tuple[int, str], Farewell] = {}
        self._keeps_times = False
        self._times: list[EndedRound] = []  # of jobs that have ended
        self.changes: Counter[int] = Counter()

    def find(self, peer: bytes) -> tuple[Job, Member] | None:
        """Return the job and member that a peer speaks for, if any."""
        return self._by_peer.get(peer)

    def streams(self, peer: bytes) -> tuple[bytes, ...]:
        """Return the peers of a member's further streams; none of any other peer."""
        found = self._by_peer.get(peer)
        if found is None or found[1].peer != peer:
            return ()
        return tuple(found[0].links[found[1].rank].peers.values())[1:]

    def give_ticket(self, job: Job, member: Member, *, resumes: bool) -> str:
        """Return what a member's further connections have to show."""
        link = job.links[member.rank]
        link.ticket, link.resumes = nonce(), resumes
        self._tickets[link.ticket] = job, member
        return link.ticket

    def shown(self, said: Stream, key: str) -> tuple[Job, Member]:
        """Return whose ticket a STREAM or RESUME shows, when its sender has shown a public key.

        Raises:
            MembershipError: nobody's who is here.
            AuthError: the member has shown another key.
        """
        if said.ticket not in self._tickets:
            raise MembershipError("this reducer has no link with that ticket: it was lost, or left")
        job, member = self._tickets[said.ticket]
        if job.links[member.rank].key != key:
            raise AuthError("a further connection of a link has to show the same key")
        return job, member

    def attach(self, job: Job, member: Member, number: int, peer: bytes) -> None:
        """Make a peer a further stream of a member, unless there are too many."""
        link = job.links[member.rank]
        if number in link.peers:
            raise RemoteProtocolError(f"stream {number} of this link is here already")
        self.quotas.check_stream(link.key)
        self.quotas.count(link.key)
        link.peers[number] = peer
        self._by_peer[peer] = job, member
        self.changes[job.key] += 1

    def members(self) -> list[Member]:
        """Every live member of every job."""
        return [member for job in self.jobs.values() for member in job.members.values()]

    def holder(self, header: Header) -> Member | None:
        """Return the live member that already has the rank that this HELLO asks for."""
        job = self.jobs.get(header.job)
        if job is None or job.generation != header.generation:
            return None
        return job.members.get(header.rank)

    def join(self, request: JoinRequest) -> tuple[Job, Member, Job | None]:
        """Make a peer the member that its HELLO asks to be.

        Returns:
            Its job, itself, and the job that ended because this is a later generation of it.

        Raises:
            ReductionError: it contradicts itself or another rank, or there is no room for it.
        """
        peer, header, hello, key, _ = request
        if header.job != fingerprint(hello.job):
            raise RemoteProtocolError("the header's job is not the fingerprint of the job's name")
        if header.rank >= hello.world_size:
            raise RemoteProtocolError(f"rank {header.rank} of a world of {hello.world_size}")
        shown = "" if key == LOCAL else key
        earlier = self.jobs.get(header.job)
        if earlier is None or earlier.generation < header.generation:
            self.quotas.check_job(hello, shown, new=earlier is None)
            job = Job(header, hello, self._slots.Rounds(hello.world_size), shown)
            if self._keeps_times:
                job.rounds.keep_times()
        else:
            job, earlier = earlier, None
            _check_rejoin(job, header, hello)
        going = [] if earlier is None else [earlier.links[rank] for rank in earlier.members]
        leaving = sum(len(link.peers) for link in going if link.key == shown)
        self.quotas.check_member(shown, leaving)
        self.quotas.reserve(job, header.window, 0 if earlier is None else earlier.reserved)
        if earlier is not None:
            for link in going:
                self._forget(link)
            self._end(earlier)
        if job.key not in self.jobs:
            self.jobs[job.key] = job
            self.quotas.raises_limit(job)
            self._recall(job, hello.process)
        member = self._slots.Member(peer, header)
        job.members[member.rank] = member
        job.lost.pop(member.rank, None)
        job.farewells.discard(member.rank)
        job.barred.pop(member.rank, None)
        job.links[member.rank] = Link(key, hello.process, hello.host_name, {0: peer})
        self.quotas.count(key)
        self._by_peer[peer] = (job, member)
        self.changes[job.key] += 1
        return job, member, earlier

    def leave(self, job: Job, member: Member, reason: RankLostError) -> None:
        """Take a member out of its job; the job is dropped with its last member."""
        del job.members[member.rank]
        self._forget(job.links[member.rank])
        job.lost[member.rank] = (member.watermark, reason)
        self.changes[job.key] += 1
        if member.state is LinkState.LEFT:
            job.farewells.add(member.rank)
        if not job.members:
            self._remember(job)
            self._end(job)

    def _remember(self, job: Job) -> None:
        """Keep what a rank that was given up is to learn, if it comes back after its job."""
        if not job.farewells:
            return  # all of them may come back
        rank = min(job.farewells)
        farewell = Farewell(job.generation, rank, job.links[rank].process, *job.lost[rank])
        for other in job.lost.keys() - job.farewells:
            if process := job.links[other].process:
                self._abandoned[job.key, process] = farewell
        while len(self._abandoned) > MAX_ABANDONED:
            del self._abandoned[next(iter(self._abandoned))]

    def _recall(self, job: Job, process: str) -> None:
        """Let a job that a rank which was given up begins anew lack who has left it for good."""
        farewell = self._abandoned.pop((job.key, process), None)
        if farewell is not None and farewell.generation == job.generation:
            job.lost[farewell.rank] = farewell.watermark, farewell.reason
            job.links[farewell.rank] = Link("", farewell.process, "", {})
            job.farewells.add(farewell.rank)

    def keep_times(self) -> None:
        """Keep the times of rounds of jobs that begin from now on, for `take_times`."""
        self._keeps_times = True

    def take_times(self) -> list[EndedRound]:
        """Return the rounds that have ended since the last call."""
        taken, self._times = self._times, []
        for job in self.jobs.values():
            taken += _ended_rounds(job)
        return taken

    def _end(self, job: Job) -> None:
        del self.jobs[job.key], self.changes[job.key]
        if self._keeps_times:
            while job.rounds.oldest is not None:
                job.rounds.discard_oldest()
            self._times += _ended_rounds(job)

    def _forget(self, link: Link) -> None:
        """Forget a member's connections."""
        self._tickets.pop(link.ticket, None)
        for peer in link.peers.values():
            del self._by_peer[peer]
        self.quotas.count(link.key, -len(link.peers))


def is_another(process: str, hello: Hello) -> bool:
    """Whether a HELLO comes from another process, as far as both have said what they are."""
    return bool(process and hello.process) and process != hello.process


def _check_rejoin(job: Job, header: Header, hello: Hello) -> None:
    if header.generation < job.generation:
        raise StaleGenerationError(
            f"job {job.name!r} is in generation {job.generation}, "
            f"rank {header.rank} came with {header.generation}",
            generation=header.generation,
            current=job.generation,
        )
    if job.hello.run and hello.run and job.hello.run != hello.run:
        raise _other_run(job)
    places = job.hello.reducer_index, hello.reducer_index
    member = header.rank in job.members and not is_another(job.links[header.rank].process, hello)
    if member and places[0] != places[1]:
        raise MismatchError(
            f"job {job.name!r}: two addresses of REDUCTION_SERVERS (numbers {min(places)} and "
            f"{max(places)}, from 0 on) are one reducer: leave one of them out",
            field="reducer_index",
            rank=header.rank,
            other_rank=header.rank,
            expected=places[0],
            got=places[1],
        )
    expected, got = _settings(job.hello), _settings(hello)
    for name in expected:
        if name in got and expected[name] != got[name]:
            one, other = (job.first_rank, expected[name]), (header.rank, got[name])
            what = SETTINGS.get(name, name)
            raise MismatchError.between(f"job {job.name!r}", name, one, other, called=what)
    if header.rank in job.members:
        raise DuplicateRankError(
            f"job {job.name!r} already has a live rank {header.rank}: another run uses this "
            "job's name, or another process of this run has the same rank: set another "
            "REDUCTION_JOB for each run, and another rank for each process",
            rank=header.rank,
        )
    if header.rank in job.lost and (
        header.watermark < job.lost[header.rank][0]
        or is_another(job.links[header.rank].process, hello)
    ):
        raise _other_run(job)


def _settings(hello: Hello) -> dict[str, object]:
    """Return what is equal at every rank that says it, in the order in which it is compared."""
    known = {name: getattr(hello, name) for name in SETTINGS}
    # What a peer calls like one of these must not hide it.
    return known | {
        name: said for name, said in sorted(hello.settings.items()) if name not in known
    }


def _other_run(job: Job) -> StaleGenerationError:
    live = ", ".join(map(str, sorted(job.members)))
    return StaleGenerationError(
        f"job {job.name!r} still has ranks {live} of another run: wait until they have exited, set "
        "another REDUCTION_JOB, or raise REDUCTION_GENERATION",
        generation=job.generation,
        current=job.generation,
    )


def _ended_rounds(job: Job) -> list[EndedRound]:
    return [EndedRound(job.name, job.generation, times) for times in job.rounds.take_times()]
