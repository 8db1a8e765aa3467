"""``hvd.elastic``: a training whose ranks come and go, with what it keeps between two commits.

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()                                   # every rank, at the same step

    train(hvd.elastic.TorchState(model, optimizer, epoch=0))

Ranks are lost and let in as `worker_client.client.client.Client.admit` says: with
``REDUCTION_ON_RANK_LOST=continue`` the others' all-reduces go on without a lost rank, and a process
with ``REDUCTION_JOIN=1`` joins. At the next commit every rank finds who is there, and begins again
with the function, from the state of the first rank.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from typing import TYPE_CHECKING, Any, TypeVar

from reducer.errors import RankLostError, ReducerLostError, ReductionError, ReductionTimeout
from worker_client.horovod.common.exceptions import HostsUpdatedInterrupt
from worker_client.horovod.job import CURRENT
from worker_client.horovod.torch.functions import broadcast_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from worker_client.horovod.job import HorovodJob

    T = TypeVar("T")

# After these the ranks may go on from their last commit; others say that the script is wrong.
_PASSING = (RankLostError, ReducerLostError, ReductionTimeout)
_PAUSE_S = 0.5  # between two attempts to go on

log = logging.getLogger(__name__)


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Let a function train while ranks leave and join.

    The function is called with a state that is the same at every rank, and again when ranks have
    left or joined (`State.commit` finds that). When a call of it fails because a rank or the
    reducers were lost, or an all-reduce took too long, it is called again with the state of the
    last commit, when all ranks have met again, for which they have twice as long as for an
    all-reduce (``REDUCTION_TIMEOUT``). Other errors are raised. Before a further call the state's
    reset callbacks are called.

    Args:
        func: takes a `State`, and more. Ranks make no calls to each other before it, but for
            ``hvd.init()``: a rank that joins makes its first calls in it. A `DistributedOptimizer`
            is made before it: in it there would be one more for each call.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        job = CURRENT.job
        skip_sync, until = False, math.inf  # the latter: for ranks that go on from a commit to meet
        while True:
            try:
                if until < math.inf:
                    job.renew(afresh=True)
                    state.on_reset()
                if not skip_sync:
                    state.sync()
                until = math.inf
                job.in_elastic_function = job.client.spec.elastic
                try:
                    return func(state, *args, **kwargs)
                finally:
                    job.in_elastic_function = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
                state.on_reset()
            except ReductionError as error:
                if not _passes(error, job) or time.monotonic() > until:
                    raise
                skip_sync = False
                if until < math.inf:
                    log.debug("not all ranks are back: %s", error)
                    time.sleep(_PAUSE_S)
                else:
                    log.warning("going on from the last commit, after this error: %s", error)
                    until = time.monotonic() + 2 * job.client.timeout_s
                state.restore()

    return wrapper


def _passes(error: ReductionError, job: HorovodJob) -> bool:
    """Whether ranks may go on from their last commit after an error."""
    if isinstance(error, RankLostError) and error.rank in job.client.present:
        return False  # the job does not go on without that rank
    return isinstance(error, _PASSING) or type(error) is ReductionError


class State:
    """What ranks have in common; subclasses say how it is saved, restored and made the same.

    `bcast_object` takes an object, and returns the one of rank 0; `get_rank` changes nothing.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = CURRENT.rank,  # noqa: ARG002 (Horovod's)
    ) -> None:
        self._bcast_object = bcast_object
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Have functions called when ranks have left or joined, before the function is run again.

        To scale the learning rate with ``hvd.size()``, say. They must not call other ranks.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Do what is to be done when ranks have left or joined."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, and see whether ranks have left or wait to join: `check_host_updates`.

        Every rank calls it at the same point, with no call to other ranks in progress.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """See whether ranks have left, and let those join that wait for it.

        Every rank calls it at the same point. It takes as long as three small all-reduces; nothing
        where neither can be, because ``REDUCTION_ON_RANK_LOST`` is not ``continue``.

        Raises:
            HostsUpdatedInterrupt: the ranks are others than before, at every rank alike.
            ReductionError: as `Client.admit`.
        """
        if CURRENT.job.client.spec.elastic and CURRENT.job.renew():
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Keep the state as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state that of rank 0, at every rank, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Do what a subclass has to do when ranks have left or joined, before the callbacks."""


class ObjectState(State):
    """A state of objects of types that `broadcast_object` takes, which are its attributes."""

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = CURRENT.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._set(kwargs)
        self._saved_state = kwargs
        self._keep()

    def save(self) -> None:
        """Keep everything as it is now; copies, so that changes in place are undone as well."""
        self._keep()

    def restore(self) -> None:
        """Go back to what was saved last."""
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Replace everything by what rank 0 has now, and save it."""
        if self._saved_state:
            now = self._now()
            received = self._bcast_object(now)
            if received is not now:
                self._set(received)
        self._keep()

    def _now(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _set(self, objects: dict[str, Any]) -> None:
        for name, value in objects.items():
            setattr(self, name, value)

    def _keep(self) -> None:
        self._saved_state = copy.deepcopy(self._now())
