"""Which labs there are: each holds a number by a lock that ends with the process keeping it.

A lab's file, ``/run/reduction-lab/NUMBER``, says what it is. The lab is alive while its keeper
holds the lock on that file, and the kernel lets go of the lock however the keeper dies.
"""

import fcntl
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.network import CONGESTION, NAMES, NAMESPACES, PREFIX, LabUnavailable

CLAIMS = Path("/run/reduction-lab")
NUMBERS = range(256)  # the third byte of the hosts' addresses


@dataclass(frozen=True, slots=True)
class Facts:
    """What a lab's file says: what was asked for.

    Attributes:
        mark: in the environment of its processes.
        owner: process id of the benchmark.
        command: its command line.
    """

    mark: str = ""
    hosts: int = 0
    mbit: float | None = None
    owner: int = 0
    command: str = ""
    round_trip_ms: float = 0.0
    loss_percent: float = 0.0
    congestion: str = CONGESTION
    port_bytes: int = 0


class Claim:
    """A lab's number, held by this process until `release`, or until it ends."""

    def __init__(self, number: int, file: int) -> None:
        self.number = number
        self.before = _read(number)  # of a dead lab that had it; empty facts if there is none
        self._file = file

    def write(self, facts: Facts) -> None:
        """Say what the lab is."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(asdict(facts)).encode(), 0)

    def release(self) -> None:
        """Give the number back."""
        _path(self.number).unlink(missing_ok=True)
        os.close(self._file)


def claim() -> Claim:
    for number in NUMBERS:
        if taken := take(number):
            return taken
    raise LabUnavailable(f"{len(NUMBERS)} labs are alive: wait until one ends")


def take(number: int) -> Claim | None:
    """Take this number, or return None if a living lab has it.

    Raises:
        LabUnavailable: the directory cannot be written.
    """
    try:
        CLAIMS.mkdir(exist_ok=True)
        file = os.open(_path(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LabUnavailable(f"a lab keeps its number below {CLAIMS}: {error}") from error
    # Whoever released the number just now removed the file's name: its lock keeps nobody out.
    if not _lock(file) or os.fstat(file).st_nlink == 0:
        os.close(file)
        return None
    return Claim(number, file)


def known() -> list[int]:
    """Numbers of all labs of which something exists, alive or dead."""
    names = [path.name for path in CLAIMS.glob("*")]
    for directory in (NAMESPACES, NAMES):
        names += [path.name.removeprefix(PREFIX) for path in directory.glob(f"{PREFIX}*-*")]
    found = (re.match(r"(\d+)(-|$)", name) for name in names)
    return sorted({int(match[1]) for match in found if match and int(match[1]) in NUMBERS})


def look(number: int) -> tuple[bool, Facts]:
    """Whether the lab with this number is alive, and what its file says."""
    facts = _read(number)
    try:
        file = os.open(_path(number), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False, facts
    try:
        return not _lock(file), facts
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(number: int) -> Facts:
    try:
        return Facts(**json.loads(_path(number).read_text()))
    except (OSError, ValueError, TypeError):  # half-written, or by another version
        return Facts()


def _path(number: int) -> Path:
    return CLAIMS / str(number)
