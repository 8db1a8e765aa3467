"""Jobs, generations and ranks: who takes part in what (sans I/O)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from reducer.engine.allow_list import LOCAL
from reducer.engine.lateness import Watch
from reducer.errors import (
    AuthError,
    CapacityError,
    DuplicateRankError,
    MembershipError,
    MismatchError,
    RankLostError,
    RemoteProtocolError,
    StaleGenerationError,
)
from reducer.wire.authentication import nonce
from reducer.wire.constants import MAX_ROUNDS_AHEAD, NO_SEQUENCE, SPARE_CHUNKS
from reducer.wire.header import Header, fingerprint
from reducer.wire.layout import LARGEST_CHUNK, charge
from reducer.wire.states import LinkState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reducer.engine.limits import Limits
    from reducer.engine.slots import Member, Round, Rounds, RoundTimes, SlotsModule
    from reducer.errors import ReductionError
    from reducer.wire.messages import Hello, Loss, Stream

GROWTH = 1 << 20  # bytes; more is set aside for records in such steps
GRANT = 1024  # rounds that a job may begin before it has to ask again
MAX_GIVEN_UP = 1024  # ranges that are remembered; failures make some, and they pass
MAX_ABANDONED = 4096  # ranks that are remembered after their jobs
SETTINGS = {  # equal at every rank: what people know them as
    "world_size": "the number of ranks",
    "reducers": "REDUCTION_SERVERS (how many there are)",
    "reducer_index": "REDUCTION_SERVERS (the place of this reducer among them)",
    "lane": "REDUCTION_SERVERS (the port of this reducer)",
    "chunk_bytes": "REDUCTION_CHUNK_BYTES",
    "patience_ms": "REDUCTION_PATIENCE (in milliseconds)",
}


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


class Job:
    """One generation of one job.

    Attributes:
        hello: settings of the first rank that joined; every other rank must give the same.
        members: live ranks.
        lost: ranks that have left in whatever way, the watermark that each had reached, and why.
        farewells: those of them that have said GOODBYE.
        max_chunk_bytes: the largest chunk that the job's settings lead to.
        rounds: all-reduces in flight, or failed and not yet forgotten, by sequence number.
        losses: by reducer, the latest that ranks have said of its loss; of `ALL_REDUCERS` if a
            rank began anew with all of them.
        given_up: all-reduces that a rank has given up, as first, last, and why.
        reserved: bytes of the reducer's memory set aside for this job.
        window: the largest that is set aside for each rank, bytes.
        key_shown: public key that its first rank has shown; "" without keys.
        keys: public key that each rank came with.
        processes: what each rank has called its process, of members and lost ranks.
        host_names: of the machine of each of these ranks; "" of one that did not say.
        patience_s: how long a rank may be silent before it is given up.
        barred: why ranks that the job lacks were refused, if their settings are others.
        watch: looks for the rank that the others wait for.
        streaming: ranks whose links have further streams.
    """

    def __init__(self, header: Header, hello: Hello, rounds: Rounds, key: str = "") -> None:
        self.key = header.job
        self.key_shown = key
        self.name = hello.job
        self.generation = header.generation
        self.hello = hello
        self.first_rank = header.rank
        self.world_size = hello.world_size
        self.max_chunk_bytes = hello.chunk_bytes or LARGEST_CHUNK
        self.members: dict[int, Member] = {}
        self.lost: dict[int, tuple[int, RankLostError]] = {}
        self.farewells: set[int] = set()
        self.rounds = rounds
        self.losses: dict[int, Loss] = {}
        self.given_up: list[tuple[int, int, ReductionError]] = []
        self.reserved = 0
        self.window = 0
        rounds.most = 0
        self.keys: dict[int, str] = {}
        self.processes: dict[int, str] = {}
        self.host_names: dict[int, str] = {}
        self.patience_s = hello.patience_ms / 1000
        self.barred: dict[int, MismatchError] = {}
        self.watch = Watch()
        self.streaming: set[int] = set()

    @property
    def spare(self) -> int:
        """What a rank may have in flight beyond its window, bytes."""
        return SPARE_CHUNKS * charge(self.max_chunk_bytes)

    def bar(self, rank: int, error: MismatchError) -> bool:
        """Take note that a rank was refused; whether the job cannot go on without it."""
        if not self.nonmembers():
            return False  # it is somebody else
        self.barred[rank] = error
        return True

    @property
    def bar_reason(self) -> MismatchError | None:
        """Why no all-reduce can succeed for now: a rank that the job lacks has other settings."""
        return next(iter(self.barred.values()), None) if self.barred and self.nonmembers() else None

    def nonmembers(self) -> tuple[int, ...]:
        """Ranks that have not joined, or left, or were lost."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.members)

    @property
    def healthy(self) -> bool:
        """Whether every rank is here, has been since the start, and has given up nothing."""
        return len(self.members) == self.world_size and not self.lost and not self.given_up

    def reached(self) -> int:
        """Every all-reduce below this number is finished at every rank."""
        if len(self.members) + len(self.lost) < self.world_size:
            return 0
        return min(
            *(member.watermark for member in self.members.values()),
            *(watermark for watermark, _ in self.lost.values()),
            NO_SEQUENCE,
        )

    def give_up(self, first: int, last: int, error: ReductionError) -> list[tuple[int, int]]:
        """Remember that a rank has given up these all-reduces.

        Returns:
            Those of them that no range had before, as first and last, as far as there can be some.

        Raises:
            RemoteProtocolError: there is no end to such ranges.
        """
        for at, (low, high, why) in enumerate(self.given_up):
            if first <= high + 1 and low <= last + 1:  # mostly all ranks give up the same
                self.given_up[at] = min(low, first), max(high, last), why
                return self._within((first, low - 1), (high + 1, last))
        if len(self.given_up) >= MAX_GIVEN_UP:
            raise RemoteProtocolError(f"more than {MAX_GIVEN_UP} ranges were given up")
        self.given_up.append((first, last, error))
        return self._within((first, last))

    def _within(self, *ranges: tuple[int, int]) -> list[tuple[int, int]]:
        """Return what of these ranges has numbers that a round can have."""
        oldest = self.rounds.oldest
        if oldest is None:
            return []
        reached = (
            *(member.watermark for member in self.members.values()),
            *(watermark for watermark, _ in self.lost.values()),
        )
        latest = min(max(reached) + MAX_ROUNDS_AHEAD, NO_SEQUENCE - 1)
        clipped = [(max(low, oldest), min(high, latest)) for low, high in ranges]
        return [(low, high) for low, high in clipped if low <= high]

    def forget(self) -> None:
        """Forget what no rank will ask about any more."""
        reached = self.reached()
        self.given_up = [given for given in self.given_up if given[1] >= reached]
        passed = self._passed()
        while (sequence := self.rounds.oldest) is not None and sequence < passed:
            round_ = self.rounds.get(sequence)
            if round_ is not None and round_.open:  # ranks went on without its results
                self.release(round_, round_.drop())
            self.rounds.discard_oldest()

    def release(self, round_: Round, taken: Iterable[tuple[int, int]]) -> None:
        """Give back what dropped contributions, as rank and bytes, took of windows."""
        for rank, nbytes in taken:
            if rank in self.members and round_.left_since(rank) is None:
                self.members[rank].held -= nbytes

    def _passed(self) -> int:
        """Return the number below which every live rank is done with all rounds.

        While a rank has yet to join, the latest ones stay: it is to learn why they failed.
        """
        reached = min(member.watermark for member in self.members.values())
        if len(self.members) + len(self.lost) < self.world_size:
            reached -= MAX_ROUNDS_AHEAD
        return reached


