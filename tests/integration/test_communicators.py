"""What every kind of communicator does, over real reducers: one suite for all of them."""

import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch.distributed as dist

from harness import block8_oracle
from reducer.errors import LocalProtocolError, MismatchError, ReductionTimeout
from reducer.wire.constants import DType, ReduceOp
from reducer.wire.messages import Straggler
from tests.conftest import local_pool
from tests.integration.calls import Board, process_of
from tests.interrupts import BoomError, boom_at
from tests.waits import eventually
from worker_client.client import compose
from worker_client.communicators.casting import CastingCommunicator
from worker_client.communicators.communicator import FlatCommunicator
from worker_client.communicators.elastic import ElasticCommunicator
from worker_client.communicators.fallback import FallbackCommunicator
from worker_client.communicators.node import NodeCommunicator
from worker_client.communicators.placement import arrange
from worker_client.communicators.process_group import ProcessGroup
from worker_client.config import WorkerConfig
from worker_client.protocol._flight import Call
from worker_client.protocol.operation import Operation, refused
from worker_client.protocol.spec import Heartbeats, JobSpec
from worker_client.runtime.service_thread import STOP_S

KINDS = {
    "flat": FlatCommunicator,
    "fallback": FallbackCommunicator,
    "elastic": ElasticCommunicator,
    "casting": CastingCommunicator,
    "nodes": NodeCommunicator,
    "all but elastic": NodeCommunicator,
    "elastic, casting": CastingCommunicator,
    "elastic, fallback": ElasticCommunicator,
}
# The same, with blocks on the wire: what is rounded, and what it becomes without reducers.
BLOCKS = {
    "fallback, blocks": CastingCommunicator,
    "elastic, blocks": CastingCommunicator,
    "nodes, blocks": NodeCommunicator,
}
RANKS = 4
HEARTBEATS = Heartbeats(peer_timeout_s=4.0)  # all ranks are threads of this one process
numbers = itertools.count()


def composed(kind, rank, servers, board, number):
    place = arrange("0011", rank) if kind.startswith(("nodes", "all")) else None
    job, size, me = f"kinds-{number}", RANKS, rank
    if place is not None:
        job, size, me = f"{job}-{place.local_rank}", len(place.nodes), place.node
    falls_back = "fallback" in kind or kind == "all but elastic"
    group = None
    if falls_back:
        prefix = dist.PrefixStore(job, STORE)
        group = ProcessGroup(dist.ProcessGroupGloo(prefix, me, size, timedelta(seconds=20)))
    wire_dtype = "int8" if "blocks" in kind else "none"
    if "casting" in kind or kind.startswith("all"):
        wire_dtype = "bf16"
    settings = WorkerConfig(timeout=20.0, wire_dtype=wire_dtype)
    node = None
    if place is not None:
        node = compose.Node(place, board.around(place))
    spec = JobSpec(
        job,
        0,
        me,
        size,
        tuple(servers),
        0,
        fallback=falls_back,
        elastic=kind.startswith("elastic"),
        process=str(rank),
        heartbeats=HEARTBEATS,
    )
    inner = compose.surviving(settings, spec, compose.flat(settings), group, left=lambda: None)
    return compose.around(settings, inner, "ordered", node)


STORE = dist.HashStore()


@contextmanager
def four_of(kind, servers):
    board, number = Board(), next(numbers)
    with ExitStack() as stack, ThreadPoolExecutor(RANKS) as pool:
        made = list(pool.map(lambda at: composed(kind, at, servers, board, number), range(RANKS)))
        for one in made:
            stack.callback(one.stop)
        assert {type(one) for one in made} == {(KINDS | BLOCKS)[kind]}
        assert [one.rank for one in made] == list(range(RANKS))
        assert {one.world_size for one in made} == {RANKS}
        yield made


@pytest.fixture(params=KINDS)
def four(servers, request):
    with four_of(request.param, servers) as made:
        yield made


class Asked:
    """An all-reduce, and each time that its caller was told of its end."""

    def __init__(self, values, timeout_s=20.0, **more):
        self.values = values
        self.ends = []
        view = values.view(np.uint8).data
        self.operation = Operation(
            view, DType.FLOAT32, ReduceOp.SUM, None, timeout_s, ended=self.ends.append, **more
        )


def begin(four, asked):
    """Begin the all-reduce of every rank, or of the first ones."""
    for one, communicator in zip(asked, four, strict=False):
        communicator.submit(one.operation)
    return asked


def submit(four):
    return begin(four, [Asked(np.full(4, rank, np.float32)) for rank in range(RANKS)])


