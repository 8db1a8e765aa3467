"""A job of some ranks of another one, beside it."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from reducer.errors import ConfigError, LocalProtocolError
from tests.conftest import joined


def test_some_ranks_of_a_job_have_one_of_their_own(pool):
    with joined(3, servers=pool, job="whole") as clients:

        def reduce(at):
            with clients[at].subgroup("part", [2, 0]) as part:
                result = part.all_reduce(np.full(100_000, at + 1, np.float32), "sum").wait(10)
                return part.rank, part.world_size, float(result[-1])

        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(reduce, [0, 2])) == [(1, 2, 4.0), (0, 2, 4.0)]
            whole = [client.all_reduce(np.ones(5), "sum") for client in clients]
            assert [work.wait(10)[0] for work in whole] == [3.0] * 3


def test_jobs_that_cannot_have_one(pool):
    with (
        joined(1, servers=pool, job="whole", on_rank_lost="continue") as (client,),
        pytest.raises(ConfigError, match="without REDUCTION_FALLBACK, REDUCTION_ON_RANK_LOST"),
    ):
        client.subgroup("part", [0])
    with joined(1, servers=pool, job="w" * 120) as (client,):
        with pytest.raises(ConfigError, match=r"'.*/part-of-it': give it 3 bytes less"):
            client.subgroup("part-of-it", [0])
        client.shutdown()
        with pytest.raises(LocalProtocolError):
            client.subgroup("part", [0])
