"""What the system does to a rank of `torture.guarantee`: time that is withheld, and signals."""

import ctypes
import signal
import threading
import time
from types import FrameType

from lab.network import NAMESPACES
from worker_client.client.client import Client
from worker_client.work import Work

_CLONE_NEWNET = 0x40000000  # of <sched.h>, the same on all machines
TICK_S = 0.025  # between two looks at the clock
SOON_S = 3e-4  # that an interrupt comes after at most
AGAIN_S = 2e-5  # if it came where it must not
_TARGETS = {"interrupt": Client.all_reduce.__code__, "interrupt-wait": Work.wait.__code__}


def enter(namespace: str) -> None:
    """Give this thread, and those that it starts, the network of a host of a lab."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the network of {namespace}")


class Interrupted(Exception):  # noqa: N818 (what a program's own handler raises)
    """What the signal handler raises."""


class Interrupter:
    """Raises in the middle of a product's function, as a program's own signal handler may.

    Not in that function's own lines, which do little but call others: who is interrupted before a
    call has begun cannot tell that from no call at all, and nor can the product.
    """

    def __init__(self) -> None:
        self._target: object = None
        signal.signal(signal.SIGALRM, self._handle)

    def arm(self, kind: str, amount: float) -> None:
        """Raise soon, once, where `kind` says; `amount` is from 0 to 1."""
        self._target = _TARGETS[kind]
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + amount * SOON_S)

    def disarm(self) -> None:
        """Raise no longer."""
        self._target = None

    def _handle(self, _: int, frame: FrameType | None) -> None:
        if self._target is None:
            return
        called = None
        while frame is not None and frame.f_code is not self._target:
            called, frame = frame, frame.f_back
        if frame is None or called is None:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        self._target = None
        raise Interrupted


class Clock:
    """Notes how much time the system has withheld from this process, by SIGSTOP or otherwise."""

    def __init__(self) -> None:
        self._gaps: list[tuple[float, float]] = []
        self._seen = time.monotonic()
        threading.Thread(target=self._run, name="clock", daemon=True).start()

    def withheld(self, since: float) -> float:
        """Return how many seconds were, since a time of the monotonic clock."""
        # What is withheld right now is not in the list yet.
        running = max(0.0, time.monotonic() - self._seen - 2 * TICK_S)
        return running + sum(gap for at, gap in list(self._gaps) if at >= since)

    def _run(self) -> None:
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            if (gap := now - self._seen - TICK_S) > TICK_S:
                self._gaps = [*self._gaps[-1000:], (now, gap)]
            self._seen = now
