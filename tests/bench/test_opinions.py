"""Simulators of others' and arithmetic made here agree on four ranks; what a row says."""

import pytest

from bench import opinions
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
    # Nothing comes down before a chunk of each rank has come up, 64 KiB each. SimGrid has 5 % of
    # what comes in for acknowledgements, and ns-3 has them.
    rests_s = chunks * 65536 / RATE
    assert least_s + rests_s < said.seconds < 1.08 * (least_s + rests_s)
    assert said.goodput == pytest.approx(least_s / said.seconds)


def test_a_row_has_both_of_ours_and_names_incast(capsys, monkeypatch):
    found = iter([{}, {"drops": 3}, {}])
    monkeypatch.setitem(
        opinions.ASKED, "ns3", lambda _: opinions.Opinion(0.04, 0.9, dict(next(found)))
    )
    links = {"worker_gbps": 1, "reducer_gbps": 1, "delay_s": 25e-6, "port_buffer_bytes": 4 * MIB}
    scenario = Scenario(workers=4, reducers=4, topology="pool", nbytes=4 * MIB, **links)
    for _ in range(2):
        row = opinions.compare(scenario, ["ns3"], set())
    endless = scenario.model_copy(update={"port_buffer_bytes": 0})
    assert "ns3_s" not in opinions.compare(endless, ["ns3"], set())
    plain, incast, unasked = capsys.readouterr().out.splitlines()
    # 4 MiB and one chunk of 64 KiB each of four, of what a link of 1 Gbit/s carries.
    assert row["formula_s"] == pytest.approx(4.25 * MIB / RATE, rel=0.005)
    assert row["simulated_s"] == pytest.approx(4.25 * MIB / RATE, rel=0.02)
    off = 100 * (4.25 * MIB / RATE / 0.04 - 1)
    assert float(plain.split()[-2].rstrip("%")) == pytest.approx(off, abs=1)
    assert incast.split()[-3:-1] == ["40.00", "incast"]
    assert unasked.split()[-3:] == ["-"] * 3


@pytest.mark.extended
def test_small_buffers_lose_packets_and_large_ones_do_not():
    incast = {"reducers": 1, "worker_gbps": 10, "reducer_gbps": 10, "window_bytes": MIB}
    small, large = (
        ask(ask_ns3, **incast, port_buffer_bytes=held).found for held in (MIB // 4, 16 * MIB)
    )
    assert small["drops"] > 0 == large["drops"]
    assert small["longest_queue"] <= MIB // 4 < large["longest_queue"]
