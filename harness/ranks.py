"""The ranks of a training, as processes on hosts of a lab: they report, one JSON object a line."""

from __future__ import annotations

import json
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import IO, Any

from harness import ROOT, HarnessError
from lab import Host
from worker_client.commands.demo.ranks import free_port, pipe

ABORT_S = 5.0
LAST_LINES = 5


class Ranks:
    """All ranks of one training, from enter to exit, which kills those that have not ended.

    Args:
        module: started as ``python -m MODULE ARGUMENTS`` with the launcher's usual environment.
        hosts: one per rank.
        arguments: of the module; it gets them as JSON.
        servers: addresses of the reducers; none: each rank hosts one.
        environment: of all ranks, besides the usual one.

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
    ) -> None:
        self.running = 0
        self._hosts = hosts
        self._command = [sys.executable, "-m", module, json.dumps(arguments)]
        self._environment = {
            "PYTHONPATH": str(ROOT),
            "PYTHONFAULTHANDLER": "1",  # a rank that is aborted says where it was
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(free_port()),
            "REDUCTION_JOB": f"bench-{secrets.token_hex(4)}",  # no launcher names it
            "WORLD_SIZE": str(len(hosts)),
            "GLOO_SOCKET_IFNAME": "lo" if hosts[0].address == "127.0.0.1" else "eth0",
            "REDUCTION_SERVERS": ",".join(servers),
            **(environment or {}),
        }
        self._lines: queue.Queue[tuple[int, str]] = queue.Queue()
        self._processes: list[subprocess.Popen[str]] = []
        self._said: list[IO[str]] = []
        self._killed: set[int] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Ranks:
        for rank, host in enumerate(self._hosts):
            self.start(host, RANK=str(rank))
        return self

    def start(self, host: Host, **environment: str) -> int:
        """Start one more process; return the rank that it has for this object.

        Args:
            host: where.
            environment: besides that of all ranks.
        """
        rank = len(self._processes)
        said = self._stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 (it is)
        self._said.append(said)
        process = host.start(
            self._command,
            env={**self._environment, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
        )
        self._stack.callback(_end, process)
        threading.Thread(target=self._forward, args=(rank, process), daemon=True).start()
        self._processes.append(process)
        self.running += 1
        return rank

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def hear(self, patience_s: float | None = None) -> dict[str, Any] | None:
        """Return the next report; None if a rank has ended, or none came in that time.

        Raises:
            HarnessError: a rank failed; the message holds the end of what it said, and where the
                others were.
        """
        try:
            rank, line = self._lines.get(timeout=patience_s)
        except queue.Empty:
            return None
        if line:
            said: dict[str, Any] = json.loads(line)
            return said
        code = self._processes[rank].wait()
        if code != 0 and rank not in self._killed:
            raise self.stalled(f"rank {rank} ended with code {code}\n{self._last_words(rank)}")
        self.running -= 1
        return None

    def tell(self, line: str) -> None:
        """Write a line to the standard input of every rank."""
        for process in self._processes:
            with suppress(BrokenPipeError):  # a rank that is gone is found when it is heard
                stream = pipe(process.stdin)
                stream.write(line + "\n")
                stream.flush()

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank, whose end is then no failure."""
        self._killed.add(rank)
        self._processes[rank].kill()

    def stalled(self, why: str) -> HarnessError:
        """Abort all ranks; return what to raise, with where they were."""
        for process in self._processes:
            process.send_signal(signal.SIGABRT)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(ABORT_S)
        words = [self._last_words(rank, 60) for rank in range(len(self._processes))]
        return HarnessError("\n".join([why, *words]))

    def _last_words(self, rank: int, lines: int = LAST_LINES) -> str:
        said = self._said[rank]
        said.seek(0)
        return "\n".join(said.read().strip().splitlines()[-lines:])

    def _forward(self, rank: int, process: subprocess.Popen[str]) -> None:
        """Pass on a rank's lines, and an empty one at its end."""
        with pipe(process.stdout) as lines:
            for line in lines:
                self._lines.put((rank, line))
        self._lines.put((rank, ""))


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    with suppress(BrokenPipeError):
        pipe(process.stdin).close()
