"""What every communicator is, one membership of one job; and the innermost: at the reducers."""

from __future__ import annotations

import logging
import math
import socket
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from reducer.errors import LocalProtocolError, ReducerLostError
from reducer.tcp_connections import Port
from worker_client.protocol.session import Session
from worker_client.runtime import _loop
from worker_client.runtime.driver import Driver
from worker_client.runtime.trace import Trace
from worker_client.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reducer.errors import ReductionError
    from reducer.wire.messages import Straggler
    from worker_client.protocol.link import Link
    from worker_client.protocol.operation import Operation, Unfinished
    from worker_client.protocol.spec import JobSpec
    from worker_client.runtime.credentials import Keys
    from worker_client.staging.host_buffer import Flat

LOOK_S = 0.2  # between two looks for a pool that is gone
LOOK_AT_HOSTS_S = 1.0  # between two looks whether a rank that does not answer is there
SETTLE_S = 1.0  # several times what an idle driver takes to see that some do not answer

log = logging.getLogger(__name__)


class Counters(NamedTuple):
    """What a communicator has gone through, and all that it is made of."""

    losses: int = 0  # how often a reducer that was in use was lost
    moved: int = 0  # chunks that were sent again to another reducer
    claimed: int = 0  # chunks whose result was here, of which another reducer was told
    supplied: int = 0  # results that other ranks needed from here
    fallbacks: int = 0  # all-reduces that the process group did, as no reducer was left
    returns: int = 0  # how often they went back from the process group to reducers

    def plus(self, other: Counters) -> Counters:
        """Return the sum of two."""
        return Counters(*map(sum, zip(self, other, strict=True)))


class LinkTraffic(NamedTuple):
    """What a communicator's links have carried, and all that it is made of; and whom ranks await.

    Attributes:
        bytes_sent, bytes_received: of contributions and of results on the network, without headers;
            what this process's own reducer gets and gives is not on it.
        busy_s: seconds while any all-reduce was on its way, but for stretches that failed.
        waited_for_s: by rank: seconds that the others have waited for it alone, while reducers said
            that it was the straggler.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    busy_s: float = 0.0
    waited_for_s: Mapping[int, float] = MappingProxyType({})

    @property
    def rate(self) -> float:
        """Bytes a second that came while all-reduces were on their way; 0: none came."""
        return self.bytes_received / self.busy_s if self.busy_s else 0.0

    def plus(self, other: LinkTraffic) -> LinkTraffic:
        """Return the sum of two."""
        waits = {
            rank: self.waited_for_s.get(rank, 0.0) + other.waited_for_s.get(rank, 0.0)
            for rank in {**self.waited_for_s, **other.waited_for_s}
        }
        return LinkTraffic(
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            self.busy_s + other.busy_s,
            waits,
        )

    def renumbered(self, ranks: Sequence[int]) -> LinkTraffic:
        """Return it with a rank's number in `ranks` in place of its place there."""
        waits = {ranks[rank]: waited_s for rank, waited_s in self.waited_for_s.items()}
        return self._replace(waited_for_s=waits)


