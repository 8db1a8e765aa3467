"""Which twins serve a client: the plain ones or the compiled ones."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reducer.errors import ConfigError
from worker_client.protocol.plain_flight import PlainFlight

if TYPE_CHECKING:
    from worker_client.protocol.flight import Flight
    from worker_client.protocol.spec import Heartbeats
    from worker_client.runtime.credentials import Keys
    from worker_client.runtime.transport import Transport

log = logging.getLogger(__name__)


class MakeTransport(Protocol):
    """The constructor of the two transports."""

    def __call__(
        self,
        flight: Any,
        io_threads: int,
        context: Any = None,
        keys: Keys | None = None,
        heartbeats: Heartbeats = ...,
    ) -> Transport:
        """Make a transport for a flight of the same implementation."""


class Implementation(NamedTuple):
    """Twins that belong together.

    Attributes:
        name: ``compiled`` or ``plain``.
        flight: what the session keeps its chunks in.
        transport: what moves them.
        inproc: how endpoints begin at which the transport reaches reducers of this process.
    """

    name: str
    flight: type[Flight]
    transport: MakeTransport
    inproc: str


def select(name: str | None) -> Implementation:
    """Return the implementation called ``plain`` or ``compiled``; of None, the best there is.

    Raises:
        ConfigError: the compiled one was asked for and cannot be had; the message says why.
    """
    if name == "plain":
        return _plain()
    try:
        return _compiled()
    except ConfigError as error:
        if name is not None:
            raise
        log.info("the plain implementation serves, which is slower: %s", error)
        return _plain()


def _plain() -> Implementation:
    from worker_client.runtime.plain_transport import PlainTransport  # noqa: PLC0415 (with libzmq)

    return Implementation("plain", PlainFlight, PlainTransport, inproc="inproc://")


def _compiled() -> Implementation:
    try:
        from worker_client.protocol import _flight  # noqa: PLC0415 (may not be there)
        from worker_client.runtime import _caller_lead, _loop  # noqa: F401, PLC0415
        from worker_client.runtime.compiled_transport import CompiledTransport  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"the compiled loop was not built: install a C compiler and reinstall ({error})"
        ) from None
    return Implementation("compiled", _flight.CompiledFlight, CompiledTransport, inproc="pair://")
