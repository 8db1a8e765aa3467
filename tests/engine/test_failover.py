"""What a worker does when a reducer is lost: the rules one by one."""

from dataclasses import replace

import pytest

from reducer.errors import (
    MembershipError,
    MismatchError,
    RankLostError,
    ReducerLostError,
    RemoteProtocolError,
)
from reducer.wire.header import Header
from reducer.wire.messages import (
    ALL_REDUCERS,
    LAST_EPOCH,
    LAST_STAGE,
    Loss,
    Stragglers,
    decode,
    encode,
)
from tests.engine.driven import Driven, M, error, errors, join, joined, operation, result, sent
from tests.engine.words import number
from worker_client.protocol.failover import ADOPT_S
from worker_client.protocol.flight import HandOver, Reset, Send
from worker_client.protocol.operation import HURRY_S, STRAGGLER_S


@pytest.fixture
def three():
    """Rank 0 of 2, with three reducers and chunks of 64 bytes."""
    return joined(0, 2, ("a:1", "b:2", "c:3"), 3 * 4096, 64)


@pytest.fixture
def bereft(three):
    """The same, which has lost all of them with six chunks in progress."""
    three.submit(operation(64 * 6), 0.0)
    for link in range(3):
        three.disconnected(link, "died")
    return three


@pytest.fixture
def hosted():
    """Rank 0 of 2; rank 1 hosts the second reducer."""
    return joined(0, 2, ("a:1", "b:2"), 4096, 64, hosts={1: 1})


def resets(actions):
    return [action.link for action in actions if isinstance(action, Reset)]


def losses(actions):
    """SHARD_MAP messages, as (link, what is lost), whichever process it was."""
    kinds = [(a, Header.unpack(a.header).type) for a in actions if isinstance(a, Send)]
    told = [(a.link, decode(Loss, a.payload)) for a, kind in kinds if kind is M.SHARD_MAP]
    return [(link, replace(loss, incarnation="")) for link, loss in told]


def hear_of(session, link, reducer, epoch, process="", *, stage=0):
    """Another rank says that it has lost a reducer."""
    loss = Loss(reducer, epoch, incarnation=process, stage=stage)
    return session.receive(link, Header(M.SHARD_MAP).pack(), encode(loss))


# How the second reducer is lost.
WAYS = {
    "disconnected": lambda session: session.disconnected(1, "died"),
    "unknown": lambda session: error(session, 1, MembershipError("who are you?")),
    "misunderstood": lambda session: error(session, 1, RemoteProtocolError("what?")),
    "malformed": lambda session: session.receive(1, b"nonsense", b""),
    "goodbye": lambda session: session.receive(1, Header(M.GOODBYE).pack(), b""),
    "heard": lambda session: hear_of(session, 0, 1, 0),
}


@pytest.mark.parametrize("lose", WAYS.values(), ids=WAYS)
def test_a_reducer_is_closed_and_told_of_and_its_chunks_move(three, lose):
    mine = operation(64 * 6)
    contributions = sent(three.submit(mine, 0.0), M.CONTRIBUTION)
    actions = lose(three)
    assert errors(actions) == []
    assert resets(actions) == [1]
    assert losses(actions) == [(0, Loss(1, 0)), (2, Loss(1, 0))]
    kinds = [type(action) for action in actions]
    moved = sent(actions, M.CONTRIBUTION)
    assert kinds.index(Reset) < len(kinds) - len(moved), "the old connection is closed before"
    assert sorted((link, header.offset) for link, header in moved) == [(0, 192), (2, 128)]
    kept = [(link, header) for link, header in contributions if link != 1]
    ended = [result(three, link, header) for link, header in kept + moved]
    assert [errors(actions) for actions in ended] == [[]] * 5 + [[None]]
    assert bytes(mine.view) == b"\7" * 64 * 6


def test_a_loss_that_is_told_for_a_later_epoch_too_is_one(three, caplog):
    three.disconnected(1, "died")
    assert hear_of(three, 0, 1, 0) == hear_of(three, 2, 1, 0) == []
    told = hear_of(three, 0, 1, 1)  # that rank lost it after it had answered what is next
    assert losses(told) == [(0, Loss(1, 1)), (2, Loss(1, 1))]
    assert three.session.failover.losses == 1
    assert caplog.text.count("going on without it") == 1


