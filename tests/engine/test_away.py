"""Ranks whose connection breaks, what they give up, and what they tell of other reducers."""

import pytest

from reducer.engine.engine import AWAY_S
from reducer.errors import ReducerLostError, RemoteProtocolError
from reducer.wire.header import Header
from reducer.wire.messages import ALL_REDUCERS, Loss, decode, encode, encode_error
from tests.engine.words import M, kinds, lost_rank, told, with_ranks

LOST = encode_error(ReducerLostError("all are gone", reducer="here:1"))


def test_a_rank_is_lost_when_it_has_been_away_for_a_while(reducer):
    reducer.now = 5.0
    reducer.tick()
    reducer.contribute(0)
    assert reducer.engine.unreachable(b"1") == []
    assert reducer.engine.unreachable(b"1") == []
    reducer.now = 5.0 + AWAY_S - 0.01
    assert reducer.tick() == []
    reducer.now = 5.0 + AWAY_S
    assert told(reducer.tick())[b"0"].rank == 1


def test_a_rank_that_comes_back_in_time_is_told_of_to_nobody(reducer):
    reducer.contribute(0, sequence=2, watermark=2)
    reducer.contribute(1, sequence=3, watermark=2)
    reducer.engine.unreachable(b"1")
    assert kinds(reducer.hello(1, peer=b"1", watermark=2)) == [M.WELCOME]
    reducer.now = 3 * AWAY_S
    assert reducer.tick() == []
    assert kinds(reducer.contribute_both(sequence=4, watermark=2)) == [M.RESULT] * 2
    errors = told(reducer.contribute(1, sequence=3, watermark=2))  # of its earlier life
    assert errors[b"1"].rank == 1


def test_a_lower_watermark_is_another_process(reducer):
    reducer.contribute_both(sequence=5, watermark=5)
    reducer.contribute(0, sequence=6, watermark=6)
    reducer.engine.unreachable(b"1")
    errors = told(reducer.hello(1, peer=b"new", watermark=0))
    assert errors[b"0"].rank == 1, "at once"
    assert b"new" in errors, "the job is still here"


def test_a_job_that_is_away_as_a_whole_makes_way_for_another_one(reducer):
    reducer.contribute_both(sequence=5, watermark=5)
    for rank in range(2):
        reducer.engine.unreachable(b"%d" % rank)
    sends = reducer.hello(1, peer=b"new", watermark=0)
    assert [send.peer for send in sends if kinds([send]) == [M.WELCOME]] == [b"new"]
    (job,) = reducer.engine.jobs
    assert list(job.members) == [1]
    assert reducer.rounds() == set()


def test_a_reducer_that_shuts_down_waits_for_nobody(reducer):
    reducer.contribute(0)
    reducer.engine.drain()
    reducer.engine.close()
    assert told(reducer.engine.unreachable(b"1"))[b"0"].rank == 1


# -- what was given up ----------------------------------------------------------------------------


def test_a_range_is_given_up_now_and_later(reducer):
    for sequence in (11, 13, 15):
        reducer.contribute(0, sequence=sequence)
    errors = told_by_sequence(reducer.say(1, M.ABORT, 11, LOST, nbytes=3, watermark=15))
    assert errors == {(b"0", 11), (b"0", 13)}
    assert reducer.engine.held() == 1024
    for sequence in (12, 14):
        assert isinstance(told(reducer.contribute(0, sequence))[b"0"], ReducerLostError)
    assert kinds(reducer.contribute(1, sequence=15, watermark=15)) == [M.RESULT] * 2
    assert reducer.contribute(0, sequence=10) == []


def told_by_sequence(sends):
    headers = [(send.peer, Header.unpack(send.header)) for send in sends]
    return {(peer, header.sequence) for peer, header in headers if header.type is M.ERROR}


def test_a_range_is_forgotten_when_every_rank_has_passed_it(reducer):
    reducer.say(1, M.ABORT, 0, LOST, nbytes=3, watermark=4)
    (job,) = reducer.engine.jobs
    assert not job.healthy
    assert len(job.given_up) == 1
    reducer.contribute_both(sequence=4, watermark=4)
    assert job.given_up == []
    assert job.healthy
    assert reducer.rounds() == {4}


