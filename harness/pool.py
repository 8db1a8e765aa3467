"""Reducers on hosts of a lab, and the processor time that processes use."""

import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from harness import ROOT, HarnessError
from lab import Host
from worker_client.commands.demo.ranks import pipe

READY = "reducer ready on "
START_S = 60.0
END_S = 60.0  # a machine may be busy
PORTS = range(20_000, 32_000)  # below the ports that the kernel gives to outgoing connections


class Reducer:
    """One `reducer serve` on a host, of the checkout `root`.

    Attributes:
        address: where it listens, ``host:port``, once `is_ready` or `await_ready` has said so.
        pid: the number of its process.
    """

    def __init__(
        self,
        host: Host,
        options: Sequence[str] = (),
        *,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
        root: Path = ROOT,
        stderr: IO[bytes] | None = None,
        failpoints: str = "",
    ) -> None:
        serve = ["-m", "torture.failpoints", failpoints] if failpoints else ["-m"]
        serve += ["reducer", "serve", "--insecure", "--log-level", "warning"]
        self.process = host.start(
            [sys.executable, *serve, "--bind", f"tcp://{host.address}:{port}", *options],
            env={"PYTHONPATH": str(root), "PYTHONFAULTHANDLER": "1", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=root,
        )
        self.pid = self.process.pid  # `ip netns exec` becomes what it executes
        self.address = ""

    def is_ready(self, patience_s: float = 0.0) -> bool:
        """Whether it listens, or comes to within a time."""
        stream = pipe(self.process.stdout)
        if not self.address and select.select([stream], [], [], patience_s)[0]:
            line = stream.readline()
            self.address = line.removeprefix(READY).strip() if line.startswith(READY) else ""
        return bool(self.address)

    def await_ready(self) -> "Reducer":
        """Wait until it listens; return it."""
        if not self.is_ready(START_S):
            raise HarnessError("a reducer did not start: what it said is on standard error")
        return self

    def stop(self) -> None:
        """Let it end; the lab kills it if it does not."""
        self.process.terminate()

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        pipe(self.process.stdout).close()


def start(hosts: Iterable[Host], keys: str = "", root: Path = ROOT) -> list[Reducer]:
    """Start a reducer on every host, with the keys of a directory if there is one; wait for all."""
    environment = {"REDUCTION_KEYS": keys} if keys else {}
    started = [Reducer(host, environment=environment, root=root) for host in hosts]
    return [reducer.await_ready() for reducer in started]


class Pool:
    """Reducers that are ended and started again at the same addresses.

    A port in a row is free for each of the most `threads` that one has.
    """

    def __init__(
        self,
        hosts: Iterable[Host],
        options: Sequence[str] = (),
        *,
        threads: int = 1,
        stderr: IO[bytes] | None = None,
    ) -> None:
        self._hosts = list(hosts)
        self._options = options
        self._stderr = stderr
        self._ports = [_free_ports(threads) for _ in self._hosts]
        self.ports = {port + at for port in self._ports for at in range(threads)}
        self.reducers = [self._made(at) for at in range(len(self._hosts))]
        self.addresses = [reducer.await_ready().address for reducer in self.reducers]

    def end(self, reducer: int, number: signal.Signals) -> None:
        """Send a signal and wait until the process is gone."""
        process = self.reducers[reducer].process
        process.send_signal(number)
        process.wait(END_S)

    def start(self, reducer: int) -> None:
        """Start a reducer that has ended, and wait until it listens."""
        self.launch(reducer)
        self.reducers[reducer].await_ready()

    def launch(self, reducer: int, failpoints: str = "") -> None:
        """Start a reducer that has ended; it need not come to listen."""
        self.reducers[reducer].close()
        self.reducers[reducer] = self._made(reducer, failpoints)

    def has_ended(self, reducer: int) -> bool:
        """Whether the process is gone."""
        return self.reducers[reducer].process.poll() is not None

    def stop(self) -> None:
        """Kill all."""
        for reducer in self.reducers:
            reducer.close()

    def _made(self, reducer: int, failpoints: str = "") -> Reducer:
        return Reducer(
            self._hosts[reducer],
            self._options,
            port=self._ports[reducer],
            stderr=self._stderr,
            failpoints=failpoints,
        )


def _free_ports(width: int) -> int:
    """Return the first of some ports in a row that are free: one for each thread of a reducer."""
    while True:
        first = random.choice(PORTS)  # noqa: S311 (any will do)
        with suppress(OSError):
            for port in range(first, first + width):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used, all threads, user space and kernel."""
    # In nanoseconds where the kernel keeps them; the other source counts hundredths of a second.
    threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    if threads:
        return sum(int(text.split()[0]) for text in threads) / 1e9
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