@pytest.mark.parametrize("answers", ["never", "once", "with a refusal"])
def test_a_lost_reducer_that_never_answered_may_have_a_wrong_address(answers, caplog):
    session = Driven(0, 2, ("a:1", "b:2"), 8192)
    join(session, 0)
    if answers == "once":
        join(session, 1)
    elif answers == "with a refusal":
        session.connected(1)
        error(session, 1, MembershipError("no"))
    hear_of(session, 0, 1, 0)
    advised = "reducer b:2 has never answered this worker (check its address" in caplog.text
    assert advised == (answers == "never")
    assert ("reducer b:2 died, or a rank cannot reach it: going on" in caplog.text) != advised


def test_a_result_that_is_here_is_claimed_and_supplied(three):
    contributions = sent(three.submit(operation(64 * 6), 0.0), M.CONTRIBUTION)
    done = next(header for link, header in contributions if link == 1)
    result(three, 1, done)
    actions = three.disconnected(1, "died")
    ((link, claim),) = sent(actions, M.RETAINED)
    assert claim == done._replace(type=M.RETAINED, watermark=number(0))
    assert [a.payload for a in actions if isinstance(a, Send) and a.link == link][-1] is None
    (supplied,) = three.receive(link, claim._replace(rank=0).pack(), b"")
    assert (supplied.link, Header.unpack(supplied.header)) == (link, claim)
    assert bytes(supplied.payload) == b"\7" * 64
    assert three.receive(link, claim._replace(sequence=9).pack(), b"") == [], "not kept"
    assert three.session.failover.claimed == three.session.failover.supplied == 1


def test_what_has_ended_here_is_claimed_until_every_rank_has_it(three):
    for link, header in sent(three.submit(operation(64 * 6), 0.0), M.CONTRIBUTION):
        ended = result(three, link, header)
    assert errors(ended) == [None]
    assert three.flight.retained_bytes == 64 * 6
    lost = three.disconnected(1, "died")
    assert [header.offset for _, header in sent(lost, M.RETAINED)] == [128, 192]
    three.receive(0, Header(M.PING, watermark=number(0) + 1).pack(), b"")
    assert three.flight.retained_bytes == 0
    lost = three.disconnected(0, "died")
    assert resets(lost) == [0]
    assert sent(lost, M.RETAINED) == []


def test_a_reducer_that_is_back_is_told_and_gets_nothing_yet(three):
    three.disconnected(1, "died")
    assert losses(join(three, 1)) == [(1, Loss(1, 0))]
    links = {link for link, _ in sent(three.submit(operation(64 * 6), 0.0), M.CONTRIBUTION)}
    assert links == {0, 2}


def test_who_has_waited_for_a_reducer_is_told_to_wait_longer():
    session = joined(0, 2, ("a:1",), 8192, wait_s=7.5)
    session.submit(operation(), 0.0)
    session.disconnected(0, "died")
    assert errors(session.tick(0.1)) == []
    (failure,) = errors(session.tick(7.6))
    said = "reducer a:1 died, and no reducer is left after 7.5 s: set REDUCTION_WAIT_FOR_REDUCERS"
    assert str(failure).startswith(f"{said} to wait longer, or REDUCTION_FALLBACK")


def test_who_waits_in_vain_for_another_process_is_told_to_have_more_reducers():
    session = joined(0, 2, ("a:1",), 8192, wait_s=7.5)
    session.submit(operation(), 0.0)
    session.disconnected(0, "closed the connection")
    assert errors(session.tick(0.1)) == []
    (failure,) = errors(join(session, 0))  # the same process
    assert "no reducer is left: set more REDUCTION_SERVERS, or REDUCTION_FALLBACK" in str(failure)


def test_with_no_reducer_left_everything_fails_and_begins_anew(session):
    session.submit(operation(), 0.0)
    session.disconnected(0, "died")
    assert errors(session.disconnected(1, "died as well")) == []
    assert errors(session.tick(0.1)) == [], "another one may answer"
    (failure,) = errors(session.tick(ADOPT_S + 0.1))
    assert isinstance(failure, ReducerLostError)
    assert "b:2 died as well, and no reducer is left: set REDUCTION_WAIT" in str(failure)
    assert str(failure).count("no reducer is left") == 1
    assert session.failover.map.epoch == 3
    assert errors(session.submit(operation(), 10.0)) == []
    (failure,) = errors(session.tick(10.1))
    assert isinstance(failure, ReducerLostError), "at once"
    assert str(failure).count("set REDUCTION_WAIT_FOR_REDUCERS to wait until one is back") == 1
    told = join(session, 0)
    assert losses(told) == [(0, Loss(ALL_REDUCERS, 6))]
    ((_, abort),) = sent(told, M.ABORT)
    assert (abort.sequence, abort.nbytes) == (0, number(1))
    join(session, 1)
    ((link, question),) = sent(session.submit(operation(), 0.0), M.CONTRIBUTION)
    assert question.epoch == 6
    headers = sent(result(session, link, question), M.CONTRIBUTION)
    assert {header.epoch for _, header in headers} == {7}
    assert {link for link, _ in headers} == {0, 1}


