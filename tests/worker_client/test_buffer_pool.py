"""Memory that calls borrow is used again, and dropped when calls do without it."""

import numpy as np

from worker_client.fusion.fusion import IDLE_BUFFERS, fusion_buffers
from worker_client.staging.buffer_pool import BufferPool

TURNS = 5


def lending(**how):
    return BufferPool(lambda nbytes: np.empty(nbytes, np.uint8).data, most=2, **how)


def test_the_buffer_that_was_given_back_last_is_lent_out_first():
    pool = lending()
    one, other = pool.take(100), pool.take(100)
    assert one is not other
    pool.give_back(one)
    pool.give_back(other)
    assert all(pool.take(99) is not buffer for buffer in (one, other))
    assert pool.take(100) is other
    assert pool.take(100) is one


def test_calls_that_need_no_buffer_count_as_well():
    pool = lending(turns=TURNS)
    kept = pool.take(100)
    assert (pool.used_bytes, pool.idle_bytes) == (100, 0)
    pool.give_back(kept)
    for _ in range(TURNS - 1):
        pool.skip()
    pool.forget(pool.take(7))
    assert pool.idle_bytes == 100
    pool.forget(pool.take(7))
    assert (pool.used_bytes, pool.idle_bytes) == (0, 0)


def test_the_oldest_idle_buffers_go_first():
    pool = lending()
    taken = [pool.take(nbytes) for nbytes in (1, 2, 4)]
    for buffer in taken:
        pool.give_back(buffer)
    assert (pool.used_bytes, pool.idle_bytes) == (0, 6)
    assert pool.take(4) is taken[2]
    assert pool.take(2) is taken[1]
    assert pool.used_bytes == 6


def test_any_fusion_buffer_that_is_large_enough_will_do_and_few_are_kept():
    buffers = fusion_buffers()
    one, other = buffers.take(100_000), buffers.take(100_000)
    assert one.size >= 100_000
    assert one is not other
    buffers.give_back(one)
    assert buffers.take(one.size + 1) is not one
    assert buffers.take(50_000) is one
    taken = [buffers.take(1) for _ in range(10)]
    for memory in taken:
        buffers.give_back(memory)
    again = [buffers.take(1) for _ in range(10)]
    assert len({id(memory) for memory in (*taken, *again)}) == 10 + 10 - IDLE_BUFFERS
