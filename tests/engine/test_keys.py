"""What an engine makes of the keys that peers come with."""

import pytest

from reducer.engine.allow_list import LOCAL, AllowList
from reducer.engine.limits import Limits
from reducer.errors import (
    AuthError,
    CapacityError,
    DuplicateRankError,
    MembershipError,
    RankLostError,
    RemoteProtocolError,
)
from reducer.wire.header import Header, fingerprint
from tests.engine.driven import Driven, error, errors, operation, sent
from tests.engine.words import TWO_KEYS, M, Reducer, kinds, told
from worker_client.protocol.flight import Reset
from worker_client.protocol.joining import RETRY_S

BOTH = AllowList({"key-1": frozenset({"job"}), "key-2": frozenset({"other"})})
FIRST = AllowList({"key-1": frozenset({"job"})})
NOBODY = AllowList({})


@pytest.fixture
def guarded(implementation):
    reducer = Reducer(implementation)
    assert reducer.engine.allow(BOTH) == []
    return reducer


def refused(sends):
    (error,) = told(sends).values()
    return error


@pytest.mark.parametrize("key", ["", "key-2", "key-3", "job"])
def test_only_the_jobs_key_admits(guarded, key):
    assert isinstance(refused(guarded.hello(0, key)), AuthError)
    assert guarded.engine.counters.unauthenticated == guarded.engine.counters.refused == 1
    assert guarded.engine.jobs == []
    for rank in range(2):
        assert kinds(guarded.hello(rank, "key-1")) == [M.WELCOME]


def test_a_peer_of_this_process_needs_none(guarded):
    assert kinds(guarded.hello(0, LOCAL)) == [M.WELCOME]
    assert guarded.engine.allow(NOBODY) == []
    assert [len(job.members) for job in guarded.engine.jobs] == [1]


def test_limits_count_keys_and_not_names(implementation):
    guarded = Reducer(implementation, limits=Limits(max_jobs_per_key=3))
    guarded.engine.allow(TWO_KEYS)

    def join(key, job):
        return guarded.hello(0, key, f"{key}/{job}".encode(), job=job, window=1)

    for job in ("a/1", "a/2", "a/3"):
        assert kinds(join("key-1", job)) == [M.WELCOME]
    error = refused(join("key-1", "a/4"))
    assert isinstance(error, CapacityError)
    assert (error.limit, "--max-jobs-per-key" in str(error)) == ("max_jobs_per_key", True)
    assert kinds(join("key-2", "b")) == [M.WELCOME], "the others have their own"
    guarded.lose(b"key-1/a/1")
    assert kinds(join("key-1", "a/4")) == [M.WELCOME]


def test_the_memory_of_a_keys_jobs_counts_together(implementation):
    guarded = Reducer(implementation, limits=Limits(job_memory_limit=5 << 20))
    guarded.engine.allow(TWO_KEYS)
    ends = [guarded.hello(0, "key-1", b"%d" % n, job=f"a/{n}") for n in range(4)]
    assert kinds(ends[0]) == [M.WELCOME]
    error = refused(ends[-1])
    assert isinstance(error, CapacityError)
    assert error.limit == "job_memory_limit"
    assert "of other jobs of its key" in str(error)
    assert kinds(guarded.hello(0, "key-2", b"other", job="b")) == [M.WELCOME]


@pytest.mark.parametrize("allowed", [True, False], ids=["keys", "no keys"])
def test_the_names_of_header_and_body_are_one(implementation, allowed):
    # Else who has a key for one job could throw a rank out of another, whose connection broke.
    guarded = Reducer(implementation)
    if allowed:
        guarded.engine.allow(BOTH)
    for rank in range(2):
        guarded.hello(rank, "key-1")
    guarded.engine.unreachable(b"0")
    sends = guarded.hello(0, "key-2", b"x", job="other", claims="job")
    assert isinstance(refused(sends), RemoteProtocolError)
    assert [len(job.members) for job in guarded.engine.jobs] == [2]


def test_a_name_with_another_ones_fingerprint_is_refused(guarded, monkeypatch):
    guarded.hello(0, "key-1")
    monkeypatch.setattr("reducer.engine.jobs.fingerprint", lambda _: fingerprint("job"))
    found = refused(guarded.hello(1, "key-2", job="other", claims="job"))
    assert isinstance(found, RemoteProtocolError)
    assert "not the one that the body names" in str(found)


