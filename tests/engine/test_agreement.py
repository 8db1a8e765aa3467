"""Ranks agree on the size of chunks and the reducers, whatever each of them has seen."""

import pytest

from reducer.errors import (
    LocalProtocolError,
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionTimeout,
)
from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header
from reducer.wire.layout import SMALLEST_CHUNK
from reducer.wire.messages import ALL_REDUCERS, Loss, Stragglers, encode
from tests.engine import driven
from tests.engine.network import connected
from tests.engine.words import number
from worker_client.protocol.failover import ADOPT_S
from worker_client.protocol.flight import Finish

KIB = 1 << 10
LARGE_BYTES = 1 << 20


def operation(nbytes=LARGE_BYTES, timeout_s=60.0):
    return driven.operation(b"\1" * nbytes, timeout_s)


@pytest.fixture
def fresh(implementation):
    """Two ranks and two reducers, every rank with another idea of the rate."""
    network = connected(2, 2, 0, 0, implementation)
    for rank, worker in enumerate(network.workers):
        worker.session._flow._rates = {0: [(1 + rank) * 150e6], 1: [(1 + rank) * 150e6]}
    return network


@pytest.fixture
def network(fresh):
    """The same after two calls: the ranks agree before the third."""
    for _ in range(2):
        call(fresh)
        fresh.deliver_all()
    return fresh


def chunk_bytes(network):
    return [worker.session._agreement.chunk_bytes for worker in network.workers]


def chunk_sizes(network):
    """Of the contributions that are under way."""
    headers = [Header.unpack(header) for queue in network.up.values() for header, _ in queue]
    return {header.nbytes for header in headers if header.type is MessageType.CONTRIBUTION}


def call(network, ranks=(0, 1)):
    for rank in ranks:
        network.submit(rank, operation())


def test_the_slowest_rank_decides(network):
    assert chunk_bytes(network) == [SMALLEST_CHUNK] * 2
    for _ in range(3):
        call(network)
    assert chunk_sizes(network) == {24}, "all wait for the answer"
    network.deliver_all()
    assert chunk_bytes(network) == [128 * KIB] * 2  # 300 MB/s
    for worker in network.workers:
        assert worker.ended == dict.fromkeys(range(5))
        # The question has a number between those of two calls, and is nobody's call.
        assert [done.sequence for done in worker.started] == [number(call) for call in range(5)]
        assert all(bytes(done.view) == b"\2" * LARGE_BYTES for done in worker.started)


def test_who_is_lost_is_heard_from_the_second_ping_after_an_agreement_on(network):
    session, ping = network.workers[0].session, Header(MessageType.PING).pack()
    session.receive(0, ping, b"", network.now)
    call(network)
    network.deliver_all()
    session.receive(0, ping, b"", network.now)  # it may have been said before
    session.receive(0, ping, encode(Stragglers((1,))), network.now)
    assert session.lost_ranks == {1}


def test_calls_go_on_if_the_ranks_cannot_agree(network):
    call(network)
    for worker in network.workers:
        error = LocalProtocolError("a failure")
        actions = worker.session.calls.fail(worker.session.calls.question, error)
        network.do(network.workers.index(worker), actions)
    network.deliver_all()
    assert chunk_bytes(network) == [SMALLEST_CHUNK] * 2
    assert all(worker.ended[2] is None for worker in network.workers)


def test_a_rank_that_missed_the_answer_is_found_and_all_begin_anew(fresh):
    session = fresh.workers[0].session
    session._agreement._measure(200_000_000)
    assert session._agreement.chunk_bytes == 128 * KIB
    session._map.agree([1, 1])
    call(fresh)
    fresh.deliver_all()
    errors = [worker.ended[0] for worker in fresh.workers]
    assert all(isinstance(error, MismatchError) for error in errors)
    assert {error.field for error in errors} == {"epoch"}
    assert [worker.session._map.epoch for worker in fresh.workers] == [2, 2]
    assert chunk_bytes(fresh) == [SMALLEST_CHUNK] * 2
    call(fresh)
    fresh.deliver_all()
    assert all(worker.ended[1] is None for worker in fresh.workers)


@pytest.mark.parametrize("hears_first", [False, True])
def test_a_rank_that_is_lost_amid_an_agreement_is_named(implementation, hears_first):
    network = connected(3, 2, 0, 0, implementation)
    for _ in range(2):
        call(network, (0, 1, 2))
        network.deliver_all()
    for rank in (1, 2):
        network.submit(rank, operation(8))  # the first reducer takes the question, the second it
    network.deliver_all()
    network.workers[0].present = False
    network.break_off(0, 0, at_once=True)
    network.break_off(0, 1, at_once=False)  # this reducer notices later
    network.tick(1.1)
    network.deliver(network.down[1, 0])  # the agreement has failed at rank 1
    if hears_first:
        # And rank 2 hears from it before it has its own error.
        network.drain(network.up[1, 1], network.down[2, 1])
    network.deliver_all()
    network.tick(1.1)
    network.deliver_all()
    for worker in network.workers[1:]:
        assert isinstance(worker.ended[2], RankLostError), worker.ended[2]
        assert worker.ended[2].rank == 0
    epochs = {worker.session._map.epoch for worker in network.workers[1:]}
    assert len(epochs) == 1


