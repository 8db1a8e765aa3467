"""What an engine may hold and say, checked after every step against a record of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from fuzz.headers import sound
from fuzz.source import check
from reducer.errors import LocalProtocolError
from reducer.kernels.plain import PlainKernels
from reducer.wire.constants import SPARE_CHUNKS, DType, MessageType, ReduceOp
from reducer.wire.header import Header
from reducer.wire.layout import cost
from reducer.wire.messages import Challenge, Loss, Stragglers, Welcome, decode, decode_error

if TYPE_CHECKING:
    from fuzz.twins import Answers
    from reducer.engine.engine import Engine
    from reducer.engine.jobs import Job
    from reducer.engine.limits import Limits
    from reducer.engine.slots import Member
    from tests.twins.slots import Round

_BODIES = {
    MessageType.CHALLENGE: Challenge,
    MessageType.WELCOME: Welcome,
    MessageType.SHARD_MAP: Loss,
    MessageType.STRAGGLERS: Stragglers,
}


class _Chunk(NamedTuple):
    """Contributions to one chunk of one all-reduce, by rank, and ranks that hold its result."""

    given: dict[int, bytes]
    claims: set[int]


class Model:
    """A record of what one engine has taken, to tell whether its answers are right.

    Attributes:
        results: chunks that were summed.
        supplied: chunks whose result a rank has sent.
    """

    def __init__(self, engine: Engine, memory_limit: int, limits: Limits) -> None:
        self.results = self.supplied = 0
        self._engine = engine
        self._memory_limit = memory_limit
        self._limits = limits
        self._kernels = PlainKernels()
        # The jobs themselves are keys, so that a later job of the same name is another one.
        self._open: dict[Job, dict[tuple[int, int], _Chunk]] = {}
        self._done: dict[Job, set[tuple[int, int]]] = {}
        self._before: tuple[Job, Member] | None = None
        self._deaf = False
        self._counted = (0, 0)

    def ask(self, peer: bytes) -> None:
        """Take note of who is about to speak, and as whom."""
        members = self._engine.members
        self._before = members.find(peer)
        self._deaf = peer in self._engine.dropped
        self._counted = self._counts()

    def is_member(self, peer: bytes) -> bool:
        """Whether a peer speaks for a rank."""
        return self._engine.members.find(peer) is not None

    def spoke(self, frame: bytes, payload: bytes, answers: Answers) -> None:
        """Check what a message has led to."""
        contributions, claims = (n - m for n, m in zip(self._counts(), self._counted, strict=True))
        check(contributions + claims in {0, 1}, "a message counts once")
        check(not (self._deaf and answers), "who was dropped is told nothing more")
        if contributions + claims:
            self._take(Header.unpack(frame), payload, claimed=bool(claims))
        self.answered(answers, payload)

    def answered(self, answers: Answers, supplied: bytes = b"") -> None:
        """Check what is sent, and what is held now."""
        results: dict[bytes, list[tuple[bytes, bytes]]] = {}
        for peer, messages in answers.items():
            for frame, payload in messages:
                header = Header.unpack(frame)
                if header.type is MessageType.RESULT:
                    check(len(payload) == header.nbytes, "a result is as long as it says")
                    results.setdefault(frame, []).append((peer, payload))
                else:
                    _read(header, payload)
        for frame, copies in results.items():
            self._result(Header.unpack(frame), copies, supplied)
        self._forget()
        self._look()

    def _counts(self) -> tuple[int, int]:
        return self._engine.counters.contributions, self._engine.counters.claims

    def _take(self, header: Header, payload: bytes, *, claimed: bool) -> None:
        check(self._before is not None, "nothing is taken from strangers")
        assert self._before is not None
        job, member = self._before
        nbytes = header.nbytes if claimed else len(payload)
        check(sound(header, nbytes, job.max_chunk_bytes), f"{header} is sound: {nbytes} bytes")
        said = (header.job, header.generation, header.rank)
        check(said == (job.key, job.generation, member.rank), f"{header} is its sender's")
        check(header.rank < job.world_size, "a rank is one of the world")
        at = header.sequence, header.offset
        check(at not in self._done.setdefault(job, set()), f"chunk {at} is summed once")
        chunk = self._open.setdefault(job, {}).setdefault(at, _Chunk({}, set()))
        check(header.rank not in chunk.claims | chunk.given.keys(), "a rank counts once")
        if claimed:
            chunk.claims.add(header.rank)
        else:
            chunk.given[header.rank] = bytes(payload)

    def _result(self, header: Header, copies: list[tuple[bytes, bytes]], supplied: bytes) -> None:
        job = self._engine.members.jobs[header.job]
        at = header.sequence, header.offset
        chunk = self._open.get(job, {}).pop(at, None)
        check(chunk is not None, f"no result without contributions: {at}")
        assert chunk is not None
        ranks = chunk.claims | chunk.given.keys()
        check(ranks == set(range(job.world_size)), f"no result before all are here: only {ranks}")
        self._done.setdefault(job, set()).add(at)
        expected = self._sum(chunk, header) if not chunk.claims else supplied
        self.supplied += bool(chunk.claims)
        self.results += not chunk.claims
        check(all(payload == expected for _, payload in copies), "every bit is the reference's")
        to = sorted(peer for peer, _ in copies)
        due = sorted(job.members[rank].peer for rank in chunk.given if rank in job.members)
        check(to == due, f"those who have contributed get the result: {due}, not {to}")

    def _sum(self, chunk: _Chunk, header: Header) -> bytes:
        inputs = [chunk.given[rank] for rank in sorted(chunk.given)]
        result = np.empty(header.nbytes, np.uint8)
        self._kernels.reduce(inputs, result, DType(header.dtype), ReduceOp(header.op))
        return result.tobytes()

    def _forget(self) -> None:
        """Drop what the engine must have dropped: the chunks of jobs and rounds that are over."""
        jobs = self._engine.jobs
        for record in (self._open, self._done):
            for job in [job for job in record if job not in jobs]:
                del record[job]
        for job, chunks in self._open.items():
            for at in list(chunks):
                round_ = job.rounds.get(at[0])
                if round_ is None or round_.error is not None:
                    del chunks[at]

    # -- what is held -------------------------------------------------------------------------

    def _look(self) -> None:
        members = self._engine.members
        reserved = members.quotas.reserved()
        held = self._engine.held()
        check(held <= reserved, f"{held} bytes are held, {reserved} reserved")
        check(reserved <= self._memory_limit, f"{reserved} bytes are reserved beyond the limit")
        ours = {
            (job, rank, member) for job in self._engine.jobs for rank, member in job.members.items()
        }
        theirs = {(job, member.rank, member) for job, member in members._by_peer.values()}
        check(ours == theirs, "every member has a peer that speaks for it, and every peer a member")
        check(all(job.members for job in self._engine.jobs), "a job is over with its last member")
        check(len(self._engine.jobs) <= self._limits.max_jobs, "there are too many jobs")
        for job in self._engine.jobs:
            self._look_at(job)

    def _look_at(self, job: Job) -> None:
        held = dict.fromkeys(range(job.world_size), 0)
        open_ = self._open.get(job, {})
        for sequence in job.rounds:
            round_ = cast("Round", job.rounds.get(sequence))
            for offset, slot in round_._slots.items():
                chunk = open_.get((sequence, offset))
                check(chunk is not None, f"slot {sequence, offset} has a contribution")
                assert chunk is not None
                check(set(slot.ranks()) == set(chunk.given), "a slot holds what was taken")
                check(set(slot.holders) == chunk.claims, "a slot knows who claims")
                absent = job.world_size - len(chunk.given) - len(chunk.claims)
                check(slot.missing == absent, "a slot knows how many are missing")
                check(absent > 0 or slot.asked is not None, "a complete slot is summed at once")
                for rank in slot.ranks():
                    if round_.left_since(rank) is None:
                        held[rank] += cost(slot.nbytes)
        used = sum(held[rank] for rank in job.members) + job.rounds.used()
        check(used <= job.reserved, f"{used} bytes are used, {job.reserved} reserved")
        most_of_all = self._limits.job_memory_limit or self._memory_limit
        check(job.reserved <= most_of_all, f"{job.reserved} of {most_of_all} bytes are one job's")
        check(job.max_chunk_bytes <= self._limits.max_chunk_bytes, "chunks are too large")
        for rank, member in job.members.items():
            check(member.held == held[rank], f"rank {rank} holds {held[rank]}, not {member.held}")
            spare = SPARE_CHUNKS * cost(job.max_chunk_bytes)
            windows = 2 if self._engine.members.streams(member.peer) else 1
            most = windows * member.window + spare
            check(member.held <= most, f"rank {rank} holds {member.held} of {most}")
            needed = (job.world_size + 1) * (member.window + spare)
            check(job.reserved >= needed, f"{job.reserved} of {needed} bytes are set aside")

    def left(self) -> None:
        """Check that nothing is left when everybody has gone."""
        engine = self._engine
        check(engine.jobs == [] and engine.held() == 0, "nothing is held when all have gone")
        rest = [engine.members._by_peer, engine._unreachable, engine._contests]
        rest += [engine.members._tickets]
        check(not any(rest), f"nothing is remembered when all have gone: {rest}")


def _read(header: Header, payload: bytes) -> None:
    """Check that a message of the engine can be understood."""
    if header.type is MessageType.ERROR:
        error = decode_error(payload, header.sequence)
        check(not isinstance(error, LocalProtocolError), f"{error!r} is nobody's fault here")
        return
    kind = _BODIES.get(header.type)
    if kind is not None:
        decode(kind, payload)
    elif header.type is MessageType.PING:
        check(not payload or bool(decode(Stragglers, payload).missing), "a PING names somebody")
