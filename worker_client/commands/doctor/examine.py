"""Examines one reducer: by name, by port, by greeting, and then by real all-reduces."""

from __future__ import annotations

import socket
import time
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from reducer.errors import AuthError, ReducerLostError, ReductionError, VersionError
from reducer.wire.constants import PORT
from worker_client.commands.doctor.findings import Health, Kind, Problem
from worker_client.commands.doctor.greeting import greet, split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker_client.client.client import Client

ROUND_TRIPS = 20
FIRST_BYTES, MOST_BYTES = 256 << 10, 64 << 20  # of the all-reduces that measure a link
LONG_ENOUGH_S = 0.25


def examine(address: str, connect: Callable[[str], Client], listed: Sequence[str]) -> Health:
    """Find out how one reducer is; nothing that is wrong with it is raised.

    `connect` joins a job of one worker at an address; `listed` are those of all reducers.
    """
    host, port = split(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        message = f"the name {host!r} does not resolve ({error.strerror or error})"
        advice = "write its name as others know it in REDUCTION_SERVERS, or repair the name server"
        return Health(address, problem=Problem(Kind.NAME, message, advice))
    resolved = tuple(dict.fromkeys(str(one[4][0]) for one in found))
    reached = _reach(host, port, _unlisted(host, listed))
    if isinstance(reached, Problem):
        return Health(address, resolved, problem=reached)
    try:
        client = connect(address)
    except ReductionError as error:
        return Health(address, resolved, problem=_refusal(error, reached))
    try:
        with client:
            trip, rate = _round_trip(client), _rate(client)
            return Health(address, resolved, client.lanes[0], trip, rate)
    except AuthError as error:  # the key was revoked in this moment
        return Health(address, resolved, problem=_refusal(error, reached))
    except ReductionError as error:
        problem = Problem(Kind.REFUSED, f"an all-reduce failed: {error}", "read its log")
        return Health(address, resolved, problem=problem)


def _reach(host: str, port: int, others: Sequence[int]) -> Problem | str:
    """Return what protects connections, or why there is none."""
    try:
        greeting = greet(host, port)
    except ConnectionRefusedError:
        message = f"nothing listens at port {port} of {host}"
        advice = (
            "the reducer has ended or was never started: read its log and start it again, or "
            "correct the port"
        )
        return _at_another_port(message, host, others) or Problem(Kind.DEAD, message, advice)
    except OSError as error:
        message = f"{host} does not answer at port {port} ({error.strerror or error})"
        advice = "see whether the machine runs, and whether a firewall is in between"
        return Problem(Kind.HOST, message, advice)
    if greeting.timed_out:
        message = f"port {port} of {host} takes connections and says nothing"
        advice = "look at the process there: it is stopped or hangs; restart it"
        return Problem(Kind.HANGS, message, advice)
    if greeting.mechanism:
        return greeting.mechanism
    message = f"what listens at port {port} of {host} is no reducer"
    advice = "write the port that `reducer serve` names at its start"
    return _at_another_port(message, host, others) or Problem(Kind.PORT, message, advice)


def _unlisted(host: str, listed: Sequence[str]) -> list[int]:
    """Return ports at which a reducer may listen there that is not in the list."""
    ports = [PORT, *(split(address)[1] for address in listed)]
    known = {split(address) for address in listed}
    return [port for port in dict.fromkeys(ports) if (host, port) not in known]


def _at_another_port(message: str, host: str, ports: Sequence[int]) -> Problem | None:
    """Say so if a reducer may listen at one of these ports instead."""
    for port in ports:
        try:
            found = greet(host, port).mechanism
        except OSError:
            continue
        if found:
            advice = f"write {host}:{port} in REDUCTION_SERVERS, if that is the one"
            message = f"{message}, but a reducer may listen at port {port}"
            return Problem(Kind.PORT, message, advice)
    return None


def _refusal(error: ReductionError, mechanism: str) -> Problem:
    if isinstance(error, AuthError):
        advice = "compare REDUCTION_KEYS and REDUCTION_JOB here with --keys at the reducer"
        return Problem(Kind.KEYS, str(error), advice)
    if isinstance(error, VersionError):
        return Problem(Kind.VERSION, str(error), "install the same release on both sides")
    if isinstance(error, ReducerLostError) and mechanism != "NULL":
        message = "it demands a key, and this worker has none or another pool's"
        advice = "set REDUCTION_KEYS to the directory of this job's keys"
        return Problem(Kind.KEYS, message, advice)
    if isinstance(error, ReducerLostError):
        message = "it takes connections and does not answer a HELLO"
        advice = "look at the process there: it hangs, or is no reducer"
        return Problem(Kind.HANGS, message, advice)
    return Problem(Kind.REFUSED, str(error), "do what it says")


def _round_trip(client: Client) -> float:
    data, seconds = np.zeros(1, np.float32), []
    for _ in range(ROUND_TRIPS):
        begin = time.perf_counter()
        client.all_reduce(data, "sum").wait()
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


def _rate(client: Client) -> float:
    """Return bytes per second of an all-reduce that is long enough to be measured."""
    nbytes = FIRST_BYTES
    while True:
        data = np.zeros(nbytes // 4, np.float32)
        begin = time.perf_counter()
        client.all_reduce(data, "sum").wait()
        seconds = time.perf_counter() - begin
        if seconds >= LONG_ENOUGH_S or nbytes >= MOST_BYTES:
            return nbytes / seconds
        nbytes *= 2