def test_who_asks_late_goes_on_as_those_do_that_gave_up(network):
    network.submit(0, operation(8, timeout_s=1.0))
    network.deliver_all()
    for _ in range(3):  # the deadline, and a second for a reducer to say who is missing
        network.tick(1.1)
    assert isinstance(network.workers[0].ended[2], ReductionTimeout)
    network.deliver_all()
    (epoch,) = {worker.session._map.epoch for worker in network.workers}
    network.submit(1, operation(8))
    network.deliver_all()
    assert isinstance(network.workers[1].ended[2], ReductionTimeout)
    assert {worker.session._map.epoch for worker in network.workers} == {epoch}
    call(network)
    network.deliver_all()
    assert all(worker.ended[3] is None for worker in network.workers)


def test_all_begin_anew_once_if_all_reducers_are_lost_amid_an_agreement(network):
    call(network, (0,))
    for index in range(2):
        network.do(0, network.workers[0].session.disconnected(index, "died"))
    for seconds in (0.1, ADOPT_S, 0.1):  # the call waits for its question, and then is made
        network.tick(seconds)
    assert isinstance(network.workers[0].ended[2], ReducerLostError)
    assert network.workers[0].session._map.epoch == 6


def test_an_all_reduce_that_made_others_begin_anew_is_noted_without_a_later_epoch(network):
    call(network, (0,))
    session = network.workers[0].session
    for epoch, sequence in ((6, number(1)), (5, number(2, place=0))):
        told = Header(MessageType.SHARD_MAP).pack(), encode(Loss(ALL_REDUCERS, epoch, sequence))
        network.do(0, session.receive(0, *told, network.now))
    network.do(0, session.calls.fail(session.calls.question, LocalProtocolError("a failure")))
    assert session._map.epoch == 6


def test_who_leaves_hears_of_the_calls_that_wait(network):
    for _ in range(2):
        call(network, (0,))
    actions = network.workers[0].session.close(LocalProtocolError("left"))
    ended = [action for action in actions if isinstance(action, Finish)]
    assert [finish.operation for finish in ended] == network.workers[0].started[2:]
    assert all(isinstance(finish.error, LocalProtocolError) for finish in ended)


def test_ranks_that_disagree_on_a_size_still_ask_at_the_same_call(fresh):
    for sizes in ((8, 8), (8, 8), (8, LARGE_BYTES), (8, 8), (8, 8), (LARGE_BYTES, 8), (8, 8)):
        for rank, nbytes in enumerate(sizes):
            fresh.submit(rank, operation(nbytes))
        fresh.deliver_all()
    for worker in fresh.workers:
        ended = list(worker.ended.values())  # without the questions, which are nobody's calls
        assert [isinstance(error, MismatchError) for error in ended] == [
            wrong in {2, 5} for wrong in range(7)
        ]
        right = [done for done, error in zip(worker.started, ended, strict=True) if error is None]
        assert all(bytes(done.view) == b"\2" * 8 for done in right)


def test_a_call_is_not_taken_for_a_question(network):
    call(network, (0,))
    ours = driven.operation(24, 60.0, dtype=DType.INT64, op=ReduceOp.MIN, name=None)
    ours.sequence = number(2, place=0)
    network.workers[1].started.append(ours)
    network.do(1, network.workers[1].session._start(ours, network.now))
    network.deliver_all()
    ended = network.workers[1].ended[2]
    assert isinstance(ended, MismatchError)


def test_a_reducer_that_comes_back_is_wanted_by_ranks_that_had_nothing_to_recover(network):
    network.tick(1.0)
    sessions = [worker.session for worker in network.workers]
    assert all(session._quiet for session in sessions)
    network.cut(0, 1, noticed=True)
    network.calm()
    network.tick(1.0)
    assert [session._agreement.wanted for session in sessions] == [True, True]


def test_a_question_keeps_no_call_waiting_beyond_its_time(network):
    network.submit(0, operation())  # the other rank does not come
    network.submit(0, operation(timeout_s=1.0))
    session = network.workers[0].session
    assert session.calls.active.earliest == pytest.approx(network.now + 1.0)


def test_all_begin_anew_if_those_that_they_agree_on_are_lost_meanwhile(network):
    for reducer in range(2):
        network.cut(0, reducer, noticed=True)
    network.deliver_all()
    network.mend(0, 0)
    network.deliver_all()  # rank 0 has reached the first reducer again, but not the second
    call(network)
    network.mend(0, 1)
    network.drain(network.up[0, 1], network.down[0, 1])
    network.restart(0)  # so the second one answers: only the first is to be used
    network.calm()
    assert all(worker.ended.keys() == {0, 1, 2} for worker in network.workers)
    call(network)
    network.calm()
    assert [worker.ended[3] for worker in network.workers] == [None, None]


@pytest.mark.parametrize(
    ("hosts", "largest"), [({0: 0, 1: 1}, 256 * KIB), ({1: 1}, SMALLEST_CHUNK)]
)
def test_jobs_whose_ranks_host_all_reducers_have_large_chunks_from_the_start(
    implementation, hosts, largest
):
    job = driven.joined(implementation, 0, 2, ("a:1", "b:2"), 0, hosts=hosts)
    asked = [
        header
        for _ in range(4)  # of which the third comes after a question, if there is one
        for _, header in driven.sent(job.submit(driven.operation(4 * LARGE_BYTES), 0.0))
    ]
    assert max(header.nbytes for header in asked) == largest
