"""When ranks agree on the size of chunks and on the reducers, and by what."""

import struct

from reducer.wire.constants import DType, ReduceOp
from tests.engine.driven import operation
from tests.engine.words import number
from worker_client.protocol.agreement import Agreement

KIB = 1 << 10


def before(call):
    """The first all-reduce of a call."""
    first = operation(0, 7.0)
    first.sequence = number(call)
    return first


def test_at_which_calls_the_ranks_agree():
    agreement = Agreement(needed=True, fixed=0, reducers=2)
    due = [call + 1 for call in range(400) if agreement.due(number(call))]
    assert due == [3, 6, 12, 24, 48, 96, 192, 288, 384]
    agreement.begin_round(0.0, [True] * 2, before(2))
    assert not agreement.due(number(2)), "once for each call"
    assert agreement.due(number(5))
    agreement = Agreement(needed=False, fixed=64, reducers=1)
    assert not any(agreement.due(number(call)) for call in range(400))


def test_the_slowest_rank_and_whoever_cannot_use_a_reducer_decide():
    agreement = Agreement(needed=True, fixed=0, reducers=3)
    assert agreement.chunk_bytes == 64 * KIB
    assert agreement.chunk_bytes_of(1 << 20, 4) == 32 * KIB, "of links that nobody has measured"
    assert agreement.chunk_bytes_of((1 << 20) - 4, 4) == 64 * KIB, "which this would not measure"
    question = agreement.begin_round(1.2e9, [True, False, True], before(2))
    assert (question.dtype, question.op) == (DType.INT64, ReduceOp.MIN)
    assert struct.unpack("<4q", question.view) == (1_200_000_000, 1, 0, 1)
    assert question.timeout_s == 7.0
    question.view[:] = struct.pack("<4q", 400_000_000, 1, 0, 0)  # what all ranks can do
    assert agreement.answer() == [True, False, False]
    assert agreement.chunk_bytes == 256 * KIB
    assert agreement.chunk_bytes_of(64 << 20, 4) == 256 * KIB
    assert agreement.chunk_bytes_of(1 << 20, 4) == 128 * KIB
    nobody = agreement.begin_round(0.0, [True] * 3, before(2))
    nobody.view[:] = struct.pack("<4q", 0, 1, 1, 1)  # no rank knows a rate
    assert agreement.answer() == [True] * 3
    assert agreement.chunk_bytes == 64 * KIB
    assert agreement.chunk_bytes_of(512 << 10, 4) == 64 * KIB, "as at first"
    agreement.begin_round(1.2e9, [True] * 3, before(2))
    agreement.answer()
    assert agreement.chunk_bytes > 64 * KIB
    agreement.reset()  # ranks begin anew
    assert agreement.chunk_bytes == agreement.chunk_bytes_of(64 << 20, 4) == 64 * KIB


def test_a_fixed_size_stays():
    agreement = Agreement(needed=True, fixed=640, reducers=1)
    agreement.begin_round(1.2e9, [True], before(2))
    agreement.answer()
    assert agreement.chunk_bytes == agreement.chunk_bytes_of(1 << 20, 4) == 640
    agreement.reset()
    assert agreement.chunk_bytes == 640