def test_one_that_is_below_the_senders_watermark_counts_while_others_need_it(reducer):
    reducer.contribute(1, sequence=7, watermark=7)
    reducer.contribute(0, sequence=3)
    assert told(reducer.say(1, M.ABORT, 3, LOST, watermark=7)).keys() == {b"0", b"1"}
    reducer.contribute(0, sequence=7, watermark=7)
    assert reducer.say(1, M.ABORT, 5, LOST, watermark=7) == []
    assert 5 not in reducer.rounds()


# -- reducers that are lost -----------------------------------------------------------------------


def losses(sends):
    found = [send for send in sends if kinds([send]) == [M.SHARD_MAP]]
    return {send.peer: decode(Loss, send.payload) for send in found}


def tell(reducer, rank, lost, epoch):
    return reducer.say(rank, M.SHARD_MAP, 0, encode(Loss(lost, epoch)))


@pytest.fixture
def two_of_three(implementation):
    """Ranks 0 and 1 of 3, in a job of four reducers; rank 2 has yet to come."""
    return with_ranks(implementation, 2, world_size=3, reducers=4)


def test_a_loss_is_passed_on_once(two_of_three):
    assert losses(tell(two_of_three, 0, 2, 1)) == {b"1": Loss(2, 1)}
    assert tell(two_of_three, 1, 2, 1) == []
    assert tell(two_of_three, 1, 2, 0) == []
    assert losses(tell(two_of_three, 1, 2, 4)) == {b"0": Loss(2, 4)}
    assert losses(tell(two_of_three, 1, ALL_REDUCERS, 6)) == {b"0": Loss(ALL_REDUCERS, 6)}


def test_what_made_a_rank_begin_anew_is_passed_on(two_of_three):
    said = [Loss(ALL_REDUCERS, 4, 7), Loss(ALL_REDUCERS, 4, 9), Loss(ALL_REDUCERS, 6)]
    for loss in said:
        sends = two_of_three.say(0, M.SHARD_MAP, 0, encode(loss))
        assert losses(sends) == {b"1": loss}
    for loss in (*said, Loss(ALL_REDUCERS, 5, 11)):
        assert two_of_three.say(1, M.SHARD_MAP, 0, encode(loss)) == []
    assert losses(two_of_three.hello(2, world_size=3, reducers=4)) == {b"2": said[-1]}


def test_who_joins_late_is_told_of_every_loss(two_of_three):
    tell(two_of_three, 0, 2, 1)
    tell(two_of_three, 0, 3, 0)
    sends = two_of_three.hello(2, world_size=3, reducers=4)
    assert kinds(sends) == [M.WELCOME, M.SHARD_MAP, M.SHARD_MAP]
    found = [decode(Loss, send.payload) for send in sends[1:]]
    assert found == [Loss(2, 1), Loss(3, 0)]


def test_a_reducer_that_the_job_does_not_have_cannot_be_lost(two_of_three):
    assert isinstance(told(tell(two_of_three, 0, 4, 0))[b"0"], RemoteProtocolError)
    assert losses(tell(two_of_three, 1, 3, 0)) == {}  # rank 0 is no member any more


def test_a_rank_that_is_away_is_lost_to_the_others_of_its_job_alone(reducer):
    reducer.hello(0, peer=b"other", job="other")
    reducer.contribute(0)
    assert lost_rank(reducer.lose(b"1")) == 1
    assert len(reducer.engine.jobs) == 2


@pytest.mark.parametrize("change", [{"job": "another"}, {"generation": 1}])
def test_a_peer_that_was_away_may_come_back_as_somebody_else(reducer, change):
    reducer.contribute(0)
    reducer.engine.unreachable(b"1")
    sends = reducer.hello(1, **change)
    assert told(sends[:1])[b"0"].rank == 1
    assert kinds([send for send in sends if send.peer == b"1"]) == [M.WELCOME]
    reducer.now += 2 * AWAY_S
    assert told(reducer.tick()) == {}, "its new life goes on"
    for peer in (b"0", b"1"):
        reducer.lose(peer)
    assert reducer.engine.jobs == []


def test_an_epoch_to_which_no_job_comes_is_passed_on_to_nobody(reducer):
    losses = (Loss(ALL_REDUCERS, (1 << 32) - 1), Loss(0, (1 << 32) - 2))
    for rank, loss in enumerate(losses):  # each breaks the protocol, and is dropped
        peer = b"%d" % rank
        sends = reducer.say(rank, M.SHARD_MAP, (1 << 64) - 1, encode(loss))
        assert isinstance(told(sends)[peer], RemoteProtocolError)
        assert {send.peer for send in sends} == {peer}
