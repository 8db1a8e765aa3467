"""What an engine makes of the keys that peers come with."""

import pytest

from reducer.errors import AuthError, RemoteProtocolError
from reducer.wire.header import fingerprint
from tests.engine.driven import Driven, error, errors, operation, sent
from tests.engine.transcripts import transcripts
from tests.engine.words import TWO_KEYS, M, Reducer, told
from worker_client.protocol.flight import Reset
from worker_client.protocol.joining import RETRY_S

GUARDED = """
    new
    allow key-1=job key-2=other
"""
test_rules = transcripts(
    """
Only the job's key admits
    each key: "" | key-2 | key-3 | job
    0 HELLO key=$key -> 0 AuthError
    counters unauthenticated=1 refused=1
    jobs
    0 1 HELLO key=key-1 -> 0 1 WELCOME

A peer of this process needs none
    0 HELLO key=LOCAL -> 0 WELCOME
    allow
    jobs job=1

Limits count keys and not names
    new max_jobs_per_key=3
    allow key-1=* key-2=*
    0@1 HELLO key=key-1 job=a/1 window=1 -> 1 WELCOME
    0@2 HELLO key=key-1 job=a/2 window=1 -> 2 WELCOME
    0@3 HELLO key=key-1 job=a/3 window=1 -> 3 WELCOME
    0@4 HELLO key=key-1 job=a/4 window=1 -> 4 CapacityError limit=max_jobs_per_key
        says=--max-jobs-per-key
    0@b HELLO key=key-2 job=b window=1 -> b WELCOME     # the others have their own
    lose 1
    0@4 HELLO key=key-1 job=a/4 window=1 -> 4 WELCOME

The memory of a key's jobs counts together
    new job_memory_limit=5<<20
    allow key-1=* key-2=*
    0@0 HELLO key=key-1 job=a/0 -> 0 WELCOME
    0@1 HELLO key=key-1 job=a/1 -> 1 CapacityError limit=job_memory_limit
        says="of other jobs of its key"
    0@other HELLO key=key-2 job=b -> other WELCOME

The names of header and body are one
    # Else who has a key for one job could throw a rank out of another, whose connection broke.
    each reducer: allow key-1=job key-2=other | new     # with keys, and without
    $reducer
    0 1 HELLO key=key-1 -> 0 1 WELCOME
    unreachable 0
    0@x HELLO key=key-2 job=other claims=job -> x RemoteProtocolError
    jobs job=2

Who is revoked is told and gone
    0 1 HELLO key=key-1 -> 0 1 WELCOME
    0@a HELLO key=key-2 job=other -> a WELCOME
    1@b HELLO key=key-2 job=other -> b WELCOME
    0 CONTRIBUTION
    allow key-1=job -> a b AuthError
    jobs job=2
    counters unauthenticated=2
    # What they say on the connection that they still have is a stranger's.
    0@a ABORT 0 ReducerLostError -> a MembershipError
    0@a HELLO key=key-2 job=other -> a AuthError
    1 CONTRIBUTION -> 0 1 RESULT                # and the others have their result

Of two keys of one job the other hears whom it has lost
    allow old=job new=job
    0 HELLO key=old -> 0 WELCOME
    1 HELLO key=new -> 1 WELCOME
    1 CONTRIBUTION
    allow new=job -> 0 AuthError, 1 RankLostError rank=0 says=revoked

Who waits for a rank is revoked too
    0 HELLO key=key-1 -> 0 WELCOME
    0@again HELLO key=key-1 -> 0 PING
    allow -> 0 again AuthError
    later 10
    jobs

A contest keeps its key
    0 HELLO key=key-1 -> 0 WELCOME
    0@again HELLO key=key-1 -> 0 PING
    unreachable 0 -> again WELCOME
    allow key-1=job
    allow -> again AuthError
""",
    GUARDED,
)


def test_a_name_with_another_ones_fingerprint_is_refused(implementation, monkeypatch):
    guarded = Reducer(implementation)
    guarded.engine.allow(TWO_KEYS)
    guarded.hello(0, "key-1")
    monkeypatch.setattr("reducer.engine.membership.fingerprint", lambda _: fingerprint("job"))
    (found,) = told(guarded.hello(1, "key-2", job="other", claims="job")).values()
    assert isinstance(found, RemoteProtocolError)
    assert "not the one that the body names" in str(found)


@pytest.mark.parametrize("refused", [1, 2])
def test_who_begins_without_all_waits_for_those_that_admit_it(refused):
    newcomer = Driven(0, 1, ("a:1", "b:2"), 4096, reducers_timeout_s=1.0)
    for index in range(refused):
        assert newcomer.refused(index, AuthError("wrong key")) == []
    assert isinstance(newcomer.session.refusal, AuthError) == (refused == 2)
    assert not newcomer.session.joined


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
