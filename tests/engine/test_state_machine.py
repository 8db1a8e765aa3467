"""Sessions and engines under every order of messages that Hypothesis can think of.

The network delivers between connections in any order, repeats contributions, and loses messages
only with their connection.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reducer import kernels
from reducer.engine.engine import PING_INTERVAL_S
from reducer.errors import (
    LocalProtocolError,
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionTimeout,
)
from reducer.wire.constants import MIN_COST, SPARE_CHUNKS, DType, MessageType, ReduceOp
from reducer.wire.header import Header
from tests.engine.network import Network
from worker_client.protocol.joining import RETRY_S
from worker_client.protocol.lifecycle import GRACE_S
from worker_client.protocol.operation import Operation

COUNTS = (0, 1, 7, 16, 33, 100, 257)
CHUNK_BYTES = 64
SPARE_BYTES = SPARE_CHUNKS * MIN_COST
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

    def at(self, rank):
        """The call as this rank makes it."""
        if rank != self.odd_rank:
            return self
        return {
            "total_bytes": Call(self.dtype, self.op, self.count + 5, self.name),
            "dtype": Call(_other_dtype(self.dtype), self.op, self.count, self.name),
            "op": Call(self.dtype, _other_op(self.op), self.count, self.name),
            "name": Call(self.dtype, self.op, self.count, "another name"),
        }[self.odd_field]

    def values(self, rank, sequence):
        """The bytes that this rank contributes."""
        call = self.at(rank)
        rng = np.random.default_rng([rank, sequence])
        return rng.integers(0, 120, call.count * call.dtype.itemsize, np.uint8)


def _other_dtype(dtype):
    return {
        DType.FLOAT32: DType.INT32,
        DType.INT32: DType.FLOAT32,
        DType.BFLOAT16: DType.FLOAT16,
        DType.UINT8: DType.INT8,
    }[dtype]


def _other_op(op):
    return ReduceOp.MAX if op is ReduceOp.SUM else ReduceOp.SUM


class Training(RuleBasedStateMachine):
    """Ranks call all-reduces, messages travel, ranks go; the guarantee must hold."""

    implementation = "compiled"

    @initialize(
        world_size=st.integers(2, 4),
        reducers=st.integers(1, 3),
        window=st.sampled_from([1, 8192]),
        spared=st.booleans(),
        whims=st.randoms(use_true_random=False),
    )
    def start(self, world_size, reducers, window, spared, whims):
        self.network = Network(world_size, reducers, CHUNK_BYTES, window, self.implementation)
        self.network.prompt = lambda: whims.random() < 0.5
        self.calls = []
        self.checked = [set() for _ in range(world_size)]
        # Then nobody goes, the last reducer is there for all ranks all the time, and news of a loss
        # is faster than what it is about.
        self.spared = reducers - 1 if spared else None
        # A reducer forgets who is gone once nobody is left: who joins later waits in vain.
        self.gone_early = False
        self.network.connect()

    def present(self):
        return [rank for rank, worker in enumerate(self.network.workers) if worker.present]

    def has_joined(self, rank):
        return self.network.workers[rank].joined

    def let_news_pass(self):
        """Deliver what was said of a loss before time passes, if that is promised."""
        if self.spared is not None and self.network.cut_off:
            self.network.deliver_all()

    # -- rules --------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        dtype=st.sampled_from([DType.FLOAT32, DType.INT32, DType.BFLOAT16, DType.UINT8]),
        op=st.sampled_from([ReduceOp.SUM, ReduceOp.MIN, ReduceOp.PRODUCT]),
        count=st.sampled_from(COUNTS),
    )
    def submit(self, data, dtype, op, count):
        rank = data.draw(st.sampled_from(self.present() or [0]), "rank")
        worker = self.network.workers[rank]
        if not (worker.present and self.has_joined(rank)):
            return
        sequence = len(worker.started)
        if sequence == len(self.calls):
            odd = data.draw(st.integers(0, 9), "agreement") == 0
            field = data.draw(st.sampled_from(FIELDS), "field") if odd else None
            rank_odd = data.draw(st.integers(0, len(self.network.workers) - 1)) if odd else None
            self.calls.append(Call(dtype, op, count, "a name", rank_odd, field))
        self.call(rank)

    @rule(
        choice=st.randoms(use_true_random=False),
        count=st.sampled_from(COUNTS),
        share=st.floats(0.0, 1.0),
    )
    def train(self, choice, count, share):
        """Every rank makes every call, and some of what is said arrives: losses hit the midst."""
        ranks = [rank for rank in self.present() if self.has_joined(rank)]
        self.calls.append(Call(DType.INT32, ReduceOp.SUM, count, "a name"))
        for rank in ranks:
            while len(self.network.workers[rank].started) < len(self.calls):
                self.call(rank)
        waiting = sum(len(queue) for queue in self.network.waiting())
        self.deliver_some(choice, int(3 * share * waiting))

    def call(self, rank):
        worker = self.network.workers[rank]
        sequence = len(worker.started)
        call = self.calls[sequence].at(rank)
        view = memoryview(bytearray(self.calls[sequence].values(rank, sequence).tobytes()))
        self.network.submit(rank, Operation(view, call.dtype, call.op, call.name, TIMEOUT_S))

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 40))
    def deliver(self, choice, count):
        self.deliver_some(choice, count)

    def deliver_some(self, choice, count):
        for _ in range(count):
            if queues := self.network.waiting():
                self.network.deliver(choice.choice(queues))

    @rule(choice=st.randoms(use_true_random=False))
    def repeat_a_contribution(self, choice):
        queue = choice.choice(list(self.network.up.values()))
        for at, (header, payload) in enumerate(queue):
            if Header.unpack(header).type in {MessageType.CONTRIBUTION, MessageType.RETAINED}:
                queue.insert(choice.randint(at, len(queue)), (header, payload))
                return

    @precondition(lambda self: self.network.later)
    @rule(choice=st.randoms(use_true_random=False))
    def notice(self, choice):
        later = self.network.later
        later.pop(choice.randrange(len(later)))()

    @rule(seconds=st.floats(0.01, 2.0))
    def wait(self, seconds):
        self.let_news_pass()
        self.network.tick(seconds)

    @precondition(lambda self: self.spared is None and len(self.present()) > 1)
    @rule(choice=st.randoms(use_true_random=False), farewell=st.booleans(), often=st.integers(0, 9))
    def go(self, choice, farewell, often):
        rank = choice.choice(self.present())
        # A rank that has not joined everywhere is missed when the others' deadlines pass.
        if often == 0 and self.network.workers[rank].session.joined:
            self.gone_early |= not all(map(self.has_joined, self.present()))
            (self.network.leave if farewell else self.network.lose)(rank)

    @rule(choice=st.randoms(use_true_random=False), noticed=st.booleans(), often=st.integers(0, 9))
    def cut(self, choice, noticed, often):
        network = self.network
        rank, index = choice.choice(list(network.up))
        worker = network.workers[rank]
        linked = self.has_joined(rank) and worker.session.links[index].member
        if index != self.spared and often < 3 and worker.present and linked:
            network.cut(rank, index, noticed)

    @rule(choice=st.randoms(use_true_random=False), often=st.integers(0, 9))
    def restart(self, choice, often):
        index = choice.randrange(len(self.network.served))
        if index != self.spared and often == 0 and all(map(self.has_joined, self.present())):
            self.network.restart(index)

    @precondition(lambda self: self.network.cut_off)
    @rule(choice=st.randoms(use_true_random=False))
    def mend(self, choice):
        self.let_news_pass()
        self.network.mend(*choice.choice(sorted(self.network.cut_off)))

    # -- what must hold -----------------------------------------------------------------------

    @invariant()
    def windows_are_kept(self):
        for worker in self.network.workers:
            for link in range(len(worker.session.links)):
                stats = worker.session.flight.stats(link)
                assert 0 <= stats.in_flight <= stats.window + SPARE_BYTES
        for engine in self.network.engines:
            assert (
                0
                <= engine.held()
                <= sum(
                    member.window + SPARE_BYTES
                    for job in engine.jobs
                    for member in job.members.values()
                )
            )

    @invariant()
    def results_are_exact(self):
        for rank, worker in enumerate(self.network.workers):
            for sequence in worker.ended.keys() - self.checked[rank]:
                self.check(rank, sequence, worker.ended[sequence])
                self.checked[rank].add(sequence)

    def check(self, rank, sequence, error):
        call, worker = self.calls[sequence], self.network.workers[rank]
        if error is None:
            assert call.odd_rank is None, "reduced although the ranks disagree"
            ranks = range(len(self.network.workers))
            given = [call.values(other, sequence) for other in ranks]
            expected = np.empty_like(given[0])
            kernels.select("numpy").reduce(given, expected, call.dtype, call.op)
            assert bytes(worker.started[sequence].view) == expected.tobytes()
        elif isinstance(error, MismatchError) and error.field == "epoch":
            # Who hears first that a rank is gone begins anew before the others; the call lacks it.
            if len(self.present()) == len(self.network.workers):
                self.check_that_ranks_may_lose_touch()
        elif isinstance(error, MismatchError) and error.field == "history":
            assert self.has_odd_history(sequence, {error.rank, error.other_rank})
        elif isinstance(error, MismatchError):
            assert call.odd_rank in {error.rank, error.other_rank}
            assert error.rank != error.other_rank
            assert error.field == call.odd_field
        elif isinstance(error, LocalProtocolError):
            assert not worker.present
        elif isinstance(error, ReducerLostError):
            self.check_that_ranks_may_lose_touch()
        elif isinstance(error, ReductionTimeout):
            # Ranks that have lost touch may wait for each other's parts at different reducers: who
            # is missing here may even have the result.
            self.check_that_ranks_may_lose_touch()
        else:
            assert isinstance(error, RankLostError)
            if self.network.workers[error.rank].present:
                self.check_that_ranks_may_lose_touch()

    def has_odd_history(self, sequence, ranks):
        """Whether two ranks disagreed on a call before, and neither had heard so at this one."""
        amid = [self.network.workers[rank].amid[sequence] for rank in ranks]
        return len(ranks) == 2 and any(
            self.calls[before].odd_rank in ranks for before in set.intersection(*amid)
        )

    def check_that_ranks_may_lose_touch(self):
        assert self.network.was_cut or self.gone_early
        assert self.spared is None

    def settle(self):
        """Bring every connection back, let every rank make every call, deliver everything."""
        network = self.network
        network.prompt = lambda: True
        for _ in range(3):
            network.calm()
            network.tick(RETRY_S)  # PINGs show who is gone
        for rank in self.present():
            while len(network.workers[rank].started) < len(self.calls):
                self.call(rank)
        for _ in range(3):
            network.calm()
            network.tick(RETRY_S)
        if (network.was_cut or self.gone_early) and self.spared is None:
            # A reducer that nobody was connected to has forgotten who is gone: deadlines tell.
            # A call that waits for the ranks to agree begins when their question has ended.
            for seconds in (TIMEOUT_S, GRACE_S) * 3:
                network.tick(seconds)
                network.calm()

    def teardown(self):
        if not hasattr(self, "network"):
            return
        network = self.network
        self.settle()
        self.results_are_exact()
        everybody = len(self.present()) == len(network.workers)
        spared = everybody and (self.spared is not None or not network.was_cut)
        for rank in self.present():
            worker = network.workers[rank]
            assert worker.ended.keys() == set(range(len(self.calls))), "an all-reduce hangs"
            if spared:
                for number, error in worker.ended.items():
                    odd = self.calls[number].odd_rank is not None
                    amiss = isinstance(error, MismatchError)
                    assert amiss if odd else error is None or (amiss and error.field == "history")
            assert worker.session.active == 0
            links = range(len(worker.session.links))
            assert all(worker.session.flight.stats(link).in_flight == 0 for link in links)
        for engine in network.engines:
            assert engine.held() == 0
        if everybody:
            self.check_that_all_is_well()
        for rank in self.present():
            network.leave(rank)
        network.deliver_all()
        network.tick(2.0)
        for engine in network.engines:
            assert engine.jobs == []

    def check_that_all_is_well(self):
        """One more call ends well, and nobody keeps what came before it."""
        network = self.network
        self.calls.append(Call(DType.UINT8, ReduceOp.SUM, 1))
        for rank in self.present():
            self.call(rank)
        network.calm()
        network.tick(PING_INTERVAL_S)
        network.calm()
        for worker in network.workers:
            assert worker.ended[len(self.calls) - 1] is None
            assert worker.session.flight.retained_bytes <= 1
        self.results_are_exact()


FEW = settings(
    max_examples=60,
    stateful_step_count=60,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
    print_blob=True,  # it does not find the same examples in every process
)
MANY = settings(FEW, max_examples=3000)


class PlainTraining(Training):
    """The same with the plain rounds."""

    implementation = "plain"


def case(machine, how):
    """A test case of its own; Hypothesis keeps one for each class of machines."""
    made = type(machine.__name__, (machine,), {}).TestCase
    made.settings = how
    return made


def long(machine):
    """A test case of many more examples."""
    marked = pytest.mark.timeout(600)(case(machine, MANY))
    return pytest.mark.extended(f"Test{machine.__name__}")(marked)


TestTraining = case(Training, FEW)
TestPlainTraining = case(PlainTraining, FEW)
TestLongTraining = long(Training)
TestLongPlainTraining = long(PlainTraining)
