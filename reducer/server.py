"""A running reducer: the thread, the clock, and the way from `start` to `stop`."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from reducer import __version__, kernels
from reducer.engine.admission import ReducerIdentity
from reducer.engine.engine import Engine
from reducer.engine.rounds import EngineCounters
from reducer.errors import ConfigError
from reducer.kernels.plain import PlainKernels
from reducer.memory import memory_limit
from reducer.monitoring.observer import Observer, StatusInbox
from reducer.runtime.guard import LOOK_S, Guard
from reducer.runtime.keyring import Reader, Refusals
from reducer.timeline import LogEvents, Timeline
from reducer.wire.constants import COMPILED_FEATURES, PLACES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from reducer.config import ReducerConfig
    from reducer.engine.membership import EndedRound
    from reducer.engine.slots import SlotsModule
    from reducer.kernels import Kernels
    from reducer.runtime import _loop
    from reducer.runtime.keyring import Keyring
    from reducer.runtime.transport import Transport

DRAIN_S = 0.5  # for workers to take their last results: a Ctrl-C must end everything within 2 s

_OURS = logging.getLogger("reducer")

log = logging.getLogger(__name__)


class Server:
    """One reducer: threads with a port, an engine and slots each, and nothing shared between them.

    Args:
        keyring: what to show to workers, and whom to admit; None for everybody, without encryption.
        secret: what workers must prove that they know; empty for nothing.

    Attributes:
        address: ``host:port`` under which workers reach it (the port is known once it is built);
            they learn of its other threads' ports there.
        context: what workers of this process need to reach it there: the `meet` of each thread's
            transport, by endpoint.
        lanes: the addresses of its threads.
        inproc: the endpoints at which they reach its threads without a socket, by their addresses.
        observer: reads its state, from any thread.

    Raises:
        ConfigError: an endpoint cannot be bound, or the kernel variant does not exist here, or
            nothing was compiled, or the reference is asked for.
    """

    def __init__(
        self, config: ReducerConfig, keyring: Keyring | None = None, secret: bytes = b""
    ) -> None:
        table = kernels.select(config.kernel)
        slots, make_loop, make_transport = _compiled(config, table)
        memory = memory_limit(config) // config.threads
        self.context: dict[str, Callable[[], object]] = {}
        with ExitStack() as undo:
            transports: list[Transport] = []
            for endpoint in _endpoints(config):
                transports.append(
                    make_transport(
                        endpoint,
                        self.context,
                        keyring,
                        max_chunk_bytes=int(config.max_chunk_bytes),
                        handshake_s=config.handshake_timeout,
                    )
                )
                undo.callback(transports[-1].close)
            host = _reachable(transports[0].host)
            self.lanes = tuple(f"{host}:{transport.port}" for transport in transports)
            self.address = self.lanes[0]
            where = config.timeline
            self._timeline = None if where is None else _open_timeline(where, self.address)
            undo.pop_all()
        self.inproc = dict(zip(self.lanes, (one.inproc for one in transports), strict=True))
        self._keyring = keyring
        self._reader = None if keyring is None or not keyring.changes else Reader(keyring)
        self._stopping, self._hurry = threading.Event(), threading.Event()
        if self._timeline is not None:
            self._events = LogEvents(self._timeline, logging.INFO)
            _OURS.addHandler(self._events)
        incarnation = secrets.token_hex(8)
        others = tuple(transport.port for transport in transports[1:])
        self._lanes = [
            _Lane(
                Engine(
                    table,
                    slots,
                    ReducerIdentity(incarnation, address, others, COMPILED_FEATURES),
                    memory_limit=memory,
                    limits=config.limits(),
                    allowed=None if keyring is None else keyring.allowed,
                    secret=secret,
                ),
                transport,
                make_loop,
                config,
                stopping=self._stopping,
                hurry=self._hurry,
                keyring=keyring,
                timeline=self._timeline,
            )
            for address, transport in zip(self.lanes, transports, strict=True)
        ]
        self.observer = Observer(
            [lane.inbox for lane in self._lanes],
            self._lanes,
            self._stopping,
            version=__version__,
            address=self.address,
            incarnation=incarnation,
        )
        log.info("serves with the %s kernels", table.name)

    @property
    def counters(self) -> EngineCounters:
        """What it has done since it started, over all threads."""
        return sum((lane.engine.counters for lane in self._lanes), EngineCounters())

    @property
    def alive(self) -> bool:
        """Whether all its threads run."""
        reads = self._reader is None or self._reader.is_alive()
        return reads and all(lane.is_alive() for lane in self._lanes)

    def start(self, secret: bytes = b"") -> None:
        """Begin to serve; `secret` is what workers must prove that they know, if it is new."""
        for lane in self._lanes if secret else ():
            lane.engine.demand(secret)
        if self._reader is not None:
            self._reader.start()
        for lane in self._lanes:
            lane.start()

    def reload_keys(self) -> None:
        """Have the allow-list read again; a signal handler may call this."""
        if self._keyring is not None:
            self._keyring.reload()

    def stop(self, grace_s: float = 0.0) -> None:
        """Say goodbye, and finish open rounds until the workers leave or half a second is over.

        Args:
            grace_s: for so many seconds before that, go on for jobs that have no other reducer.

        Raises:
            BaseException: whatever ended a thread before it was told to stop.
        """
        for lane in self._lanes:
            lane.grace_s = grace_s
        self._stopping.set()  # seen at the next tick
        for lane in self._lanes:
            lane.join()
        if self._timeline is not None:
            _OURS.removeHandler(self._events)
            self._timeline.close()
        if self._reader is not None:
            self._reader.stop()
        failures = [lane.failure for lane in self._lanes]
        failures += [] if self._reader is None else [self._reader.failure]
        for failure in failures:
            if failure is not None:
                raise failure

    def hurry(self) -> None:
        """End the grace of `stop`, which has begun; a signal handler may call this."""
        self._hurry.set()


class _Lane(threading.Thread):
    """One thread of a reducer; when it is to stop, it serves for `grace_s` longer."""

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        make_loop: type[_loop.Loop],
        config: ReducerConfig,
        *,
        stopping: threading.Event,
        hurry: threading.Event,
        keyring: Keyring | None,
        timeline: Timeline | None,
    ) -> None:
        super().__init__(name=f"reducer-{transport.port}", daemon=True)
        self.engine = engine
        self.failure: BaseException | None = None
        self._transport = transport
        self._guard = Guard(engine, transport, config.connection_limits())
        self.inbox = StatusInbox(engine, self._guard, transport.port)
        self._make_loop = make_loop
        self.grace_s = 0.0
        self._stopping = stopping
        self._hurry = hurry
        self._cpus = config.cpus
        self._keyring = keyring
        self._allowed = None if keyring is None else keyring.allowed
        self._refusals = Refusals()
        self._timeline = timeline
        if timeline is not None:
            engine.members.keep_times()

    def run(self) -> None:
        """Serve until the reducer is to stop."""
        try:
            if self._cpus is not None:
                os.sched_setaffinity(0, self._cpus)  # of this thread
            loop = self._make_loop(self.engine, self._transport, self._guard)
            loop.do(self.engine.tick(loop.clock.now()))  # from here on it knows the time
            while not self._stopping.is_set():
                self.inbox.answer()
                loop.step(self._guard.wait_s)
                loop.do(self._guard.look(loop.clock.now()))
                if self._keyring is not None:
                    self._mind_keys(self._keyring, loop)
                if self._timeline is not None:
                    _show_rounds(self._timeline, self.engine.members.take_times())
            if self.engine.jobs:
                names = ", ".join(repr(job.name) for job in self.engine.jobs)
                log.info(
                    "told to stop: goes on for job %s for %g s at most, or until all its ranks "
                    "have left or use another reducer",
                    names,
                    self.grace_s or DRAIN_S,
                )
            loop.do(self.engine.drain())
            self._serve_last(loop, self.grace_s, self._hurry.is_set)
            self.engine.close()
            self._serve_last(loop, DRAIN_S, lambda: False)
            self.inbox.answer()  # who has asked in this moment would wait for long
            if self._timeline is not None:
                _show_rounds(self._timeline, self.engine.members.take_times())
        except BaseException as error:
            self.failure = error
            log.exception("the reducer stopped because of an error of its own")
            raise
        finally:
            self._transport.close()

    def _serve_last(self, loop: _loop.Loop, seconds: float, ends: Callable[[], bool]) -> None:
        """Serve the jobs that are left for at most so long."""
        end = time.monotonic() + seconds
        while self.engine.jobs and time.monotonic() < end and not ends():
            self.inbox.answer()
            loop.step(LOOK_S)
            loop.do(self._guard.look(loop.clock.now()))

    def _mind_keys(self, keyring: Keyring, loop: _loop.Loop) -> None:
        """Go by the allow-list as it is now, and tell and count who was refused."""
        if (allowed := keyring.allowed) is not self._allowed:
            self._allowed = allowed
            loop.do(self.engine.allow(allowed))
        refused = self._transport.refusals()
        self._refusals.note(refused)
        self.engine.counters.unauthenticated += len(refused)


def _compiled(
    config: ReducerConfig, table: Kernels
) -> tuple[SlotsModule, type[_loop.Loop], type[Transport]]:
    """Return what a thread serves with: records of rounds, a loop and a transport.

    Raises:
        ConfigError: they were not built or not asked for, or cannot call these kernels; the message
            says what to do.
    """
    if config.impl == "plain":
        raise ConfigError(
            "impl: plain is the reference reducer, which `reducer serve` alone starts: unset "
            "REDUCTION_IMPL where a rank hosts a reducer"
        )
    try:
        from reducer.engine import _slots  # noqa: PLC0415 (`reducer status` needs nothing compiled)
        from reducer.runtime import _loop  # noqa: PLC0415
        from reducer.runtime.transport import Transport  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"the reducer was not built: install a C compiler, then the package again ({error})"
        ) from None
    if isinstance(table, PlainKernels):
        raise ConfigError(
            "kernel: a reducer cannot call the numpy kernels: choose another variant, or the "
            "reference reducer, whose sums they are, with --impl plain (REDUCTION_IMPL)"
        )
    return _slots, _loop.Loop, Transport


def _open_timeline(directory: Path, address: str) -> Timeline:
    """Begin a timeline, and keep that of the process that was at this address before."""
    path = directory / f"reducer-{address.replace(':', '-')}.json"
    if path.is_file():
        path.replace(path.with_suffix(".earlier.json"))
    return Timeline(path, f"reducer {address}", {"kind": "reducer", "address": address})


def _show_rounds(timeline: Timeline, ended: Iterable[EndedRound]) -> None:
    """Put rounds on a timeline, on a track for each job."""
    for job, generation, times in ended:
        begun_s, done_s = times.begun_us / 1e6, times.done_us / 1e6
        args = {"job": job, "generation": generation, **times._asdict()}
        name = f"all-reduce {times.sequence // PLACES}"
        if not times.done_us:
            timeline.instant(job, f"{name} failed", begun_s, args)
            continue
        alone_s, complete_s = times.alone_us / 1e6, times.complete_us / 1e6
        parts = (
            ("gathered", begun_s, alone_s),
            (f"waited for rank {times.last_rank}", alone_s, complete_s),
            ("summed", complete_s, done_s),
        )
        timeline.slice(job, name, (begun_s, done_s), args, parts)


def _endpoints(config: ReducerConfig) -> list[str]:
    """Return where threads listen: at the port itself, at the one after it, and so on."""
    host, _, port = config.bind.rpartition(":")
    if port == "0":
        return [config.bind] * config.threads
    return [f"{host}:{int(port) + lane}" for lane in range(config.threads)]


def _reachable(host: str) -> str:
    """Name a host under which others can reach a socket bound to `host`."""
    if host in {"0.0.0.0", "[::]"}:  # noqa: S104 (recognised, not bound)
        return socket.gethostname()
    return host
