"""A reducer, honest jobs and intruders, each as processes of their own, on this machine."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from harness import ROOT, pool
from harness.ranks import Ranks
from hostile.intruder import JOB
from lab import Lab
from reducer.commands.keygen import keygen
from worker_client.commands.demo.ranks import pipe

ALONE, FAIR = "alone", "beside an honest job"
BAR = 1.10
PATIENCE_S = 120.0  # of ranks, beside intruders


class Reducer:
    """A running reducer, whose files and memory are counted."""

    def __init__(self, running: pool.Reducer) -> None:
        self.address = running.address
        self.process = psutil.Process(running.pid)

    @property
    def files(self) -> int:
        """Its open files, connections among them."""
        return int(self.process.num_fds())

    @property
    def resident(self) -> int:
        """Bytes of memory that it uses."""
        return int(self.process.memory_info().rss)


@contextmanager
def keys_for(*jobs: str) -> Iterator[Path]:
    with TemporaryDirectory() as home:
        keygen(Path(home), jobs)
        yield Path(home)


@contextmanager
def reducer(*options: str, keys: Path | None = None) -> Iterator[Reducer]:
    """Start a reducer on loopback with these options, and with keys if there are any."""
    shown = [] if keys is None else ["--keys", str(keys / "pool")]
    with Lab.loopback(1) as lab:
        serve = pool.Reducer(lab.hosts[0], ["--log-level", "error", *options, *shown])
        yield Reducer(serve.await_ready())


class Job:
    """The ranks of an honest job: their wrong elements, and longest all-reduce (s), so far.

    Attributes:
        p99: the 99th percentile of the latest all-reduces, of the slowest rank, seconds.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.wrong = 0
        self.longest = self.p99 = 0.0
        self._ranks = ranks

    def begin(self, count: int) -> None:
        """Let it make so many all-reduces."""
        self._ranks.tell(str(count))

    def end(self) -> float:
        """Wait until they are made; return their median time, seconds, of the slowest rank."""
        reports = self._ranks.hear_all(PATIENCE_S)
        self.wrong += sum(report["wrong"] for report in reports)
        self.longest = max(self.longest, *(report["longest"] for report in reports))
        self.p99 = max(report["p99"] for report in reports)
        return float(max(report["median"] for report in reports))

    def median(self, count: int) -> float:
        """Make so many all-reduces; return their median time, seconds."""
        self.begin(count)
        return self.end()


@contextmanager
def job(
    address: str, name: str, world_size: int, nbytes: int, keys: Path | None = None
) -> Iterator[Job]:
    """Start the ranks of an honest job and wait until all have joined."""
    given = {
        "nbytes": nbytes,
        "servers": [address],
        "job": name,
        "keys": keys and str(keys / "jobs" / name),
    }
    with (
        Lab.loopback(world_size) as lab,
        Ranks("hostile.tenant", lab.hosts, given, [address]) as ranks,
    ):
        ranks.hear_all(PATIENCE_S)  # they have joined
        yield Job(ranks)


@contextmanager
def intruder(kind: str, address: str, keys: Path | None = None) -> Iterator[list[int]]:
    """Let somebody intrude; how often it did is in the list afterwards."""
    counts: list[int] = []
    shown = [] if keys is None else [str(keys / "jobs" / JOB)]
    with Lab.loopback(1) as lab:
        running = lab.hosts[0].start(
            [sys.executable, "-m", "hostile.intruder", kind, address, *shown],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        pipe(running.stdout).readline()
        yield counts
        pipe(running.stdin).close()
        counts.append(json.loads(pipe(running.stdout).readline())["count"])


class Comparison:
    """An honest job's times alone, beside an honest second job, and beside each kind of company."""

    def __init__(self, honest: Job, second: Job, count: int, kinds: Iterable[str]) -> None:
        self._honest = honest
        self._second = second
        self._count = count
        self._times: dict[str, list[float]] = {kind: [] for kind in (ALONE, FAIR, *kinds)}
        honest.median(count)

    def measure_usual(self) -> None:
        """Measure what others are held to: alone, and with a fair share."""
        self.measure(ALONE)
        self._second.begin(2 * self._count)
        self.measure(FAIR)
        self._second.end()

    def measure(self, kind: str) -> None:
        """Measure while there is company of this kind."""
        self._times[kind].append(self._honest.median(self._count))

    def report(self, headings: str, columns: Mapping[str, str]) -> int:
        """Print medians over rounds, and what else there is to say of a kind.

        Returns:
            1 if a result was wrong or a kind took more than `BAR` of the fair share, else 0.
        """
        alone, fair = (statistics.median(self._times[kind]) for kind in (ALONE, FAIR))
        print(f"{'':24}{'median':>10}{'of alone':>10}{'of fair':>10}{headings}")
        above = []
        for kind, times in self._times.items():
            median = statistics.median(times)
            print(
                f"{kind:24}{median * 1e3:8.2f}ms{median / alone:10.2f}{median / fair:10.2f}"
                f"{columns.get(kind, '')}"
            )
            above += [kind] * (median / fair > BAR)
        wrong = self._honest.wrong + self._second.wrong
        print(
            f"wrong elements: {wrong}; beyond {BAR:.2f} of a fair share: {', '.join(above) or '-'}"
        )
        return int(wrong > 0 or bool(above))