def await_ends(asked):
    eventually(lambda: all(one.ends for one in asked))


def test_each_ends_once_with_the_sum(four):
    asked = [one for _ in range(20) for one in submit(four)]
    await_ends(asked)
    assert all((one.values == 6).all() for one in asked)
    assert all(one.ends == [None] and one.operation.over for one in asked)
    eventually(lambda: not any(communicator.busy for communicator in four))
    assert not any(communicator.closing for communicator in four)
    assert all(sum(communicator.counters) == 0 for communicator in four)
    assert all(communicator.traffic.bytes_received > 0 for communicator in four)
    assert all(communicator.traffic.busy_s > 0 for communicator in four)


def in_blocks(four, count):
    """Sum whole numbers, exact in any order; every rank must have the oracle's bits."""
    rng = np.random.default_rng(count)
    given = [rng.integers(-127, 128, count).astype(np.float32) for _ in four]
    for values in given:
        values[::101] = 127
    expected = block8_oracle.reduced(given, mean=False)
    if isinstance(four[0], NodeCommunicator):  # ranks of a node first, and blocks as in a flat job
        nodes = [given[0] + given[1], given[2] + given[3]]
        expected = block8_oracle.reduced(nodes, mean=False)
    asked = begin(four, [Asked(values, rounded=True) for values in given])
    await_ends(asked)
    assert all(one.ends == [None] for one in asked)
    assert all(one.values.tobytes() == expected.tobytes() for one in asked)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_have_the_bits_of_the_specification(kind, servers):
    with four_of(kind, servers) as made:
        for count in (4096, 70_001, 3_000_001):
            in_blocks(made, count)


def test_the_process_group_sums_blocks_as_reducers_do():
    with local_pool(1) as servers, four_of("fallback, blocks", servers) as made:
        in_blocks(made, 4096)
        process_of(servers[0]).kill()
        for count in (4096, 70_001, 3_000_001):
            in_blocks(made, count)
        assert all(one.counters.fallbacks >= 3 for one in made)


def test_ranks_that_disagree_where_no_reducer_is_left_hear_what_each_says():
    with local_pool(1) as servers, four_of("fallback", servers) as made:
        await_ends(submit(made))
        process_of(servers[0]).kill()
        asked = [Asked(np.ones(4 + (rank == 1), np.float32)) for rank in range(RANKS)]
        await_ends(begin(made, asked))
        for one in asked:
            error = one.ends[0]
            said = error.field, error.rank, error.expected, error.other_rank, error.got
            assert said == ("total_bytes", 0, 16, 1, 20)
        await_ends(after := submit(made))
        assert all(one.ends == [None] and (one.values == 6).all() for one in after)


def test_who_waits_leads_until_it_is_done(four):
    def go(rank):
        for _ in range(20):
            asked = Asked(np.full(4, rank, np.float32))
            four[rank].submit(asked.operation)
            until = time.monotonic() + 20
            while not asked.ends and time.monotonic() < until:
                four[rank].wait(lambda: bool(asked.ends), until)  # noqa: B023 (within this turn)
                time.sleep(0)
            assert asked.ends == [None]

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(go, range(RANKS)))


def test_a_refusal_fails_the_call_everywhere_and_no_other(four):
    refusals = (None, refused(four[1].spec.rank, "not this one"), None, None)
    asked = [Asked(np.ones(4, np.float32), call=Call(), refusal=one) for one in refusals]
    begin(four, asked)
    after = submit(four)
    await_ends([*asked, *after])
    assert all(isinstance(one.ends[0], MismatchError) and len(one.ends) == 1 for one in asked)
    assert all("not this one" in str(one.ends[0]) for one in asked)
    assert all(one.ends == [None] and (one.values == 6).all() for one in after)


def test_in_a_callback_nobody_may_wait(four):
    said = []
    asked = [Asked(np.ones(4, np.float32)) for _ in four]

    def callback(error):
        said.append(four[0].in_callback)
        with pytest.raises(LocalProtocolError, match="for ever"):
            four[0].wait(lambda: False, time.monotonic() + 5)
        said.append(error)

    asked[0].operation.ended = callback
    begin(four, asked)
    eventually(lambda: said == [True, None])
    assert not four[0].in_callback


