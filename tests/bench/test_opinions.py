"""Simulators of others' and arithmetic made here agree on four ranks."""

import pytest

from bench.opinions import Scenario, SimulatorMissingError, ask_ns3, ask_simgrid

MIB = 1 << 20
# TCP's payload of a link of 1 Gbit/s, of packets of 1500 bytes in Ethernet's frames.
RATE = 1e9 / 8 * 1448 / 1514


def ask(simulator, **changed):
    scenario = {"workers": 4, "reducers": 4, "topology": "pool", "nbytes": 4 * MIB}
    links = {"worker_gbps": 1, "reducer_gbps": 1, "delay_s": 25e-6, "port_buffer_bytes": 4 * MIB}
    try:
        return simulator(Scenario(**scenario | links | changed))
    except SimulatorMissingError as missing:
        pytest.skip(f"{missing}: make simulators")


@pytest.mark.parametrize(
    ("changed", "through_busiest", "chunks"),
    [
        ({}, 4 * MIB, 4),
        ({"reducers": 1}, 16 * MIB, 4),
        ({"reducers": 2, "reducer_gbps": 2}, 4 * MIB, 2),
        ({"topology": "embedded", "reducers": 0}, 6 * MIB, 0),
    ],
    ids=["as many", "one", "two that are twice as fast", "embedded"],
)
@pytest.mark.parametrize(
    "simulator", [ask_simgrid, pytest.param(ask_ns3, marks=pytest.mark.extended)]
)
def test_time_is_of_the_busiest_link_and_of_its_first_and_last_chunks(
    simulator, changed, through_busiest, chunks
):
    least_s = through_busiest / RATE
    said = ask(simulator, **changed)
    # Nothing comes down before a chunk of each rank has come up, 64 KiB each.
    rests_s = chunks * 65536 / RATE
    assert least_s + rests_s < said.seconds < 1.15 * (least_s + 2 * rests_s)
    assert said.goodput == pytest.approx(least_s / said.seconds)


@pytest.mark.extended
def test_small_buffers_lose_packets_and_large_ones_do_not():
    incast = {"reducers": 1, "worker_gbps": 10, "reducer_gbps": 10, "window_bytes": MIB}
    small, large = (
        ask(ask_ns3, **incast, port_buffer_bytes=held).found for held in (MIB // 4, 16 * MIB)
    )
    assert small["drops"] > 0 == large["drops"]
    assert small["longest_queue"] <= MIB // 4 < large["longest_queue"]
