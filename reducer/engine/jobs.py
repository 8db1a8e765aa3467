"""Jobs: one generation each, and what its ranks have said and done (sans I/O)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reducer.engine.lateness import Watch
from reducer.errors import AuthError, MembershipError, RemoteProtocolError
from reducer.wire.constants import MAX_ROUNDS_AHEAD, NO_SEQUENCE, SPARE_CHUNKS
from reducer.wire.layout import LARGEST_CHUNK, cost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reducer.engine.slots import Member, Round, Rounds
    from reducer.errors import MismatchError, RankLostError, ReductionError
    from reducer.wire.header import Header
    from reducer.wire.messages import Hello, Loss, Stream

MAX_GIVEN_UP = 1024  # ranges that are remembered; failures make some, and they pass


@dataclass(slots=True)
class Link:
    """Where a rank has come from, and its connections.

    Attributes:
        key, process, host_name: what it has shown and said; "" for nothing.
        peers: of the first connection, which is number 0, and of further streams.
        ticket: what further connections show; "" if there may be none.
        resumes: they may go on over others when they break.
        attempts: the latest RESUME that was taken for each.
    """

    key: str
    process: str
    host_name: str
    peers: dict[int, bytes]
    ticket: str = ""
    resumes: bool = False
    attempts: dict[int, int] = field(default_factory=dict)

    def resumed(self, said: Stream, *, once: bool) -> bytes:
        """Return the peer of the connection that a RESUME has go on; each may be good `once`."""
        if not self.resumes:
            raise MembershipError("this link's connections do not go on when they break")
        if said.number not in self.peers:
            raise MembershipError(f"this link has had no stream {said.number}")
        if once and said.attempt <= self.attempts.get(said.number, 0):
            raise AuthError("this RESUME, or a later one, was said before")
        self.attempts[said.number] = said.attempt
        return self.peers[said.number]


class Job:
    """One generation of one job.

    Attributes:
        key_shown: public key that its first rank has shown; "" without keys.
        hello: settings of the first rank that joined; every other rank must give the same.
        lost: ranks that have left in whatever way, the watermark that each had reached, and why.
        farewells: those of them that have said GOODBYE.
        links: of members and lost ranks.
        rounds: all-reduces in flight, or failed and not yet forgotten, by sequence number.
        losses: by reducer, the latest that ranks have said of its loss; of `ALL_REDUCERS` if a
            rank began anew with all of them.
        given_up: all-reduces that a rank has given up, as first, last, and why.
        window: the largest that is set aside for each rank, bytes.
        barred: why ranks that the job lacks were refused, if their settings are others.
        served: the loop was asked to take its contributions.
    """

    def __init__(self, header: Header, hello: Hello, rounds: Rounds, key: str) -> None:
        self.key = header.job
        self.key_shown = key
        self.name = hello.job
        self.generation = header.generation
        self.hello = hello
        self.first_rank = header.rank
        self.world_size = hello.world_size
        self.max_chunk_bytes = hello.chunk_bytes or LARGEST_CHUNK
        self.peer_timeout_s = hello.patience_ms / 1000
        self.members: dict[int, Member] = {}
        self.lost: dict[int, tuple[int, RankLostError]] = {}
        self.farewells: set[int] = set()
        self.rounds = rounds
        rounds.limit = 0
        self.losses: dict[int, Loss] = {}
        self.given_up: list[tuple[int, int, ReductionError]] = []
        self.window = 0
        self.barred: dict[int, MismatchError] = {}
        self.watch = Watch()
        self.links: dict[int, Link] = {}
        self.served = False

    @property
    def reserved(self) -> int:
        """Bytes of the reducer's memory set aside for this job."""
        return self.rounds.reserved

    @property
    def spare(self) -> int:
        """What a rank may have in flight beyond its window, bytes."""
        return SPARE_CHUNKS * cost(self.max_chunk_bytes)

    def bar(self, rank: int, error: MismatchError) -> bool:
        """Record that a rank was refused; whether the job cannot go on without it."""
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
