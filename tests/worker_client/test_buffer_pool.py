"""Memory that the wire cast lends out is used again, and dropped when calls do without it."""

import numpy as np

from worker_client.staging.buffer_pool import BufferPool

TURNS = 5


def lending():
    return BufferPool(lambda nbytes: np.empty(nbytes, np.uint8).data, most=2, turns=TURNS)


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
    pool = lending()
    kept = pool.take(100)
    pool.give_back(kept)
    for _ in range(TURNS - 1):
        pool.skip()
    pool.forget(pool.take(7))
    assert pool.idle_bytes == 100
    pool.forget(pool.take(7))
    assert (pool.used_bytes, pool.idle_bytes) == (0, 0)


def test_the_oldest_idle_buffers_go_first():
    pool = BufferPool(lambda nbytes: np.empty(nbytes, np.uint8).data, most=2)
    taken = [pool.take(nbytes) for nbytes in (1, 2, 4)]
    for buffer in taken:
        pool.give_back(buffer)
    assert (pool.used_bytes, pool.idle_bytes) == (0, 6)
    assert pool.take(4) is taken[2]
    assert pool.take(2) is taken[1]
    assert pool.used_bytes == 6
