"""What a doctor finds at reducers, and what it says to do; no input or output here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOW = 1 / 3  # of what the others carry: less is no noise of a measurement


class Kind(StrEnum):
    """What can be wrong with a reducer, or with this host."""

    NAME = "name does not resolve"
    HOST = "host does not answer"
    DEAD = "nothing listens"
    PORT = "wrong port"
    HANGS = "reducer hangs"
    KEYS = "keys"
    VERSION = "version"
    REFUSED = "refused"
    SLOW = "slow link"
    GLOO = "Gloo's address"


@dataclass(frozen=True)
class Problem:
    """What is wrong, and what to do: a sentence about each."""

    kind: Kind
    message: str
    advice: str
    # False of what is wrong only in a job of several hosts, if nobody says whether this is one.
    certain: bool = True


@dataclass(frozen=True)
class Health:
    """What was found at one reducer."""

    address: str  # ``host:port``, as in the settings
    resolved: tuple[str, ...] = ()  # the addresses that its name stands for
    lanes: int | None = None  # connections to it, one for each thread that serves
    round_trip_s: float | None = None  # of the smallest all-reduce, median
    bytes_per_s: float | None = None  # to it, and at the same time from it
    problem: Problem | None = None


def compare(found: Sequence[Health]) -> list[Health]:
    """Return the same, with links named that carry far less than the others.

    A buffer is cut into equal shares, so that the slowest link decides how long all take.
    """
    rates = {one.address: one.bytes_per_s for one in found if one.bytes_per_s is not None}
    compared = []
    for one in found:
        others = [rate for address, rate in rates.items() if address != one.address]
        if one.problem is None and one.bytes_per_s is not None and others:
            usual = median(others)
            if one.bytes_per_s < SLOW * usual:
                compared.append(replace(one, problem=_slow(one.bytes_per_s, usual)))
                continue
        compared.append(one)
    return compared


def _slow(rate: float, usual: float) -> Problem:
    return Problem(
        Kind.SLOW,
        f"its link carries {mbit(rate):.0f} Mbit/s, the others {mbit(usual):.0f} Mbit/s: every "
        "all-reduce takes as long as this one",
        "look at its network card and switch, at what else uses them or its processors, or leave "
        "it out of REDUCTION_SERVERS",
    )


def mbit(bytes_per_s: float) -> float:
    """Return a rate in Mbit/s."""
    return bytes_per_s * 8 / 1e6
