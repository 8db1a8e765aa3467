"""Which loop serves: the plain one, or the compiled one where there is one."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reducer.engine import slots
from reducer.errors import ConfigError
from reducer.kernels.plain import PlainKernels
from reducer.runtime import loop
from reducer.wire.constants import COMPILED_FEATURES, FEATURES

if TYPE_CHECKING:
    from reducer.engine.engine import Engine
    from reducer.engine.slots import SlotsModule
    from reducer.kernels import Kernels
    from reducer.runtime.guard import Guard
    from reducer.runtime.transport import Transport

NAMES = ("compiled", "plain")

log = logging.getLogger(__name__)


class MakeLoop(Protocol):
    """The constructor of `loop.Loop` and of its compiled twin."""

    def __call__(self, engine: Engine, transport: Any, guard: Guard) -> loop.Loop:
        """Join an engine, a transport and its guard."""


class Implementation(NamedTuple):
    """Twins that belong together.

    Attributes:
        name: ``compiled`` or ``plain``.
        slots: what the engine keeps its rounds in.
        loop: what serves.
        transport: what that receives from, and sends to.
        features: what reducers that have them speak.
    """

    name: str
    slots: SlotsModule
    loop: MakeLoop
    transport: type[Transport]
    features: int = FEATURES


def select(name: str | None, kernels: Kernels) -> Implementation:
    """Return the implementation called `name`, or the compiled one if it can run.

    Args:
        name: ``compiled``, ``plain`` or None.
        kernels: what will sum; the compiled loop calls compiled kernels only.

    Raises:
        ConfigError: the compiled loop is demanded and cannot run; the message says why.
    """
    if name == "plain":
        return _plain()
    try:
        return _compiled(kernels)
    except ConfigError as error:
        if name == "compiled":
            raise
        log.info("the plain loop serves: %s", error)
        return _plain()


def _plain() -> Implementation:
    # It alone loads libzmq.
    transport = import_module("reducer.runtime.plain_transport")
    return Implementation("plain", slots, loop.Loop, transport.PlainTransport)


def _compiled(kernels: Kernels) -> Implementation:
    if isinstance(kernels, PlainKernels):
        raise ConfigError("the compiled loop cannot call the numpy kernels")
    try:
        rounds = import_module("reducer.engine._slots")
        serves = import_module("reducer.runtime._loop")
        transport = import_module("reducer.runtime.compiled_transport")
    except ImportError as error:
        raise ConfigError(
            f"the compiled loop was not built: install a C compiler and reinstall ({error})"
        ) from None
    return Implementation(
        "compiled",
        rounds,
        serves.Loop,
        transport.CompiledTransport,
        COMPILED_FEATURES,
    )
