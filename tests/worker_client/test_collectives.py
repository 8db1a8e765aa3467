"""Broadcast and all-gather over real reducers."""

import numpy as np
import pytest

from reducer.errors import ConfigError, MismatchError, RankLostError
from tests.worker_client.waits import at_all
from worker_client.collectives import all_gather_bytes, broadcast


@pytest.mark.parametrize("root", [0, 2])
def test_every_rank_gets_the_roots_bits(job, root):
    arrays = [np.full((5, 3), rank - 0.1, np.float32).T for rank in range(3)]
    arrays[root][:, 0] = (np.nan, 1, 2)
    expected = arrays[root].tobytes()
    at_all(job(3), lambda client: broadcast(client, arrays[client.rank], root))
    assert [array.tobytes() for array in arrays] == [expected] * 3


def test_payloads_of_any_length_are_gathered(job):
    payloads = [b"", b"a" * 300_000, b"\0\xff"]
    got = at_all(job(3), lambda client: all_gather_bytes(client, payloads[client.rank]))
    assert got == [dict(enumerate(payloads))] * 3
    nothing = at_all(job(2, job="nothing"), lambda client: all_gather_bytes(client, b""))
    assert nothing == [{0: b"", 1: b""}] * 2


def test_a_root_that_is_no_rank_is_refused(job):
    (client,) = job(1)
    with pytest.raises(ConfigError, match="root 1 is not a rank of a world of size 1"):
        broadcast(client, np.zeros(1), root=1)


@pytest.mark.parametrize(
    ("root", "dtype", "shape", "said"),
    [
        (1, np.float32, (6,), "disagree on the root: rank 0 says 0, rank 2 says 1"),
        (0, np.int32, (6,), r"dtype or shape: rank 0 says .*, rank 2 says "),
        (0, np.float32, (2, 3), r"dtype or shape: rank 0 says .*, rank 2 says "),
        (0, np.float32, (7,), "total_bytes"),
    ],
    ids=["root", "dtype", "shape", "size"],
)
def test_ranks_that_disagree_hear_it_and_go_on(job, root, dtype, shape, said):
    clients = job(3)

    def receive(client):
        array = np.full(shape, 1, dtype) if client.rank == 2 else np.full(6, 1, np.float32)
        before = array.tobytes()
        with pytest.raises(MismatchError, match=said) as caught:
            broadcast(client, array, root if client.rank == 2 else 0)
        assert array.tobytes() == before
        return str(caught.value)

    texts = at_all(clients, receive)
    assert "float32 (6,)" in texts[0] or "dtype" not in said
    for _ in range(3):
        arrays = [np.full(6, client.rank) for client in clients]
        at_all(clients, lambda client, arrays=arrays: broadcast(client, arrays[client.rank], 1))
        assert [array.tolist() for array in arrays] == [[1] * 6] * 3


def test_a_root_that_is_lost_is_named(job):
    clients = job(3, on_rank_lost="continue")
    at_all(clients, lambda client: client.all_reduce(np.ones(1)).wait(30))
    clients[0].shutdown()

    def receive(client):
        kept = np.ones(3)
        with pytest.raises(RankLostError) as caught:
            broadcast(client, kept)
        assert (kept == 1).all()
        return caught.value.rank

    assert at_all(clients[1:], receive) == [0, 0]
