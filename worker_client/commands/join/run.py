"""The command: machines meet, run the script's first steps, and become ranks of one training."""

from __future__ import annotations

import json
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from reducer.commands import terminal
from reducer.errors import ConfigError, ReductionError
from reducer.units import address, host_port
from worker_client import config
from worker_client.client.interfaces import addresses, outward, towards
from worker_client.commands.demo.ranks import free_port
from worker_client.commands.join import meet
from worker_client.commands.launch import become, devices, find_program
from worker_client.launch import Launcher, Resolved, decide

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker_client.commands.join.meet import Machine
    from worker_client.launch import LaunchDecision

PORT = 29600  # near torch's own, 29500, which a launcher may have
_ELSEWHERE = "192.0.2.1"  # of no network at all (RFC 5737): the way there is the default route's
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # which nobody takes for each other
_SECRET_LETTERS, _FEWEST_LETTERS = 20, 12  # 20 of 31 letters are 99 bits
_PLAN_S = 120.0  # by which the first machine may end its measurement later than another one
_MEASURED = ("REDUCTION_BATCH_SHARES", "REDUCTION_WIRE_DTYPE")


def join(
    words: Sequence[str], *, secret: str, machines: int, port: int | None, processes: int | None
) -> None:
    """Meet the other machines, measure, and become this machine's part of the training.

    Args:
        words: the script, and before it, on all machines but the first, ``HOST[:PORT] --``.
        secret: what the first machine has printed; there "" for a new one.
        machines: how many train.
        port: where the first machine listens, if not at `PORT`.
        processes: ranks on this machine; None for one on each GPU, at least one.

    Raises:
        ConfigError: that cannot be run here, or does not go with the first machine.
        ReductionError: the machines have not met, or the script has failed.
    """
    first, script = read(words, port)
    _check(script, first, secret)
    ranks = processes or max(1, devices())
    if first is None:
        meeting = Meeting(0, _invite(script, secret, machines, port))
    else:
        machine, number = meet.find(first, secret, machines=machines, ranks=ranks)
        tell(f"this is machine {number + 1} of {machines}: waiting for all of them")
        meeting = Meeting(number, [machine])
    # Where this host's own name is a loopback address, as on Debian, Gloo would listen there.
    cards = [name for name, its in addresses().items() if meeting.own in its]
    gloo = {"GLOO_SOCKET_IFNAME": cards[0]} if cards else {}
    environment = {**gloo, "REDUCTION_EMBEDDED": "1", **config.environment()}
    own = {name: environment.pop(name) for name in _MEASURED if name in environment}

    def begin() -> dict[str, Any]:
        each = [ranks, *(one.ranks for one in meeting.others)]
        return {"ranks": each, "port": free_port(), "sets": own}

    def plan() -> dict[str, Any]:
        sets = {**found.get("sets", {}), **own}
        return {"port": free_port(), "sets": sets, "said": found.get("said", [])}

    begun = meeting.told(begin, None)
    environment |= begun["sets"]
    for line in _left_out(own, begun["sets"]):
        tell(line)
    starts = partial(decision, meeting.number, begun["ranks"], meeting.first)
    found: dict[str, Any] = {}
    if len(begun["sets"]) < len(_MEASURED):
        found = _measured(partial(starts, begun["port"]), script, environment)
    planned = meeting.told(plan, _PLAN_S)
    sets = ", ".join(f"{name}={value}" for name, value in planned["sets"].items())
    for line in (*planned["said"], sets or "equal shares of a batch, and exact gradients"):
        tell(line)
    decided = starts(planned["port"], script)
    become(decided, {**environment, **decided.sets, **planned["sets"]})


def _left_out(own: dict[str, str], first: dict[str, str]) -> list[str]:
    """Return lines on settings of this machine that are not those of the first."""
    return [
        f"{name}={value}, as it is set here, is left out: the first machine decides for all"
        for name, value in own.items()
        if first.get(name) != value
    ]


class Meeting:
    """The machines that train, as one of them sees them.

    Attributes:
        number: of this machine, 0 at the first one.
        others: at the first machine all others, at these the first.
        own, first: addresses of this machine and of the first, as the other end reaches them.
    """

    def __init__(self, number: int, others: list[Machine]) -> None:
        self.number = number
        self.others = others
        self.own = others[0].own
        self.first = others[0].address if number else self.own

    def told(self, make: Callable[[], dict[str, Any]], limit_s: float | None) -> dict[str, Any]:
        """Let the first machine make something and tell the others; return that at each.

        Raises:
            MembershipError: a machine has left, or says nothing for `limit_s`.
        """
        if self.number:
            said = self.others[0].hear(limit_s)
            self.others[0].say(heard=True)
            return said
        said = make()
        for one in self.others:
            one.say(**said)
        for one in self.others:
            one.hear(limit_s or meet.ANSWER_S)
        return said


