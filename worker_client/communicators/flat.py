"""One membership of one job: a session, its connections, and who moves them on."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reducer.errors import ConfigError, LocalProtocolError, ReducerLostError
from worker_client.protocol.session import Session
from worker_client.runtime.driver import Driver
from worker_client.runtime.service_thread import leave_in_child

if TYPE_CHECKING:
    from collections.abc import Callable

    from reducer.errors import ReductionError
    from worker_client.protocol.operation import Operation, Unfinished
    from worker_client.protocol.spec import JobSpec
    from worker_client.runtime.credentials import Keys
    from worker_client.runtime.implementation import Implementation

LOOK_S = 0.2  # between two looks for a pool that is gone
SETTLE_S = 1.0  # several times what an idle driver takes to see that some do not answer

log = logging.getLogger(__name__)


class FlatCommunicator:
    """A session that runs.

    Args:
        spec: who we are and where the reducers are.
        implementation: of the flight and the transport.
        io_threads: threads of libzmq that serve the connections.
        context: that of the reducer that this process hosts, if it does.
        keys: what to show to reducers.
        ended, left, hand_over: as of `Driver`.

    Raises:
        ConfigError: an address cannot be resolved.
    """

    def __init__(
        self,
        spec: JobSpec,
        implementation: Implementation,
        *,
        io_threads: int,
        context: Any,
        keys: Keys | None = None,
        ended: Callable[[Operation, ReductionError | None], None],
        left: Callable[[ReductionError], None],
        hand_over: Callable[[list[Unfinished]], None],
    ) -> None:
        inproc = {
            address: endpoint
            for address, endpoint in spec.inproc.items()
            if endpoint.startswith(implementation.inproc)
        }
        spec = replace(spec, inproc=inproc)
        self.session = Session(spec, implementation.flight)
        self._wait_until = time.monotonic() + spec.wait_s
        for address in spec.reducers:
            _resolve(address, self._wait_until)
        transport = implementation.transport(
            self.session.flight, io_threads, context if inproc else None, keys, spec.heartbeats
        )
        for link in self.session.links:
            transport.connect(self.session.endpoint(link))
        self.driver = Driver(self.session, transport, ended, left, hand_over)

    def join(self, timeout_s: float) -> None:
        """Wait until every reducer has welcomed us that is in use.

        If none has, wait for longer, as the spec says.

        Raises:
            ReducerLostError: a reducer did not answer in time; the message names it and says why.
            LocalProtocolError: it was stopped meanwhile.
            ReductionError: a reducer refused this worker; the class says why.
        """
        since = time.monotonic()
        settled = self.driver.settled
        settled.wait(timeout_s)
        if time.monotonic() < self._wait_until and not settled.is_set() and not self._is_known:
            left_s = self._wait_until - time.monotonic()
            log.warning("no reducer answers yet: waiting for one for up to %.0f s more", left_s)
            while time.monotonic() < self._wait_until and not (settled.is_set() or self._is_known):
                settled.wait(LOOK_S)
            settled.wait(timeout_s + SETTLE_S)  # for the others, or to begin without them
        waited_s = time.monotonic() - since
        if self.driver.closing:
            raise LocalProtocolError("this client was shut down")
        refusal = self.session.refusal
        if refusal is not None:
            raise refusal
        for link in self.session.links:
            if link.refusal is not None and self.in_use[link.reducer]:
                raise link.refusal
            if not link.member and self.in_use[link.reducer]:
                why = _diagnose(link.address) if not link.up else "does not answer a HELLO"
                raise ReducerLostError(
                    f"reducer {link.address} {why} (waited {waited_s:.3g} s): check the address in "
                    "REDUCTION_SERVERS, and that `reducer serve` runs there, or set "
                    "REDUCTION_WAIT_FOR_REDUCERS",
                    reducer=link.address,
                )

    @property
    def _is_known(self) -> bool:
        """Whether some reducer has welcomed us."""
        return any(link.member for link in self.session.links)

    @property
    def in_use(self) -> list[bool]:
        """Whether each reducer is in use, in the order of the spec."""
        shard_map = self.session.failover.map
        return [shard_map.uses(at) for at in range(len(self.session.spec.reducers))]


def _resolve(address: str, until: float) -> None:
    """Find out where a reducer is; clusters know no names of replicas that do not run."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            break
        except OSError as error:
            if time.monotonic() < until:
                time.sleep(LOOK_S)
                continue
            raise ConfigError(
                f"reducer {address}: the name {host!r} cannot be resolved ({error.strerror}): "
                "check REDUCTION_SERVERS"
            ) from None
    for *_, place in found:
        leave_in_child(str(place[0]), int(place[1]))


def _diagnose(address: str) -> str:
    """Say why a reducer cannot be reached, by trying once with a plain socket."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError as error:
        return f"cannot be reached: {error.strerror or error}"
    return "accepts connections but does not speak this protocol"
