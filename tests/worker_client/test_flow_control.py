"""Windows follow what is measured."""

import pytest

from worker_client.protocol.flight import LinkStats
from worker_client.protocol.flow_control import (
    BUSY_BYTES,
    LOOK_S,
    MOST_BYTES,
    SAMPLES,
    FlowControl,
    window_limit,
)

MIB = 1 << 20
KIB = 1 << 10


class Path:
    """Links of one rate and round trip, as far as flow control sees them."""

    def __init__(self, links, rate, rtt_s):
        self.rate, self.rtt_s = rate, rtt_s
        self.windows = [0] * links
        self.received = [0] * links
        self.before = [0] * links
        self.large, self.measured_since, self.large_ended = 0, 0.0, 0.0

    def begin(self, now):
        """A large all-reduce."""
        self.large += 1
        if self.large == 1:
            self.measured_since = now
            self.before = list(self.received)

    def end(self):
        self.large -= 1

    def set_window(self, link, nbytes):
        self.windows[link] = nbytes

    def measure_anew(self, link):
        """What comes; every round trip is as long."""
        self.before[link] = self.received[link]

    def stats(self, link):
        window, received = self.windows[link], self.received[link]
        measured = received - self.before[link]
        return LinkStats(window, 0, 0, received, 0, 0.0, self.rtt_s, measured)

    def carry(self, seconds):
        """As much as the window and the rate allow."""
        for link, window in enumerate(self.windows):
            self.received[link] += int(seconds * min(self.rate, window / self.rtt_s))


def one_link(rate, rtt_s, most, chunk_bytes=64 * KIB, forced=False, **measured):
    """One link to a reducer that allows so many bytes."""
    path = Path(1, rate, rtt_s)
    flow = FlowControl(path, chunk_bytes, forced=forced)
    flow.admit(0, most, 1.0, **measured)
    return path, flow


def run(flow, path, rounds):
    for now in range(rounds):
        path.begin(now)
        path.carry(0.5)
        path.end()
        flow.ended(now + 0.5)


@pytest.mark.parametrize(
    ("forced", "chunk", "reducers", "expected"),
    [
        (0, 0, 4, 4 * MIB),
        (0, 0, 300, 512 * KIB),  # two of the largest chunks
        (32 * MIB, 0, 4, 8 * MIB),
        (1, 64 * KIB, 4, 128 * KIB),
    ],
)
def test_the_most_that_is_asked_for(forced, chunk, reducers, expected):
    assert window_limit(forced, chunk, reducers) == expected


NEAR = {"rate": 12e6, "rtt_s": 0.001}
FAR = {"rate": 1.2e9, "rtt_s": 0.010}  # it holds 12 MB


@pytest.mark.parametrize(
    ("path", "most", "flow", "rounds", "window"),
    [
        pytest.param(NEAR, 8 * MIB, {}, 0, BUSY_BYTES, id="near, not measured"),
        pytest.param(NEAR, 8 * MIB, {}, 5, BUSY_BYTES + 12e6 * 0.001, id="near"),
        pytest.param(NEAR, 8 * MIB, {"chunk_bytes": 512 * KIB}, 0, MIB, id="two chunks"),
        pytest.param(NEAR, 8 * MIB, {"chunk_bytes": 512 * KIB}, 5, MIB + 12e6 * 0.001, id="+"),
        pytest.param(FAR, MOST_BYTES, {"chunk_bytes": MIB}, 1, 4 * MIB, id="it grew as it was"),
        pytest.param(FAR, MOST_BYTES, {"chunk_bytes": MIB}, 11, 2 * MIB + 12e6, id="far"),
        pytest.param(FAR, MIB, {}, 5, MIB, id="no more than the reducer allows"),
        pytest.param(FAR, 100 * KIB, {}, 0, 100 * KIB, id="less than two chunks"),
        pytest.param(FAR, 5 * MIB, {"forced": True}, 5, 5 * MIB, id="forced"),
        pytest.param(FAR, MIB, {"can_grow": True, "round_trip_s": 0.009}, 5, MIB, id="not far"),
    ],
)
def test_windows(path, most, flow, rounds, window):
    link, control = one_link(**path, most=most, **flow)
    run(control, link, rounds)
    assert link.windows == [pytest.approx(window, rel=0.01)]
    assert control.asks(10.0) == []


def test_rates_are_of_all_links():
    path = Path(4, **NEAR)
    flow = FlowControl(path, 64 * KIB, forced=False)
    for link in range(4):
        flow.admit(link, 8 * MIB, 1.0)
    assert flow.rate == 0
    run(flow, path, 5)
    assert flow.rate == pytest.approx(48e6, rel=0.01)
    assert path.windows == [pytest.approx(BUSY_BYTES + 12e6 * 0.001, rel=0.01)] * 4


def test_what_is_shown_spans_enough_time_and_leaves_out_what_stays_here():
    path = Path(3, **NEAR)
    flow = FlowControl(path, 64 * KIB, forced=False)
    for link in range(3):
        flow.admit(link, 8 * MIB, 1.0, local=link == 2)
    now = 0.0
    for busy_s in (LOOK_S * 0.75, 0.001, LOOK_S * 0.75):  # the look amid has what had come before
        path.begin(now)
        path.carry(LOOK_S / 2)
        path.end()
        flow.ended(now + busy_s)
        assert flow.carries == 0 or now > LOOK_S
        now += 1.0
    assert flow.carries == pytest.approx(2 * 12e6 * 1.5 * LOOK_S / (1.5 * LOOK_S + 0.001), rel=0.01)
    assert flow.rate > 100 * flow.carries, "windows may be too large"


