"""Further connections of members, at a reducer whose every moment the test decides."""

import pytest

from hostile.zmtp import MORE, dial, frame
from reducer.engine.limits import ConnectionLimits
from reducer.errors import RankLostError
from reducer.wire.constants import Feature
from reducer.wire.header import Header
from reducer.wire.messages import decode_error
from tests.transport.guarded import MIB, PATIENCE, M, answer, ended, rounds
from tests.transport.scripted import Reducer

STREAMS = int(Feature.STREAMS)


def two(post):
    return [post.member("job", rank=rank, features=STREAMS, window=MIB) for rank in range(2)]


def test_it_is_no_stranger_and_ends_with_its_member(post):
    worker, _ = two(post)
    line = post.stream(worker)
    post.now = 3 * PATIENCE.hello_s
    rounds(post)
    assert post.guard.connections == 3
    assert post.closed == 0
    worker.close()
    post.until(lambda: ended(line.connection))
    post.until(lambda: post.guard.connections == 1)


def test_what_comes_after_the_end_of_a_stream_is_heard(post):
    worker, other = two(post)
    line = post.stream(worker)
    # As where something in between delays one of them.
    line.close()
    post.until(lambda: post.guard.connections == 2)
    rounds(post)
    worker.say(worker.common._replace(type=M.GOODBYE, sequence=(1 << 64) - 1).pack())
    post.until(lambda: post.members == {"job": 1})
    other.contribute(1, bytes(64))
    error = decode_error(post.meanwhile(lambda: answer(other, M.ERROR)))
    assert isinstance(error, RankLostError)
    assert str(error) == "rank 0 left the job"


@pytest.mark.parametrize("post", [ConnectionLimits(3, 10.0, max_open=5)], indirect=True)
def test_streams_push_out_no_first_connection(post):
    lines = [post.stream(worker) for worker in two(post)]
    post.member("other", features=STREAMS)
    rounds(post)
    assert (post.guard.connections, post.closed) == (5, 0)
    with dial(post.address):  # one more than there may be besides further streams
        rounds(post)
    assert (post.guard.connections, post.closed) == (5, 0)
    assert post.members == {"job": 2, "other": 1}
    assert not any(ended(line.connection) for line in lines)


def test_what_is_held_for_all_of_a_members_streams_counts_together(post):
    worker, _ = two(post)
    line = post.stream(worker)
    (job,) = post.engine.jobs
    job.rounds.reserved = MIB // 2  # and an eighth, and 256 KiB for each rank
    part = frame(worker.common.pack(), MORE) + frame(bytes(MIB))[: MIB * 3 // 4]
    worker.line.connection.sendall(part)
    rounds(post)
    assert post.members == {"job": 2}
    line.connection.sendall(part)
    post.until(lambda: post.members == {"job": 1})
    post.now += 2
    post.until(lambda: ended(line.connection))


@pytest.mark.parametrize("answered", [False, True])
def test_a_stream_that_ends_takes_its_link_along_also_before_it_is_answered(joined, answered):
    _, (reducer,) = joined(streams=2, kind=lambda: Reducer(features=STREAMS))
    first = reducer.peer
    reducer.accept()
    reducer.hear(M.STREAM)  # and has the reducer tie it, perhaps
    if answered:
        reducer.say(Header(M.STREAM))
    reducer.peer.close()
    reducer.welcome()  # the worker says HELLO anew
    assert ended(first)