def served_by(session, link, actions):
    """Answer all contributions, as many at a time as the window has room for; return how many."""
    contributions = sent(actions, M.CONTRIBUTION)
    for to, header in contributions:
        assert to == link
        contributions += sent(result(session, link, header), M.CONTRIBUTION)
    return len(contributions)


def test_the_first_that_answers_takes_the_place_of_the_last_one(bereft):
    told = join(bereft, 1, "another process")
    assert (1, Loss(0, 0, stage=1)) in losses(told), "it would be waited for"
    assert served_by(bereft, 1, told) == 6


def test_one_that_has_taken_all_keeps_it_in_the_next_stage(bereft):
    join(bereft, 1, "another process")
    join(bereft, 0, "another process")
    told = [action for lost in range(3) for action in hear_of(bereft, 1, lost, 1, "1")]
    assert 1 not in resets(told)
    assert (1, Loss(0, 1, stage=1)) in losses(told)
    assert bereft.failover.map.adopted == 1


def test_others_give_nothing_to_a_process_that_came_in_the_place_of_one_they_have_lost(three):
    """They give all to its heirs, unless it has taken the place of all."""
    three.submit(operation(64 * 6), 0.0)
    told = hear_of(three, 0, 1, 0, "the process before")
    assert resets(told) == [1]
    assert {link for link, _ in sent(told, M.CONTRIBUTION)} == {0, 2}


def test_a_process_that_one_lane_leads_to_is_not_the_one_before(bereft):
    join(bereft, 0, "another process", lanes=(7,))
    assert resets(hear_of(bereft, 0, 0, 0, "1", stage=1)) == []


def test_a_reducer_that_others_may_have_gone_on_with_is_waited_for_a_little(bereft):
    join(bereft, 0, "another process")
    hear_of(bereft, 0, 0, 0, "1", stage=1)  # the process before
    assert bereft.failover.map.adopted == 1
    for now in (1.0, 1.25):
        assert losses(bereft.tick(now)) == []
    assert (0, Loss(1, 0, stage=1)) in losses(bereft.tick(1.35))
    assert bereft.failover.map.adopted == 0


def test_one_that_knows_what_is_in_progress_takes_nobodys_place(three):
    three.submit(operation(64 * 6), 0.0)
    for link in range(3):
        three.disconnected(link, "was cut")
    actions = join(three, 1)
    assert resets(actions) == [1]
    assert (1, Loss(1, 2, stage=LAST_STAGE)) not in losses(actions), "it is closed"
    join(three, 0)
    (failure,) = errors(join(three, 2))
    assert isinstance(failure, ReducerLostError)


def test_with_a_process_group_to_fall_back_to_nobody_is_waited_for():
    session = joined(0, 2, ("a:1", "b:2"), 8192, 64, fallback=True)
    session.disconnected(0, "died")
    session.submit(operation(), 0.0)
    actions = session.disconnected(1, "died")
    assert [type(action) for action in actions] == [Reset, HandOver]


def test_who_is_told_that_others_fall_back_hands_its_calls_over_though_its_links_are_well():
    own = {"incarnation": "in its place", "fallback": True}
    session = joined(0, 2, ("a:1", "b:2"), 8192, 64, **own)
    session.submit(operation(), 0.0)
    assert resets(hear_of(session, 0, 0, LAST_EPOCH, "lost")) == [0]
    actions = hear_of(session, 1, 1, LAST_EPOCH, "lost")
    assert resets(actions) == [1]
    assert isinstance(actions[-1], HandOver)


def test_another_rank_has_begun_anew(session):
    session.submit(operation(), 0.0)
    passed_on = losses(hear_of(session, 0, ALL_REDUCERS, 2))
    assert {link for link, *_ in passed_on} == {0, 1}  # each may know a rank that has not heard
    assert hear_of(session, 0, ALL_REDUCERS, 2) == []
    assert session.active == 1
    headers = sent(session.submit(operation(0), 0.0), M.CONTRIBUTION)
    assert session.failover.map.epoch == 2
    hear_of(session, 0, ALL_REDUCERS, 1)
    assert session.failover.map.epoch == 2, "stale"
    assert all(header.epoch == 2 for _, header in headers)