def tell(line: str) -> None:
    """Say a line to whoever started the command."""
    columns = terminal.columns(sys.stderr)
    typer.echo(terminal.wrapped(f"worker-client join: {line}", 4, columns), err=True)


def read(words: Sequence[str], port: int | None) -> tuple[tuple[str, int] | None, list[str]]:
    """Return host and port of the first machine, None on that itself, and the script.

    Raises:
        ConfigError: there is no script, or an address is wrong.
    """
    first = None
    if words[1:2] == ["--"] and not words[0].endswith(".py"):
        place = words[0] if ":" in words[0] else f"{words[0]}:{port or PORT}"
        try:
            first, words = address(place), words[2:]
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if not words:
        raise ConfigError(
            "write worker-client join -- train.py ARGUMENTS on the first machine, and on the "
            "others what it prints"
        )
    return first, list(words)


def _check(script: Sequence[str], first: tuple[str, int] | None, secret: str) -> None:
    launched = config.launch()
    if launched.launcher is not Launcher.NONE:
        raise ConfigError(
            f"{launched.launcher.value} has started this process ({launched.reasons['launcher']}): "
            "use worker-client launch, or unset that"
        )
    if first is not None and not secret:
        raise ConfigError(f"{first[0]} has printed a secret: write --secret and it before HOST")
    if secret and len(secret) < _FEWEST_LETTERS:
        raise ConfigError(f"--secret: write {_FEWEST_LETTERS} characters at least")
    find_program(script[0])
    config.load()  # what every rank would refuse is refused here


def _invite(script: Sequence[str], secret: str, machines: int, port: int | None) -> list[Machine]:
    """Wait at the first machine for the others, and say what to type there."""
    secret = secret or "".join(secrets.choice(_LETTERS) for _ in range(_SECRET_LETTERS))
    own = towards(_ELSEWHERE) or next(
        (its[0] for its in outward(addresses()).values()), "127.0.0.1"
    )
    options = ["--machines", str(machines)] if machines > 2 else []
    place = host_port(own, port) if port else own
    line = ["worker-client", "join", "--secret", secret, *options, place, "--", *script]
    try:
        listener = socket.create_server(("", port or PORT))
    except OSError as error:
        raise ConfigError(f"port {port or PORT}: {error.strerror}: give another --port") from None
    with listener:
        tell("type this on the other machines, with the script's path there:")
        typer.echo(f"    {shlex.join(line)}", err=True)
        return meet.gather(listener, secret, machines, tell)


def decision(
    number: int, ranks: Sequence[int], first: str, port: int, script: Sequence[str]
) -> LaunchDecision:
    """Return what a machine runs: its one rank, or torchrun if a machine has several.

    Args:
        number: of the machine, from 0 on.
        ranks: of each machine.
        first: where the first one is; ranks meet there at `port`.
        port: as said.
        script: what the ranks run.
    """
    node = Resolved(Launcher.JOIN, node_rank=number, nodes=len(ranks))
    node = replace(node, master_addr=first, master_port=port)
    if set(ranks) == {1}:
        node = replace(node, rank=number, world_size=len(ranks), local_rank=0, local_world_size=1)
    return decide(node, {}, script, processes=str(ranks[number]), devices=devices)


def _measured(
    starts: Callable[[Sequence[str]], LaunchDecision],
    script: Sequence[str],
    environment: dict[str, str],
) -> dict[str, Any]:
    """Run the script's first steps on each machine; return what the first has concluded.

    Raises:
        ReductionError: it has failed.
    """
    tell("the script's first steps show how fast machines and links are; then it starts anew")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found"
        child = starts(["-m", "worker_client.commands.join.measure", str(file), *script])
        ended = subprocess.run(
            child.argv, env={**environment, **child.sets}, stdout=sys.stderr, check=False
        )
        if ended.returncode:
            how = f"exit code {ended.returncode}" if ended.returncode > 0 else "a signal"
            raise ReductionError(f"the script has failed in its first steps: it ended with {how}")
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found
