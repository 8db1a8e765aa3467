"""Reducers on hosts of a lab, and the processor time that processes use."""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from subprocess import PIPE

import psutil

from harness import ROOT, HarnessError
from lab.lab import Host

READY = "reducer ready on "


class Reducer:
    """One `reducer serve` on a host.

    Attributes:
        address: where it listens, ``host:port``.
        pid: its process.
        process: likewise.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid  # `ip netns exec` becomes what it executes
        assert process.stdout
        line = process.stdout.readline()
        if not line.startswith(READY):
            raise HarnessError("a reducer did not start: what it said is on standard error")
        self.address = line.removeprefix(READY).strip()

    def stop(self) -> None:
        """Let it end; the lab kills it if it does not."""
        self.process.terminate()


def start(hosts: Iterable[Host], keys: str = "", root: Path = ROOT) -> list[Reducer]:
    """Start a reducer on every host, with keys if there is a directory of some, and wait for all.

    Args:
        hosts: one for each.
        keys: that directory.
        root: the checkout whose code they are.

    Raises:
        HarnessError: one did not start.
    """
    environment = {"REDUCTION_KEYS": keys} if keys else {}
    processes = [launch(host, environment, root=root) for host in hosts]
    return [Reducer(process) for process in processes]


def launch(
    host: Host, environment: Mapping[str, str], port: int = 0, root: Path = ROOT
) -> subprocess.Popen[str]:
    """Start a reducer's process, at a free port if that is 0; `Reducer` waits until it listens."""
    serve = [sys.executable, "-m", "reducer", "serve", "--insecure", "--log-level", "warning"]
    return host.start(
        [*serve, "--bind", f"tcp://{host.address}:{port}"],
        env={"PYTHONPATH": str(root), **environment},
        stdout=PIPE,
        cwd=root,
    )


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used, all threads, user space and kernel."""
    # In nanoseconds where the kernel keeps them; the other source counts hundredths of a second.
    threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    if threads:
        return sum(int(text.split()[0]) for text in threads) / 1e9
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
