"""Whatever the network does, a step is exact or says in time why not, and the job goes on."""

import time
from functools import partial

import pytest

from reducer.wire.constants import HEADER_BYTES, MAGIC, VERSION_MAJOR, MessageType
from tests.faults.steps import (
    COUNT,
    begin,
    exact,
    exact_or_typed,
    works_again,
    works_again_or_says_why_not,
)

BOTH_WAYS = pytest.mark.parametrize("way", ["up", "down"])
MORE_FRAME = bytes([1, HEADER_BYTES])  # how ZMTP begins a header that a payload follows
PAYLOAD_LENGTH = HEADER_BYTES + 1  # where its 8 bytes begin, big-endian, counted from the magic


def chunk(way):
    """The first bytes of a chunk's header in that direction."""
    kind = MessageType.CONTRIBUTION if way == "up" else MessageType.RESULT
    return MAGIC + bytes([VERSION_MAJOR, kind])


@pytest.fixture(
    params=[1, pytest.param(3, marks=pytest.mark.extended("tests/faults/test_streams.py"))],
    ids=["one", "streams"],
)
def streams(request):
    """Connections to each reducer."""
    return request.param


@pytest.fixture
def make(make_net, servers, streams, monkeypatch):
    """Make jobs, with so many connections."""
    monkeypatch.setenv("REDUCTION_STREAMS", str(streams))
    return partial(make_net, servers)


@pytest.fixture
def net(make):
    return make()


def test_a_delay_costs_time_alone(net):
    for proxy in net.proxies:
        proxy.set("both", delay_s=0.05)
    start = time.monotonic()
    for number in range(1, 6):
        exact(begin(net.clients, number))
    assert time.monotonic() - start >= 5 * 0.1


def test_a_reducer_at_a_tenth_of_its_rate_is_not_a_dead_one(net):
    slow, count = net.proxies[0], 2_000_000  # 8 MB
    took = []
    passed = []
    for number in range(1, 4):
        if number == 3:
            slow.set("both", bytes_per_s=passed[1] / took[1] / 10)
        before, start = sum(slow.passed("up")), time.monotonic()
        exact(begin(net.clients, number, count), within_s=15)
        took.append(time.monotonic() - start)
        passed.append(sum(slow.passed("up")) - before)
    assert took[2] > 2 * took[1]  # perhaps not ten times: shares may follow the rates


def test_a_partition_is_noticed_and_gone_when_it_heals(make):
    directions = ("up", "down", "both")
    nets = [make(direction) for direction in directions]  # at once: three would take long
    start = time.monotonic()
    for direction, net in zip(directions, nets, strict=True):
        net.proxies[0].set(direction, parted=True)
    for step in [begin(net.clients, 1) for net in nets]:
        exact_or_typed(step, within_s=start + 3 - time.monotonic())
    time.sleep(max(0.0, start + 3 - time.monotonic()))  # connections are begun anew meanwhile
    for step in [begin(net.clients, 2) for net in nets]:
        exact_or_typed(step, within_s=3)
    for net in nets:
        net.proxies[0].set("both", parted=False)
        works_again(net.clients)


def test_a_slow_network_with_pauses_is_borne_if_the_job_is_patient(make, monkeypatch):
    nets = [make("as usual")]
    monkeypatch.setenv("REDUCTION_PATIENCE", "5s")
    nets.append(make("patient"))
    proxies = [proxy for net in nets for proxy in net.proxies]
    for proxy in proxies:
        proxy.set("both", delay_s=0.1)
    for net in nets:
        exact(begin(net.clients, 1))
    usual, patient = [begin(net.clients, 2) for net in nets]
    for proxy in proxies:
        proxy.set("both", parted=True)  # packets are lost, and so are their retransmissions
    time.sleep(1.6)
    for proxy in proxies:
        proxy.set("both", parted=False)
    exact(patient)
    exact(begin(nets[1].clients, 3))
    assert all(client.counters.losses == 0 for client in nets[1].clients)
    errors = exact_or_typed(usual, within_s=5)
    assert errors, "both reducers were silent for longer than a second"
    assert any("no heartbeat for 1." in str(error) for error in errors), errors


@BOTH_WAYS
@pytest.mark.parametrize("nbytes", [0, 50, HEADER_BYTES, 100_000])
def test_a_torn_frame_tears_no_sum(net, way, nbytes):
    fired = net.proxies[1].shoot(way, "cut", nbytes, after=chunk(way))
    for number in range(1, 6):  # chunks go over whichever stream has the least to carry
        exact_or_typed(begin(net.clients, number, 3 * COUNT), within_s=3)
        if fired.wait(0.5):
            break
    assert fired.is_set()
    works_again(net.clients)


def test_a_cut_of_everything_in_the_middle_of_a_step(net, streams):
    for proxy in net.proxies:
        proxy.set("both", bytes_per_s=2e6)  # so that it is in the middle
    step = begin(net.clients, 1)
    for proxy in net.proxies:
        proxy.cut()
        proxy.set("both", bytes_per_s=None)
    exact_or_typed(step, within_s=3)
    assert all(2 <= proxy.cuts <= 2 * streams for proxy in net.proxies)
    works_again(net.clients)


# A payload, and a header's field in which another value makes sense too, only TCP's own checksum
# guards.


@BOTH_WAYS
@pytest.mark.parametrize(
    ("offset", "bit"),
    [
        pytest.param(0, 5, id="magic"),
        pytest.param(40, 3, id="total_bytes"),
        pytest.param(56, 3, id="nbytes"),
        pytest.param(PAYLOAD_LENGTH, 0, id="length beyond every limit"),
        pytest.param(PAYLOAD_LENGTH + 5, 4, id="length of what never comes"),
        pytest.param(PAYLOAD_LENGTH + 7, 3, id="length of what comes next too"),
    ],
)
def test_a_flipped_bit_adds_nothing(net, way, offset, bit):
    fired = net.proxies[0].shoot(way, "flip", offset, amount=bit, after=MORE_FRAME)
    exact_or_typed(begin(net.clients, 1), within_s=3)
    assert fired.wait(20)
    works_again_or_says_why_not(net.clients)


@BOTH_WAYS
@pytest.mark.parametrize("nbytes", [1, 10, 90])
def test_bytes_of_a_header_that_come_twice_add_nothing(net, way, nbytes):
    fired = net.proxies[0].shoot(way, "duplicate", nbytes, amount=nbytes, after=chunk(way))
    exact_or_typed(begin(net.clients, 1), within_s=3)
    assert fired.wait(20)
    works_again_or_says_why_not(net.clients)
