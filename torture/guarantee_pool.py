"""The reducers of `torture.guarantee`, ended and started again, and connections that are reset."""

import ctypes
import errno
import os
import random
import signal
import socket
import stat
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from harness import HarnessError
from harness.pool import START_S, Pool
from lab import Host

END_S = 20.0  # more than a reducer takes to drain
THREADS = 2  # most that a reducer has here
_PIDFD_GETFD = 438  # the number is the same on all machines


class Reducers(Pool):
    """Reducers that come back when they are due, while others go on.

    Attributes:
        well: those that run, and were neither stopped nor told to end.
    """

    def __init__(self, hosts: Sequence[Host], options: Sequence[str], words: Path) -> None:
        self._words = words.open("ab")
        super().__init__(hosts, options, threads=THREADS, stderr=self._words)
        self.well = set(range(len(hosts)))
        self._ended: set[int] = set()  # told to, or killed
        self._wanted: dict[int, float] = {}  # to be started again; since when
        self._starting: dict[int, float] = {}

    def signal(self, reducer: int, number: signal.Signals) -> None:
        """Send a signal to one."""
        self.reducers[reducer].process.send_signal(number)
        if number == signal.SIGCONT:
            self.well.add(reducer)
        else:
            self.well.discard(reducer)
        if number in {signal.SIGKILL, signal.SIGTERM}:
            self._ended.add(reducer)

    def start_again(self, reducer: int) -> None:
        """Have one started that was told to end, as soon as it has."""
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
        for at, reducer in enumerate(self.reducers):
            code = reducer.process.poll()
            if code is not None and at not in self._ended:
                raise HarnessError(f"reducer {at} ended by itself, with code {code}")
            if at in self._wanted and code is not None:
                if code not in {0, -signal.SIGKILL}:
                    raise HarnessError(f"reducer {at} was told to end, and did with code {code}")
                self.launch(at)
                self._ended.discard(at)
                del self._wanted[at]
                self._starting[at] = now
            elif at in self._starting and reducer.is_ready():
                del self._starting[at]
                self.well.add(at)
            elif now - self._wanted.get(at, now) > END_S:
                raise HarnessError(f"reducer {at} did not end within {END_S:g} s of SIGTERM")
            elif now - self._starting.get(at, now) > START_S:
                raise HarnessError(f"reducer {at} did not start")

    def stop(self) -> None:
        """Kill all."""
        super().stop()
        self._words.close()


def reset(pid: int, ports: Collection[int], rng: random.Random, *, everything: bool) -> int:
    """Reset TCP connections of a process, as if the network did; return how many.

    The kernel lends this process the other one's sockets, if it is a descendant of it. One side of
    each is at one of the `ports`, if there are any; `everything` or one of them is reset.
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