def test_who_is_revoked_is_told_and_gone(guarded):
    for rank in range(2):
        guarded.hello(rank, "key-1")
        guarded.hello(rank, "key-2", b"other %d" % rank, job="other")
    guarded.contribute(0)
    sends = guarded.engine.allow(FIRST)
    errors = {peer: type(error) for peer, error in told(sends).items()}
    assert errors == dict.fromkeys((b"other 0", b"other 1"), AuthError)
    assert [job.name for job in guarded.engine.jobs] == ["job"]
    assert guarded.engine.counters.unauthenticated == 2
    # What they say on the connection that they still have is a stranger's.
    header = Header(M.ABORT, job=fingerprint("other"), sequence=0)
    found = refused(guarded.engine.receive(b"other 0", header.pack(), b"", "key-2"))
    assert isinstance(found, MembershipError)
    assert isinstance(refused(guarded.hello(0, "key-2", b"other 0", job="other")), AuthError)
    # And the others have their result.
    assert kinds(guarded.contribute(1)) == [M.RESULT] * 2


def test_of_two_keys_of_one_job_the_other_hears_whom_it_has_lost(implementation):
    guarded = Reducer(implementation)
    guarded.engine.allow(AllowList({key: frozenset({"job"}) for key in ("old", "new")}))
    guarded.hello(0, "old")
    guarded.hello(1, "new")
    guarded.contribute(1)
    errors = told(guarded.engine.allow(AllowList({"new": frozenset({"job"})})))
    assert isinstance(errors.pop(b"0"), AuthError)
    (lost,) = errors.values()
    assert isinstance(lost, RankLostError)
    assert lost.rank == 0
    assert "revoked" in str(lost)


def test_who_waits_for_a_rank_is_revoked_too(guarded):
    guarded.hello(0, "key-1")
    assert kinds(guarded.hello(0, "key-1", peer=b"again")) == [M.PING]
    sends = guarded.engine.allow(NOBODY)
    errors = {peer: type(error) for peer, error in told(sends).items()}
    assert errors == dict.fromkeys((b"0", b"again"), AuthError)
    guarded.now += 10
    assert guarded.tick() == []
    assert guarded.engine.jobs == []


def test_a_contest_keeps_its_key(guarded):
    guarded.hello(0, "key-1")
    guarded.hello(0, "key-1", peer=b"again")
    sends = guarded.engine.unreachable(b"0")
    assert kinds(sends) == [M.WELCOME]
    assert told(guarded.engine.allow(FIRST)) == {}
    assert isinstance(refused(guarded.engine.allow(NOBODY)), AuthError)


def test_a_rank_that_another_holds(guarded):
    for rank in range(2):
        guarded.hello(rank, "key-1")
    guarded.hello(1, "key-1", peer=b"twin")
    guarded.now += 10
    assert isinstance(refused(guarded.tick()), DuplicateRankError)


# -- the worker's side ----------------------------------------------------------------------------


def test_a_worker_without_the_right_key_does_not_join(newcomer):
    why = AuthError("wrong key")
    assert newcomer.refused(0, why) == []
    assert newcomer.session.refusal is why
    assert not newcomer.session.joined


@pytest.mark.parametrize("refused", [1, 2])
def test_who_begins_without_all_waits_for_those_that_admit_it(implementation, refused):
    newcomer = Driven(implementation, 0, 1, ("a:1", "b:2"), 4096, patience_s=1.0)
    for index in range(refused):
        newcomer.refused(index, AuthError("wrong key"))
    assert isinstance(newcomer.session.refusal, AuthError) == (refused == 2)


def test_calls_end_with_why_the_only_reducer_is_closed(lone):
    lone.submit(operation(), 0.0)
    actions = error(lone, 0, AuthError("revoked"))
    assert [type(failure) for failure in errors(actions)] == [AuthError]
    assert Reset(0) in actions
    assert [type(failure) for failure in errors(lone.submit(operation(), 0.0))] == [AuthError]
    lone.refused(0, AuthError("not on the list"))
    (failure,) = errors(lone.submit(operation(), 0.0))
    assert str(failure) == "not on the list"
    assert Reset(0) in lone.tick(RETRY_S + 1.0)  # it may be back on the list


def test_a_reducer_that_drops_us_is_lost_and_the_other_one_serves(session):
    session.submit(operation(), 0.0)
    actions = error(session, 0, AuthError("revoked"))
    assert errors(actions) == []
    assert Reset(0) in actions
    assert [link for link, _ in sent(actions, M.SHARD_MAP)] == [1]
