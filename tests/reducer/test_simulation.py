"""`reducer plan --simulate`: its network by hand, its reducers beside the engine, its results."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reducer.planning import network_model, simulation
from reducer.planning.simulated_job import MessageCosts
from reducer.planning.simulation import SimulationScenario, simulate
from reducer.planning.virtual_network import Card, Flow, LinkQueue, LinkRate, VirtualClock
from reducer.wire.constants import PLACES
from reducer.wire.header import Header
from tests.commands import run_here, transcript
from tests.engine.twins import Served
from tests.golden import check_golden

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


class Wire:
    """Cards of senders, and one port; what has come, and when."""

    def __init__(self, senders, *, burst=0, buffer=0, delay=0.0):
        self.clock = VirtualClock()
        rate = LinkRate(100.0, burst)
        self.port = LinkQueue(rate, buffer)
        self.came = []
        cards = [Card(self.clock, rate, delay, 10) for _ in range(senders)]
        self.flows = [Flow(card, self.port, self.arrive) for card in cards]

    def arrive(self, name):
        self.came.append((name, pytest.approx(self.clock.now)))

    def run(self):
        self.clock.run()
        return self.came


def test_a_message_takes_its_bytes_over_the_rate_and_the_delay():
    wire = Wire(1, delay=0.5)
    wire.flows[0].send(100, "a")
    wire.flows[0].send(50, "b")
    assert wire.run() == [("a", 1.5), ("b", 2.0)]
    assert wire.port.deepest == 0


def test_connections_of_a_card_take_turns_of_two_segments():
    wire = Wire(1)
    wire.flows.append(Flow(wire.flows[0].card, wire.port, wire.arrive))
    wire.flows[0].send(50, "long")
    wire.flows[1].send(9, "short")
    wire.flows[1].send(12, "third")
    # long 20, short 9 and third 7, long 20, third 5, long 10
    assert wire.run() == [("short", 0.29), ("third", 0.61), ("long", 0.71)]


def test_two_senders_queue_at_a_port():
    wire = Wire(2)
    for name, flow in zip("ab", wire.flows, strict=True):
        flow.send(100, name)
    assert wire.run() == [("a", 1.9), ("b", 2.0)]
    assert wire.port.deepest == 90  # when the last segment comes, 200 bytes have and 100 have left


def test_a_link_that_has_rested_catches_up():
    wire = Wire(1, burst=40)
    wire.clock.at(10.0, lambda: wire.flows[0].send(100, "a"))
    assert wire.run() == [("a", 10.6)]


def test_what_finds_no_room_is_lost_and_sent_again():
    wire = Wire(4, buffer=25)
    for name, flow in zip("abcd", wire.flows, strict=True):
        flow.send(100, name)
    came = wire.run()
    assert sorted(name for name, _ in came) == [*"abcd"]
    assert wire.port.carried == 400
    assert wire.port.deepest <= 25
    assert wire.port.lost > 0
    assert sum(flow.card.link.carried for flow in wire.flows) == 400 + wire.port.lost


class EngineRules:
    """A thread of a reducer by the engine of production, with real bytes.

    Its results are put into the order in which the compiled loop sends them, which no engine knows.
    """

    def __init__(self, world_size):
        self.n = world_size
        self.served = Served("compiled", memory_limit=1 << 40)
        self.served.engine.tick(0.0)

    def welcome(self, frame, payload):
        rank = Header.unpack(frame).rank
        ((_, header, body),) = self.served.receive(rank.to_bytes(7, "little"), frame, payload)
        return header, body

    def receive(self, rank, frame, payload):
        peer = rank.to_bytes(7, "little")
        sends = self.served.receive(peer, frame, bytes(payload))
        answers = {int.from_bytes(to, "little"): (header, body) for to, header, body in sends}
        said = Header.unpack(frame)
        turn = said.offset // said.nbytes if said.nbytes else 0
        order = sorted(answers, key=lambda to: (to - turn) % self.n)
        question = said.sequence % PLACES == 0
        return [
            (to, header, body if question or body is None else memoryview(body))
            for to, (header, body) in ((to, answers[to]) for to in order)
        ]


SMALL = {"worker_gbps": 1.0, "reducer_gbps": 1.0}


@pytest.mark.parametrize(
    "scenario",
    [
        SimulationScenario(4, 4, "pool", 1 << 20, **SMALL),
        SimulationScenario(3, 2, "pool", 700_004, **SMALL, lanes=2),
        SimulationScenario(4, 0, "embedded", 2 << 20, **SMALL),
        SimulationScenario(
            4, 2, "mixed", 1 << 20, **SMALL, costs=MessageCosts(1e-5, 1e-9, 2e-5, 1e-9)
        ),
        SimulationScenario(
            2, 2, "pool", 1 << 20, **SMALL, delay_s=0.02
        ),  # far: streams, and CREDIT
        SimulationScenario(2, 1, "pool", 4096, **SMALL),
    ],
    ids=str,
)
def test_reducers_say_what_the_engine_says(scenario):
    assert simulate(scenario) == simulate(scenario, EngineRules)


@pytest.mark.parametrize(
    ("workers", "reducers", "topology", "nbytes", "gbps"),
    [
        *(
            (4, 4, "pool", 4 << 20, 1.0),
            (4, 2, "pool", 1 << 20, 1.0),
            (4, 2, "mixed", 8 << 20, 2.5),
        ),
        *((4, 4, "pool", 16 << 20, 10.0), (8, 2, "pool", 8 << 20, 10.0)),
    ],
)
def test_ranks_agree_on_the_chunks_that_large_jobs_begin_with(
    workers, reducers, topology, nbytes, gbps
):
    scenario = SimulationScenario(workers, reducers, topology, nbytes, gbps, gbps)
    agreed = simulate(scenario)
    assert simulation.agreed_chunk_bytes(scenario) == agreed.chunk_bytes


def test_a_large_job_is_simulated_as_a_small_one(monkeypatch):
    scenario = SimulationScenario(16, 8, "pool", 8 << 20, 10.0, 10.0)
    agreed = simulate(scenario)
    monkeypatch.setattr(simulation, "MANY_LINKS", 1)
    begun_so = simulate(scenario)
    assert begun_so.seconds == pytest.approx(agreed.seconds, rel=0.05)
    assert begun_so.reducer_port_bytes == pytest.approx(agreed.reducer_port_bytes, rel=0.2)
    assert begun_so.events < agreed.events / 2


@settings(max_examples=20, deadline=None)
@given(
    *(st.integers(2, 6), st.integers(1, 6), st.sampled_from(["pool", "embedded", "mixed"])),
    *(st.integers(1, 1 << 19).map(lambda count: 4 * count), st.sampled_from([0.1, 1.0, 25.0])),
)
def test_nothing_is_faster_than_its_cards(workers, reducers, topology, nbytes, gbps):
    scenario = SimulationScenario(workers, reducers, topology, nbytes, gbps, 2 * gbps)
    outcome = simulate(scenario)
    # Shards are of whole cache lines, and of 32 KiB or more: a card may have more than its share.
    evenly = network_model.shares(workers, reducers, topology)
    least = network_model.busiest_card_s(workers, evenly, scenario.network) * nbytes
    assert outcome.seconds >= 0.999 * least
    assert outcome.busiest_gbps <= 2 * gbps
    assert outcome.lost_share == 0


@pytest.mark.parametrize(
    ("workers", "reducers", "topology", "reducer_gbps"),
    [(8, 8, "pool", 10.0), (8, 2, "pool", 40.0), (8, 2, "pool", 10.0), (8, 0, "embedded", 10.0)],
)
def test_cards_that_share_by_packets_take_what_the_formula_says(
    workers, reducers, topology, reducer_gbps
):
    job = (workers, reducers, topology, 8 << 20, 10.0, reducer_gbps, 25e-6)
    outcome = simulate(SimulationScenario(*job, segment_bytes=4 << 10))
    assert outcome.formula_s == pytest.approx(outcome.seconds, rel=0.06)


def test_a_short_buffer_at_the_port_of_few_reducers_loses_segments():
    scenario = {"workers": 16, "reducers": 2, "topology": "pool", "nbytes": 4 << 20}
    scenario |= {"worker_gbps": 10.0, "reducer_gbps": 10.0}
    long = simulate(SimulationScenario(**scenario))
    short = simulate(SimulationScenario(**scenario, port_buffer_bytes=256 << 10))
    assert long.reducer_port_bytes > 1 << 20
    assert long.lost_share == 0
    assert short.reducer_port_bytes <= 256 << 10
    assert short.lost_share > 0.01
    assert short.seconds > long.seconds


def test_processors_that_are_slow_decide():
    scenario = {"workers": 2, "reducers": 2, "topology": "pool", "nbytes": 4 << 20}
    scenario |= {"worker_gbps": 1.0, "reducer_gbps": 1.0}
    costs = MessageCosts(reducer_byte_s=1e-7)  # a reducer takes in, and sends, 10 MB/s
    outcome = simulate(SimulationScenario(**scenario, costs=costs))
    # Each reducer takes in a half of both ranks' buffers, and sends as much.
    assert outcome.seconds == pytest.approx(2 * (4 << 20) * 1e-7, rel=0.02)
    assert outcome.reducers_cpu_s_per_gb == pytest.approx(4 * 1e9 * 1e-7, rel=0.01)
    assert outcome.worker_cpu_s_per_gb == 0


# Of docs/figures: name, way and size, rate of the links.
MEASURED = [
    *(("pool-2", "pool-2", "64 MiB", 1.0), ("cards-ring", "embedded", "64 MiB", 0.8)),
    *(("pool-4", "pool-4", size, 1.0) for size in ("256 KiB", "1 MiB", "4 MiB")),
    *(("pool-4", "embedded", size, 1.0) for size in ("256 KiB", "1 MiB", "4 MiB")),
]


@pytest.mark.parametrize(("name", "way", "size", "gbps"), MEASURED)
def test_it_says_what_the_lab_has_measured(name, way, size, gbps):
    rows = json.loads((FIGURES / f"{name}.json").read_text())["rows"]
    (row,) = (row for row in rows if (row["way"], row["size"]) == (way, size))
    nbytes = int(size.split()[0]) << {"KiB": 10, "MiB": 20}[size.split()[1]]
    topology = way.partition("-")[0]
    job = (row["workers"], row["reducers"], topology, nbytes, gbps, gbps)
    outcome = simulate(SimulationScenario(*job, 5e-5, burst_bytes=256 << 10))
    assert outcome.seconds == pytest.approx(row["us"] / 1e6, rel=0.05)


LINE = "reducer plan --workers 4 --worker-gbps 10 --reducer-gbps 10 --simulate --reducers 0,2,4"
LINES = [
    LINE,
    f"{LINE} --port-buffer 256KiB --costs '{{\"worker_message_s\": 2e-6}}'",
    f"{LINE[:-6]} 2 --topology pool --model-bytes 4MiB --json",
]


def test_what_the_command_prints():
    check_golden(Path(__file__).with_name("simulated.txt"), transcript(LINES))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--topology star", "topology: Input should be"),
        ("--port-buffer deep", "port-buffer: could not parse"),
        ("--costs 1", "costs: "),
        ("--topology pool", "a pool needs at least 1 reducer"),
        ("--vertex", "give one"),
    ],
)
def test_what_cannot_be_simulated(option, says):
    done = run_here(f"{LINE} {option}")
    assert done.returncode == 2
    assert says in done.stderr
