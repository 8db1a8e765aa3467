"""Results that ranks hold from a reducer that is lost: claims, questions, answers."""

import pytest

from reducer.errors import MismatchError, RankLostError, ReductionTimeout, RemoteProtocolError
from reducer.wire.header import Header
from reducer.wire.messages import Stragglers, decode, encode_error
from tests.engine.words import M, kinds, lost_rank, told, with_ranks

RESULT = bytes(range(64))


@pytest.fixture
def trio(implementation):
    """Three ranks of one job."""
    return with_ranks(implementation, 3)


def asked(sends):
    """Whom a reducer asks for a result, and for which."""
    (send,) = sends
    header = Header.unpack(send.header)
    assert header.type is M.RETAINED
    assert not send.payload
    assert (header.rank, header.watermark, header.since, header.history) == (0, 0, 0, 0)
    return send.peer, header


def test_a_rank_that_holds_the_result_is_asked_and_the_others_get_it(trio):
    past = {"since": 2, "history": 9}
    assert trio.contribute(0, **past) == []
    assert trio.retain(1, watermark=1, **past) == []
    peer, question = asked(trio.contribute(2, **past))
    assert (peer, question.sequence, question.offset, question.nbytes) == (b"1", 0, 0, 64)
    sends = trio.retain(1, payload=RESULT, watermark=1)
    assert sorted(send.peer for send in sends) == [b"0", b"2"]
    assert kinds(sends) == [M.RESULT] * 2
    assert all(bytes(send.payload) == RESULT for send in sends)
    assert trio.engine.held() == 0
    counters = trio.engine.counters
    assert (counters.claims, counters.supplied, counters.results) == (1, 1, 2)
    assert trio.retain(1, payload=RESULT, watermark=1) == []
    assert trio.contribute(0) == []
    assert counters.duplicates == 2


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_claims_and_contributions_come_in_any_order(trio, order):
    says = {0: trio.retain, 1: trio.contribute, 2: trio.retain}
    for rank in order[:-1]:
        assert says[rank](rank) == []
    peer, _ = asked(says[order[-1]](order[-1]))
    assert peer in {b"0", b"2"}
    sends = trio.retain(int(peer), payload=RESULT)
    assert [send.peer for send in sends] == [b"1"]


def test_what_every_rank_holds_is_asked_of_nobody(reducer):
    assert reducer.retain(0) == []
    assert reducer.retain(1) == []
    (job,) = reducer.engine.jobs
    assert not job.rounds.get(0).open
    assert reducer.engine.held() == 0


def test_an_empty_result_needs_no_asking(reducer):
    nothing = {"total_bytes": 0, "nbytes": 0}
    assert reducer.retain(0, **nothing) == []
    (send,) = reducer.contribute(1, payload=b"")
    assert send.peer == b"1"
    assert kinds([send]) == [M.RESULT]
    assert len(send.payload) == 0


def test_a_claim_counts_once_and_takes_nothing_of_a_window(trio):
    trio.retain(0)
    assert trio.engine.held() == 0
    assert trio.retain(0) == []
    assert trio.contribute(0) == []
    assert trio.engine.counters.duplicates == 2
    assert trio.engine.counters.claims == 1
    assert trio.retain(1) == []
    asked(trio.contribute(2))


def test_only_the_one_that_was_asked_may_answer(trio):
    assert trio.retain(0, payload=RESULT) == []
    trio.retain(0)
    trio.retain(1)
    peer, _ = asked(trio.contribute(2))
    other = 1 - int(peer)
    assert trio.retain(other, payload=RESULT) == []
    assert trio.retain(int(peer), payload=RESULT, offset=0) != []


@pytest.mark.parametrize("politely", [True, False])
def test_a_holder_that_goes_before_it_answers_fails_the_round(reducer, politely):
    reducer.retain(1)
    asked(reducer.contribute(0))
    sends = reducer.say(1, M.GOODBYE, (1 << 64) - 1) if politely else reducer.lose(b"1")
    assert lost_rank(sends) == 1
    assert reducer.engine.held() == 0


def test_a_holder_that_is_gone_is_not_asked(trio):
    trio.retain(0)
    trio.retain(1)
    trio.lose(b"0")
    peer, _ = asked(trio.contribute(2))
    assert peer == b"1"


@pytest.mark.parametrize("back", [True, False])
def test_with_every_holder_gone_or_back_anew_the_round_fails(reducer, back):
    reducer.retain(1)
    if back:
        reducer.engine.unreachable(b"1")
        assert kinds(reducer.hello(1)) == [M.WELCOME]
    else:
        reducer.lose(b"1")
    assert lost_rank(reducer.contribute(0)) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"total_bytes": 128}, "total_bytes"),
        ({"total_bytes": 4096, "nbytes": 128}, "chunk_bytes"),
        ({"tag": 5}, "name"),
        ({"epoch": 1}, "epoch"),
        ({"history": 1}, "history"),
    ],
)
def test_a_claim_that_disagrees_fails_the_round(reducer, change, field):
    reducer.contribute(0, **({"total_bytes": 4096} if field == "chunk_bytes" else {}))
    errors = told(reducer.retain(1, **change))
    assert errors.keys() == {b"0", b"1"}
    assert {error.field for error in errors.values()} == {field}
    assert reducer.engine.held() == 0


def test_an_answer_of_another_size_fails_the_round(reducer):
    reducer.retain(1)
    asked(reducer.contribute(0))
    errors = told(reducer.retain(1, payload=bytes(32), nbytes=32))
    assert isinstance(errors[b"0"], MismatchError)
    assert reducer.engine.held() == 0


def test_an_answer_whose_header_says_another_size_is_refused(reducer):
    reducer.retain(1)
    asked(reducer.contribute(0))
    errors = told(reducer.retain(1, payload=bytes(32)))
    assert isinstance(errors[b"1"], RemoteProtocolError)
    assert isinstance(errors[b"0"], RankLostError)


def test_a_claim_of_what_all_ranks_have_is_dropped(reducer):
    reducer.contribute_both(sequence=1, watermark=1)
    assert reducer.retain(0, sequence=0, watermark=1) == []
    assert reducer.engine.counters.late == 1
    assert reducer.rounds() == {1}


def test_a_rank_that_was_asked_counts_as_missing(reducer):
    reducer.retain(1)
    reducer.contribute(0)
    (send,) = reducer.say(0, M.STRAGGLERS, 0)
    assert decode(Stragglers, send.payload).missing == (1,)
    timeout = encode_error(ReductionTimeout("not done after 1 s"))
    assert told(reducer.say(0, M.ABORT, 0, timeout))[b"0"].missing == (1,)


def test_stragglers_are_named(trio):
    assert trio.say(0, M.STRAGGLERS, 0) == [], "nobody knows that one"
    trio.contribute(0)
    (send,) = trio.say(0, M.STRAGGLERS, 0)
    assert (send.peer, Header.unpack(send.header).sequence) == (b"0", 0)
    assert decode(Stragglers, send.payload).missing == (1, 2)
    trio.contribute(2)
    (send,) = trio.say(2, M.STRAGGLERS, 0)
    assert decode(Stragglers, send.payload).missing == (1,)
    trio.contribute(1)
    assert trio.say(0, M.STRAGGLERS, 0) == []
