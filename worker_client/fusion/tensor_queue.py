"""Named tensors that wait for other ranks, and the plain twin of what accepts them."""

from __future__ import annotations

import copy
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from reducer.errors import ConfigError, ReductionError, ReductionTimeout
from worker_client.fusion.negotiation import Key, Tensor
from worker_client.protocol.operation import STRAGGLER_S
from worker_client.staging.arguments import parse
from worker_client.staging.host_buffer import HostBuffer, host_buffer
from worker_client.work import STATELESS, Work

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from reducer.wire.constants import ReduceOp
    from worker_client.work import Lead


class Request(Work):
    """A tensor that is to be reduced, and the handle that its caller waits with.

    Attributes:
        tensor: what it is.
        call: as of `Key`.
        view: the memory of `data`, bytes, or of a copy.
        begun, deadline: in seconds of the monotonic clock.
        warnings: how often it was said that it waits.
        missing: ranks that it waits for, as far as is known.
        residual: as of `Operation`; set by whoever submits it.
    """

    __slots__ = STATELESS

    tensor: Tensor
    call: int
    begun: float
    deadline: float
    warnings: int
    missing: tuple[int, ...]
    residual: memoryview | None

    @property
    def view(self) -> memoryview:
        raise NotImplementedError

    def lacked_by(self, ranks: tuple[int, ...]) -> None:
        """Take note that ranks take no part in a round: what they lacked before, they still do."""
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

    def submit(  # noqa: PLR0917 (by position, as there may be thousands in each step)
        self,
        data: Any,
        op: str | ReduceOp,
        name: str,
        timeout: float | str | None,
        exact: bool,
        shape: str = "",
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


def twin(implementation: str) -> MakeSubmissions:
    """Return the twin that goes with an implementation, ``compiled`` or ``plain``.

    Where the compiled one alone was not built, the plain one serves, which is slower.
    """
    if implementation == "plain":
        return PlainSubmissions
    try:
        from worker_client.fusion import _tensor_queue  # noqa: PLC0415 (may not be there)
    except ImportError as error:
        log.info("named tensors are accepted by the plain twin, which is slower: %s", error)
        return PlainSubmissions
    return _tensor_queue.CompiledSubmissions


class PlainRequest(Request):
    """See `Request`."""

    __slots__ = (
        "_ended",
        "_future",
        "_lead",
        "_lock",
        "_view",
        "_waiters",
        "begun",
        "call",
        "data",
        "deadline",
        "error",
        "missing",
        "residual",
        "tensor",
        "warnings",
        "write_back",
    )

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
        self.tensor = tensor
        self.call = call
        self.data = data
        self._view = buffer.view
        self.write_back = buffer.write_back
        self.begun = now
        self.deadline = now + timeout_s
        self.warnings = 0
        self.missing = ()
        self.residual = None
        self._lead = lead
        self._ended = False
        self.error = None
        self._future = None
        self._waiters = None
        self._lock = threading.Lock()

    @property
    def view(self) -> memoryview:
        return self._view


class PlainSubmissions:
    """See `Submissions` and `MakeSubmissions`."""

    def __init__(
        self, changed: threading.Condition, lock: Any, lead: Lead, timeout_s: float, threshold: int
    ) -> None:
        self.requests: dict[str, PlainRequest] = {}
        self.calls: dict[str, int] = {}
        self.refusal: ReductionError | None = None
        self.news_bytes = 0
        self.news_since: float | None = None
        self.news_until = 0.0
        self._changed = changed
        self._lock = lock
        self._lead = lead
        self._timeout_s = timeout_s
        self._threshold = threshold

    def submit(  # noqa: PLR0917 (by position, as there may be thousands in each step)
        self,
        data: Any,
        op: str | ReduceOp,
        name: str,
        timeout: float | str | None,
        exact: bool,
        shape: str = "",
    ) -> Request:
        buffer = host_buffer(data)
        reduction, timeout_s = parse(buffer.dtype, op, name, timeout, self._timeout_s)
        tensor = Tensor(name, buffer.dtype, reduction, buffer.view.nbytes, exact, shape)
        now = time.monotonic()
        with self._lock:
            if self.refusal is not None:
                raise copy.copy(self.refusal)
            if name in self.requests:
                raise in_progress(name)
            call = self.calls.get(name, 0)
            request = PlainRequest(tensor, call, buffer, data, self._lead, now, timeout_s)
            self.news_bytes += tensor.nbytes
            if self.news_since is None or self.news_bytes >= self._threshold:
                self._changed.notify_all()
            if self.news_since is None:
                self.news_since = now
            self.news_until = now
            # Last, and as one: an exception out of a signal handler finds it accepted, or not.
            self.requests[name], self.calls[name] = request, call + 1
        return request

    @staticmethod
    def pack(requests: Sequence[Request], into: memoryview) -> None:
        begin = 0
        for request in requests:
            end = begin + request.tensor.nbytes
            into[begin:end] = request.view
            begin = end

    @staticmethod
    def unpack(requests: Sequence[Request], packed: memoryview) -> None:
        begin = 0
        for request in requests:
            end = begin + request.tensor.nbytes
            request.view[:] = packed[begin:end]
            begin = end
        for request in requests:
            request.end(None)


def in_progress(name: str) -> ConfigError:
    """Say that another all-reduce of this name waits."""
    return ConfigError(f"all-reduce {name!r} is in progress: wait for it, or give another name")
