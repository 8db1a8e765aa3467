"""Options that the benchmarks share."""

from __future__ import annotations

import os
import sys

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from bench.contenders import Contender
from bench.lab import Lab

SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
BASELINES = ("gloo", "mpi", "ring")


def sizes(text: str) -> list[int]:
    """Read ``4KiB,1MiB``; each must hold a whole number of fp32 elements, and at least one."""
    try:
        found = [int(size) for size in TypeAdapter(list[ByteSize]).validate_python(_words(text))]
    except ValidationError:
        raise typer.BadParameter(f"write sizes such as 4KiB,1MiB, not {text!r}") from None
    if not found or any(size < 4 or size % 4 for size in found):
        raise typer.BadParameter(f"sizes are multiples of 4 bytes, got {text!r}")
    return found


def counts(text: str) -> list[int]:
    """Read ``2,4,8``: numbers of at least 1."""
    words = _words(text)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise typer.BadParameter(f"write numbers such as 2,4,8, not {text!r}")
    return [int(word) for word in words]


def iterations(text: str) -> int | None:
    """Read a number of iterations, or ``auto`` (None)."""
    return None if text == "auto" else counts(text)[0]


def ours(workers: int, reducers: str, embedded: bool, mixed: int) -> list[Contender]:
    """List the topologies that were asked for; a pool of as many reducers as workers if none."""
    found = [Contender("pool", count) for count in counts(reducers)]
    found += [Contender("embedded")] if embedded else []
    found += [Contender("mixed", mixed)] if mixed else []
    return found or [Contender("pool", workers)]


def baselines(text: str) -> list[Contender]:
    """Read ``gloo,mpi,ring``."""
    found: list[Contender] = []
    for word in _words(text):
        if word == "gloo":
            found.append(Contender("gloo"))
        elif word == "mpi":
            found.append(Contender("mpi"))
        elif word == "ring":
            found.append(Contender("ring"))
        else:
            raise typer.BadParameter(f"{word!r} is none of {', '.join(BASELINES)}")
    return found


def lab(hosts: int, mbit: float | None) -> Lab:
    """Make the lab: shaped links, or loopback if they are not wanted.

    Without root there is no lab: then the unshaped part is all that can be measured, and this says
    so.
    """
    if mbit is not None and os.geteuid() != 0:
        print("# shaped links need root: measuring on loopback, unshaped, instead", file=sys.stderr)
        mbit = None
    return Lab.loopback(hosts) if mbit is None else Lab(hosts, mbit)


def _words(text: str) -> list[str]:
    return [word for word in (part.strip() for part in text.split(",")) if word]
