"""Reading an environment while taking note of which variable said what."""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, Any, NoReturn

from reducer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHOWN = 60  # characters of an offending value
_PORTS = range(20000, 30000)  # below those that Linux hands out by itself
_NAME = re.compile(r"\[[0-9a-fA-F:]+(%[\w.-]+)?\]|[^\s:/\[\],]+")


class Notes:
    """What an environment says, field by field of `Resolved`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.values: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}  # by field, the variable that said so

    def get(self, name: str) -> str:
        """Return a variable's value, empty if it is not set."""
        return self.environment.get(name, "").strip()

    def put(self, field: str, value: object, because: str) -> None:
        """Record what a field is; who came first is right."""
        if field not in self.values:
            self.values[field] = value
            self.reasons[field] = because

    def number(self, field: str, *names: str, least: int = 0, most: int = 1 << 31) -> None:
        """Record an integer, out of the first of these variables that is set.

        Raises:
            ConfigError: it is no integer from `least` to `most`.
        """
        for name in names:
            if text := self.get(name):
                if not re.fullmatch(r"-?[0-9]{1,18}", text):
                    refuse(name, "write an integer", text)
                if not least <= int(text) <= most:
                    refuse(name, f"write an integer from {least} to {most}", text)
                self.put(field, int(text), name)
                return

    def meeting_point(self) -> None:
        """Record MASTER_ADDR and MASTER_PORT."""
        if host := self.get("MASTER_ADDR"):
            # torch takes an IPv6 address without its brackets, too.
            if not _NAME.fullmatch(host) and not (
                host.count(":") > 1 and _NAME.fullmatch(f"[{host}]")
            ):
                refuse("MASTER_ADDR", "write a host's name or address, without a port", host)
            self.put("master_addr", host.strip("[]"), "MASTER_ADDR")
        self.number("master_port", "MASTER_PORT", least=1, most=65535)

    def derived_port(self, key: str, because: str) -> None:
        """Record a port that all processes of a job find by its name, if none was said."""
        port = _PORTS[zlib.crc32(key.encode()) % len(_PORTS)]
        self.put("master_port", port, f"chosen by {because}")

    def check(self) -> None:
        """Check that numbers go with each other."""
        for part, whole in (
            ("rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node_rank", "nodes"),
        ):
            self._compare(part, whole, strictly=True)
        self._compare("local_world_size", "world_size")
        self._compare("nodes", "world_size")

    def _compare(self, part: str, whole: str, *, strictly: bool = False) -> None:
        less, more = self.values.get(part), self.values.get(whole)
        if less is None or more is None or less < more or (less == more and not strictly):
            return
        raise ConfigError(
            f"{self.reasons[part]} and {self.reasons[whole]} contradict each other: {part} {less} "
            f"does not go with {whole} {more}{', as ranks count from 0' if strictly else ''}"
        )


def refuse(name: str, advice: str, got: object) -> NoReturn:
    """Raise a ConfigError that quotes the offending part of what a variable says."""
    raise ConfigError(f"{name}: {advice} (got {shown(got)})")


def shown(value: object) -> str:
    """Return a value as it is quoted, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def host_of(address: str) -> str | None:
    """Return the host of ``host:port`` or ``host``, without brackets; None if it is neither."""
    match = re.fullmatch(rf"(?P<host>{_NAME.pattern})(:[0-9]{{1,5}})?", address)
    return match["host"].strip("[]") if match else None  # as torch takes an IPv6 address
