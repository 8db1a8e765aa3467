"""A running reducer: the thread, the clock, and the way from `start` to `stop`."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING

from reducer import implementation, kernels
from reducer.engine import Counters, Engine
from reducer.transport import Transport

if TYPE_CHECKING:
    from reducer.config import ReducerConfig

TICK_S = 0.1
DRAIN_S = 0.5  # for workers to take their last results: a Ctrl-C must end everything within 2 s

log = logging.getLogger(__name__)


class Server:
    """One reducer in a thread of its own.

    Args:
        config: where to listen and what to spend.

    Attributes:
        address: ``host:port`` under which workers reach it (the port is known once it is built).

    Raises:
        ConfigError: the endpoint cannot be bound, or the kernel variant does not exist here.
    """

    def __init__(self, config: ReducerConfig) -> None:
        table = kernels.select(config.kernel)
        chosen = implementation.select(config.impl, table)
        self._transport = Transport(config.bind)
        self.address = f"{_reachable(self._transport.host)}:{self._transport.port}"
        self._engine = Engine(
            table,
            chosen.slots,
            memory_limit=int(config.memory_limit),
            incarnation=secrets.token_hex(8),
            address=self.address,
        )
        self._loop = chosen.loop(self._engine, self._transport)
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="reducer", daemon=True)
        log.info("serves with the %s loop and the %s kernels", chosen.name, table.name)

    @property
    def counters(self) -> Counters:
        """What it has done since it started."""
        return self._engine.counters

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye, finish open rounds until the workers leave or half a second is over.

        Raises:
            BaseException: whatever ended the thread before it was told to stop.
        """
        self._stopping.set()  # seen at the next tick
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._loop.step(TICK_S)
            self._loop.send(self._engine.drain())
            give_up = time.monotonic() + DRAIN_S
            while self._engine.jobs and time.monotonic() < give_up:
                self._loop.step(TICK_S)
        except BaseException as error:
            self._failure = error
            log.exception("the reducer stopped because of an error of its own")
            raise
        finally:
            self._transport.close()


def _reachable(host: str) -> str:
    """Name a host under which others can reach a socket bound to `host`."""
    if host in {"0.0.0.0", "[::]"}:  # noqa: S104 (recognised, not bound)
        return socket.gethostname()
    return host
