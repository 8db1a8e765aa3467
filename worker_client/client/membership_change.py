"""What a client has for calls with names, also when ranks have joined; how these do."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from reducer.errors import ConfigError, LocalProtocolError, MembershipError
from worker_client.communicators.elastic import Change
from worker_client.communicators.newcomers import LOOK_S, NewcomerRendezvous, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from worker_client.communicators.communicator import FlatCommunicator
    from worker_client.communicators.elastic import ElasticCommunicator
    from worker_client.communicators.newcomers import MembershipRequest
    from worker_client.fusion.fusion import Fusion
    from worker_client.protocol.spec import JobSpec

ENDS_S = 1.0  # for a call to end whose caller has heard that it has

log = logging.getLogger(__name__)


class Resources:
    """What a client has besides its communicator, and what ends with that.

    Attributes:
        fusion: the one in use: there is another one when ranks have joined.
        failure: what stopping the reducer has raised.
    """

    def __init__(self, fusion: Fusion, stop_host: Callable[[], object] | None = None) -> None:
        self.fusion = fusion
        self.failure: BaseException | None = None
        self._stop_host = stop_host

    def release(self) -> None:
        """Let it all end, after the farewell, in the thread that has said it.

        Whatever ends the client comes here: its `shutdown`, or an error of its own in the thread
        that moves its all-reduces on.
        """
        try:
            if self._stop_host is not None:
                self._stop_host()
        except BaseException as failure:  # noqa: BLE001 (the thread that shuts the client down gets it)
            self.failure = failure
        if not self.fusion.closing:
            # Not here: it waits for callbacks, of which one may wait for this thread.
            threading.Thread(target=self.fusion.stop, name="leave", daemon=True).start()


class MembershipChange:
    """The membership of a client's two communicators; ranks join both of them, or none.

    `elastic` is that of calls in order. `new_fusion` makes what reduces named tensors after ranks
    have joined, from how many have ever taken part and which ones are lost. `enter` makes a
    communicator, for the rendezvous. `ranks_of` returns the client's ranks by those of `elastic`,
    which are nodes if all-reduces go through nodes first.

    Attributes:
        newcomer: this rank has joined, and not called `admit` yet.
        refusal: why no rank can join.
    """

    def __init__(
        self,
        elastic: ElasticCommunicator,
        enter: Callable[[JobSpec], FlatCommunicator],
        new_fusion: Callable[[int, Collection[int]], Fusion],
        resources: Resources,
        *,
        newcomer: bool,
        ranks_of: Callable[[Iterable[int]], tuple[int, ...]] = tuple,
    ) -> None:
        self.newcomer = newcomer
        self.refusal: str | None = None
        self._ranks_of = ranks_of
        self._elastic = elastic
        self._enter = enter
        self._new_fusion = new_fusion
        self._resources = resources
        self._rendezvous: NewcomerRendezvous | None = None
        self._callbacks: list[Callable[[Change], None]] = []
        elastic.on_change = self._changed

    def enter_job(self, membership_request: MembershipRequest) -> None:
        """Wait until the others let this rank in.

        Raises:
            MembershipError: they have another membership by now.
            ReductionError: they cannot be waited for.
        """
        membership_request.accept()
        self._elastic.begin_joining()
        while not self._elastic.await_members(timeout_s=LOOK_S):
            if membership_request.refused.is_set():
                raise MembershipError("the membership has changed before this rank was in it")

    def begin_membership(self, timeout_s: float) -> None:
        """Be ready for calls with names, and wait until all ranks are, in a new membership."""
        try:
            self._resources.fusion.open()
            self._elastic.check()  # or nobody would stop that any more
            self._lose_named()
            self._elastic.admit(0, timeout_s)
        except BaseException:
            self._resources.fusion.stop()
            raise

    def admit(self, timeout_s: float, busy: Callable[[], bool]) -> bool:
        """Let ranks join that wait for it, unless this rank is `busy`; see `Client.admit`."""
        if self.refusal is not None:
            raise ConfigError(self.refusal)
        until = time.monotonic() + ENDS_S
        while busy():
            if time.monotonic() > until:
                raise ConfigError("ranks join between calls: wait for all calls before admit()")
            time.sleep(0.001)
        if self.newcomer:
            self.newcomer = False
            return True
        elastic = self._elastic
        more = self._ready()
        joined = elastic.admit(more, timeout_s)
        if more and self._rendezvous is not None:
            self._rendezvous.decide(
                admitted=joined and elastic.present[-1] == elastic.world_size - 1
            )
        if joined:
            earlier = self._resources.fusion
            fusion = self._new_fusion(elastic.world_size, elastic.lost_at_admission)
            self._resources.fusion = fusion
            try:
                self.begin_membership(timeout_s)
            finally:  # all have left it behind
                fusion.follow(earlier)
        return joined

    def subscribe(self, callback: Callable[[Change], None]) -> None:
        """Have a function called with every new membership; see `Client.on_membership`."""
        self._callbacks.append(callback)
        if self.newcomer:
            callback(Change(self._elastic.present, (self._elastic.rank,), ()))

    def settle(self) -> None:
        """Wait until the ranks have reconciled, if they are about to.

        Raises:
            ReductionError: they cannot go on.
        """
        self._elastic.await_members()

    def stop(self) -> None:
        """Let nobody in any more."""
        if self._rendezvous is not None:
            self._rendezvous.stop()

    def _ready(self) -> int:
        """Return how many ranks are ready to join, if it is this rank that lets them in."""
        if self._elastic.present[0] != self._elastic.rank:
            if self._rendezvous is not None:
                self._rendezvous.stop()
                self._rendezvous = None
            return 0
        if self._rendezvous is None:
            self._rendezvous = NewcomerRendezvous(self._enter, self._elastic.spec, self._propose)
            if self._elastic.closing:  # it was shut down meanwhile
                self._rendezvous.stop()
        return int(self._rendezvous.ready())

    def _propose(self) -> Proposal:
        elastic = self._elastic
        if elastic.failed or elastic.closing:
            raise LocalProtocolError("this rank goes on no more, and lets nobody in")
        spec = elastic.spec
        return Proposal(elastic.world_size + 1, sorted(elastic.lost), spec.run, spec.generation)

    def _lose_named(self) -> None:
        """Go on without lost ranks in calls with names as well, where they may never have been."""
        if (named := self._resources.fusion.communicator) is not None:
            named.lose(self._elastic.lost)

    def _changed(self, change: Change) -> None:
        self._lose_named()
        change = Change(*map(self._ranks_of, change))
        for callback in self._callbacks:
            _notify(callback, change)


def _notify(callback: Callable[[Change], None], change: Change) -> None:
    try:
        callback(change)
    except Exception:  # the job goes on all the same
        log.exception("a callback of on_membership() failed")
