"""Named tensors that have been submitted here, and that other ranks may not have submitted yet."""

from __future__ import annotations

import copy
import logging
import threading
from typing import TYPE_CHECKING, Any

from reducer.errors import ConfigError, ReductionError, ReductionTimeout
from worker_client.negotiation import Key
from worker_client.pending import STRAGGLER_S
from worker_client.work import Work

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from worker_client.host_buffer import HostBuffer
    from worker_client.negotiation import Tensor
    from worker_client.work import Lead

NAMED_S = 1.0  # how much later to warn, if it is not known yet which rank is late

log = logging.getLogger(__name__)


class Request(Work):
    """A tensor that is to be reduced, and the handle that its caller waits with.

    Args:
        tensor: what it is.
        call: how many calls of its name there were before.
        buffer: its memory.
        data: what the caller gave.
        lead: as of `Work`.
        now: in seconds of the monotonic clock.
        timeout_s: seconds until it fails.
    """

    __slots__ = ("begun", "buffer", "call", "data", "deadline", "missing", "tensor", "warn_at")

    def __init__(  # noqa: PLR0917 (by position, as there may be thousands in each step)
        self,
        tensor: Tensor,
        call: int,
        buffer: HostBuffer,
        data: Any,
        lead: Lead,
        now: float,
        timeout_s: float,
    ) -> None:
        super().__init__("", lead)
        self.tensor = tensor
        self.call = call
        self.buffer = buffer
        self.data = data
        self.begun = now
        self.deadline = now + timeout_s
        self.warn_at = now + STRAGGLER_S
        self.missing: tuple[int, ...] = ()  # ranks that it waits for, as far as is known

    def lacked_by(self, ranks: tuple[int, ...]) -> None:
        """Take note that ranks take no part in a round: what they lacked before, they still do."""
        self.missing = tuple(sorted({*self.missing, *ranks}))

    @property
    def key(self) -> Key:
        """What ranks call it among each other."""
        return Key(self.tensor, self.call)

    def end(self, error: BaseException | None) -> None:
        """End it; called once, when nothing reads or writes its memory any more."""
        if isinstance(error, ReductionError):
            error = copy.copy(error)
            error.name = self.tensor.name
        if error is None and self.buffer.write_back is not None:
            try:
                self.buffer.write_back()
            except Exception as refused:  # noqa: BLE001 (the array's own; whoever waits gets it)
                error = refused
        self.finish(self.data, error)

    def __str__(self) -> str:
        """Say which all-reduce this is, for errors and logs."""
        tensor = self.tensor
        return f"all-reduce {tensor.name!r} ({tensor.nbytes} bytes of {tensor.dtype.name})"


class Waiting:
    """The requests that wait for other ranks, by name; threads may share it.

    Attributes:
        lock: guards what is not constant.
        changed: notified when there is something to do, with that lock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._requests: dict[str, Request] = {}
        self._calls: dict[str, int] = {}  # of each name, from when ranks began to count

    def __len__(self) -> int:
        return len(self._requests)

    def count(self, name: str) -> int:
        """Count a call, and return how many of its name there were before; hold `changed`.

        Raises:
            ConfigError: another one of this name waits.
        """
        if name in self._requests:
            raise ConfigError(
                f"all-reduce {name!r} is in progress: wait for it, or give another name"
            )
        before = self._calls.get(name, 0)
        self._calls[name] = before + 1
        return before

    def add(self, request: Request) -> None:
        """Take note of a request; hold `changed`."""
        self._requests[request.tensor.name] = request

    def rebase(self, bases: Mapping[str, int]) -> None:
        """Count calls of some names from 0 again: so many of each count as none from now on."""
        with self.changed:
            for name, base in bases.items():
                calls = self._calls.pop(name, 0) - base
                if calls:
                    self._calls[name] = calls
                if (request := self._requests.get(name)) is not None:
                    request.call -= base

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

    def look(self, now: float, besides: Collection[Request] = ()) -> None:
        """Fail those that have no time left, and warn of those that have waited for long.

        Args:
            now: in seconds of the monotonic clock.
            besides: those that may not be failed now, as other ranks were told that they are here.
        """
        mine = self.all()
        overdue = [one for one in mine if one.deadline <= now and one not in besides]
        for request in self.withdraw(one.tensor.name for one in overdue):
            waited_s = now - request.begun
            why = f"{request}: not submitted by {_ranks(request.missing)} within {waited_s:.3g} s"
            request.end(ReductionTimeout(why, missing=request.missing))
        late = [
            one
            for one in mine
            if one.deadline > now and one.warn_at + (0.0 if one.missing else NAMED_S) <= now
        ]
        for missing in dict.fromkeys(one.missing for one in late):
            _warn([one for one in late if one.missing == missing], now)
        for request in late:
            request.warn_at = request.begun + 2 * (request.warn_at - request.begun)


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
