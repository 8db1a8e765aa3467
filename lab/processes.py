"""Find and end every process of a lab, also the grandchildren that nobody told us of."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARK = "LAB_ID"  # set in the environment of every process that a lab starts
PATIENCE_S = 5.0
PAUSE_S = 0.01
PROC = Path("/proc")


class Members:
    """The processes that belong to a lab.

    A process belongs to it if it is in one of the lab's namespaces, or if its environment has the
    lab's mark; children inherit both, whatever session or process group they make for themselves.
    Files of namespaces are held open: the kernel gives the number of one that is gone to the next.
    """

    def __init__(self, mark: str, namespaces: Iterable[Path]) -> None:
        self._mark = f"{MARK}={mark}".encode() if mark else None
        self._files = []
        for path in namespaces:
            with suppress(FileNotFoundError):
                self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._namespaces = {_identity(os.fstat(file)) for file in self._files}
        self._namespaces.discard(_identity((PROC / "self/ns/net").stat()))

    def close(self) -> None:
        """Let go of the namespaces."""
        while self._files:
            os.close(self._files.pop())

    def find(self) -> list[int]:
        """Process ids of all living members; this process is none."""
        pids = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
        return [pid for pid in pids if pid != os.getpid() and self._is_member(pid)]

    def kill(self) -> list[int]:
        """Kill all members, and those they start meanwhile.

        Returns:
            Process ids of those that are still there after `PATIENCE_S`, which the kernel keeps.
        """
        deadline = time.monotonic() + PATIENCE_S
        while found := self.find():
            if time.monotonic() > deadline:
                break
            for pid in found:
                self._kill(pid)
            time.sleep(PAUSE_S)
        return found

    def _kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                # The id may have passed to another process since it was found; now it cannot.
                if self._is_member(pid):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)

    def _is_member(self, pid: int) -> bool:
        with suppress(OSError):
            if _identity((PROC / f"{pid}/ns/net").stat()) in self._namespaces:
                return True
        # Other users' processes cannot be read, and those that have ended have nothing to read.
        with suppress(OSError):
            return self._mark in (PROC / f"{pid}/environ").read_bytes().split(b"\0")
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
