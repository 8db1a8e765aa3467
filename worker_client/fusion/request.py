"""A tensor that its caller has submitted under a name, and what keeps such requests."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Protocol

from reducer.errors import ReductionError
from worker_client.fusion.negotiation import Key
from worker_client.work import STATELESS, Work

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from reducer.wire.constants import ReduceOp
    from worker_client.fusion.negotiation import Tensor
    from worker_client.work import Lead


class Request(Work):
    """A tensor that is to be reduced, and the handle that its caller waits with.

    Attributes:
        tensor: what it is.
        call: as of `Key`.
        data: what the caller gave.
        view: its memory, bytes.
        write_back: copies the result to where the caller expects it, if `view` is a copy.
        begun, deadline: in seconds of the monotonic clock.
        warnings: how often it was said that it waits.
        missing: ranks that it waits for, as far as is known.
    """

    __slots__ = STATELESS

    tensor: Tensor
    call: int
    data: Any
    write_back: Callable[[], object] | None
    begun: float
    deadline: float
    warnings: int
    missing: tuple[int, ...]

    @property
    def view(self) -> memoryview:
        """As above."""
        raise NotImplementedError

    def lacked_by(self, ranks: tuple[int, ...]) -> None:
        """Take note that ranks take no part in a round: what they lacked before, they still do."""
        self.missing = tuple(sorted({*self.missing, *ranks}))

    @property
    def key(self) -> Key:
        """What ranks call it among each other."""
        return Key(self.tensor, self.call)

    def end(self, error: BaseException | None) -> None:
        """End it; called when nothing reads or writes its memory any more."""
        if isinstance(error, ReductionError):
            error = copy.copy(error)
            error.name = self.tensor.name
        if error is None and self.write_back is not None:
            try:
                self.write_back()
            except Exception as refused:  # noqa: BLE001 (the array's own; whoever waits gets it)
                error = refused
        self.finish(self.data, error)

    def __str__(self) -> str:
        """Say which all-reduce this is, for errors and logs."""
        tensor = self.tensor
        return f"all-reduce {tensor.name!r} ({tensor.nbytes} bytes of {tensor.dtype.name})"


class MakeSubmissions(Protocol):
    """The constructor of the two twins."""

    def __call__(
        self, changed: threading.Condition, lock: Any, lead: Lead, timeout_s: float, threshold: int
    ) -> Submissions:
        """Make one.

        Args:
            changed: notified when there is something to do.
            lock: that of `changed`, which guards all attributes.
            lead: as of `Work`.
            timeout_s: of requests whose caller names none.
            threshold: so many bytes of news are something to do.
        """


class Submissions(Protocol):
    """Requests by name, and what is done thousands of times in each step; threads may share it.

    Attributes:
        requests: those that wait for other ranks.
        calls: of each name so far, beyond the base that all ranks have; it may be below that.
        refusal: why nothing is accepted any more, if so.
        news_bytes: of what has come since the latest round began.
        news_since: when the oldest of that came, in seconds of the monotonic clock, ...
        news_until: ... and when the latest.
    """

    requests: dict[str, Any]  # of one class, a subclass of `Request`
    calls: dict[str, int]
    refusal: ReductionError | None
    news_bytes: int
    news_since: float | None
    news_until: float

    def submit(
        self, data: Any, op: str | ReduceOp, name: str, timeout: float | str | None
    ) -> Request:
        """Accept a tensor; the arguments are those of `Client.all_reduce`.

        Raises:
            ConfigError: one of them is not supported, or another one of this name waits.
            ReductionError: as of `refusal`.
        """

    @staticmethod
    def pack(requests: Sequence[Any], into: memoryview) -> None:
        """Copy the memory of requests, one after the other, into `into`, which has room for it."""

    @staticmethod
    def unpack(requests: Sequence[Any], packed: memoryview) -> None:
        """Copy results from `packed` to the requests, and end them well."""