class Communicator:
    """All-reduces of host memory, in the same order at every rank; threads may share it.

    Its kinds are put around each other at the start of a job (`worker_client.client.compose`), and
    what one of them does not say itself, the one inside does. `FlatCommunicator` is the innermost,
    or several of them are, one after another.

    Attributes:
        inner: the one inside, now.
    """

    inner: Communicator

    @property
    def spec(self) -> JobSpec:
        """The job, as it began."""
        return self.inner.spec

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self.spec.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that have ever taken part: at the start, and joined since."""
        return self.inner.world_size

    @property
    def present(self) -> tuple[int, ...]:
        """Ranks that take part: all of them, but for those that the job goes on without."""
        return self.inner.present

    @property
    def in_use(self) -> list[bool]:
        """Whether each reducer is in use, in the order of the spec."""
        inner = self.inner  # another one, perhaps, the next time
        used = dict(zip(inner.spec.reducers, inner.in_use, strict=True))
        return [used.get(address, False) for address in self.spec.reducers]

    @property
    def straggler(self) -> Straggler | None:
        """The rank that the others wait for again and again, as the reducers say."""
        return self.inner.straggler

    @property
    def lost_ranks(self) -> Collection[int]:
        """Ranks of the membership in use that reducers have called lost, by its numbers."""
        return self.inner.lost_ranks

    @property
    def reached(self) -> float:
        """Number of the first all-reduce that some rank may not have finished; infinity: none."""
        return self.inner.reached

    @property
    def final(self) -> ReductionError | None:
        """Why no all-reduce of an elastic membership ends well any more: a rank of it is lost."""
        return self.inner.final

    @property
    def usable(self) -> Sequence[int] | None:
        """How many lanes of each reducer this rank can use; none yet; None: none any more."""
        return self.inner.usable

    @property
    def links(self) -> Sequence[Link]:
        """The links to the reducers of the membership in use."""
        return self.inner.links

    @property
    def piecewise(self) -> bool:
        """Whether a large call may come as so many all-reduces as a call can have."""
        return self.inner.piecewise

    @property
    def takes_devices(self) -> bool:
        """Whether `all_reduce` can be called, with tensors on devices."""
        return False

    @property
    def takes_unfilled(self) -> bool:
        """Whether `submit` takes pieces of a call that are yet to be filled."""
        return False

    @property
    def contributors(self) -> Sequence[int]:
        """Ranks whose contributions the latest all-reduce has, if one was in progress at a time."""
        return self.inner.contributors

    @property
    def counters(self) -> Counters:
        """What it has gone through so far."""
        return self.inner.counters

    @property
    def traffic(self) -> LinkTraffic:
        """What its links have carried so far."""
        return self.inner.traffic

    @property
    def carries(self) -> float:
        """What its links to other machines carry at best, bytes a second; 0 if that is unknown."""
        return self.inner.carries

    @property
    def closing(self) -> bool:
        """Whether nothing may be submitted any more."""
        return self.inner.closing

    @property
    def busy(self) -> bool:
        """Whether an all-reduce is in progress, besides the one whose callback this is."""
        return self.inner.busy

    @property
    def in_callback(self) -> bool:
        """Whether this thread is in a callback of an all-reduce, which may wait for none."""
        return self.inner.in_callback

    def check(self) -> None:
        """See whether all-reduces may be submitted.

        Raises:
            ReductionError: why not.
        """
        if self.closing:
            raise LocalProtocolError(_loop.SHUT_DOWN)

    def join(self, timeout_s: float) -> None:
        """Wait until every reducer has welcomed this rank that is in use.

        Raises:
            ReducerLostError: a reducer did not answer in time; the message names it and says why.
            LocalProtocolError: it was stopped meanwhile.
            ReductionError: a reducer refused this worker; the class says why.
        """
        self.inner.join(timeout_s)

    def submit(self, operation: Operation) -> None:
        """Start an all-reduce, which ends itself (`Operation.end`).

        Raises:
            ReductionError: nothing may be submitted any more, and the operation does not end.
        """
        self.inner.submit(operation)

    def all_reduce(self, whole: Operation, flat: Flat) -> None:
        """Start an all-reduce of a tensor on a device, as `DeviceStaging.all_reduce` does."""
        self.inner.all_reduce(whole, flat)

    def wait(self, done: Callable[[], bool], until: float) -> None:
        """Move all-reduces on until `done`, or `until`, if this thread can; else return at once.

        Raises:
            LocalProtocolError: this is a callback of an all-reduce: nobody else can bring its end.
        """
        self.inner.wait(done, until)

    def lose(self, ranks: frozenset[int]) -> None:
        """Go on without ranks that are lost elsewhere, if it can: it may never have seen them."""
        self.inner.lose(ranks)

    def fail(self, error: ReductionError) -> None:
        """End badly what is in progress, and tell the reducers."""
        self.inner.fail(error)

    def stop(self) -> None:
        """Leave the job; what is in progress fails. May be called again.

        It returns before where waiting could last for ever, as `Driver.stop` does.
        """
        self.inner.stop()


class FlatCommunicator(Communicator):
    """A session that runs, on a core of its own.

    `left` is called once, after the farewell; `hand_over` takes the calls that no reducer can
    finish any more, if `spec.fallback`.
    """

    def __init__(
        self,
        spec: JobSpec,
        left: Callable[[], None] = lambda: None,
        hand_over: Callable[[list[Unfinished]], None] | None = None,
        *,
        context: Any,
        keys: Keys | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.session = session = Session(spec)
        self._wait_until = time.monotonic() + spec.wait_s
        port = Port(spec.port_bytes, spec.world_size)
        transport = Transport(session.flight, context, keys, spec.heartbeats, port)
        for link in session.links:
            transport.connect(session.endpoint(link))
        self.core = transport.core
        self._driver = Driver(session, transport, trace or Trace(), left, hand_over or _keep)

    def submit(self, operation: Operation) -> None:
        self.core.submit(operation)

    def wait(self, done: Callable[[], bool], until: float) -> None:
        self.core.wait(done, until)

    def fail(self, error: ReductionError) -> None:
        """End badly what is in progress, and tell the reducers."""
        self._driver.fail(error)

    def stop(self) -> None:
        self._driver.stop()

    @property
    def open(self) -> list[Operation]:
        """What was submitted and has not ended, besides what is in a callback just now."""
        return list(self.core.open)

    @property
    def busy(self) -> bool:
        return bool(self.core.open)

    @property
    def closing(self) -> bool:
        return self.core.closed

    @property
    def in_callback(self) -> bool:
        return self._driver.in_callback

    @property
    def spec(self) -> JobSpec:
        return self.session.spec

    @property
    def world_size(self) -> int:
        return self.spec.world_size

    @property
    def present(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    @property
    def contributors(self) -> Sequence[int]:
        return self.present

    @property
    def straggler(self) -> Straggler | None:
        return self.session.straggler

    @property
    def lost_ranks(self) -> Collection[int]:
        return self.session.lost_ranks

    @property
    def reached(self) -> float:
        # Process groups survive no rank: of what they do nothing is made again.
        return math.inf if self.session.handed_over else self.session.flight.reached

    @property
    def final(self) -> ReductionError | None:
        return self.session.calls.final

    @property
    def usable(self) -> Sequence[int] | None:
        if self.session.failover.final:
            return None
        return self.session.failover.usable_lanes() if self.session.joined else ()

    @property
    def links(self) -> Sequence[Link]:
        return self.session.links

    @property
    def piecewise(self) -> bool:
        return True

    @property
    def takes_unfilled(self) -> bool:
        return True

    def lose(self, ranks: frozenset[int]) -> None:
        """Go on with them: it can do nothing without."""

    @property
    def counters(self) -> Counters:
        seen = self.session.failover
        return Counters(seen.losses, seen.moved, seen.claimed, seen.supplied)

    @property
    def traffic(self) -> LinkTraffic:
        flight = self.session.flight
        carried = [flight.link_bytes(link.index) for link in self.session.network_links]
        return LinkTraffic(
            sum(sent for sent, _ in carried),
            sum(received for _, received in carried),
            flight.busy_s,
            dict(self.session.waited_for_s),
        )

    @property
    def carries(self) -> float:
        return self.session.carries

    def join(self, timeout_s: float) -> None:
        """Wait for the reducers; if none answers, for as long as `spec.wait_s` says.

        Raises:
            RankLostError: what a rank hosts cannot be reached, or has not answered in the time that
                `spec.hosts_wait_s` says.
        """
        since = time.monotonic()
        settled = self._driver.settled
        if self.spec.hosts:
            self._await_hosts(since, timeout_s)
        settled.wait(max(0.0, since + timeout_s - time.monotonic()))
        if time.monotonic() < self._wait_until and not settled.is_set() and not self._is_known:
            left_s = self._wait_until - time.monotonic()
            log.warning("no reducer answers yet: waiting for one for up to %.0f s more", left_s)
            while time.monotonic() < self._wait_until and not (settled.is_set() or self._is_known):
                settled.wait(LOOK_S)
            settled.wait(timeout_s + SETTLE_S)  # for the others, or to begin without them
        waited_s = time.monotonic() - since
        if self.closing:
            raise LocalProtocolError("this client was shut down")
        refusal = self.session.refusal
        if refusal is not None:
            raise refusal
        for link in self.session.links:
            if link.refusal is not None and self.in_use[link.reducer]:
                raise link.refusal
            # Once all have answered, one that is lost in this moment is failover's business.
            if not link.member and self.in_use[link.reducer] and not settled.is_set():
                why = self._diagnose(link)
                raise ReducerLostError(
                    f"reducer {link.address} {why[0]} (waited {waited_s:.3g} s): {why[1]}, or set "
                    "REDUCTION_WAIT_FOR_REDUCERS",
                    reducer=link.address,
                )

    def _diagnose(self, link: Link) -> tuple[str, str]:
        """Say why a reducer is not reached, trying once with a plain socket, and what to do."""
        why = "does not answer a HELLO"
        unresolved = self._driver.unresolved(link.index)
        if not (link.up or unresolved):
            error = _attempt(link.address)
            why = "accepts connections but does not speak this protocol"
            if error is not None:
                why = f"cannot be reached: {error.strerror or error}"
                unresolved = (error.strerror or "") if isinstance(error, socket.gaierror) else ""
        if unresolved:
            host = link.address.rpartition(":")[0]
            advice = (
                f"repair the name server of this machine (`getent hosts {host}` asks it), or write "
                "the reducer's name as it knows it, or its address, in REDUCTION_SERVERS"
            )
            return f"cannot be reached: its name could not be resolved: {unresolved}", advice
        return why, "check the address in REDUCTION_SERVERS, and that `reducer serve` runs there"

    def _await_hosts(self, since: float, timeout_s: float) -> None:
        """Wait for reducers that ranks host, busy ones too: no rank can go on without them."""
        reached: dict[str, float] = {}  # when each could be last
        until, told = since + max(timeout_s, self.spec.hosts_wait_s), False
        while not self._driver.settled.wait(LOOK_AT_HOSTS_S):
            late = [link for link in self.session.links if link.reducer in self.spec.hosts]
            late = [link for link in late if not link.member and link.refusal is None]
            if not late:
                return
            for link in late:
                error = _attempt(link.address)  # which may take a second
                now = time.monotonic()
                if self._driver.settled.is_set():
                    return
                if error is None:
                    reached[link.address] = now
                elif isinstance(error, ConnectionRefusedError) or (
                    now >= reached.get(link.address, since) + timeout_s
                ):
                    why = f"cannot be reached: {error.strerror or error}"
                    raise self.session.failover.host_lost(link, why)
            if now >= until:
                why = f"has not answered for {now - since:.3g} s: it is stopped, or too busy"
                raise self.session.failover.host_lost(late[0], why)
            if now >= since + timeout_s and not told:
                told = True
                rank, address = self.spec.hosts[late[0].reducer], late[0].address
                said = "rank %d, whose reducer is %s, does not answer yet: waiting for %.0f s more"
                log.warning(said, rank, address, until - now)

    @property
    def _is_known(self) -> bool:
        return any(link.member for link in self.session.links)

    @property
    def in_use(self) -> list[bool]:
        shard_map = self.session.failover.map
        return [shard_map.uses(at) for at in range(len(self.session.spec.reducers))]


def _attempt(address: str) -> OSError | None:
    """Return why there is no connection to a reducer, None if there is one."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError as error:
        return error
    return None


def _keep(calls: list[Unfinished]) -> None:
    raise RuntimeError(f"{len(calls)} calls were handed over, and nobody is there to take them")