def test_a_reducer_that_owns_less_gets_a_smaller_window():
    path = Path(3, **NEAR)
    flow = FlowControl(path, 64 * KIB, forced=False)
    for link, share in enumerate((1.0, 1 / 2, 0.0)):
        flow.admit(link, 8 * MIB, share)
    assert path.windows == [BUSY_BYTES, BUSY_BYTES // 4, 0]


def test_lost_packets_hold_up_what_is_behind_them_in_a_far_network():
    # Of 200 ms, whose chunks take 600 ms: their contributions wait for what was lost.
    path, flow = one_link(rate=6e6, rtt_s=0.2, most=MOST_BYTES, round_trip_s=0.2)
    for now in range(40):
        path.begin(now)
        path.received[0] += int(0.5 * min(path.rate, path.windows[0] / 0.6))
        path.end()
        flow.ended(now + 0.5)
    assert flow.rate == pytest.approx(6e6, rel=0.01)
    assert path.windows[0] == pytest.approx(BUSY_BYTES + 5 * 0.2 * 6e6, rel=0.01)


def test_windows_of_a_far_network_grow_to_256_mib_in_all():
    path = Path(2, rate=1e9, rtt_s=0.1)
    flow = FlowControl(path, 64 * KIB, forced=False)
    for link in range(2):
        flow.admit(link, MOST_BYTES // 2, 1.0, 0.1, can_grow=True)
    for now in range(10):
        run(flow, path, 1)
        assert all(window <= 128 * MIB for window in path.windows)
        for link, asked in flow.asks(now):
            assert asked > path.windows[link]
            flow.raise_limit(link, asked)
    assert path.windows == [128 * MIB] * 2
    flow.admit(0, MOST_BYTES // 2, 1.0, 0.1)  # a reducer of an earlier version
    flow.raise_limit(0, 64 * MIB)
    run(flow, path, 5)
    assert path.windows == [MOST_BYTES // 2, 128 * MIB]


def test_who_asks_in_vain_waits_twice_as_long():
    path, flow = one_link(rate=1e8, rtt_s=0.1, most=MIB, round_trip_s=0.1, can_grow=True)
    run(flow, path, 5)
    assert [now for now in range(20) if flow.asks(float(now))] == [0, 1, 3, 7, 15]
    flow.raise_limit(0, 2 * MIB)
    assert [now for now in range(31, 40) if flow.asks(float(now))] == [31, 32, 34, 38]


def test_a_far_link_that_is_gone_holds_up_no_looks():
    path = Path(2, rate=3e8, rtt_s=0.005)
    flow = FlowControl(path, 64 * KIB, forced=False)
    flow.admit(0, MOST_BYTES, 1.0, 0.005)
    flow.admit(1, MOST_BYTES, 1.0, 0.3, can_grow=True)
    flow.dismiss(1)
    for now in range(5):
        path.begin(float(now))
        path.received[0] += 8 * MIB
        path.end()
        flow.ended(now + 0.05)
    assert flow.rate == pytest.approx(160 * MIB)


def test_a_burst_of_a_far_network_is_no_rate():
    path, flow = one_link(rate=1e7, rtt_s=0.2, most=MOST_BYTES, round_trip_s=0.2, can_grow=True)
    for _ in range(3):
        path.begin(0.0)
    path.received[0] = MIB
    path.end()
    flow.ended(0.25)
    path.received[0] = 3 * MIB  # what was behind a lost packet
    for now in (0.251, 0.252):
        path.end()
        flow.ended(now)
    flow.tick(0.252)
    assert flow.rate == pytest.approx(MIB / 0.25)


def test_a_window_shrinks_with_the_rate_but_not_while_the_link_waits():
    path, flow = one_link(rate=1.2e8, rtt_s=0.010, most=MOST_BYTES)
    run(flow, path, 5)
    before = path.windows[0]
    path.rate = 0.0
    run(flow, path, 2 * SAMPLES)
    assert path.windows[0] == before > BUSY_BYTES + 1e6
    path.rate = 1.2e7
    run(flow, path, SAMPLES)
    assert path.windows == [pytest.approx(BUSY_BYTES + 1.2e5, rel=0.01)]


def test_failed_all_reduces_and_others_between_them_say_nothing():
    path, flow = one_link(rate=1e9, rtt_s=0.1, most=5 * MIB)
    path.begin(10.0)
    path.carry(0.5)
    path.end()
    assert path.windows == [BUSY_BYTES]
    path.received[0] += 1 << 40  # in small ones
    path.rate = 0
    run(flow, path, 1)
    assert path.windows == [BUSY_BYTES]
    assert flow.rate == 0


def test_a_long_all_reduce_is_measured_on_the_way():
    path, flow = one_link(rate=1e9, rtt_s=0.1, most=1 << 30)
    flow.tick(5.0)
    path.begin(10.0)
    path.carry(LOOK_S / 2)
    flow.tick(10.0 + LOOK_S / 2)
    assert path.windows == [BUSY_BYTES]
    path.carry(LOOK_S / 2)
    flow.tick(10.0 + 2 * LOOK_S)
    assert path.windows[0] > BUSY_BYTES


def test_a_large_one_that_c_has_ended_is_measured_as_others_are():
    path, flow = one_link(rate=1e9, rtt_s=0.1, most=1 << 30)
    path.begin(10.0)
    path.carry(0.5)
    path.end()
    path.large_ended = 10.5
    flow.tick(11.0)
    assert flow.rate == pytest.approx(2 * path.received[0])
    assert path.large_ended == 0
