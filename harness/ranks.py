"""The ranks of a training, as processes on hosts of a lab: they report, one JSON object a line."""

from __future__ import annotations

import json
import queue
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness import HarnessError, pool
from harness.processes import Process
from lab import Host, Lab
from worker_client.commands.demo.ranks import free_port

WHERE_LINES = 60  # of a rank that is aborted


class Ranks:
    """All ranks of one training, which are killed when the context ends if they still run.

    The module gets its arguments as JSON, and a launcher's usual environment. Without servers, each
    rank hosts a reducer.

    Attributes:
        running: how many have not ended.
    """

    def __init__(
        self,
        module: str,
        hosts: Sequence[Host],
        arguments: dict[str, Any],
        servers: list[str],
        environment: Mapping[str, str] | None = None,
        *,
        per_rank: Callable[[int], Mapping[str, str]] = lambda _: {},
        python: str | Path = sys.executable,
    ) -> None:
        self.running = 0
        self._python = python
        self._hosts = hosts
        self._per_rank = per_rank
        self._command = ["-m", module, json.dumps(arguments)]
        self._environment = {
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(free_port()),
            "REDUCTION_JOB": f"bench-{secrets.token_hex(4)}",  # no launcher names it
            "WORLD_SIZE": str(len(hosts)),
            "REDUCTION_SERVERS": ",".join(servers),
            **(environment or {}),
        }
        self._heard: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self._processes: list[Process] = []
        self._killed: set[int] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Ranks:
        for rank, host in enumerate(self._hosts):
            self.start(host, RANK=str(rank), **self._per_rank(rank))
        return self

    def start(self, host: Host, **environment: str) -> int:
        """Start one more process; return the rank that it has for this object."""
        rank = len(self._processes)
        process = Process(
            host,
            *self._command,
            hear=lambda said: self._heard.put((rank, said)),
            environment={**self._environment, **environment},
            python=self._python,
        )
        self._stack.callback(process.end)
        self._processes.append(process)
        self.running += 1
        return rank

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def hear(self, patience_s: float | None = None) -> dict[str, Any] | None:
        """Return the next report; None if a rank has ended, or none came in that time.

        Raises:
            HarnessError: a rank failed; the message holds the end of what it said, and where the
                others were.
        """
        try:
            rank, said = self._heard.get(timeout=patience_s)
        except queue.Empty:
            return None
        if said is not None:
            return said
        process = self._processes[rank]
        if (code := process.wait()) and rank not in self._killed:
            raise self.stalled(f"rank {rank} ended with code {code}\n{process.last_words()}")
        self.running -= 1
        return None

    def hear_all(self, patience_s: float) -> list[dict[str, Any]]:
        """Return one report of every rank, in the order in which they come.

        Raises:
            HarnessError: a rank failed, or did not report in that time.
        """
        found: list[dict[str, Any]] = []
        while len(found) < len(self._processes):
            running = self.running
            if (said := self.hear(patience_s)) is not None:
                found.append(said)
            elif self.running == running:  # else one that has reported has ended
                raise self.stalled(f"a rank said nothing for {patience_s:g} s")
        return found

    def tell(self, line: str) -> None:
        """Write a line to the standard input of every rank."""
        for process in self._processes:
            process.tell(line)

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank, whose end is then no failure."""
        self._killed.add(rank)
        self._processes[rank].signal(signal.SIGKILL)

    def stalled(self, why: str) -> HarnessError:
        """Abort all ranks; return what to raise, with where they were."""
        for process in self._processes:
            process.signal(signal.SIGABRT)
        for process in self._processes:
            process.abort()
        words = [process.last_words(WHERE_LINES) for process in self._processes]
        return HarnessError("\n".join([why, *words]))


@contextmanager
def training(
    lab: Lab, workers: int, module: str, arguments: dict[str, Any], **more: Any
) -> Iterator[Ranks]:
    """Start `Ranks` on a lab's first hosts, and a reducer on each of the others."""
    reducers = pool.start(lab.hosts[workers:])
    servers = [reducer.address for reducer in reducers]
    with Ranks(module, lab.hosts[:workers], arguments, servers, **more) as ranks:
        yield ranks
    for reducer in reducers:
        reducer.stop()
