"""The addresses of this machine: by interface, towards a host, and of `REDUCTION_INTERFACE`."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from reducer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LIST_ADDRESSES = 0x8912  # SIOCGIFCONF of linux/sockios.h
_REQUEST = struct.Struct("@16s4x4s16x")  # struct ifreq with an IPv4 address
_MOST = 1024  # addresses
_IPV6 = Path("/proc/net/if_inet6")
_LOOPBACK = "lo"
_DISCARD_PORT = 9  # discard's (RFC 863); any would do
_ANYWHERE = "00"  # an IPv6 address's scope, if other networks know it


def addresses() -> dict[str, list[str]]:
    """Return the IPv4 and then the IPv6 addresses of each interface that has some, by its name.

    IPv6 addresses that only their own link knows are left out.
    """
    found: dict[str, list[str]] = {}
    buffer = array.array("B", bytes(_MOST * _REQUEST.size))
    place, room = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _LIST_ADDRESSES, struct.pack("@iP", room, place))
    used = struct.unpack("@iP", answer)[0]
    for name, address in _REQUEST.iter_unpack(buffer.tobytes()[:used]):
        interface = name.partition(b"\0")[0].decode().partition(":")[0]  # eth0:1 is eth0's
        found.setdefault(interface, []).append(socket.inet_ntoa(address))
    lines: list[str] = []
    with contextlib.suppress(OSError):  # there is none without IPv6
        lines = _IPV6.read_text().splitlines()
    for line in lines:
        digits, _, _, scope, _, interface = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if scope == _ANYWHERE or address.is_loopback:
            found.setdefault(interface, []).append(str(address))
    return found


def outward(found: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the interfaces of `addresses` that other hosts may reach."""
    loopback = {name for name, its in found.items() if ipaddress.ip_address(its[0]).is_loopback}
    return {name: its for name, its in found.items() if name not in loopback}


def unresolved(host: str) -> str:
    """Say why a host's name has no address; "" if it has, or is none."""
    try:
        socket.getaddrinfo(host.strip("[]"), None)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def towards(host: str) -> str | None:
    """Return this machine's address on the way to a host; None if its name or the way is missing.

    Of a host's IPv4 and IPv6 addresses an IPv4 one goes first. For an IPv6 address that only its
    own link knows, and that means nothing without a zone, another one of that interface stands.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, place in sorted(found, key=itemgetter(0)):
        # A system without IPv6 has no such socket, and its name server may have such addresses.
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing; the kernel picks the route's own address
            own = probe.getsockname()
            if family == socket.AF_INET6 and ipaddress.ip_address(own[0]).is_link_local:
                own = addresses().get(socket.if_indextoname(own[3]), [])
            if own:
                return str(own[0])
    return None


def choose(wanted: str, found: Mapping[str, list[str]]) -> str:
    """Return the address that is meant.

    Args:
        wanted: an interface's name, an address, or a network such as ``10.0.0.0/8``.
        found: as `addresses` returns them.

    Raises:
        ConfigError: there is none; the message names those that there are.
    """
    if wanted in found:
        return found[wanted][0]
    there = described(found)
    inside: dict[str, list[str]] = {}  # addresses in the network, by interface
    try:
        meant = ipaddress.ip_interface(wanted)
    except ValueError:
        pass
    else:
        if any(str(meant.ip) in its for its in found.values()):
            return str(meant.ip)
        for name, its in found.items():
            if within := [one for one in its if ipaddress.ip_address(one) in meant.network]:
                inside[name] = within
    if len(inside) > 1:
        inside.pop(_LOOPBACK, None)
    if len(inside) > 1:
        raise ConfigError(
            f"REDUCTION_INTERFACE: several interfaces of this machine have an address of "
            f"{wanted!r}; there are {there}. Write the name of one, or an address"
        )
    for within in inside.values():
        return within[0]
    raise ConfigError(
        f"REDUCTION_INTERFACE: no interface of this machine has the name or an address of "
        f"{wanted!r}; there are {there}. Write one of these names, an address, or a network such "
        "as 10.0.0.0/8"
    )


def described(found: Mapping[str, list[str]]) -> str:
    """Say which interfaces there are; `found` is as `addresses` returns them."""
    return ", ".join(f"{name} ({' '.join(found[name])})" for name in sorted(found)) or "none"
