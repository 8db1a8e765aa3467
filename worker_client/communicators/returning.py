"""Back from the process group to the reducers, as soon as all ranks can use one again.

While calls go through the process group, this rank joins another job at the reducers, in which
nothing has happened yet. With each call the ranks tell each other where they are members of it
(`communicators.fallback`). Once there is a reducer at which all are, that call and all later
ones are made there.

What has been submitted to the earlier session comes out of it, in its order, through the process
group's thread, which passes it on. Until the last of it has, later calls wait behind it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import LocalProtocolError, ReductionError
from reducer.wire.constants import DType, ReduceOp
from worker_client.communicators.membership import PATIENCE_S, marked
from worker_client.protocol.operation import Operation
from worker_client.runtime.service_thread import STOP_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker_client.communicators.flat import FlatCommunicator
    from worker_client.protocol.spec import JobSpec

    Ended = Callable[[Operation, ReductionError | None], None]
    Left = Callable[[ReductionError], None]

RETRY_S = 1.0  # after an address could not even be resolved

log = logging.getLogger(__name__)


class Offer(NamedTuple):
    """What a rank tells the others with a call.

    Attributes:
        attempt: number of the job that it has joined, or tries to join.
        usable: by reducer, whether it is a member there; empty if it has not joined.
    """

    attempt: int
    usable: Sequence[bool] = ()


class Past(NamedTuple):
    """What has happened in communicators before; see `worker_client.client.client.Counters`."""

    losses: int = 0
    moved: int = 0
    claimed: int = 0
    supplied: int = 0

    def plus(self, communicator: FlatCommunicator) -> Past:
        """Add what has happened in another communicator."""
        there = communicator.session.failover
        found = (there.losses, there.moved, there.claimed, there.supplied)
        return Past(*map(sum, zip(self, found, strict=True)))


class Returning:
    """Stands in for the driver of a client that falls back to a process group.

    The process group's thread calls `offer`, `settle`, `go` and `forward`.

    Args:
        spec: of the job.
        enter: makes a communicator of a job, from its spec, whom to tell of ends, and the way back.
        ended, left: as of `Driver`.
        announced: whether another client of this rank says, at the same time, where calls go.

    Attributes:
        communicator: where calls are submitted.
        returns: how often they went back to the reducers.
        past: what has happened in communicators before this one.
    """

    def __init__(
        self,
        spec: JobSpec,
        enter: Callable[[JobSpec, Ended, Left, Returning], FlatCommunicator],
        ended: Ended,
        left: Left,
        *,
        announced: bool,
    ) -> None:
        self.returns = 0
        self.past = Past()
        self._spec = spec
        self._enter = enter
        self._ended = ended
        self._left = left
        self._level = logging.DEBUG if announced else logging.WARNING
        self._attempt = 1
        self._coming: FlatCommunicator | None = None  # where calls are to go
        self._retry_at = 0.0
        self._stopped = False
        self._marker: Operation | None = None  # after all that the earlier one was given
        self._later: deque[Operation] = deque()  # submitted after the marker
        self._leaving: threading.Thread | None = None
        # Guards `communicator`, `_marker`, `_later`. The group's thread waits for nobody with it.
        self._gate = threading.RLock()
        self.communicator = self._connect(spec)

    # -- as of Driver -------------------------------------------------------------------------

    @property
    def closing(self) -> bool:
        """Whether nothing may be submitted any more."""
        return self._stopped or self.communicator.driver.closing

    @property
    def in_callback(self) -> bool:
        """Whether this thread leads; see `Driver.in_callback`."""
        either = (self.communicator, self._coming)
        return any(one is not None and one.driver.in_callback for one in either)

    def submit(self, operation: Operation) -> None:
        """Start an all-reduce behind all others.

        Raises:
            LocalProtocolError: the client has stopped.
        """
        with self._gate:
            if self.closing:
                raise LocalProtocolError("this client was shut down")
            if self._marker is None:
                self.communicator.driver.submit(operation)
            else:
                self._later.append(operation)

    def wait(self, done: Callable[[], bool], until: float) -> None:
        """Lead where calls are submitted; see `Driver.wait`."""
        self.communicator.driver.wait(done, until)

    def stop(self) -> None:
        """Leave the job; what is in progress fails. May be called again."""
        with self._gate:
            self._stopped = True
            communicators = [one for one in (self._coming, self.communicator) if one is not None]
            leaving = self._leaving
        for communicator in communicators:
            communicator.driver.stop()
        if leaving is not None:
            leaving.join(STOP_S)

    # -- the process group's thread -----------------------------------------------------------

    def offer(self) -> Offer:
        """Say where this rank could go on; it begins to join, if it does not yet."""
        if self._marker is None and not self._stopped:
            if self._coming is not None and self._coming.session.losses.final:
                self._try_another(self._attempt + 1)  # its reducers are gone again
            if self._coming is None and time.monotonic() >= self._retry_at:
                self._join()
            if self._coming is not None and self._coming.session.joined:
                return Offer(self._attempt, self._coming.session.failover.usable())
        return Offer(self._attempt)

    def settle(self, offers: Sequence[Offer]) -> bool:
        """Find out whether all ranks go back with this call; all come to the same.

        Args:
            offers: what each rank has said with it.
        """
        latest = max(offer.attempt for offer in offers)
        if latest > self._attempt:
            self._try_another(latest)
        if any(offer.attempt != latest for offer in offers):
            return False
        usable = zip(*(offer.usable for offer in offers), strict=False)
        return any(all(everywhere) for everywhere in usable)

    def go(self) -> None:
        """Go back with the call that `settle` was asked about: `forward` gets it next."""
        log.log(self._level, "reducers are back: all-reduces go through them again")
        self.returns += 1
        nothing = memoryview(b"")
        with self._gate:
            self._marker = Operation(nothing, DType.UINT8, ReduceOp.SUM, None, 1.0)
            with suppress(LocalProtocolError):  # the client ends
                self.communicator.driver.submit(self._marker)

    def forward(self, operation: Operation) -> None:
        """Submit to the reducers what comes out of the earlier communicator."""
        if operation is self._marker:
            self._arrive()
        else:
            self._submit_there(operation)

    def _submit_there(self, operation: Operation) -> None:
        assert self._coming is not None, "ranks go where they have joined"
        with suppress(LocalProtocolError):  # it has stopped, and so all calls end with the client
            self._coming.driver.submit(operation)

    def _arrive(self) -> None:
        """Submit what has waited; from then on calls take the straight way."""
        while True:
            with self._gate:
                if not self._later:
                    break_off = self._change_over()
                    break
                operation = self._later.popleft()
            self._submit_there(operation)
        if break_off is not None:
            break_off.start()

    def _change_over(self) -> threading.Thread | None:
        """Submit calls to the new communicator from now on; return what leaves the other."""
        assert self._coming is not None
        earlier, self.communicator = self.communicator, self._coming
        self._coming = self._marker = None
        self._attempt += 1
        self.past = self.past.plus(earlier)
        if self._stopped:
            return None
        self._leaving = threading.Thread(target=earlier.driver.stop, name="leave", daemon=True)
        return self._leaving

    def _join(self) -> None:
        spec = replace(
            self._spec,
            job=marked(self._spec.job, ("after the process group", self._attempt)),
            patience_s=PATIENCE_S,
        )
        try:
            self._coming = self._connect(spec)
        except ReductionError as error:
            log.debug("no way back to the reducers yet: %s", error)
            self._retry_at = time.monotonic() + RETRY_S

    def _try_another(self, attempt: int) -> None:
        """Give up the job that this rank tries to join, for another one."""
        self._attempt = attempt
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.driver.stop()

    def _connect(self, spec: JobSpec) -> FlatCommunicator:
        def left(error: ReductionError) -> None:
            going_there = communicator is self._coming and self._marker is not None
            if communicator is self.communicator or going_there:
                self._stopped = True  # if it has ended by itself
                self._left(error)

        communicator = self._enter(spec, self._ended, left, self)
        return communicator
