"""How machines meet at the first one: lines of JSON over TCP, of which none counts before a proof.

The first machine says its version, how many machines there are to be, and a nonce. Who comes proves
with a nonce of its own that it knows the secret, and then the first machine does. So strangers are
refused at both ends, and what was overheard proves nothing. Lines are not encrypted.
"""

from __future__ import annotations

import hmac
import json
import socket
import time
from typing import TYPE_CHECKING, Any

from reducer import __version__
from reducer.errors import AuthError, ConfigError, MembershipError
from reducer.units import host_port
from reducer.wire.authentication import nonce, proves

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWER_S = 10.0  # for a line that is due at once
_MOST_BYTES = 1 << 16  # of a line


class Machine:
    """Another machine, over a connection.

    Attributes:
        ranks: how many it starts; known at the first machine.
        own, address: this machine's address on the way there, and its own.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.ranks = 1
        self.own: str = connection.getsockname()[0]
        self.address: str = connection.getpeername()[0]
        self.close = connection.close
        self._socket = connection
        self._came = b""

    def say(self, **said: object) -> None:
        """Send a line.

        Raises:
            MembershipError: nobody is there any more.
        """
        try:
            self._socket.sendall(json.dumps(said).encode() + b"\n")
        except OSError as error:
            raise MembershipError(f"{self.address} has left: {error}") from None

    def hear(self, limit_s: float | None = ANSWER_S) -> dict[str, Any]:
        """Wait for a line, for so long at most, and return what it says.

        Raises:
            MembershipError: none came, or one that no `worker-client join` says.
        """
        until = None if limit_s is None else time.monotonic() + limit_s
        try:
            while b"\n" not in self._came:
                self._socket.settimeout(until and max(until - time.monotonic(), 1e-3))
                more = self._socket.recv(_MOST_BYTES)
                if not more:
                    raise MembershipError(f"{self.address} has left: see what it says there")
                self._came += more
                if len(self._came) > _MOST_BYTES:
                    raise ValueError("a long line")
            line, _, self._came = self._came.partition(b"\n")
            said = json.loads(line)
            if not isinstance(said, dict):
                raise TypeError("no object")
        except (OSError, RecursionError, TypeError, ValueError) as error:
            why = f"{self.address} says nothing of worker-client join: {error}"
            raise MembershipError(why) from None
        return said


def gather(
    listener: socket.socket, secret: str, machines: int, tell: Callable[[str], object]
) -> list[Machine]:
    """Wait at the first machine until the others have come; `tell` is called with who does."""
    found: list[Machine] = []
    while len(found) < machines - 1:
        connection, _ = listener.accept()
        machine = Machine(connection)
        try:
            _admit(machine, secret, machines, len(found) + 1)
        except (AuthError, MembershipError) as error:
            tell(f"refused: {error}")
            machine.close()
        else:
            found.append(machine)
            tell(f"{machine.address} is machine {len(found) + 1} of {machines}")
    return found


def _admit(machine: Machine, secret: str, machines: int, number: int) -> None:
    challenge = nonce()
    machine.say(version=__version__, machines=machines, nonce=challenge)
    said = machine.hear()
    terms = challenge, said.get("nonce"), said.get("ranks")
    if not proves(ascii(said.get("proof")), ascii(_proof(secret, "other", *terms))):
        machine.say(refused="secret")
        raise AuthError(f"{machine.address} does not know the secret")
    machine.ranks = int(said["ranks"])
    machine.say(proof=_proof(secret, "first", *terms), number=number)


def find(place: tuple[str, int], secret: str, *, machines: int, ranks: int) -> tuple[Machine, int]:
    """Find the first machine; return it and which one this is, from 1 on.

    Args:
        place: host and port of the first machine.
        secret: that it has printed.
        machines: how many there are to be.
        ranks: how many this one starts.

    Raises:
        AuthError: the secret is another one, or what listens there does not know it.
        ConfigError: there is no such host, or both differ in version or number of machines.
        MembershipError: nothing listens there, or something else.
    """
    first = Machine(_connected(*place, machines))
    try:
        return first, _introduce(first, host_port(*place), secret, machines, ranks)
    except BaseException:
        first.close()
        raise


def _introduce(first: Machine, place: str, secret: str, machines: int, ranks: int) -> int:
    asked = first.hear()
    for what, own in (("version", __version__), ("machines", machines)):
        if asked.get(what) != own:
            raise ConfigError(
                f"{place} has {what} {asked.get(what)!r}, and this machine {own!r}: they must be "
                "the same"
            )
    own_nonce = nonce()
    terms = asked.get("nonce"), own_nonce, ranks
    first.say(nonce=own_nonce, ranks=ranks, proof=_proof(secret, "other", *terms))
    answer = first.hear()
    if not proves(ascii(answer.get("proof")), ascii(_proof(secret, "first", *terms))):
        raise AuthError(f"{place} has another secret than --secret")
    return int(answer["number"])


def _connected(host: str, port: int, machines: int) -> socket.socket:
    place = host_port(host, port)
    try:
        return socket.create_connection((host.strip("[]"), port), ANSWER_S)
    except socket.gaierror as error:
        why = f"the name {host!r} could not be resolved: {error.strerror}: write its address, as"
        raise ConfigError(f"{why} 192.168.1.5") from None
    except ConnectionRefusedError:
        raise MembershipError(
            f"nothing listens at {place}: start worker-client join -- train.py there first; or all "
            f"its machines have joined already: start anew with --machines {machines + 1} on each"
        ) from None
    except OSError as error:
        why = f"{place} does not answer: it is off, or a firewall drops its packets: {error}"
        raise MembershipError(why) from None


def _proof(secret: str, speaker: str, *terms: object) -> str:
    return hmac.new(secret.encode(), ascii((speaker, terms)).encode(), "sha256").hexdigest()
