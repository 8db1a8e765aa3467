"""Named tensors from their submission to their end; what is done with each of them is compiled."""

from __future__ import annotations

import copy
import logging
import time
from typing import TYPE_CHECKING

from reducer.errors import ConfigError, ReductionError, ReductionTimeout
from worker_client.fusion import _tensor_queue
from worker_client.fusion.negotiation import MOST_KNOWN, GivenUp, Key
from worker_client.protocol.operation import STRAGGLER_S
from worker_client.work import Work

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import Any

    from worker_client.fusion.negotiation import RoundDecision, Tensor
    from worker_client.work import Lead

BURST = 20  # cycles that a tensor waits at most while others keep coming
LOOK_S = 0.2  # how often to look at deadlines while a round waits for other ranks
NAMED_S = 1.0  # how much later to warn, if it is not known yet which rank is late
WHY_MOST = 500  # characters of a reason that other ranks are told

log = logging.getLogger(__name__)


class Request(_tensor_queue.RequestState, Work):
    """A tensor that is to be reduced, and the handle that its caller waits with.

    Attributes:
        tensor: what it is.
        call: as of `Key`.
        view: the memory of `data`, bytes, or of a copy.
        begun, deadline: in seconds of the monotonic clock.
        warnings: how often it was said that it waits.
        missing: ranks that it waits for, as far as is known.
        residual: as of `Operation`.
    """

    __slots__ = ()

    def lacked_by(self, ranks: tuple[int, ...]) -> None:
        """Record that ranks take no part in a round: what they lacked before, they still do."""
        self.missing = tuple(sorted({*self.missing, *ranks}))

    @property
    def key(self) -> Key:
        """What ranks call it among each other."""
        return Key(self.tensor, self.call)

    def end(self, error: Exception | None) -> None:
        """End it; called when nothing reads or writes its memory any more."""
        if isinstance(error, ReductionError):
            error = copy.copy(error)
            error.name = self.tensor.name
        elif error is None and self.write_back is not None:
            error = self.written_back()
        self.finish(error)

    def __str__(self) -> str:
        """Say which all-reduce this is, for errors and logs."""
        tensor = self.tensor
        return f"all-reduce {tensor.name!r} ({tensor.nbytes} bytes of {tensor.dtype.name})"


