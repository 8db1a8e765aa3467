"""Which twins serve a client: the plain ones or the compiled ones."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reducer import failpoints
from reducer.errors import ConfigError
from worker_client.plain_flight import PlainFlight
from worker_client.submissions import PlainSubmissions
from worker_client.transport import PlainTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reducer.failpoints import Failpoint, Place
    from worker_client.flight import Flight
    from worker_client.keys import Keys
    from worker_client.request import MakeSubmissions
    from worker_client.settings import Heartbeats
    from worker_client.transport import Transport

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
        submissions: what accepts tensors that have names.
        arm: sets failpoints, and returns what passes one; see `failpoints.arm`.
    """

    name: str
    flight: type[Flight]
    transport: MakeTransport
    submissions: MakeSubmissions
    arm: Callable[[Sequence[Failpoint]], Callable[[Place], bool]]


PLAIN = Implementation("plain", PlainFlight, PlainTransport, PlainSubmissions, failpoints.arm)


def select(name: str | None) -> Implementation:
    """Return the implementation called ``plain`` or ``compiled``; of None, the best there is.

    Raises:
        ConfigError: the compiled one was asked for and cannot be had; the message says why.
    """
    if name == "plain":
        return PLAIN
    try:
        return _compiled()
    except ConfigError as error:
        if name is not None:
            raise
        log.info("the plain implementation serves, which is slower: %s", error)
        return PLAIN


def _compiled() -> Implementation:
    try:
        from worker_client._flight import CompiledFlight, arm  # noqa: PLC0415 (may not be there)
        from worker_client._submissions import CompiledSubmissions  # noqa: PLC0415
        from worker_client.compiled_transport import CompiledTransport  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"the compiled loop was not built: install a C compiler and reinstall ({error})"
        ) from None
    CompiledTransport.check()
    return Implementation("compiled", CompiledFlight, CompiledTransport, CompiledSubmissions, arm)
