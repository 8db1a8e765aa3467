"""Ranks agree on the size of chunks and the reducers, whatever each of them has seen."""

import pytest

from reducer.errors import (
    LocalProtocolError,
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionTimeout,
)
from reducer.wire.constants import MessageType
from reducer.wire.header import Header
from reducer.wire.layout import SMALLEST_CHUNK
from reducer.wire.messages import ALL_REDUCERS, Loss, Stragglers, decode_error, encode
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
    """Two ranks and two reducers."""
    return connected(2, 2, 0, 0, implementation)


@pytest.fixture
def network(fresh):
    """The same after two calls: the ranks agree before the third.

    The links of rank 0 carry 300 MB/s together, those of rank 1 600 MB/s.
    """
    for _ in range(2):
        call(fresh)
        for rank in (1, 0):
            fresh.now += LARGE_BYTES / 600e6
            receive_all(fresh, rank)
    return fresh


def receive_all(network, rank):
    """Deliver what both ranks contribute, and what reducers send one of them."""
    queues = [*network.up.values(), network.down[rank, 0], network.down[rank, 1]]
    while any(queues):
        network.drain(*queues)


def epochs(network):
    return {worker.session.failover.map.epoch for worker in network.workers if worker.present}


def chunk_sizes(network):
    """Of the contributions that are under way."""
    headers = [Header.unpack(header) for queue in network.up.values() for header, _ in queue]
    return {header.nbytes for header in headers if header.type is MessageType.CONTRIBUTION}


def largest_chunk(network):
    """Make a large call; return the size of its largest chunks, which ranks must agree on."""
    for rank in range(2):
        network.submit(rank, operation(8 * LARGE_BYTES))
    largest = 0
    while queues := network.waiting():
        largest = max(largest, *chunk_sizes(network), 0)
        network.drain(*queues)
    assert [list(worker.ended.values())[-1] for worker in network.workers] == [None, None]
    return largest


def call(network, ranks=(0, 1)):
    for rank in ranks:
        network.submit(rank, operation())


def test_the_slowest_rank_decides(network):
    for _ in range(3):
        call(network)
    assert chunk_sizes(network) == {24}, "all wait for the answer"
    network.deliver_all()
    for worker in network.workers:
        assert worker.ended == dict.fromkeys(range(5))
        # The question has a number between those of two calls, and is nobody's call.
        assert [done.sequence for done in worker.started] == [number(call) for call in range(5)]
        assert all(bytes(done.view) == b"\2" * LARGE_BYTES for done in worker.started)
    assert largest_chunk(network) == 128 * KIB  # 300 MB/s


def test_who_is_lost_is_heard_from_the_second_ping_after_an_agreement_on(network):
    session, ping = network.workers[0].session, Header(MessageType.PING).pack()
    session.receive(0, ping, b"", network.now)
    call(network)
    network.deliver_all()
    session.receive(0, ping, b"", network.now)  # it may have been said before
    session.receive(0, ping, encode(Stragglers((1,))), network.now)
    assert session.lost_ranks == {1}


def test_a_rank_that_missed_the_answer_is_found_and_all_begin_anew(network):
    call(network)
    session = network.workers[1].session
    declined = MismatchError("?", field="question", rank=1, other_rank=0, expected="", got="")
    network.do(1, session.calls.fail(session.calls.agreement, declined))
    network.deliver_all()
    errors = [worker.ended[2] for worker in network.workers]
    assert all(isinstance(error, MismatchError) for error in errors)
    assert {error.field for error in errors} == {"epoch"}
    assert len(epochs(network)) == 1
    assert largest_chunk(network) == SMALLEST_CHUNK


def test_who_has_no_answer_begins_anew_beyond_those_that_have_it(network):
    call(network, (0,))
    session = network.workers[0].session
    before = session.failover.map.epoch
    network.do(0, session.calls.fail(session.calls.agreement, ReductionTimeout("no answer")))
    assert session.failover.map.epoch == before + 2


def test_an_answer_is_of_no_use_to_a_rank_that_has_begun_anew_since_it_asked(network):
    call(network)
    told = Header(MessageType.SHARD_MAP).pack(), encode(Loss(ALL_REDUCERS, 6, number(5)))
    session = network.workers[1].session
    network.do(1, session.receive(0, *told, network.now))
    network.drain(*network.up.values())
    network.drain(*(network.down[1, index] for index in range(2)))
    assert session.calls.agreement is None
    assert session.failover.map.epoch == 6, "which others have begun, and not the one after it"
    network.deliver_all()
    call(network)
    network.deliver_all()
    assert [worker.ended[3] for worker in network.workers] == [None, None]


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
    assert len(epochs(network)) == 1


def test_who_asks_late_goes_on_as_those_do_that_gave_up(network):
    network.submit(0, operation(8, timeout_s=1.0))
    network.deliver_all()
    for _ in range(3):  # the deadline, and a second for a reducer to say who is missing
        network.tick(1.1)
    assert isinstance(network.workers[0].ended[2], ReductionTimeout)
    network.deliver_all()
    (epoch,) = epochs(network)
    network.submit(1, operation(8))
    network.deliver_all()
    assert isinstance(network.workers[1].ended[2], ReductionTimeout)
    assert epochs(network) == {epoch}
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
    assert network.workers[0].session.failover.map.epoch == 6


def test_an_all_reduce_that_made_others_begin_anew_is_noted_without_a_later_epoch(network):
    call(network, (0,))
    session = network.workers[0].session
    for epoch, sequence in ((6, number(1)), (5, number(2, place=0))):
        told = Header(MessageType.SHARD_MAP).pack(), encode(Loss(ALL_REDUCERS, epoch, sequence))
        network.do(0, session.receive(0, *told, network.now))
    network.do(0, session.calls.fail(session.calls.agreement, LocalProtocolError("a failure")))
    assert session.failover.map.epoch == 6


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
    ((index, queue),) = ((index, queue) for (_, index), queue in network.up.items() if queue)
    question, payload = queue[0]
    network.deliver_all()
    without_a_name = Header.unpack(question)._replace(rank=1, tag=0).pack()
    answers = network.receive(1, index, without_a_name, payload)
    assert {send.peer for send in answers} == {network.peer(rank, index) for rank in range(2)}
    assert {decode_error(send.payload).field for send in answers} == {"name"}


def test_a_reducer_that_comes_back_is_wanted_by_ranks_that_had_nothing_to_recover(network):
    call(network)
    network.calm()
    network.tick(1.0)
    network.cut(0, 1, noticed=True)
    network.calm()
    network.tick(1.0)
    call(network)
    assert chunk_sizes(network) == {24}, "both ask whether it can be used"


def test_a_question_keeps_no_call_waiting_beyond_its_time(network):
    network.submit(0, operation())  # the other rank does not come
    network.submit(0, operation(timeout_s=1.0))
    session = network.workers[0].session
    assert session.flight.earliest == pytest.approx(network.now + 1.0)


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
def test_jobs_whose_ranks_host_all_reducers_have_large_chunks_from_the_start(hosts, largest):
    job = driven.joined(0, 2, ("a:1", "b:2"), 0, hosts=hosts)
    asked = [
        header
        for _ in range(4)  # of which the third comes after a question, if there is one
        for _, header in driven.sent(job.submit(driven.operation(4 * LARGE_BYTES), 0.0))
    ]
    assert max(header.nbytes for header in asked) == largest
