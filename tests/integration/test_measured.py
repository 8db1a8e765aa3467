"""What a client says of its all-reduces: bytes on the network, how long they took, at what rate."""

import time

import numpy as np
import pytest

from reducer.errors import MismatchError
from tests.conftest import joined, local_pool, reducer_here
from tests.integration.calls import each, ones
from tests.integration.test_topologies import beside
from worker_client.communicators.communicator import LinkTraffic

pytestmark = pytest.mark.usefixtures("no_settings")

LARGE = 1 << 20  # elements
SPARE = 0.01  # of the bytes: the ranks' own questions


@pytest.fixture(scope="module")
def pool():
    with local_pool(2) as servers:
        yield servers


def timed(client, size, calls, late_s=0.0, **how):
    """Make calls; return how long each took as its caller sees it, seconds."""
    took_s = []
    for _ in range(calls):
        time.sleep(late_s * (client.rank == 1))
        begun_s = time.perf_counter()
        client.all_reduce(ones(size), **how).wait(20)
        took_s.append(time.perf_counter() - begun_s)
    return took_s


def test_bytes_and_a_rate(pool):
    with joined(2, servers=pool, job="measured") as clients:
        each(clients, lambda client: timed(client, LARGE, 5))
        for client in clients:
            found = client.summary()
            for nbytes in found.traffic[:2]:
                assert 20 * LARGE <= nbytes <= (1 + SPARE) * 20 * LARGE
            assert 0 < found.traffic.busy_s < found.traffic.bytes_received / found.rate * 1.001
            assert found.rate == pytest.approx(found.traffic.bytes_received / found.traffic.busy_s)
    with joined(2, servers=pool, job="carried") as clients:
        each(clients, lambda client: timed(client, LARGE, 12, 0.05))
        found = next(client for client in clients if client.rank == 0).summary()
        assert found.rate / 2 < found.carries < 4 * found.rate, "the best of spans of 0.2 s"


@pytest.mark.parametrize("how", [{}, {"name": "a tensor"}])
def test_an_all_reduce_is_timed_from_its_call_to_its_end(pool, how):
    with joined(2, servers=pool, job=f"timed {len(how)}") as clients:
        took_s = each(clients, lambda client: timed(client, 1000, 21, 0.03, **how))
        for client, mine_s in zip(clients, took_s, strict=True):
            found = client.summary()
            assert found.durations.count == 21
            for share in (0.5, 1.0):
                shown_s = found.durations.quantile(share)
                exact_s = np.quantile(mine_s, share, method="inverted_cdf")
                assert shown_s <= exact_s * 17 / 16
                if client.rank == 0:  # who waits for the other one: its caller is told late, too
                    assert shown_s >= max(0.02, exact_s / 2)
        busy_s = [client.summary().traffic.busy_s for client in clients]
        assert sum(took_s[0]) / 2 < busy_s[0] < 1.1 * sum(took_s[0]) + 0.1


def test_what_failed_is_not_timed(pool):
    with joined(2, servers=pool, job="failed") as clients:
        works = [client.all_reduce(ones(1 + client.rank)) for client in clients]
        for work in works:
            with pytest.raises(MismatchError):
                work.wait(20)
        each(clients, lambda client: timed(client, 5, 3))
        assert [client.summary().durations.count for client in clients] == [3, 3]


def test_int8_takes_a_quarter_of_the_bytes(pool):
    with joined(2, servers=pool, job="int8", wire_dtype="int8") as clients:
        each(clients, lambda client: timed(client, LARGE, 3))
        for found in (client.summary() for client in clients):
            assert found.durations.count == 3  # calls, however many pieces travelled
            for nbytes in found.traffic[:2]:
                assert nbytes == pytest.approx(12 * LARGE / 3.9, rel=0.05)


def test_what_a_rank_gives_its_own_reducer_is_not_on_the_network():
    with reducer_here() as one, reducer_here() as other, beside([one, other]) as clients:
        each(clients, lambda client: timed(client, LARGE, 3))
        for found in (client.summary() for client in clients):
            for nbytes in found.traffic[:2]:
                assert nbytes == pytest.approx(6 * LARGE, rel=SPARE)


def test_traffic_adds_up_by_the_ranks_of_the_job():
    before = LinkTraffic(1, 2, 0.5, {0: 1.0, 2: 0.25})
    after = LinkTraffic(10, 20, 1.5, {0: 2.0, 1: 4.0}).renumbered((1, 2))  # rank 0 is gone
    assert before.plus(after) == LinkTraffic(11, 22, 2.0, {0: 1.0, 1: 2.0, 2: 4.25})
    assert LinkTraffic().plus(before) == before
    assert (LinkTraffic().rate, before.rate) == (0.0, 4.0)
