"""The form of all results: one JSON schema, with the machine and the settings beside the rows.

Sizes are in bytes, durations in seconds or microseconds as their names say, rates in bytes per
second. None means that nothing was measured, or that it makes no sense there. README.md defines
every figure.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TypeAlias

import zmq
from pydantic import BaseModel, ConfigDict

SCHEMA = 1
Kind: TypeAlias = Literal["allreduce", "scaling", "soak"]
ROOT = Path(__file__).parent.parent


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


class Settings(Record):
    """How it was measured."""

    command: str
    mbit: float | None
    """Rate of every link each way in Mbit/s; None: not shaped, so that processors are the limit."""
    load: float
    """Load average of the last minute when it began: what else the machine was doing."""
    payload_rates: list[float]
    """Bytes per second of one TCP stream between two hosts, by iperf3, in each lab that was used;
    empty if links were not shaped."""
    workers: list[int]
    rounds: int
    environment: dict[str, str]
    """``REDUCTION_`` variables."""
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


class Results(Record):
    """One run of one command."""

    schema_version: int = SCHEMA
    kind: Kind
    time: datetime
    machine: Machine
    settings: Settings
    rows: list[Row] = []
    soak: Soak | None = None

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read what `write` wrote.

        Raises:
            pydantic.ValidationError: it is something else.
        """
        return cls.model_validate_json(path.read_text())


def now() -> datetime:
    """Return the time for `Results.time`."""
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
