"""The form of all results: one JSON schema, with the machine and the settings beside the figures.

Sizes are in bytes, durations in seconds, microseconds or milliseconds as their names say, rates in
bytes per second. None means that a figure was not measured, or makes no sense there. README.md
defines every figure.
"""

import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil
import zmq
from pydantic import BaseModel, ConfigDict, Field

from harness import ROOT
from lab.network import CONGESTION

SCHEMA = 2
Kind: TypeAlias = Literal["allreduce", "scaling", "soak"]
LOAD_S = 0.5  # over which the load of the processors is measured
BUSY_SHARE = 0.5  # of the processors: the load from which on the machine is called busy


class Record(BaseModel):
    """A part of a result."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Machine(Record):
    """What it was measured on, and with."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    versions: dict[str, str]
    commit: str
    """Git commit, with ``+`` if the working tree differed from it in more than docs/figures."""


class Run(Record):
    """The machine and the command of a result, as they were when the command began."""

    schema_version: int = SCHEMA
    time: datetime
    machine: Machine
    command: str
    environment: dict[str, str]
    """``REDUCTION_`` variables."""
    load: float
    """Processors that other processes used just before; see `processors_in_use`."""

    def write(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_text(self.model_dump_json(indent=1) + "\n")


class Distance(Record):
    """What is between the hosts; the arguments of `lab.Lab`."""

    round_trip_ms: float = 0.0
    loss_percent: float = 0.0
    congestion: str = CONGESTION
    port_bytes: int = 0


NEAR = Distance()


class Settings(Record):
    """The settings of all-reduces."""

    mbit: float | None
    """Rate of every link each way in Mbit/s; None: not shaped, so that processors are the limit."""
    payload_rates: list[float]
    streams: int = 1
    distance: Distance = NEAR
    workers: list[int]
    rounds: int
    skipped: dict[str, str]
    """Contenders that were asked for and not measured, and why."""


class Row(Record):
    """One contender at one size."""

    contender: str
    ours: bool
    workers: int
    reducers: int
    """On hosts of their own."""
    cards: int
    """Hosts in use, each with one network card: workers and reducers."""
    nbytes: int
    count: int
    dtype: Literal["float32"]
    op: Literal["sum"]
    iterations: int
    rounds_us: list[float]
    time_us: float
    mean_us: float
    p99_us: float
    algbw: float
    busbw: float
    wrong: int
    checked: int
    exact: bool
    """Whether every bit was compared, or values within the rounding of any order."""
    payload_share: float | None
    limit: float | None
    worker_cpu_s_per_gb: float
    reducer_cpu_s_per_gb: float | None
    ratios: dict[str, float]
    card_ratios: dict[str, float]
    """The same at equal total bandwidth, algbw times workers over cards; empty if not shaped."""


class Sample(Record):
    """A process at one moment of a soak."""

    process: str
    done: int
    seconds: float
    rss: int
    files: int
    threads: int


class Trend(Record):
    """How a process's memory went in the second half of a soak."""

    process: str
    start_rss: int
    end_rss: int
    bytes_per_1000: float
    growth: float
    flat: bool
    files: tuple[int, int]
    """Open files at the half's start and end."""
    threads: tuple[int, int]


class Soak(Record):
    """A long run of all-reduces of mixed sizes."""

    workers: int
    reducers: int
    all_reduces: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    wrong: int = 0
    checked: int = 0
    samples: list[Sample] = []
    trends: list[Trend] = []


class Results(Run):
    """One run of `bench.allreduce`, `bench.scaling` or `torture.soak`."""

    kind: Kind
    settings: Settings
    rows: list[Row] = []
    soak: Soak | None = None


class DdpRow(Record):
    """One way to average gradients."""

    variant: str
    bucket_cap_mb: int | None
    """None: DDP's default, 25 and a first bucket of 1."""
    samples_per_s: float
    rounds_ms: list[float]
    step_ms: float
    median_ms: float
    p99_ms: float
    cpu_ms: float
    exposed_ms: float
    all_reduce_ms: float | None
    ideal_ms: float | None
    exposed_over_ideal: float | None
    """None where the ideal is less than a hundredth of the step: the ratio is noise."""
    wrong: int
    checked: int
    identical: bool | None
    largest_difference: float | None
    """Between a weight of this variant and of the first Gloo variant."""


class DdpResults(Run):
    """One run of `bench.ddp`."""

    kind: Literal["ddp"] = "ddp"
    mbit: float | None
    """Rate of every link each way in Mbit/s; None: not shaped, so that processors are the limit."""
    payload_rate: float | None
    model: str
    nbytes: int
    parameters: int
    """Tensors."""
    batch: int
    """Samples per rank and step."""
    workers: int
    reducers: int
    """On hosts of their own; 0: embedded."""
    rounds: int
    steps: int
    compute_ms: float | None
    """Simulated forward and backward pass; None: a real one."""
    backward_ms: float
    wire_ms: float | None
    rows: list[DdpRow]
    ours_over_gloo: float


class ChaosResults(Run):
    """One run of `torture.chaos`."""

    kind: Literal["chaos"] = "chaos"
    workers: int
    reducers: int
    kills: int
    steps: int
    lost: int
    errors: list[str]
    """What the first of them raised."""
    identical: bool
    median_s: float
    undisturbed_s: float
    stall_s: float
    recovery_median_s: float
    recovery_p99_s: float
    moved: int
    claimed: int
    supplied: int


class TableResults(Run):
    """One run of a benchmark whose figures are the rows of the table that it prints."""

    kind: Literal["table"] = "table"
    rows: list[dict[str, str | float]]


class MicroStats(BaseModel):
    """Seconds of one call, over the rounds."""

    median: float
    iqr: float
    rounds: int


class MicroBenchmark(BaseModel):
    """One benchmark of pytest-benchmark."""

    group: str | None
    name: str
    extra_info: dict[str, Any]
    """``nbytes``, if there: the bytes that one call works on."""
    stats: MicroStats


class MicroResults(BaseModel):
    """What the report reads of a file that pytest-benchmark has written."""

    kind: Literal["micro"] = "micro"
    time: datetime = Field(alias="datetime")
    version: str
    machine_info: dict[str, Any]
    """What pytest-benchmark writes; bench/micro/conftest.py adds ``load``, which `Run` defines."""
    commit_info: dict[str, Any]
    benchmarks: list[MicroBenchmark]


AnyResults: TypeAlias = Results | DdpResults | ChaosResults | MicroResults


def read(path: Path) -> AnyResults:
    """Read the file of a benchmark.

    Raises:
        OSError, KeyError, ValueError: the file cannot be read, or holds something else.
    """
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    if "benchmarks" in found:
        return MicroResults.model_validate(found)
    kind, schema = found["kind"], found.get("schema_version")
    if schema != SCHEMA:
        raise ValueError(f"its schema has version {schema}, and not {SCHEMA}: measure again")
    kinds: dict[str, type[DdpResults | ChaosResults]] = {"ddp": DdpResults, "chaos": ChaosResults}
    return kinds.get(kind, Results).model_validate(found)


def begin(module: str) -> Run:
    """Describe this machine, what it is busy with, and the command that begins."""
    return Run(
        time=datetime.now(UTC).replace(microsecond=0),
        machine=machine(),
        command=" ".join(["python", "-m", module, *sys.argv[1:]]),
        environment={
            name: os.environ[name] for name in os.environ if name.startswith("REDUCTION_")
        },
        load=processors_in_use(),
    )


def processors_in_use() -> float:
    """Return how many of the processors that this process may use are busy, while it sleeps.

    The load average of the last minute would also count the benchmark that ran before this one.
    """
    shares = psutil.cpu_percent(LOAD_S, percpu=True)
    return float(sum(shares[cpu] for cpu in os.sched_getaffinity(0)) / 100)


def busy(load: float, cores: int) -> str:
    """Return a warning if the machine was busy when a benchmark began, and nothing otherwise."""
    if load < BUSY_SHARE * cores:
        return ""
    return (
        f"the machine was busy: other processes used {load:.1f} of {cores} processors when this "
        "benchmark began; repeat it on an idle machine"
    )


def machine() -> Machine:
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
        versions=_versions(),
        commit=_commit(),
    )


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.M)
    return match[1] if match else platform.machine()


def _versions() -> dict[str, str]:
    found = {"libzmq": zmq.zmq_version()}
    for name in ("reduction-server", "numpy", "pyzmq", "torch", "mpi4py"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if match := re.search(r"\(Open MPI\) (\S+)", _output("mpirun", "--version")):
        found["Open MPI"] = match[1]
    return found


def _commit() -> str:
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD").strip()
    status = ("status", "--porcelain", "-uno", "--", ".", ":!docs/figures")
    changed = _output("git", "-C", str(ROOT), *status).strip()
    return commit + ("+" if changed else "") if commit else "unknown"


def _output(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""
