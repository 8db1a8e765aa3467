"""What two simulators of others' say of an all-reduce, beside `reducer plan` and its `--simulate`.

    python -m bench.opinions [--scenarios FILE] [--ask simgrid,ns3]

SimGrid shares links fairly between messages, and knows no packets. ns-3 has packets, TCP, and
switches whose ports drop what they have no room for. Neither shares code with `reducer.planning`:
they know the rules of docs/protocol.md only as numbers, which `rules` takes from the project.
Both have cards that share their rate by packets or better, where Linux hands 64 KiB to a card at
once: so ours is asked with short segments here.
README.md defines every option and figure.
"""

import json as json_format
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from pydantic import BaseModel, ConfigDict, Field

from bench import options, results
from reducer.planning import network_model
from reducer.planning.simulation import SimulationOutcome, SimulationScenario, simulate
from reducer.wire.constants import HEADER_BYTES, SHARD_ALIGNMENT
from reducer.wire.layout import LARGEST_CHUNK, chunk_size, chunk_size_of, shards
from worker_client.protocol import flow_control

FOLDER = Path(__file__).parent / "simulators"
SCENARIOS = FOLDER / "scenarios.jsonl"
PROGRAM = Path("build/opinions/ns3_star")
SYSTEM_PYTHON = "/usr/bin/python3"  # Debian's packages of SimGrid are for this one
SEGMENT_BYTES = 1448
FILLED = 0.9  # of a port, by windows: headers take the rest
FRAMING = HEADER_BYTES + network_model.FRAMING
NS3_ROUNDS = 6  # of 16 MiB with 16 ranks and reducers the fourth and the sixth are 1 % apart
MOST_MESSAGES = 150_000  # of one run of SimGrid, which takes minutes
SEGMENT_BYTES = 4 << 10  # of our simulation; half of it changes its times by 2 % at most


class SimulatorMissingError(Exception):
    """A simulator is not installed; the message says what to install."""


class Scenario(BaseModel):
    """An all-reduce between hosts on one switch.

    Attributes:
        reducers: of the pool; with `topology` embedded every worker hosts one instead.
        delay_s: from a host to another one.
        port_buffer_bytes: what a port of the switch holds, of packets that wait for its link; 0 for
            any number, which ns-3 is not asked about.
        chunk_bytes, window_bytes: forced, of each link; 0 for the project's rules.
        paced: whether no connection sends faster than its part of the busier of both links.
        clamped: whether TCP's windows of the connections that meet at a port fit into it together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: int = Field(ge=2)
    reducers: int = Field(ge=0)
    topology: Literal["pool", "embedded"]
    nbytes: int = Field(ge=64)
    worker_gbps: float
    reducer_gbps: float
    delay_s: float
    port_buffer_bytes: int
    chunk_bytes: int = 0
    window_bytes: int = 0
    paced: bool = False
    clamped: bool = False

    @property
    def owners(self) -> int:
        """How many reducers share the buffer."""
        return self.workers if self.topology == "embedded" else self.reducers

    @property
    def network(self) -> network_model.Network:
        """The links, as payload that they carry."""
        share = network_model.payload_share() * 1e9 / 8
        return network_model.Network(
            self.worker_gbps * share, self.reducer_gbps * share, 2 * self.delay_s
        )


class Rules(NamedTuple):
    """What the project's rules make of a scenario; shards are as long as the longest one."""

    reducers: int
    shard_bytes: int
    chunk_bytes: int
    window_bytes: int


class Opinion(NamedTuple):
    """What a simulator says.

    Attributes:
        goodput: payload of the busiest link, of what it can carry, 0 to 1.
        found: what else the simulator has counted.
    """

    seconds: float
    goodput: float
    found: dict[str, float]


def rules(scenario: Scenario) -> Rules:
    """Return shards, chunks and windows.

    A worker makes its window from what it measures. Here it is from what the network has: the rate
    that is a link's part, and the time of one chunk of every rank, the shortest that a worker sees.
    """
    network, n, k = scenario.network, scenario.workers, scenario.owners
    cut = shards(scenario.nbytes, (1,) * k, 0, scenario.chunk_bytes)
    chunk = scenario.chunk_bytes or LARGEST_CHUNK
    if not scenario.chunk_bytes and scenario.topology == "pool":
        owned = network_model.shares(n, k, "pool")
        rate = 1 / network_model.busiest_card_s(n, owned, network)
        chunk = chunk_size_of(scenario.nbytes, k, chunk_size(rate))
    shard = max(each.end - each.start for each in cut)
    chunk = min(chunk, shard)
    reducer_rate = network.worker_rate if scenario.topology == "embedded" else network.reducer_rate
    trip_s = network.round_trip_s + chunk * max(1 / network.worker_rate, n / reducer_rate)
    busy = max(flow_control.BUSY_BYTES, flow_control.BUSY_CHUNKS * chunk)
    window = int(busy + trip_s * min(network.worker_rate / k, reducer_rate / n))
    limit = flow_control.window_limit(0, scenario.chunk_bytes, k)
    return Rules(len(cut), shard, chunk, scenario.window_bytes or min(window, limit))