class TensorQueue(_tensor_queue.QueueState):
    """The calls with names of one rank; threads may share it.

    `submit` accepts a tensor; its arguments are those of `Client.all_reduce`. It raises a
    ConfigError if one of them is not supported, or another call of this name waits, and `refusal`.

    Args:
        lead: as of `Work`.
        timeout_s: of requests whose caller names none.
        threshold: so many bytes of news are worth a round.
        cycle_s: how long a tensor waits for the next one, seconds.

    Attributes:
        requests: those that wait for other ranks, by name.
        calls: of each name so far, beyond the base that all ranks have; it may be below that.
        refusal: why nothing is accepted any more, if so.
        news_bytes: of what has come since the latest round began.
        news_since: when the oldest of that came, in seconds of the monotonic clock, ...
        news_until: ... and when the latest.
        durations: of calls that have ended well, each from its submission to its end.
        changed: guards all of this; notified when there is something to do.
        waited_s: seconds from the latest submission until nothing was in progress, so far.
    """

    def __init__(self, lead: Lead, timeout_s: float, threshold: int, cycle_s: float) -> None:
        super().__init__(Request, lead, timeout_s, threshold)
        self.waited_s = 0.0
        self._waited_from = 0.0  # the submission from which it was counted last
        self._cycle_s = cycle_s
        self._urgent = False  # somebody waits for a call
        self._taken: set[Request] = set()  # by a round that all ranks were in, and not ended
        # Calls that this rank does not make: that the others have not heard of, and that they heard
        # of in the latest round, which may have failed at some of them.
        self._unannounced: list[GivenUp] = []
        self._announced: list[GivenUp] = []
        # Calls that another rank does not make, by name and number, which this one may still make.
        self._refused: dict[tuple[str, int], ReductionError] = {}

    # -- any thread ---------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a call is in progress."""
        with self.changed:
            return bool(self.requests) or bool(self._taken)

    def accepted(self, name: object, data: Any) -> bool:
        """Whether a call of this name waits that was made with this very array or tensor."""
        request = self.requests.get(name) if isinstance(name, str) else None
        return request is not None and request.data is data

    def refused(self, name: str) -> ReductionError:
        """Return why a call of this name is not accepted now."""
        return in_progress(name) if self.refusal is None else copy.copy(self.refusal)

    def decline(self, name: str, why: BaseException) -> None:
        """Use up the number of a call of this name that this rank does not make."""
        with self.changed:
            call = self.calls.get(name, 0)
            self.calls[name] = call + 1
            self._unannounced.append(GivenUp(name, call, f"{type(why).__name__}: {why}"[:WHY_MOST]))
            self.changed.notify_all()

    def hurry(self) -> None:
        """Have a round begin at once, as somebody waits for a call."""
        with self.changed:
            self._urgent = bool(self.requests)
            self.changed.notify_all()

    def close(self, why: ReductionError) -> None:
        """Accept nothing any more."""
        with self.changed:
            self.refusal = why
            self.changed.notify_all()

    # -- between rounds -----------------------------------------------------------------------

    def await_round(self, now: float, again_at: float) -> bool:
        """Wait until a round may be due, for `LOOK_S` at most where a deadline could pass.

        Without news none is due before `again_at`. Return whether one is due `now`.
        """
        with self.changed:
            self._fail_refused()
            if not self.requests:  # what has failed before any round is no news
                self.news_bytes, self.news_since = 0, None
            due = self._due(again_at)
            if due > now and self.refusal is None:
                idle = not (self.requests or self._unannounced)
                wait_s = min(due, self.next_deadline()) - now
                self.changed.wait(None if idle else min(wait_s, LOOK_S))
            return due <= now

    def _due(self, again_at: float) -> float:
        """Return when the next round is to begin, in seconds of the monotonic clock."""
        if self._unannounced:
            return again_at
        if not self.requests:
            return float("inf")
        if self.news_since is None:
            return again_at  # others may have what is here
        if self._urgent or self.news_bytes >= self.threshold:
            return 0.0
        return min(self.news_until, self.news_since + BURST * self._cycle_s) + self._cycle_s

    def next_deadline(self) -> float:
        """Return when the first has no time left, in seconds of the monotonic clock."""
        return min((request.deadline for request in self.all()), default=float("inf"))

    def all(self) -> list[Request]:
        """Return all that wait for other ranks."""
        with self.changed:
            return list(self.requests.values())

    def expire(self, now: float, besides: Collection[Request] = ()) -> None:
        """Fail those that have no time left, and warn of those that have waited for long.

        Those `besides` may not fail now, as other ranks were told that they are here.
        """
        mine = self.all()
        overdue = [one for one in mine if one.deadline <= now and one not in besides]
        for request in self._withdraw(one.tensor.name for one in overdue):
            why = f"not submitted by {_ranks(request.missing)} within {now - request.begun:.3g} s"
            error = ReductionTimeout(f"{request}: {why}", missing=request.missing)
            given_up = GivenUp(
                request.tensor.name, request.call, f"{error}"[:WHY_MOST], error.missing
            )
            with self.changed:
                self._unannounced.append(given_up)  # the others hear that this rank gives it up
            request.end(error)
        old = [one for one in mine if one.begun <= now - STRAGGLER_S and one.deadline > now]
        late = [one for one in old if _warn_at(one) <= now]
        for missing in dict.fromkeys(one.missing for one in late):
            _warn([one for one in late if one.missing == missing], now)
        for request in late:
            request.warnings += 1

    # -- rounds -------------------------------------------------------------------------------

    def begin_round(self) -> tuple[list[Request], list[GivenUp]]:
        """Return what this rank has for a round, and the calls that it does not make."""
        with self.changed:
            self.news_bytes, self.news_since, self._urgent = 0, None, False
            return list(self.requests.values()), list(self._unannounced)

    def learn(self, given_up: list[GivenUp], decision: RoundDecision) -> None:
        """Fail what the ranks do not make, or cannot; `given_up` is what this one has said."""
        with self.changed:
            del self._unannounced[: len(given_up)]
            self._announced = given_up
            for (name, call), error in decision.given_up.items():
                waiting = self.requests.get(name)
                if call >= self.calls.get(name, 0) or (
                    waiting is not None and waiting.call == call
                ):
                    self._refused[name, call] = error
            while len(self._refused) > MOST_KNOWN:
                del self._refused[next(iter(self._refused))]
            self._fail_refused()
        for key, mismatch in decision.mismatched.items():
            waiting = self.requests.get(key.tensor.name)
            if waiting is not None and waiting.key == key:
                self.fail([key.tensor.name], mismatch)

    def _fail_refused(self) -> None:
        """Fail the calls that another rank does not make."""
        if not self._refused:
            return
        for request in self.all():
            if error := self._refused.pop((request.tensor.name, request.call), None):
                self.fail([request.tensor.name], error)

    def round_failed(self) -> None:
        """Let this rank say everything again: others may have heard more of a round, or less."""
        with self.changed:
            self._unannounced[:0], self._announced = self._announced, []

    def forget_untold(self) -> None:
        """Say no more which calls this rank does not make: the others' have failed as well."""
        with self.changed:
            self._unannounced = []

    def stand_in(self, tensor: Tensor, call: int) -> bool:
        """Whether this rank, which has joined, is to make a call of others; it is the next then."""
        name = tensor.name
        with self.changed:
            if (
                name in self.requests
                or call < self.calls.get(name, 0)
                or (name, call) in self._refused
            ):
                return False  # it fails by itself
            self.calls[name] = call
            return True

    def rebase(self, bases: Mapping[str, int]) -> None:
        """Subtract bases from the counts of names, and drop counts that become 0."""
        if not bases:
            return
        with self.changed:
            counts = {name: self.calls.get(name, 0) for name in {**self.calls, **bases}}
            left = {name: count - bases.get(name, 0) for name, count in counts.items()}
            self.calls = {name: count for name, count in left.items() if count}
            for name, request in self.requests.items():
                request.call -= bases.get(name, 0)
            self._unannounced, self._announced = (
                [one._replace(call=one.call - bases.get(one.name, 0)) for one in given_up]
                for given_up in (self._unannounced, self._announced)
            )
            self._refused = {
                (name, call - bases.get(name, 0)): error
                for (name, call), error in self._refused.items()
            }

    # -- ends ---------------------------------------------------------------------------------

    def take(self, names: Iterable[str]) -> list[Request]:
        """Take out calls of these names, which all ranks have; `end` ends them."""
        requests = self._withdraw(names)
        self._taken.update(requests)
        return requests

    def end(
        self,
        requests: Sequence[Request],
        error: Exception | None,
        packed: memoryview | None = None,
    ) -> None:
        """End calls that were taken out, whose results are in `packed` if they were packed."""
        if error is None:
            self.ended_well(requests)
        if packed is not None and error is None:
            _tensor_queue.unpack(requests, packed)
        else:
            for request in requests:
                request.end(error)
        self._taken.difference_update(requests)  # last: what an interrupt leaves, `end_all` ends
        if self.news_until != self._waited_from and not (self._taken or self.requests):
            self._waited_from = self.news_until
            self.waited_s += time.monotonic() - self.news_until

    def fail(self, names: Iterable[str], error: ReductionError) -> None:
        """Fail calls of these names that wait for other ranks."""
        self.end(self._withdraw(names), error)

    def end_all(self, why: ReductionError) -> None:
        """Accept nothing any more, and fail all that is here."""
        with self.changed:
            self.refusal = why
        self.end([*self._withdraw(list(self.requests)), *self._taken], why)

    def _withdraw(self, names: Iterable[str]) -> list[Request]:
        with self.changed:
            return [self.requests.pop(name) for name in names]


def _warn_at(request: Request) -> float:
    wait_s: float = STRAGGLER_S * 2**request.warnings
    return request.begun + wait_s + (0.0 if request.missing else NAMED_S)


def _warn(late: Sequence[Request], now: float) -> None:
    log.warning(
        "%s%s: not submitted by %s, %.0f s so far",
        late[0],
        f" and {len(late) - 1} more" if late[1:] else "",
        _ranks(late[0].missing),
        now - late[0].begun,
    )


def _ranks(missing: tuple[int, ...]) -> str:
    return f"rank {', '.join(map(str, missing))}" if missing else "some rank"


def in_progress(name: str) -> ConfigError:
    """Say that another all-reduce of this name waits."""
    return ConfigError(f"all-reduce {name!r} is in progress: wait for it, or give another name")
