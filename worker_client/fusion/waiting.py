"""Named tensors that have been submitted here, and that other ranks may not have submitted yet."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from reducer.errors import ReductionTimeout
from worker_client.protocol.pending import STRAGGLER_S

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from worker_client.fusion.request import MakeSubmissions, Request
    from worker_client.work import Lead

NAMED_S = 1.0  # how much later to warn, if it is not known yet which rank is late

log = logging.getLogger(__name__)


class Waiting:
    """The requests that wait for other ranks, by name; threads may share it.

    Args:
        make: makes what accepts requests.
        lead, timeout_s, threshold: as of `Submissions`.

    Attributes:
        submissions: accepts requests.
        lock: guards what is not constant.
        changed: notified when there is something to do, with that lock.
    """

    def __init__(self, make: MakeSubmissions, lead: Lead, timeout_s: float, threshold: int) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.submissions = make(self.changed, self.lock, lead, timeout_s, threshold)
        self._requests = self.submissions.requests

    def __len__(self) -> int:
        return len(self._requests)

    def rebase(self, bases: Mapping[str, int]) -> None:
        """Subtract bases from the counts of names, and drop counts that become 0."""
        with self.changed:
            counts = self.submissions.calls
            left = {name: counts.get(name, 0) - bases.get(name, 0) for name in {**counts, **bases}}
            self.submissions.calls = {name: count for name, count in left.items() if count}
            for name, request in self._requests.items():
                request.call -= bases.get(name, 0)

    def all(self) -> list[Request]:
        """Return all of them."""
        with self.changed:
            return list(self._requests.values())

    def withdraw(self, names: Iterable[str] | None = None) -> list[Request]:
        """Take out those of some names, or all, and return them."""
        with self.changed:
            names = list(self._requests) if names is None else names
            return [self._requests.pop(name) for name in names]

    def next_deadline(self) -> float:
        """Return when the first has no time left, in seconds of the monotonic clock."""
        return min((request.deadline for request in self._requests.values()), default=float("inf"))

    def look(
        self, now: float, besides: Collection[Request] = ()
    ) -> list[tuple[Request, ReductionTimeout]]:
        """Take out those that have no time left, and warn of those that have waited for long.

        Args:
            now: in seconds of the monotonic clock.
            besides: those that may not be taken out now, as other ranks were told that they are
                here.

        Returns:
            Those that are to fail, and how.
        """
        mine = self.all()
        overdue = [one for one in mine if one.deadline <= now and one not in besides]
        failed = []
        for request in self.withdraw(one.tensor.name for one in overdue):
            waited_s = now - request.begun
            why = f"{request}: not submitted by {_ranks(request.missing)} within {waited_s:.3g} s"
            failed.append((request, ReductionTimeout(why, missing=request.missing)))
        old = [one for one in mine if one.begun <= now - STRAGGLER_S and one.deadline > now]
        late = [one for one in old if _warn_at(one) <= now]
        for missing in dict.fromkeys(one.missing for one in late):
            _warn([one for one in late if one.missing == missing], now)
        for request in late:
            request.warnings += 1
        return failed


def _warn_at(request: Request) -> float:
    patience_s: float = STRAGGLER_S * 2**request.warnings
    return request.begun + patience_s + (0.0 if request.missing else NAMED_S)


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