def receive_window(scenario: Scenario, reducers: int) -> int:
    """Return TCP's window of every connection, so that each port has room for all that meet there.

    Bytes, in whole segments, two at least; a host of both roles has as many windows again.
    """
    held = scenario.port_buffer_bytes // (2 if scenario.topology == "embedded" else 1)
    part = int(FILLED * held) // max(scenario.workers, reducers)
    return SEGMENT_BYTES * max(2, part // SEGMENT_BYTES)


def formula_s(scenario: Scenario) -> float:
    """Return the time by the closed formula."""
    n, k = scenario.workers, scenario.reducers
    return network_model.all_reduce_s(scenario.nbytes, n, k, scenario.topology, scenario.network)


def ours(scenario: Scenario) -> SimulationOutcome:
    """Return what `reducer plan --simulate` says, of cards that share as the others' do."""
    return simulate(
        SimulationScenario(
            scenario.workers,
            scenario.reducers,
            scenario.topology,
            scenario.nbytes,
            scenario.worker_gbps,
            scenario.reducer_gbps,
            scenario.delay_s,
            port_buffer_bytes=scenario.port_buffer_bytes,
            chunk_bytes=scenario.chunk_bytes,
            segment_bytes=SEGMENT_BYTES,
        )
    )


def ask_simgrid(scenario: Scenario) -> Opinion:
    """Ask SimGrid. It takes larger chunks where there would be more than `MOST_MESSAGES`.

    Raises:
        SimulatorMissingError: the system's Python has no SimGrid.
    """
    probe = [SYSTEM_PYTHON, "-c", "import simgrid"]
    if not Path(SYSTEM_PYTHON).exists() or _fails(probe):
        raise SimulatorMissingError("SimGrid: install Debian's package python3-simgrid")
    ruled = rules(scenario)
    most = max(1, MOST_MESSAGES // (2 * scenario.workers * ruled.reducers))
    coarse = SHARD_ALIGNMENT * -(-ruled.shard_bytes // most // SHARD_ALIGNMENT)
    ruled = ruled._replace(chunk_bytes=max(ruled.chunk_bytes, coarse))
    job = {
        **ruled._asdict(),
        "workers": scenario.workers,
        "embedded": scenario.topology == "embedded",
        "framing_bytes": FRAMING,
        "worker_rate": scenario.network.worker_rate,
        "reducer_rate": scenario.network.reducer_rate,
        "delay_s": scenario.delay_s,
    }
    command = [SYSTEM_PYTHON, str(FOLDER / "simgrid_star.py")]
    said = subprocess.run(
        command, input=json_format.dumps(job), capture_output=True, text=True, check=True
    )
    seconds = json_format.loads(said.stdout)["seconds"]
    return _opinion(scenario, seconds, {"chunk_bytes": ruled.chunk_bytes})


def _fails(command: list[str]) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode != 0


def ask_ns3(scenario: Scenario, rounds: int = NS3_ROUNDS, congestion: str = "TcpCubic") -> Opinion:
    """Ask ns-3, of the last of some all-reduces: TCP's windows grow in those before.

    Raises:
        SimulatorMissingError: there is no ns-3, or no compiler.
    """
    ruled = rules(scenario)
    part_gbps = min(scenario.worker_gbps / ruled.reducers, scenario.reducer_gbps / scenario.workers)
    arguments: dict[str, str | float] = {
        "workers": scenario.workers,
        "reducers": ruled.reducers,
        "embedded": int(scenario.topology == "embedded"),
        "shard": ruled.shard_bytes,
        "chunk": ruled.chunk_bytes,
        "window": ruled.window_bytes,
        "framing": FRAMING,
        "buffer": scenario.port_buffer_bytes,
        "worker-gbps": scenario.worker_gbps,
        "reducer-gbps": scenario.reducer_gbps,
        "delay": scenario.delay_s,
        "rounds": rounds,
        "congestion": congestion,
        "pace": part_gbps * network_model.payload_share() if scenario.paced else 0,
        "receive": receive_window(scenario, ruled.reducers) if scenario.clamped else 0,
    }
    command = [str(_ns3_program()), *(f"--{name}={value}" for name, value in arguments.items())]
    said = json_format.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    ends = said.pop("ends")
    if len(ends) < rounds:
        return Opinion(float("inf"), 0.0, said)
    said["first_s"] = ends[0]
    seconds = ends[-1] - ends[-2] if rounds > 1 else ends[0]
    return _opinion(scenario, seconds, said)


def _ns3_program() -> Path:
    """Compile the program for ns-3, if its source has changed."""
    source = FOLDER / "ns3_star.cc"
    if PROGRAM.exists() and PROGRAM.stat().st_mtime > source.stat().st_mtime:
        return PROGRAM
    if not shutil.which("g++") or not Path("/usr/include/ns3/internet-module.h").exists():
        raise SimulatorMissingError("ns-3: install Debian's packages libns3-dev and g++")
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    # What pkg-config says names libraries that the package does not install.
    modules = ("internet", "point-to-point", "traffic-control", "network", "core")
    libraries = [f"-lns3-{module}" for module in modules]
    subprocess.run(["g++", "-std=c++17", "-O2", "-o", PROGRAM, source, *libraries], check=True)
    return PROGRAM


def _opinion(scenario: Scenario, seconds: float, found: dict[str, float]) -> Opinion:
    owned = network_model.shares(scenario.workers, scenario.reducers, scenario.topology)
    byte_s = network_model.busiest_card_s(scenario.workers, owned, scenario.network)
    return Opinion(seconds, scenario.nbytes * byte_s / seconds, found)


ASKED: dict[str, Callable[[Scenario], Opinion]] = {"simgrid": ask_simgrid, "ns3": ask_ns3}
MOST_WORKERS_NS3 = 64  # more take it longer than minutes


def main(
    scenarios: Annotated[Path, typer.Option(help="Scenarios as JSON, one a line.")] = SCENARIOS,
    ask: Annotated[str, typer.Option(help="Of simgrid and ns3.")] = "simgrid,ns3",
    json: options.Json = None,
) -> None:
    """Print what `reducer plan` and the simulators say of each scenario, and how they differ."""
    run = results.begin("bench.opinions")
    grid = [Scenario.model_validate_json(text) for text in scenarios.read_text().splitlines()]
    asked = [name for name in ASKED if name in ask.split(",")]
    head = "".join(f"{name + ', ms':>12} {'formula':>7} {'simulated':>9}" for name in asked)
    print(
        f"{'n':>5} {'k':>4} {'topology':>9} {'MiB':>5} {'Gbit/s':>9} {'formula, ms':>12} "
        f"{'simulated, ms':>13}{head}"
    )
    missing: set[str] = set()
    rows = [compare(scenario, asked, missing) for scenario in grid]
    options.write_table(run, rows, json)


def compare(scenario: Scenario, asked: list[str], missing: set[str]) -> dict[str, str | float]:
    """Ask about one scenario, and print the row; who is missing says so once, and is added."""
    expected_s, simulated = formula_s(scenario), ours(scenario)
    rates = f"{scenario.worker_gbps:g}, {scenario.reducer_gbps:g}"
    row: dict[str, str | float] = {**scenario.model_dump(), "formula_s": expected_s}
    row |= {"simulated_s": simulated.seconds, "simulated_lost": simulated.lost_share}
    line = (
        f"{scenario.workers:>5} {scenario.owners:>4} {scenario.topology:>9} "
        f"{scenario.nbytes / 2**20:>5g} {rates:>9} {1e3 * expected_s:>12.2f} "
        f"{1e3 * simulated.seconds:>13.2f}"
    )
    for name in asked:
        said = None
        if name not in missing and not (name == "ns3" and not _is_for_ns3(scenario)):
            try:
                said = ASKED[name](scenario)
            except SimulatorMissingError as why:
                missing.add(name)
                print(f"# {why}")
        if said is None:
            line += f"{'-':>12} {'-':>7} {'-':>9}"
        else:
            errors = [
                f"{ours_s / said.seconds - 1:+.1%}" for ours_s in (expected_s, simulated.seconds)
            ]
            if said.found.get("drops"):  # incast, which is not the formula's business
                errors[0] = "incast"
            line += f"{1e3 * said.seconds:>12.2f} {errors[0]:>7} {errors[1]:>9}"
            found = {"s": said.seconds, "goodput": said.goodput, **said.found}
            row |= {f"{name}_{key}": value for key, value in found.items()}
    print(line, flush=True)
    return row


def _is_for_ns3(scenario: Scenario) -> bool:
    return scenario.workers <= MOST_WORKERS_NS3 and scenario.port_buffer_bytes > 0


if __name__ == "__main__":
    typer.run(main)
