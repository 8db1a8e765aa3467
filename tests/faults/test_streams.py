"""Links of several connections: chunks are shared among them, and who loses one loses the link."""

import pytest

from tests.conftest import reference_here
from tests.faults.steps import begin, exact
from tests.waits import eventually

STREAMS = 4
ANSWERED = 200  # bytes down: greeting and READY are 139, and the answer to a STREAM is 66


def answered(proxy):
    """Return how many connections the reducer has let into their link."""
    return sum(passed >= ANSWERED for passed in proxy.passed("down"))


@pytest.fixture
def make(make_net, monkeypatch):
    """Make jobs of two ranks, with four streams to each reducer, of which so many come."""
    monkeypatch.setenv("REDUCTION_STREAMS", str(STREAMS))

    def make(servers, came=STREAMS):
        net = make_net(servers)
        eventually(lambda: all(answered(proxy) == 2 * came for proxy in net.proxies))
        exact(begin(net.clients, 0))
        return net

    return make


def test_chunks_go_over_all_streams(pool, make):
    clients, (proxy, _) = make(pool)
    ways = ("up", "down")
    before = [proxy.passed(way) for way in ways]
    proxy.set("both", bytes_per_s=16e6)  # then a chunk goes where the least is on its way
    exact(begin(clients, 1, 4_000_000))
    for way, earlier in zip(ways, before, strict=True):
        carried = [now - then for now, then in zip(proxy.passed(way), earlier, strict=True)]
        assert len(carried) == 2 * STREAMS
        assert sum(carried) > 16e6, "half of 16 MB of each rank"
        assert min(carried) > 32e3, carried  # a chunk: kernels on both sides take some at once
        assert max(carried) < 8e6, carried


@pytest.mark.parametrize("count", [200_000, 4_000_000])
def test_a_stream_that_is_lost_costs_no_step(pool, make, count):
    clients, proxies = make(pool)
    step = begin(clients, 1, count)
    proxies[0].cut(latest=1)  # a further stream: first connections came before
    exact(step)
    exact(begin(clients, 2, count))
    assert proxies[0].cuts == 1
    assert [client.counters.losses for client in clients] == [1, 1]
    # The link is made anew with all of its streams, at both ranks.
    eventually(lambda: proxies[0].connections == 4 * STREAMS)
    assert proxies[1].connections == 2 * STREAMS
    exact(begin(clients, 3, count))


def test_a_reducer_that_has_none_is_used_with_one(make):
    with reference_here() as address:
        clients, (proxy,) = make([address], came=1)
        for number in range(1, 4):
            exact(begin(clients, number))
        assert proxy.connections == 2