class Streams(NamedTuple):
    """The further streams of a member, by their numbers, and the ticket that they have shown.

    Attributes:
        ticket: the member's.
        peers: of the streams.
        resumes: the member's connections may go on when they break.
        attempts: the latest RESUME that was taken for each, by its number.
    """

    ticket: str
    peers: dict[int, bytes]
    resumes: bool
    attempts: dict[int, int]


class Membership:
    """All jobs of one reducer, and which peer speaks for which rank.

    Args:
        memory_limit: bytes that all jobs together may reserve.
        slots: the implementation of members, rounds and slots.
        limits: what one job may take, and how many there may be.

    Attributes:
        changes: how often somebody has joined, left or been lost.
        tied: peers of further streams, and whose they are, that `newly_tied` has yet to tell.
        resumable: members whose connections may go on when they break, and `newly_resumable` has
            yet to tell.
    """

    def __init__(self, memory_limit: int, slots: SlotsModule, limits: Limits) -> None:
        self.memory_limit = memory_limit
        self._limits = limits
        self.changes = 0
        self._slots = slots
        self._keeps_times = False
        self._times: list[EndedRound] = []  # of jobs that have ended
        self.jobs: dict[int, Job] = {}
        self._by_peer: dict[bytes, tuple[Job, Member]] = {}
        self._tickets: dict[str, bytes] = {}  # of members that may have further streams
        self._mains: dict[bytes, bytes] = {}  # the member's peer, by that of a further stream
        self._streams: dict[bytes, Streams] = {}  # the other way round
        self.tied: list[tuple[bytes, bytes]] = []
        self.resumable: list[bytes] = []
        self._of_key: Counter[str] = Counter()  # connections of members that have come with each
        # Of ranks that were given up, by job and process, in jobs that others have left for good.
        self._abandoned: dict[tuple[int, str], Farewell] = {}

    def find(self, peer: bytes) -> tuple[Job, Member] | None:
        """Return the job and member that a peer speaks for, if any."""
        return self._by_peer.get(peer)

    def main(self, peer: bytes) -> bytes:
        """Return the peer that a further stream belongs to; of any other peer, itself."""
        return self._mains.get(peer, peer)

    def streams(self, peer: bytes) -> tuple[bytes, ...]:
        """Return the peers of a member's further streams."""
        known = self._streams.get(peer)
        return () if known is None else tuple(known.peers.values())

    def give_ticket(self, peer: bytes, *, resumes: bool) -> str:
        """Return the ticket that a member's further connections have to show.

        Args:
            peer: of the member.
            resumes: whether its connections may go on when they break.
        """
        ticket = nonce()
        if resumes:
            self.resumable.append(peer)
        self._tickets[ticket] = peer
        self._streams[peer] = Streams(ticket, {}, resumes, {})
        return ticket

    def ticket_holder(self, ticket: str) -> bytes:
        """Return the peer of the member that was given a ticket.

        Raises:
            MembershipError: nobody who is here has it.
        """
        if ticket not in self._tickets:
            raise MembershipError("this reducer has no link with that ticket: it was lost, or left")
        return self._tickets[ticket]

    def stream(self, main: bytes, number: int, key: str) -> bytes:
        """Return the peer of a member's connection, by its number.

        Args:
            main: the member's, which was given a ticket.
            number: of a further stream, or 0.
            key: public key that who asks has shown.

        Raises:
            AuthError: the member's connection has shown another key.
            MembershipError: the member has no such stream, or none of its connections may go on.
        """
        job, member = self._by_peer[main]
        if job.keys[member.rank] != key:
            raise AuthError("who goes on with a connection has to show the same key")
        if not self._streams[main].resumes:
            raise MembershipError("this link's connections do not go on when they break")
        found = {0: main, **self._streams[main].peers}.get(number)
        if found is None:
            raise MembershipError(f"this link has had no stream {number}")
        return found

    def is_new_attempt(self, main: bytes, said: Stream) -> bool:
        """Whether a RESUME is later than all that were taken for a connection; then it is taken.

        Args:
            main: the member's peer.
            said: what the RESUME says of the connection, which there is.
        """
        attempts = self._streams[main].attempts
        if said.attempt <= attempts.get(said.number, 0):
            return False
        attempts[said.number] = said.attempt
        return True

    def tie(self, peer: bytes, main: bytes, number: int, key: str) -> None:
        """Make a peer a further stream of a member.

        Args:
            peer: of the connection.
            main: the member's, which was given a ticket.
            number: of the stream.
            key: public key that the connection has shown, if it has.

        Raises:
            RemoteProtocolError: the member has had a stream of that number, or it is 0.
            AuthError: the member's connection has shown another key.
            CapacityError: there are as many streams as may be, of all members or of the key.
        """
        job, member = self._by_peer[main]
        if job.keys[member.rank] != key:
            raise AuthError("a further stream of a link has to show the same key")
        streams = self._streams[main].peers
        if number in streams or number == 0:
            raise RemoteProtocolError(f"stream {number} of this link is here already")
        limits = self._limits
        most, of_key = limits.max_streams, limits.max_connections_per_key
        if most is not None and len(self._by_peer) + len(self._mains) >= most:
            raise CapacityError(
                f"half of the {2 * most} connections that a thread may have are taken: raise the "
                "reducer's --max-connections (REDUCTION_MAX_CONNECTIONS), or set "
                "REDUCTION_STREAMS=1 at the workers",
                limit="max_streams",
            )
        if key not in {"", LOCAL} and of_key is not None and self._of_key[key] >= of_key // 2:
            raise CapacityError(
                f"half of the {of_key} connections that this key may have are taken: raise the "
                "reducer's --max-connections-per-key (REDUCTION_MAX_CONNECTIONS_PER_KEY), or set "
                "REDUCTION_STREAMS=1 at the workers",
                limit="max_connections_per_key",
            )
        self._of_key[key] += 1
        streams[number] = peer
        self._mains[peer] = main
        self.tied.append((peer, main))
        job.streaming.add(member.rank)

    def members(self) -> list[Member]:
        """Every live member of every job."""
        return [member for _, member in self._by_peer.values()]

    def holder(self, header: Header) -> Member | None:
        """Return the live member that already has the rank that this HELLO asks for."""
        job = self.jobs.get(header.job)
        if job is None or job.generation != header.generation:
            return None
        return job.members.get(header.rank)

    def join(
        self, peer: bytes, header: Header, hello: Hello, key: str = ""
    ) -> tuple[Job, Member, Job | None]:
        """Make a peer the member that its HELLO asks to be.

        Args:
            peer: the transport's name for the connection.
            header: of its HELLO.
            hello: the body.
            key: public key that it has shown, if it has; `LOCAL` of a peer in this process.

        Returns:
            Its job, itself, and the job that ended because this is a later generation of it.

        Raises:
            RemoteProtocolError: the HELLO contradicts itself.
            StaleGenerationError: the job is in a later generation, or this rank starts anew while
                ranks of an earlier run are still here.
            MismatchError: a setting differs from another rank's.
            DuplicateRankError: a live member has this rank.
            CapacityError: the job is too large for a limit, or there are too many jobs, or members
                of this key.
        """
        if header.job != fingerprint(hello.job):
            raise RemoteProtocolError("the header's job is not the fingerprint of the job's name")
        if header.rank >= hello.world_size:
            raise RemoteProtocolError(f"rank {header.rank} of a world of {hello.world_size}")
        shown = "" if key == LOCAL else key
        earlier = self.jobs.get(header.job)
        if earlier is None or earlier.generation < header.generation:
            self._check_size(hello, shown, new=earlier is None)
            job = Job(header, hello, self._slots.Rounds(hello.world_size), shown)
            if self._keeps_times:
                job.rounds.keep_times()
        else:
            job, earlier = earlier, None
            self._check_rejoin(job, header, hello)
        self._check_key(shown, earlier)
        self._reserve(job, header.window, 0 if earlier is None else earlier.reserved)
        if earlier is not None:
            self._drop(earlier)
        if job.key not in self.jobs:
            self.jobs[job.key] = job
            self._granted(job)
            self._recall(job, hello.process)
        member = self._slots.Member(peer, header)
        self.changes += 1
        job.members[member.rank] = member
        job.lost.pop(member.rank, None)
        job.farewells.discard(member.rank)
        job.barred.pop(member.rank, None)
        job.processes[member.rank] = hello.process
        job.keys[member.rank] = key
        self._of_key[key] += 1
        job.host_names[member.rank] = hello.host_name
        self._by_peer[peer] = (job, member)
        return job, member, earlier

    def leave(self, peer: bytes, reason: RankLostError) -> tuple[Job, Member] | None:
        """Take a peer out of its job; the job is dropped with its last member."""
        found = self._by_peer.pop(peer, None)
        if found is not None:
            self.changes += 1
            job, member = found
            del job.members[member.rank]
            self._forget(job, member)
            job.lost[member.rank] = (member.watermark, reason)
            if member.state is LinkState.LEFT:
                job.farewells.add(member.rank)
            if not job.members:
                self._remember(job)
                self._end(job)
        return found

    def _remember(self, job: Job) -> None:
        """Keep what a rank that was given up is to learn, if it comes back after its job."""
        if not job.farewells:
            return  # all of them may come back
        rank = min(job.farewells)
        farewell = Farewell(job.generation, rank, job.processes[rank], *job.lost[rank])
        for other in job.lost.keys() - job.farewells:
            if process := job.processes[other]:
                self._abandoned[job.key, process] = farewell
        while len(self._abandoned) > MAX_ABANDONED:
            del self._abandoned[next(iter(self._abandoned))]

    def _recall(self, job: Job, process: str) -> None:
        """Let a job that a rank which was given up begins anew lack who has left it for good."""
        farewell = self._abandoned.pop((job.key, process), None)
        if farewell is not None and farewell.generation == job.generation:
            job.lost[farewell.rank] = farewell.watermark, farewell.reason
            job.processes[farewell.rank] = farewell.process
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

    def _drop(self, job: Job) -> None:
        for member in job.members.values():
            self._forget(job, member)
            del self._by_peer[member.peer]
        self._end(job)

    def _end(self, job: Job) -> None:
        del self.jobs[job.key]
        if self._keeps_times:
            while job.rounds.oldest is not None:
                job.rounds.discard_oldest()
            self._times += _ended_rounds(job)

    def _forget(self, job: Job, member: Member) -> None:
        """Forget the connections of a member, all but that it speaks for its rank."""
        key = job.keys[member.rank]
        if (streams := self._streams.pop(member.peer, None)) is not None:
            del self._tickets[streams.ticket]
            self._of_key[key] -= len(streams.peers)
            for peer in streams.peers.values():
                del self._mains[peer]
            job.streaming.discard(member.rank)
        self._of_key[key] -= 1
        if not self._of_key[key]:
            del self._of_key[key]

    def _of(self, key: str) -> list[Job]:
        """Return the jobs whose first rank has shown a key."""
        return [job for job in self.jobs.values() if job.key_shown == key]

    def reserved(self) -> int:
        """Bytes set aside for all jobs."""
        return sum(job.reserved for job in self.jobs.values())

    def _check_rejoin(self, job: Job, header: Header, hello: Hello) -> None:
        if header.generation < job.generation:
            raise StaleGenerationError(
                f"job {job.name!r} is in generation {job.generation}, "
                f"rank {header.rank} came with {header.generation}",
                generation=header.generation,
                current=job.generation,
            )
        if job.hello.run and hello.run and job.hello.run != hello.run:
            raise _other_run(job)
        theirs, ours = job.hello.settings, hello.settings
        said = [
            *(
                (name, what, getattr(job.hello, name), getattr(hello, name))
                for name, what in SETTINGS.items()
            ),
            *(
                (name, name, theirs[name], ours[name])
                for name in sorted(theirs.keys() & ours.keys())
            ),
        ]
        places = job.hello.reducer_index, hello.reducer_index
        member = header.rank in job.members and not is_another(job.processes[header.rank], hello)
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
        for name, what, expected, got in said:
            if expected != got:
                one, other = (job.first_rank, expected), (header.rank, got)
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
            or is_another(job.processes[header.rank], hello)
        ):
            raise _other_run(job)

    def _check_size(self, hello: Hello, key: str, *, new: bool) -> None:
        """Refuse a job before anything is made that grows with it."""
        limits = self._limits
        chunk_bytes = hello.chunk_bytes or LARGEST_CHUNK
        if new and len(self.jobs) >= limits.max_jobs:
            raise CapacityError(
                f"this reducer serves {limits.max_jobs} jobs already: wait until one has ended, or "
                "raise the reducer's --max-jobs (REDUCTION_MAX_JOBS)",
                limit="max_jobs",
            )
        if new and key and len(self._of(key)) >= limits.max_jobs_per_key:
            raise CapacityError(
                f"this reducer serves {limits.max_jobs_per_key} jobs of this key already (a job is "
                "two if it has names): wait until one has ended, or raise the reducer's "
                "--max-jobs-per-key (REDUCTION_MAX_JOBS_PER_KEY)",
                limit="max_jobs_per_key",
            )
        if hello.world_size > limits.max_ranks:
            raise CapacityError(
                f"job {hello.job!r} has {hello.world_size} ranks, this reducer takes "
                f"{limits.max_ranks} of a job: raise its --max-ranks (REDUCTION_MAX_RANKS)",
                limit="max_ranks",
            )
        if chunk_bytes > limits.max_chunk_bytes:
            raise CapacityError(
                f"job {hello.job!r} has chunks of {chunk_bytes} bytes, this reducer takes "
                f"{limits.max_chunk_bytes}: lower REDUCTION_CHUNK_BYTES, or raise the reducer's "
                "--max-chunk-bytes (REDUCTION_MAX_CHUNK_BYTES)",
                limit="max_chunk_bytes",
            )

    def _check_key(self, key: str, earlier: Job | None) -> None:
        """Refuse one more member of a key that has as many as it may, but for those that go."""
        most = self._limits.max_connections_per_key
        if not key or most is None:
            return
        leaving = 0
        if earlier is not None:
            going = (m for rank, m in earlier.members.items() if earlier.keys[rank] == key)
            leaving = sum(1 + len(self.streams(member.peer)) for member in going)
        if self._of_key[key] - leaving >= most:
            raise CapacityError(
                f"this reducer has {most} connections of this key already (a rank has one to each "
                "thread, and one more if its calls have names, besides REDUCTION_STREAMS): end "
                "other jobs of the key, or raise the reducer's --max-connections-per-key "
                "(REDUCTION_MAX_CONNECTIONS_PER_KEY)",
                limit="max_connections_per_key",
            )

    def extend(self, job: Job, member: Member, window: int) -> None:
        """Let a member have a larger window, as far as there is memory for all ranks."""
        left = self.memory_limit - self.reserved() + job.reserved
        if self._limits.job_memory_limit is not None:
            left = min(left, self._limits.job_memory_limit - self._of_others(job))
        share = left // 2  # the rest is for jobs that grow as well, or have yet to come
        room = share // (job.world_size + 1) - job.spare
        member.window = max(member.window, min(window, max(room, job.window)))
        job.window = max(job.window, member.window)
        job.reserved = job.rounds.reserved = _needed(job, job.window)

    def _reserve(self, job: Job, window: int, freed: int) -> None:
        self._set_aside(
            job,
            _needed(job, window),
            f"{job.world_size} ranks with a window of {window}",
            "lower REDUCTION_WINDOW_BYTES",
            freed,
        )
        job.window = max(job.window, window)

    def grow(self, job: Job, nbytes: int) -> None:
        """Set aside more for the records of a job's all-reduces, if there is room.

        Raises:
            CapacityError: there is none.
        """
        needed = job.reserved + max(nbytes, GROWTH)
        self._set_aside(job, needed, "many chunks at once", "raise REDUCTION_CHUNK_BYTES")

    def grant(self, job: Job) -> None:
        """Let a job begin more rounds, if it may, and all jobs of its key.

        Raises:
            CapacityError: it may not.
        """
        if not self._granted(job):
            raise CapacityError(
                f"job {job.name!r} or others of its key have {self._limits.max_rounds} all-reduces "
                "in progress here: wait for some of them, or raise the reducer's --max-rounds "
                "(REDUCTION_MAX_ROUNDS)",
                limit="max_rounds",
            )

    def _granted(self, job: Job) -> bool:
        """Let a job begin more rounds, if it may; return whether it may."""
        jobs = self._of(job.key_shown) if job.key_shown else [job]
        for each in jobs:
            each.rounds.most = len(each.rounds)  # what it was granted and has not used
        free = self._limits.max_rounds - sum(each.rounds.most for each in jobs)
        job.rounds.most += min(max(free, 0), GRANT)
        return free > 0

    def _set_aside(self, job: Job, needed: int, why: str, advice: str, freed: int = 0) -> None:
        free = self.memory_limit - self.reserved() + freed
        if needed - job.reserved > free:
            raise CapacityError(
                f"job {job.name!r} needs {needed} bytes of a reducer ({why}), {free} of "
                f"{self.memory_limit} are free: {advice}, add reducers, or raise the reducer's "
                "--memory-limit (REDUCTION_MEMORY_LIMIT; its log says if its machine has less)",
                limit="memory_limit",
            )
        most = self._limits.job_memory_limit
        others = self._of_others(job)
        if most is not None and needed + others > most:
            beside = f", beside {others} of other jobs of its key" if others else ""
            raise CapacityError(
                f"job {job.name!r} needs {needed} bytes of a reducer ({why}){beside}, one job may "
                f"take {most}: {advice}, add reducers, or raise the reducer's --job-memory-limit "
                "(REDUCTION_JOB_MEMORY_LIMIT)",
                limit="job_memory_limit",
            )
        job.reserved = job.rounds.reserved = needed

    def _of_others(self, job: Job) -> int:
        """Return what other jobs of a job's key have reserved, bytes."""
        if not job.key_shown:
            return 0
        return sum(one.reserved for one in self._of(job.key_shown) if one.key != job.key)


def is_another(process: str, hello: Hello) -> bool:
    """Whether a HELLO comes from another process, as far as both have said what they are."""
    return bool(process and hello.process) and process != hello.process


def _needed(job: Job, window: int) -> int:
    """Return what a job has to reserve for windows of this size, bytes; never less than it has.

    That is n windows of contributions, and results that the slowest rank has not taken: one more.
    """
    return max(job.reserved, (job.world_size + 1) * (window + job.spare))


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
