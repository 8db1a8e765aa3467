"""What a client has gone through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reducer.wire.messages import Straggler


@dataclass(frozen=True)
class Summary:
    """What a client has gone through so far; as text, a line.

    Attributes:
        rank, world_size: who it is.
        present: ranks that take part.
        calls, bytes_reduced, waited_s, losses: as of `Client`.
        fallbacks: all-reduces that the process group did, as no reducer was left.
        straggler: the rank that the others wait for again and again, and why, if there is one.
        failure: class and text of the error of the all-reduce that has ended last, named ones
            apart; "" if it ended well.
    """

    rank: int
    world_size: int
    present: tuple[int, ...]
    calls: int
    bytes_reduced: int
    waited_s: float
    losses: int
    fallbacks: int
    straggler: Straggler | None
    failure: str = ""

    def __str__(self) -> str:
        """Say all of it."""
        said = [
            f"{count(self.calls, 'all-reduce')}, {_size(self.bytes_reduced)}",
            f"waited {self.waited_s:.1f} s",
            _lost(self.losses),
        ]
        if self.fallbacks:
            said.append(f"{count(self.fallbacks, 'all-reduce')} by the process group")
        if lost := sorted({*range(self.world_size)} - {*self.present}):
            said.append(f"went on without rank {', '.join(map(str, lost))}")
        if self.straggler is not None and self.rank == self.present[0]:  # once a job
            said.append(f"{self.straggler}")
        if self.failure:
            said.append(f"the last one failed: {self.failure}")
        return ", ".join(said)


def _lost(times: int) -> str:
    """Say how often a reducer was lost, which may have been the same one."""
    return f"reducers lost {times} times" if times > 1 else f"{times or 'no'} reducer lost"


def count(number: int, noun: str) -> str:
    """Return a number of things, in words."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
