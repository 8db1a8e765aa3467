"""The keeper: a process beside the benchmark that makes a lab and removes it, come what may.

It gets its request as JSON, answers with one line of JSON, and waits until its standard
input ends or its owner does. It is in a session of its own and ignores the signals of a terminal: a
lab lasts as long as its owner, and an owner that is killed leaves nothing.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from lab import claims
from lab.delay import cables
from lab.network import LabUnavailable, Network, require_root
from lab.processes import Members


@dataclass(frozen=True, slots=True)
class Request:
    """A lab to keep."""

    facts: claims.Facts
    namespaces: bool  # False: hosts are this machine, and there are only processes to look after
    owner: int  # pidfd of the process that owns the lab

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Read a request, of which `asdict` was written."""
        fields = json.loads(text)
        return cls(**{**fields, "facts": claims.Facts(**fields["facts"])})


def keep(request: Request) -> None:
    if not request.namespaces:
        try:
            _answer(number=-1)
            _wait(request.owner)
        finally:
            tear_down(request.facts.mark, None)
        return
    claim = claims.claim()
    network = Network(claim.number, request.facts.hosts)
    try:
        tear_down(claim.before.mark, network)
        claim.write(request.facts)
        try:
            with _built(network, request.facts):
                _answer(number=claim.number)
                _wait(request.owner)
        finally:
            tear_down(request.facts.mark, network)
    finally:
        claim.release()


@contextmanager
def _built(network: Network, facts: claims.Facts) -> Iterator[None]:
    """Build what `remove` will remove, and keep it joined meanwhile."""
    if not (facts.round_trip_ms or facts.loss_percent):
        network.build(facts.mbit, facts.congestion, port_bytes=facts.port_bytes)
        yield
        return
    network.build(facts.mbit, facts.congestion, bridged=False)
    delay_ms = facts.round_trip_ms / 2
    with cables(network.bridge, network.ports, delay_ms, facts.loss_percent):
        yield


def tear_down(mark: str, network: Network | None) -> None:
    """Kill all processes of a lab and remove its network; what does not exist is no error."""
    members = Members(mark, network.namespaces() if network else [])
    try:
        members.kill()
        if network:
            network.remove()
        # A process that was just being started has arrived by now; no later one can find the names.
        if left := members.kill():
            with suppress(OSError):
                print(f"processes {left} of a lab do not end", file=sys.stderr)
    finally:
        members.close()


def clean() -> list[int]:
    """Remove what dead labs left, and return their numbers.

    Raises:
        LabUnavailable: not root.
    """
    require_root()
    removed = []
    for number in claims.known():
        if claim := claims.take(number):
            tear_down(claim.before.mark, Network(number, 1))
            claim.release()
            removed.append(number)
    return removed


def _answer(**fields: object) -> None:
    with suppress(BrokenPipeError):  # the owner is dead already: the wait will end at once
        os.write(sys.stdout.fileno(), json.dumps(fields).encode() + b"\n")


def _wait(owner: int) -> None:
    # The pipe ends when the owner is done. A process that the owner forked may hold it too, so that
    # the owner's death has to be seen by itself.
    select.select([sys.stdin.fileno(), owner], [], [])


def main(request: str) -> int:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    try:
        keep(Request.from_json(request))
    except LabUnavailable as error:
        _answer(unavailable=str(error))
        return 1
    return 0
