"""Sessions and engines under every order of messages that Hypothesis can think of.

The network delivers between connections in any order, repeats contributions, and loses messages
only with their connection.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reducer import kernels
from reducer.errors import (
    LocalProtocolError,
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionTimeout,
)
from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header
from tests.engine.network import Network
from worker_client.operation import Operation
from worker_client.session import GRACE_S

if TYPE_CHECKING:
    import random

COUNTS = (0, 1, 7, 16, 33, 100, 257)
CHUNK_BYTES = 64
TIMEOUT_S = 300.0
FIELDS = ("total_bytes", "dtype", "op", "name")


@dataclass(frozen=True)
class Call:
    """One all-reduce as all ranks should call it, and the rank that calls it differently."""

    dtype: DType
    op: ReduceOp
    count: int
    name: str | None = None
    odd_rank: int | None = None
    odd_field: str | None = None

    def at(self, rank: int) -> Call:
        """The call as this rank makes it."""
        if rank != self.odd_rank:
            return self
        return {
            "total_bytes": Call(self.dtype, self.op, self.count + 5, self.name),
            "dtype": Call(_other_dtype(self.dtype), self.op, self.count, self.name),
            "op": Call(self.dtype, _other_op(self.op), self.count, self.name),
            "name": Call(self.dtype, self.op, self.count, "another name"),
        }[self.odd_field]

    def values(self, rank: int, sequence: int) -> np.ndarray:
        """The bytes that this rank contributes."""
        call = self.at(rank)
        rng = np.random.default_rng([rank, sequence])
        return rng.integers(0, 120, call.count * call.dtype.itemsize, np.uint8)


def _other_dtype(dtype: DType) -> DType:
    return {
        DType.FLOAT32: DType.INT32,
        DType.INT32: DType.FLOAT32,
        DType.BFLOAT16: DType.FLOAT16,
        DType.UINT8: DType.INT8,
    }[dtype]


def _other_op(op: ReduceOp) -> ReduceOp:
    return ReduceOp.MAX if op is ReduceOp.SUM else ReduceOp.SUM


class Training(RuleBasedStateMachine):
    """Ranks call all-reduces, messages travel, ranks go; the guarantee must hold."""

    implementation = "compiled"

    @initialize(
        world_size=st.integers(2, 4), reducers=st.integers(1, 3), window=st.sampled_from([1, 8192])
    )
    def start(self, world_size: int, reducers: int, window: int) -> None:
        self.network = Network(world_size, reducers, CHUNK_BYTES, window, self.implementation)
        self.calls: list[Call] = []
        self.checked: list[set[int]] = [set() for _ in range(world_size)]
        self.network.connect()

    def present(self) -> list[int]:
        return [rank for rank, worker in enumerate(self.network.workers) if worker.present]

    # -- rules --------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        dtype=st.sampled_from([DType.FLOAT32, DType.INT32, DType.BFLOAT16, DType.UINT8]),
        op=st.sampled_from([ReduceOp.SUM, ReduceOp.MIN, ReduceOp.PRODUCT]),
        count=st.sampled_from(COUNTS),
    )
    def submit(self, data: st.DataObject, dtype: DType, op: ReduceOp, count: int) -> None:
        rank = data.draw(st.sampled_from(self.present() or [0]), "rank")
        worker = self.network.workers[rank]
        if not (worker.present and (worker.session.joined or rank in self.network.was_cut)):
            return
        sequence = len(worker.started)
        if sequence == len(self.calls):
            odd = data.draw(st.integers(0, 9), "agreement") == 0
            field = data.draw(st.sampled_from(FIELDS), "field") if odd else None
            rank_odd = data.draw(st.integers(0, len(self.network.workers) - 1)) if odd else None
            self.calls.append(Call(dtype, op, count, "a name", rank_odd, field))
        self.call(rank)

    def call(self, rank: int) -> None:
        worker = self.network.workers[rank]
        sequence = len(worker.started)
        call = self.calls[sequence].at(rank)
        view = memoryview(bytearray(self.calls[sequence].values(rank, sequence).tobytes()))
        self.network.submit(rank, Operation(view, call.dtype, call.op, call.name, TIMEOUT_S))

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 40))
    def deliver(self, choice: random.Random, count: int) -> None:
        for _ in range(count):
            if queues := self.network.waiting():
                self.network.deliver(choice.choice(queues))

    @rule(choice=st.randoms(use_true_random=False))
    def repeat_a_contribution(self, choice: random.Random) -> None:
        queue = choice.choice(list(self.network.up.values()))
        for at, (header, payload) in enumerate(queue):
            if Header.unpack(header).type is MessageType.CONTRIBUTION:
                queue.insert(choice.randint(at, len(queue)), (header, payload))
                return

    @rule(seconds=st.floats(0.01, 2.0))
    def wait(self, seconds: float) -> None:
        self.network.tick(seconds)

    @precondition(lambda self: len(self.present()) > 1)
    @rule(choice=st.randoms(use_true_random=False), farewell=st.booleans(), often=st.integers(0, 9))
    def go(self, choice: random.Random, farewell: bool, often: int) -> None:
        rank = choice.choice(self.present())
        # A rank that has not joined everywhere is missed when the others' deadlines pass.
        if often == 0 and self.network.workers[rank].session.joined:
            (self.network.leave if farewell else self.network.lose)(rank)

    @rule(choice=st.randoms(use_true_random=False), noticed=st.booleans(), often=st.integers(0, 9))
    def cut(self, choice: random.Random, noticed: bool, often: int) -> None:
        network = self.network
        rank, index = choice.choice(list(network.up))
        worker = network.workers[rank]
        if often == 0 and worker.present and worker.session.links[index].member:
            network.cut(rank, index, noticed)

    @precondition(lambda self: self.network.cut_off)
    @rule()
    def mend(self) -> None:
        self.network.mend(*min(self.network.cut_off))

    # -- what must hold -----------------------------------------------------------------------

    @invariant()
    def windows_are_kept(self) -> None:
        for worker in self.network.workers:
            for link in range(len(worker.session.links)):
                stats = worker.session.flight.stats(link)
                assert 0 <= stats.in_flight <= max(stats.window, 1024)
        for engine in self.network.engines:
            assert (
                0
                <= engine.held()
                <= sum(
                    max(member.window, 1024)
                    for job in engine.jobs
                    for member in job.members.values()
                )
            )

    @invariant()
    def results_are_exact(self) -> None:
        for rank, worker in enumerate(self.network.workers):
            for sequence in worker.ended.keys() - self.checked[rank]:
                self.check(rank, sequence, worker.ended[sequence])
                self.checked[rank].add(sequence)

    def check(self, rank: int, sequence: int, error: Exception | None) -> None:
        call, worker = self.calls[sequence], self.network.workers[rank]
        if error is None:
            assert call.odd_rank is None, "reduced although the ranks disagree"
            ranks = range(len(self.network.workers))
            given = [call.values(other, sequence) for other in ranks]
            expected = np.empty_like(given[0])
            kernels.select("numpy").reduce(given, expected, call.dtype, call.op)
            assert bytes(worker.started[sequence].view) == expected.tobytes()
        elif isinstance(error, MismatchError):
            assert call.odd_rank in {error.rank, error.other_rank}
            assert error.rank != error.other_rank
            assert error.field == call.odd_field
        elif isinstance(error, LocalProtocolError):
            assert not worker.present
        elif isinstance(error, ReducerLostError):
            assert self.network.was_cut
        elif isinstance(error, ReductionTimeout):
            assert self.network.was_cut
            assert not any(self.network.workers[missing].present for missing in error.missing)
        else:
            assert isinstance(error, RankLostError)
            gone = not self.network.workers[error.rank].present
            assert gone or self.network.was_cut

    def settle(self) -> None:
        """Bring every connection back, let every rank make every call, deliver everything."""
        network = self.network
        network.deliver_all()
        for pair in list(network.cut_off):
            network.mend(*pair)
        network.deliver_all()
        network.tick(2.0)  # PINGs show who is gone
        for rank in self.present():
            while len(network.workers[rank].started) < len(self.calls):
                self.call(rank)
        network.deliver_all()
        if network.was_cut and len(self.present()) < len(network.workers):
            # A reducer that nobody was connected to has forgotten who is gone: deadlines tell.
            for seconds in (TIMEOUT_S, GRACE_S):
                network.tick(seconds)
                network.deliver_all()

    def teardown(self) -> None:
        if not hasattr(self, "network"):
            return
        network = self.network
        self.settle()
        self.results_are_exact()
        undisturbed = len(self.present()) == len(network.workers) and not network.was_cut
        for rank in self.present():
            worker = network.workers[rank]
            assert worker.ended.keys() == set(range(len(self.calls))), "an all-reduce hangs"
            if undisturbed:
                for sequence, error in worker.ended.items():
                    odd = self.calls[sequence].odd_rank is not None
                    assert isinstance(error, MismatchError) if odd else error is None
            assert worker.session.active == 0
            links = range(len(worker.session.links))
            assert all(worker.session.flight.stats(link).in_flight == 0 for link in links)
        for engine in network.engines:
            rounds = [round_ for job in engine.jobs for _, round_ in job.rounds.items()]
            assert not any(round_.open for round_ in rounds)
            assert engine.held() == 0
        for rank in self.present():
            network.leave(rank)
        network.deliver_all()
        network.tick(2.0)
        for engine in network.engines:
            assert engine.jobs == []


SETTINGS = settings(
    max_examples=int(os.environ.get("STATE_MACHINE_EXAMPLES", "500")),
    stateful_step_count=60,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize="STATE_MACHINE_EXAMPLES" not in os.environ,
)


class PlainTraining(Training):
    """The same with the plain rounds."""

    implementation = "plain"


TestTraining = Training.TestCase
TestTraining.settings = SETTINGS
TestPlainTraining = PlainTraining.TestCase
TestPlainTraining.settings = SETTINGS
