"""Examines this host: whether rank 0's host has an address, and where its own name leads Gloo."""

from __future__ import annotations

import contextlib
import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from worker_client.client.interfaces import addresses, described, outward, towards
from worker_client.commands.doctor.findings import Kind, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from worker_client.launch import Resolved

# An address of no network at all (RFC 5737): the way there is that of the default route.
_ELSEWHERE = "192.0.2.1"


def examine_host(resolved: Resolved, reducers: Iterable[str], *, told: bool) -> Iterator[Problem]:
    """Yield what keeps this host from rank 0's, and other hosts from Gloo here.

    `told`: whether GLOO_SOCKET_IFNAME says where Gloo listens, instead of this host's name.
    """
    master = resolved.master_addr
    if master is not None and not _found(master):
        message = f"the name of rank 0's host, {master!r}, does not resolve"
        advice = f"correct {resolved.reasons['master_addr']}, or repair the name server"
        yield Problem(Kind.NAME, message, advice)
    several_hosts = _has_several_hosts(resolved)
    name = socket.gethostname()
    address = _bound(name)
    known = address is not None and not ip_address(address).is_loopback
    if told or known or several_hosts is False:
        return
    interface = _interface([master, *reducers, _ELSEWHERE])
    yield Problem(
        Kind.GLOO,
        f"{name}, the name of this host, is {address or 'no name of an address here'}: ranks on "
        "other hosts cannot reach Gloo",
        f"export GLOO_SOCKET_IFNAME={interface} here if the job has several hosts, or make the "
        "name one of an address that they reach",
        certain=several_hosts is True,
    )


def _has_several_hosts(resolved: Resolved) -> bool | None:
    """Whether the job has ranks on other hosts as well; None if nobody says so."""
    if resolved.nodes is not None:
        return resolved.nodes > 1
    if resolved.world_size is not None and resolved.local_world_size is not None:
        return resolved.world_size > resolved.local_world_size
    master = resolved.master_addr
    return True if master is not None and _found(master) and _bound(master) is None else None


def _found(host: str) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [(family, place) for family, _, _, _, place in found]


def _bound(host: str) -> str | None:
    """Return the address that Gloo takes: the first one of this name that can be bound."""
    for family, place in _found(host):
        # A system without IPv6 has no such socket.
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind(place)
            return str(place[0]).partition("%")[0]
    return None


def _interface(hosts: Iterable[str | None]) -> str:
    """Return the interface that leads to the first of these hosts which is another one."""
    there = outward(addresses())
    for host in hosts:
        own = host and towards(host)
        for name, its in there.items():
            if own in its:
                return name
    if len(there) == 1:
        return next(iter(there))
    return f"INTERFACE (one of {described(there)})"