def test_ranks_of_different_epochs_begin_anew(session):
    session.submit(operation(), 0.0)
    wrong = MismatchError("epochs", field="epoch", rank=0, other_rank=1, expected=4, got=0)
    (failure,) = errors(error(session, 0, wrong, number(0)))
    assert failure.field == "epoch"
    assert session.failover.map.epoch == 5


def test_a_hosted_reducer_is_lost_with_its_rank_alone(hosted):
    hosted.submit(operation(), 0.0)
    actions = hosted.disconnected(1, "died")
    (failure,) = errors(actions)
    assert isinstance(failure, RankLostError)
    assert failure.rank == 1
    assert resets(actions) == []
    assert losses(actions) == []
    assert hear_of(hosted, 0, 1, 0) == []
    # What is called later needs it as well.
    (failure,) = errors(hosted.submit(operation(), 1.0))
    assert isinstance(failure, RankLostError)
    assert failure.rank == 1


def test_a_hosted_reducer_that_does_not_know_a_rank_is_joined_again(hosted):
    hosted.submit(operation(), 0.0)
    actions = error(hosted, 1, MembershipError("I do not know you"))
    assert [type(failure) for failure in errors(actions)] == [MembershipError]
    assert resets(actions) == [1]
    assert losses(actions) == []
    join(hosted, 1)
    contributions = sent(hosted.submit(operation(), 1.0), M.CONTRIBUTION)
    assert {link for link, _ in contributions} == {0, 1}


def test_an_all_reduce_that_takes_long_is_asked_about(session, caplog):
    ((link, _),) = sent(session.submit(operation(1, timeout_s=60.0), 0.0), M.CONTRIBUTION)
    assert sent(session.tick(STRAGGLER_S - 0.1)) == []
    ((asked, header),) = sent(session.tick(STRAGGLER_S))
    assert (asked, header.type, header.sequence) == (link, M.STRAGGLERS, number(0))
    assert sent(session.tick(STRAGGLER_S + 1.0)) == []
    answer = Header(M.STRAGGLERS, sequence=number(0)).pack()
    assert session.receive(link, answer, encode(Stragglers((0, 3)))) == []
    assert "waits for rank 0, 3" in caplog.text
    assert len(sent(session.tick(2 * STRAGGLER_S))) == 1
    assert session.active == 1


def test_a_rank_that_one_reducer_waits_for_and_another_has_lost_is_named(session):
    # The first was restarted, and that rank has never been there.
    ((link, _),) = sent(session.submit(operation(1, timeout_s=60.0), 0.0), M.CONTRIBUTION)
    ping = Header(M.PING).pack()
    session.receive(1 - link, ping, encode(Stragglers((0,))))
    assert session.lost_ranks == {0}
    assert sent(session.tick(HURRY_S / 2)) == []
    ((asked, _),) = sent(session.tick(HURRY_S), M.STRAGGLERS)
    answer = Header(M.STRAGGLERS, sequence=number(0)).pack()
    (failure,) = errors(session.receive(asked, answer, encode(Stragglers((0,)))))
    assert isinstance(failure, RankLostError)
    assert failure.rank == 0
    session.receive(1 - link, ping, b"")
    assert session.lost_ranks == set(), "it is back"
    session.submit(operation(1, timeout_s=60.0), 1.0)
    later = Header(M.STRAGGLERS, sequence=number(1)).pack()
    assert errors(session.receive(link, later, encode(Stragglers((0,))))) == []


@pytest.mark.parametrize(("reducer", "epoch"), [(-1, (1 << 32) - 1), (0, (1 << 32) - 2)])
def test_an_epoch_to_which_no_job_comes_is_not_believed(session, reducer, epoch):
    actions = hear_of(session, 1, reducer, epoch)
    assert Reset(1) in actions
    assert losses(actions) == [(0, Loss(1, 0))], "who says so is out of use, nobody else"


@pytest.mark.parametrize("expected", ["tomorrow", (1 << 32) - 1])
def test_a_mismatch_on_epochs_that_are_none_is_not_believed(session, expected):
    session.submit(operation(), 0.0)
    wrong = MismatchError("?", field="epoch", rank=0, other_rank=1, expected=expected, got=1)
    assert losses(error(session, 1, wrong, number(0))) == [(0, Loss(1, 0))]


def test_a_result_is_kept_whatever_a_reducer_says_of_what_is_in_progress(session):
    sends = sent(session.submit(operation(), 0.0), M.CONTRIBUTION)
    session.receive(0, Header(M.PING, watermark=(1 << 64) - 1).pack(), b"")
    for link, header in sends:
        result(session, link, header)
    assert session.flight.reached == number(0)
    assert session.flight.retained_bytes == 256
