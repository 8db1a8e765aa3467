"""The reducers of `torture.guarantee`, ended and started again, and connections that are reset."""

import ctypes
import errno
import os
import random
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from harness import ROOT, HarnessError
from harness.pool import READY
from worker_client.commands.demo.ranks import pipe

START_S = 60.0
END_S = 20.0  # more than a reducer takes to drain
PORTS = range(20_000, 32_000)  # below those that the system gives to connections
THREADS = 2  # most that a reducer has here
_PIDFD_GETFD = 438  # the number is the same on all machines


class Reducers:
    """Reducers at fixed ports.

    Args:
        count: how many.
        options: of `reducer serve`.
        words: where their standard error goes.

    Attributes:
        addresses: of all.
        ports: at which they listen.
        well: those that run, and were neither stopped nor told to end.
    """

    def __init__(self, count: int, options: Sequence[str], words: Path) -> None:
        self._options = list(options)
        self._words = words.open("ab")
        self._first = [_free_ports() for _ in range(count)]
        self.addresses = tuple(f"127.0.0.1:{port}" for port in self._first)
        self.ports = {port + at for port in self._first for at in range(THREADS)}
        self.well = set(range(count))
        self._ended: set[int] = set()  # told to, or killed
        self._wanted: dict[int, float] = {}  # to be started again; since when
        self._starting: dict[int, float] = {}
        self._processes = [self._launch(reducer) for reducer in range(count)]
        for reducer in range(count):
            if not self._is_ready(reducer, START_S):
                raise HarnessError(f"reducer {reducer} did not start")

    def pid(self, reducer: int) -> int:
        """Return the process of a reducer that is there."""
        return self._processes[reducer].pid

    def signal(self, reducer: int, number: signal.Signals) -> None:
        """Send a signal to one."""
        self._processes[reducer].send_signal(number)
        if number == signal.SIGCONT:
            self.well.add(reducer)
        else:
            self.well.discard(reducer)
        if number in {signal.SIGKILL, signal.SIGTERM}:
            self._ended.add(reducer)

    def start(self, reducer: int) -> None:
        """Have one started again that was told to end, as soon as it has."""
        self._wanted[reducer] = time.monotonic()

    @property
    def settled(self) -> bool:
        """Whether all that are to be started again were."""
        return not (self._wanted or self._starting)

    def advance(self) -> None:
        """Start those that are due.

        Raises:
            HarnessError: one has ended by itself, does not end, or does not start.
        """
        now = time.monotonic()
        for reducer, process in enumerate(self._processes):
            code = process.poll()
            if code is not None and reducer not in self._ended:
                raise HarnessError(f"reducer {reducer} ended by itself, with code {code}")
            if reducer in self._wanted and code is not None:
                if code not in {0, -signal.SIGKILL}:
                    raise HarnessError(
                        f"reducer {reducer} was told to end, and did with code {code}"
                    )
                _close(process)
                self._processes[reducer] = self._launch(reducer)
                self._ended.discard(reducer)
                del self._wanted[reducer]
                self._starting[reducer] = now
            elif reducer in self._starting and self._is_ready(reducer, 0):
                del self._starting[reducer]
                self.well.add(reducer)
            elif now - self._wanted.get(reducer, now) > END_S:
                raise HarnessError(f"reducer {reducer} did not end within {END_S:g} s of SIGTERM")
            elif now - self._starting.get(reducer, now) > START_S:
                raise HarnessError(f"reducer {reducer} did not start")

    def close(self) -> None:
        """Kill all."""
        for process in self._processes:
            process.kill()
            process.wait()
            _close(process)
        self._words.close()

    def _launch(self, reducer: int) -> subprocess.Popen[str]:
        serve = [sys.executable, "-m", "reducer", "serve", "--log-level", "warning"]
        serve += ["--bind", f"tcp://127.0.0.1:{self._first[reducer]}", "--stop-at-eof"]
        return subprocess.Popen(
            [*serve, *self._options],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
        )

    def _is_ready(self, reducer: int, patience_s: float) -> bool:
        stream = pipe(self._processes[reducer].stdout)
        ready, _, _ = select.select([stream], [], [], patience_s)
        return bool(ready) and stream.readline().startswith(READY)


def _close(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        pipe(stream).close()


def reset(pid: int, ports: Collection[int], rng: random.Random, *, everything: bool) -> int:
    """Reset TCP connections of a process, as if the network did; return how many.

    The kernel lends this process the other one's sockets, if it is a descendant of it.

    Args:
        pid: of the process.
        ports: at which one of the two sides must be; any if there are none.
        rng: chooses.
        everything: whether all of them, or one.

    Raises:
        PermissionError: that is not allowed here.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with ExitStack() as stack:
        victims = []
        for one in _lent(pid, libc):
            stack.callback(one.close)
            if (found := _ports_of(one)) and (not ports or found & set(ports)):
                victims.append(one)
        if not everything and victims:
            victims = [rng.choice(victims)]
        for one in victims:
            if rng.random() < 0.3:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            else:  # connecting to nothing is how Linux lets go of a connection
                libc.connect(one.fileno(), struct.pack("H14x", socket.AF_UNSPEC), 16)
        return len(victims)


def _lent(pid: int, libc: ctypes.CDLL) -> Iterator[socket.socket]:
    """Yield copies of a process's sockets."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            number = libc.syscall(_PIDFD_GETFD, handle, int(path.name), 0)
            if number < 0 and ctypes.get_errno() == errno.EPERM:
                raise PermissionError(errno.EPERM, "pidfd_getfd")
            if number < 0:
                continue  # it was closed meanwhile
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                yield socket.socket(fileno=number)
            else:
                os.close(number)
    except FileNotFoundError:
        return  # the process is gone
    finally:
        os.close(handle)


def _ports_of(one: socket.socket) -> set[int]:
    """Return both ports of a TCP connection; none of anything else."""
    if one.family not in {socket.AF_INET, socket.AF_INET6} or one.type != socket.SOCK_STREAM:
        return set()
    try:
        return {one.getsockname()[1], one.getpeername()[1]}
    except OSError:
        return set()


def _free_ports(width: int = THREADS) -> int:
    """Return the first of some ports in a row that are free: one for each thread of a reducer."""
    while True:
        first = random.choice(PORTS)  # noqa: S311 (any will do)
        with suppress(OSError):
            for port in range(first, first + width):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
