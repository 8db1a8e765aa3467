"""A process that is told lines, and tells JSON objects, one a line, by its standard streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import ROOT
from lab import Host
from worker_client.commands.demo.ranks import pipe

ABORT_S = 5.0
LAST_LINES = 5


def say(what: object) -> None:
    """Tell an object, in one piece: another thread may tell one at the same time."""
    print(json.dumps(what) + "\n", end="", flush=True)


class Process:
    """A Python process of this checkout: ``"-m", MODULE`` and arguments are its command.

    A thread calls `hear` with each object that it tells, and with None at its end. Another `python`
    is one with other packages.
    """

    def __init__(
        self,
        host: Host,
        *command: str,
        hear: Callable[[dict[str, Any] | None], None],
        environment: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives with the process)
        self._hear = hear
        self._process = host.start(
            [str(python), *command],
            env={
                "PYTHONPATH": str(ROOT),
                "PYTHONFAULTHANDLER": "1",  # who is aborted says where it was
                "OMP_NUM_THREADS": "1",
                # Gloo would listen on whatever the machine's name resolves to.
                "GLOO_SOCKET_IFNAME": "lo" if host.address == "127.0.0.1" else "eth0",
                **(environment or {}),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        with suppress(BrokenPipeError):  # its end is heard
            stream = pipe(self._process.stdin)
            stream.write(line + "\n")
            stream.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it has not ended."""
        self._process.send_signal(number)

    @property
    def ended(self) -> int | None:
        """How it has ended: its exit code, or minus a signal's number; None if it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for its end; return what `ended` says."""
        return self._process.wait()

    def abort(self) -> None:
        """Have it say where it is, and end."""
        self.signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ABORT_S)

    def last_words(self, lines: int = LAST_LINES) -> str:
        """Return the end of what it has written to standard error."""
        words = os.pread(self._words.fileno(), 1 << 20, 0).decode(errors="replace")
        return "\n".join(words.strip().splitlines()[-lines:])

    def end(self) -> None:
        """Kill it; nothing more is heard then."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        with suppress(BrokenPipeError):
            pipe(self._process.stdin).close()
        self._words.close()

    def _read(self) -> None:
        with pipe(self._process.stdout) as lines:
            for line in lines:
                self._hear(json.loads(line))
        self._hear(None)