def test_stop_ends_what_is_open_and_refuses_the_rest(four):
    asked = [Asked(np.ones(4, np.float32)) for _ in range(5)]
    for one in asked:
        four[2].submit(one.operation)
    stopping = threading.Thread(target=four[2].stop)
    stopping.start()
    stopping.join(20)
    four[2].stop()
    assert all(len(one.ends) == 1 for one in asked)
    assert all(isinstance(one.ends[0], LocalProtocolError) for one in asked)
    assert len({id(one.ends[0]) for one in asked}) == len(asked), "an error of its own for each"
    assert four[2].closing
    late = Asked(np.ones(4, np.float32))
    with pytest.raises(LocalProtocolError, match="shut down"):
        four[2].submit(late.operation)
    with pytest.raises(LocalProtocolError, match="shut down"):
        four[2].check()
    assert not late.ends


def straggler_of(one):
    """Return which rank it names where its reducers name rank 1 of theirs."""
    found = []

    def named():
        for link in one.links:  # until the next PING says that there is none
            link.straggler = Straggler(1, "late", 0.5, 0.1)
        found[:] = [one.straggler]
        return found != [None]

    eventually(named)
    return found[0].rank


def test_the_straggler_has_the_number_that_the_job_gives_it(four):
    for rank, one in enumerate(four):
        # The second one of two nodes is, for each rank, its like of ranks 2 and 3.
        nodes = isinstance(one, NodeCommunicator)
        assert straggler_of(one) == (2 + rank % 2 if nodes else 1)
    if isinstance(one, ElasticCommunicator):
        whole = one.membership
        one.membership = replace(whole, present=(0, 2, 3))
        assert straggler_of(one) == 2
        one.membership = whole


@pytest.mark.extended_cases("elastic", "casting")
def test_a_late_rank_is_named(four):
    asked = begin(four, [Asked(np.ones(4, np.float32), 0.5) for _ in four[:3]])
    await_ends(asked)
    assert isinstance(asked[2].ends[0], ReductionTimeout)
    assert asked[2].ends[0].missing == (3,)
    assert all(one.ends[0] is not None for one in asked)


@pytest.mark.extended_cases("fallback", "casting", "elastic,")
def test_an_interrupted_call_is_no_other_ones(four):
    """Whatever line of `submit` it comes in: the next call's values are added to the next one's."""
    for line in range(1, 200):
        call, interrupted = Call(), False
        asked = Asked(np.full(4, 100, np.float32), call=call)
        sys.settrace(boom_at(line, after="submit", never_in="none"))
        try:
            four[1].submit(asked.operation)
        except BoomError:
            interrupted = True
        finally:
            sys.settrace(None)
        if interrupted:  # what the client does then
            why = refused(four[1].spec.rank, "BoomError")
            nothing = memoryview(b"")
            four[1].submit(
                Operation(nothing, DType.UINT8, ReduceOp.SUM, None, 20.0, call=call, refusal=why)
            )
        others = [Asked(np.full(4, 100, np.float32), call=Call()) for _ in four[:3]]
        begin([four[0], *four[2:]], others)
        after = submit(four)
        await_ends([*others, *after])
        assert all(one.ends[0] is None or "BoomError" in str(one.ends[0]) for one in others)
        assert all(one.ends == [None] and (one.values == 6).all() for one in after)
        eventually(lambda: not any(communicator.busy for communicator in four))
        if not interrupted:
            break
    else:
        pytest.fail("it has more lines than were tried")


def test_stop_in_a_callback_ends_each_once_and_soon(four):
    took = []
    asked = [Asked(np.ones(4, np.float32)) for _ in four]
    open_ = Asked(np.ones(4, np.float32))
    ends = asked[2].ends

    def callback(error):
        ends.append(error)
        begun = time.monotonic()
        four[2].stop()
        took.append(time.monotonic() - begun)

    asked[2].operation.ended = callback
    for one, communicator in zip(asked, four, strict=True):
        communicator.submit(one.operation)
        if one is asked[2]:
            communicator.submit(open_.operation)
    await_ends([*asked, open_])
    assert [one.ends for one in asked] == [[None]] * RANKS
    assert len(open_.ends) == 1
    assert isinstance(open_.ends[0], LocalProtocolError)
    eventually(lambda: took)  # what `stop` has ended may be heard of before it returns
    assert took[0] < STOP_S / 2


@pytest.mark.parametrize("kind", ["fallback", "elastic, fallback"])
def test_through_the_process_group_nothing_is_kept_and_a_callback_may_stop(kind):
    with local_pool(1) as servers, four_of(kind, servers) as made:
        await_ends(submit(made))
        process_of(servers[0]).kill()
        for _ in range(30):
            await_ends(submit(made))
        if isinstance(made[0], ElasticCommunicator):
            # Process groups survive no rank, so no call will be made again.
            eventually(lambda: all(not list(one._replay_log) for one in made))
        test_stop_in_a_callback_ends_each_once_and_soon(made)
