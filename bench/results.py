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
from datetime import datetime, timezone
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
    """Git commit, with ``+`` if the working tree differed from it."""


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
    """How far the hosts are from each other; the arguments of `lab.Lab`."""

    round_trip_ms: float = 0.0
    loss_percent: float = 0.0
    congestion: str = CONGESTION


NEAR = Distance()


class Settings(Record):
    """The settings of all-reduces."""

    mbit: float | None
    """Rate of every link each way in Mbit/s; None: not shaped, so that processors are the limit."""
    payload_rates: list[float]
    """Bytes per second of TCP between two hosts, by iperf3, in each lab that was used; empty if
    links were not shaped."""
    streams: int = 1
    """Connections of iperf3, side by side."""
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
    """Median of each round."""
    time_us: float
    """Median of the rounds."""
    mean_us: float
    """Median of the rounds' mean times."""
    p99_us: float
    algbw: float
    busbw: float
    wrong: int
    checked: int
    """Elements that were compared, over all ranks and rounds."""
    exact: bool
    """Whether every bit was compared, or values within the rounding of any order."""
    payload_share: float | None
    limit: float | None
    """The highest algbw that the links allow in this topology."""
    worker_cpu_s_per_gb: float
    reducer_cpu_s_per_gb: float | None
    ratios: dict[str, float]
    """Of this row's algbw to each baseline's."""
    card_ratios: dict[str, float]
    """The same at equal total bandwidth, algbw times workers over cards; empty if not shaped."""


class Sample(Record):
    """A process at one moment of a soak."""

    process: str
    done: int
    """All-reduces before it."""
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
    """Slope of the least-squares line, in bytes per 1000 all-reduces."""
    growth: float
    """What that slope comes to over the half, in bytes."""
    flat: bool
    """Whether that is less than an allocator's own doings."""
    files: tuple[int, int]
    """Open files at the half's start and end."""
    threads: tuple[int, int]


class Soak(Record):
    """A long run of all-reduces of mixed sizes."""

    workers: int
    reducers: int
    all_reduces: int
    nbytes: int
    """Sum of all sizes."""
    seconds: float
    wrong: int
    checked: int
    samples: list[Sample]
    trends: list[Trend]


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
    """Of all ranks."""
    rounds_ms: list[float]
    """A step's mean time in each round."""
    step_ms: float
    """Median of the rounds."""
    median_ms: float
    """Of all single steps."""
    p99_ms: float
    """Of all single steps; the slowest one if there are less than a hundred."""
    cpu_ms: float
    """Processor time of a step and rank, all threads."""
    exposed_ms: float
    """Step minus the step of the no-op hook."""
    all_reduce_ms: float | None
    """One all-reduce of as many bytes, with nothing beside it."""
    ideal_ms: float | None
    """All-reduce minus the backward pass, or 0: what no overlap can hide."""
    exposed_over_ideal: float | None
    """None where the ideal is less than a hundredth of the step: the ratio is noise."""
    wrong: int
    """Weights that differ from rank 0's in a bit, or from those of the first Gloo variant by more
    than rounding."""
    checked: int
    identical: bool | None
    """Whether all ranks have the same bits."""
    largest_difference: float | None
    """Between a weight of this variant and of the first Gloo variant."""


class DdpResults(Run):
    """One run of `bench.ddp`."""

    kind: Literal["ddp"] = "ddp"
    mbit: float | None
    """Rate of every link each way in Mbit/s; None: not shaped, so that processors are the limit."""
    payload_rate: float | None
    """Bytes per second of one TCP stream between two hosts, by iperf3; None if not shaped."""
    model: str
    nbytes: int
    """Of the model's gradients."""
    parameters: int
    """Tensors."""
    batch: int
    """Samples per rank and step."""
    workers: int
    reducers: int
    """On hosts of their own; 0: embedded."""
    rounds: int
    steps: int
    """Of every variant and round."""
    compute_ms: float | None
    """Simulated forward and backward pass; None: a real one."""
    backward_ms: float
    """Backward pass with the no-op hook."""
    wire_ms: float | None
    """The gradients' bytes over the payload rate: no worker can send or receive them faster."""
    rows: list[DdpRow]
    ours_over_gloo: float
    """Samples per second, against the better one of Gloo's variants in each round."""


class ChaosResults(Run):
    """One run of `torture.chaos`."""

    kind: Literal["chaos"] = "chaos"
    workers: int
    reducers: int
    kills: int
    steps: int
    lost: int
    """Steps that raised an error at some rank."""
    errors: list[str]
    """What the first of them raised."""
    identical: bool
    """Whether the final weights of all ranks have the same bits, with kills and without."""
    median_s: float
    """A step's time with kills."""
    undisturbed_s: float
    """The same without."""
    stall_s: float
    """The longest step minus the median one."""
    recovery_median_s: float
    """From a kill to when all ranks had finished a step."""
    recovery_p99_s: float
    moved: int
    """Chunks that were sent again to another reducer, all ranks."""
    claimed: int
    """Chunks whose result a rank had, and told another reducer so."""
    supplied: int
    """Results that a rank sent because others lacked them."""


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
    """Of pytest-benchmark."""
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
    if kind == "ddp":
        return DdpResults.model_validate(found)
    if kind == "chaos":
        return ChaosResults.model_validate(found)
    return Results.model_validate(found)


def begin(module: str) -> Run:
    """Describe this machine, what it is busy with, and the command that begins."""
    return Run(
        time=now(),
        machine=machine(),
        command=command(module),
        environment=environment(),
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


def now() -> datetime:
    """Return the time for `Run.time`."""
    return datetime.now(timezone.utc).replace(microsecond=0)


def machine() -> Machine:
    """Describe this machine."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
        versions=_versions(),
        commit=_commit(),
    )


def command(module: str) -> str:
    """Return the command line, as one would type it."""
    return " ".join(["python", "-m", module, *sys.argv[1:]])


def environment() -> dict[str, str]:
    """Return the settings that every worker and reducer inherits."""
    return {name: value for name, value in os.environ.items() if name.startswith("REDUCTION_")}


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
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "-uno").strip()
    return commit + ("+" if changed else "") if commit else "unknown"


def _output(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""
