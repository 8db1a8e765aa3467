"""Durations, addresses and names of settings as people write them."""

from __future__ import annotations

import ipaddress
import re
import socket
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BOUNDS = {"ge": "at least", "le": "at most", "gt": "more than", "lt": "less than"}  # pydantic's
_DURATION = re.compile(r"(?P<value>[0-9]+(\.[0-9]+)?)\s*(?P<unit>us|ms|s|min|h)?")
_ADDRESS = re.compile(
    r"(tcp://)?(?P<host>\[[0-9a-fA-F:]+(%[\w.-]+)?\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})"
)
# What is no setting: what Kubernetes tells every pod of a namespace that has a Service whose name
# begins with `reduction`, and what setup.py reads.
_OTHERS = re.compile(
    r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
    r"|BUILD_(DEBUG|STABLE_ABI|REPOSITORY)"
)
PREFIX = "REDUCTION_"  # of the names of variables that are settings


def seconds(text: str) -> float:
    """Read a duration: a number with ``us``, ``ms``, ``s``, ``min`` or ``h``; without, of seconds.

    Raises:
        ValueError: it is none.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"write a duration such as 300s, 5ms or 2min, got {text!r}")
    return float(match["value"]) * _UNITS[match["unit"] or "s"]


def what_to_write(mistake: Mapping[str, Any], example: str) -> str:
    """Return what a setting must be, where pydantic has refused it.

    Args:
        mistake: pydantic's.
        example: bytes, as people write them.
    """
    kind, bounds = mistake["type"], mistake.get("ctx", {})
    if kind.startswith("byte_size"):
        return f"write bytes such as {example}"
    if kind.startswith("bool"):
        return "write 0 or 1"
    for word, bound in _BOUNDS.items():
        if word in bounds:
            timed = _DURATION.fullmatch(str(mistake["input"]).strip())
            unit = " s" if timed and timed["unit"] else ""
            return f"it must be {bound} {bounds[word]:.16g}{unit}"
    message: str = mistake["msg"]
    return message.removeprefix("Value error, ")


def duration(value: object) -> object:
    """Read text as `seconds` does, and leave everything else to who checks types."""
    return seconds(value) if isinstance(value, str) else value


def address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT`` or ``tcp://HOST:PORT``; the host of IPv6 has its brackets.

    Raises:
        ValueError: it is neither.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or int(match["port"]) > 65535:
        raise ValueError(
            "write it as HOST:PORT, with a port up to 65535, an IPv6 host in [brackets], and a "
            f"comma between two, got {text!r}"
        )
    try:
        match["host"].encode("idna")  # as who looks it up will do
    except UnicodeError:
        raise ValueError(f"{match['host']!r} is no name of a host") from None
    return match["host"], int(match["port"])


def host_port(host: str, port: int) -> str:
    """Write ``HOST:PORT``; an IPv6 address gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(text: str) -> bool:
    """Whether an address, as `address` reads it, can be reached from this machine only.

    Raises:
        ValueError: it is none.
    """
    host = address(text)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_private(text: str) -> bool:
    """Whether an address, as `address` reads it, is one that the internet does not route.

    A wildcard is none, nor is a name that has no address or a public one.

    Raises:
        ValueError: it is none.
    """
    host = address(text)[0].strip("[]")
    try:
        found = [ipaddress.ip_address(place[4][0]) for place in socket.getaddrinfo(host, None)]
    except (OSError, UnicodeError):
        return False
    real = [getattr(one, "ipv4_mapped", None) or one for one in found]
    return not any(one.is_global or one.is_unspecified for one in real)


def unless_empty(value: object) -> object:
    """Return the value of a setting, or None of empty text: scripts clear variables like that."""
    return None if isinstance(value, str) and not value.strip() else value


def unknown_setting(environment: Mapping[str, str], known: Iterable[str]) -> str | None:
    """Say what is wrong with a ``REDUCTION_`` variable that is no setting, if there is one.

    Args:
        environment: of the process.
        known: settings, without ``REDUCTION_``, in any case.
    """
    names = sorted({name.upper() for name in known})
    for variable in sorted(environment):
        prefix, name = variable.upper()[: len(PREFIX)], variable.upper()[len(PREFIX) :]
        if prefix == PREFIX and name not in names and not _OTHERS.fullmatch(name):
            meant = get_close_matches(name, names, 1)
            known_are = ", ".join(f"{PREFIX}{name}" for name in names)
            hint = f"did you mean {PREFIX}{meant[0]}?" if meant else f"known are {known_are}"
            return f"unknown setting {variable}: {hint}"
    return None
