"""Many arrays at once, reduced and broadcast over real reducers."""

import ml_dtypes
import numpy as np
import pytest

from reducer.errors import ConfigError
from tests.worker_client.waits import at_all
from worker_client._packing import all_reduce_arrays, broadcast_arrays


def arrays_of(rank):
    rng = np.random.default_rng(rank)
    return [
        rng.standard_normal((3, 5), np.float32),
        np.float64(rank),
        rng.standard_normal((4, 2), np.float32).T,
        np.full(7, rank, ml_dtypes.bfloat16),
        np.zeros((0, 3), np.float32),
        np.full((2, 2), rank, np.float16),
        np.array(rank + 0.5, np.float32),
    ]


def test_arrays_of_all_types_and_shapes_are_reduced(job):
    given = [[np.asarray(array) for array in arrays_of(rank)] for rank in range(3)]
    kept = [[array.copy() for array in arrays] for arrays in given]
    got = at_all(job(3), lambda client: all_reduce_arrays(client, given[client.rank], "mean"))
    for at, one in enumerate(got[0]):
        same = [arrays[at] for arrays in given]
        expected = np.mean([array.astype(np.float64) for array in same], axis=0)
        assert (one.shape, one.dtype) == (same[0].shape, same[0].dtype)
        np.testing.assert_allclose(one.astype(np.float64), expected, rtol=1e-2)
        assert all(arrays[at].tobytes() == one.tobytes() for arrays in got)
    for arrays, before in zip(given, kept, strict=True):
        for array, was in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(array, was)


def test_each_type_is_one_all_reduce(job):
    (client,) = job(1)
    made = []
    all_reduce = client.all_reduce
    client.all_reduce = lambda *given: made.append(given) or all_reduce(*given)
    all_reduce_arrays(client, [np.asarray(array) for array in arrays_of(0)], "sum")
    assert len(made) == 4


def test_no_arrays_are_no_error(job):
    (client,) = job(1)
    assert all_reduce_arrays(client, []) == []
    assert broadcast_arrays(client, []) == []


def test_every_rank_gets_the_roots_arrays(job):
    given = [
        [
            *(np.asarray(array) for array in arrays_of(rank)),
            np.array([rank == 1, True]),
            np.array([1 << 31, rank], np.uint32),
        ]
        for rank in range(3)
    ]
    got = at_all(job(3), lambda client: broadcast_arrays(client, given[client.rank], 1))
    for arrays in got:
        for one, expected in zip(arrays, given[1], strict=True):
            assert one.dtype == expected.dtype
            np.testing.assert_array_equal(one, expected)


def test_what_has_no_bytes_of_its_own_is_refused(job):
    (client,) = job(1)
    with pytest.raises(ConfigError, match="strings or other Python objects"):
        broadcast_arrays(client, [np.array(["a"], object)])
    with pytest.raises(ConfigError, match="dtype complex64 cannot be reduced"):
        all_reduce_arrays(client, [np.zeros(2, np.complex64)])
