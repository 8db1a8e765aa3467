"""What `_state.pyx` is the compiled twin of: attributes as Python has them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from reducer.wire.header import fingerprint

if TYPE_CHECKING:
    import concurrent.futures
    import queue
    from collections.abc import Callable

    from reducer.errors import ReductionError
    from reducer.wire.constants import DType, ReduceOp
    from worker_client.work import Ended, Lead


class OperationState:
    """The attributes of an all-reduce; see `worker_client.protocol.operation.Operation`."""

    __slots__ = (
        "_claims",
        "_ended",
        "_future",
        "_lead",
        "_lock",
        "_missing",
        "_release",
        "_waiters",
        "answered",
        "ask_at",
        "ask_last_at",
        "begun",
        "call",
        "cut",
        "data",
        "deadline",
        "dtype",
        "ended",
        "error",
        "history",
        "more",
        "name",
        "op",
        "over",
        "overdue",
        "pieces",
        "prepare",
        "quiet",
        "refusal",
        "residual",
        "rounded",
        "sent",
        "sequence",
        "since",
        "tag",
        "timeout_s",
        "view",
        "write_back",
    )

    def __init__(
        self,
        view: memoryview,
        dtype: DType,
        op: ReduceOp,
        name: str | None,
        timeout_s: float,
        *,
        call: object = None,
        refusal: ReductionError | None = None,
        more: bool = False,
        rounded: bool = False,
        residual: memoryview | None = None,
        data: Any = None,
        write_back: Callable[[], object] | None = None,
        lead: Lead | None = None,
        ended: Ended | None = None,
    ) -> None:
        self.view = view
        self.dtype = dtype
        self.op = op
        self.name = name
        self.tag = fingerprint(name) if name else 0
        self.timeout_s = timeout_s
        self.call = call
        self.refusal = refusal
        self.more = more
        self.rounded = rounded
        self.residual = residual
        self.data = data
        self.write_back = write_back
        self.ended = ended
        self.over = False
        self.sequence = -1
        self.since = self.history = 0
        self.deadline = self.begun = self.ask_at = self.ask_last_at = 0.0
        self.sent = self.answered = 0.0
        self.overdue = self.quiet = self.cut = False
        self.pieces: dict[Any, None] = {}
        self.prepare: Callable[[], object] | None = None
        self.error: Exception | None = None
        self._missing: tuple[int, ...] = ()
        self._lead = lead
        self._ended = False
        self._future: concurrent.futures.Future[Any] | None = None
        self._waiters: tuple[queue.SimpleQueue[None], ...] | None = None
        self._lock = threading.Lock()


class CallMeter:
    """What a client's calls have come to so far; threads may share it.

    Attributes:
        calls: how many have begun.
        pending: how many of them have not ended.
        bytes_reduced: of the buffers of those that have ended well.
        since: the latest beginning, or end of the last pending one, in seconds of `time.monotonic`.
        waited_s: seconds from the latest beginning to when none was pending, in all.
        failure: class and text of the error of the call that has ended last; "" for none. Not the
            error itself, which refers to where it was raised, and so to that call's buffer.
    """

    def __init__(self) -> None:
        self.calls = self.pending = self.bytes_reduced = 0
        self.since = self.waited_s = 0.0
        self.failure = ""


class MeteredCall:
    """One call: what all its operations have in common, and what is called with its end.

    Args:
        meter: counts it.

    Attributes:
        pending: whether it has begun, and not ended.
        nbytes: of its buffer.
    """

    def __init__(self, meter: CallMeter) -> None:
        self._meter = meter
        self.pending = False
        self.nbytes = 0

    def begin(self) -> None:
        """Count it."""
        meter = self._meter
        # As one: an exception out of a signal handler finds it begun, or not.
        self.pending, meter.calls, meter.pending = True, meter.calls + 1, meter.pending + 1
        meter.since = time.monotonic()

    def __call__(self, error: BaseException | None) -> None:
        """Take note of its end, once."""
        meter = self._meter
        if not self.pending:
            return
        self.pending, meter.pending = False, meter.pending - 1
        meter.failure = "" if error is None else f"{type(error).__name__}: {error}"
        if error is None:
            meter.bytes_reduced += self.nbytes
        if not meter.pending:
            since, meter.since = meter.since, time.monotonic()
            meter.waited_s += meter.since - since


class NumberingState:
    """See `worker_client.protocol.lifecycle.Numbering`."""


class PendingState:
    """See `worker_client.protocol.operation.Pending`."""


class PlanState:
    """See `worker_client.protocol.shard_map.Plan`."""


class SessionState:
    """See `worker_client.protocol.session.Session`."""


class DriverState:
    """See `worker_client.runtime.driver.Driver`."""

    closing = False
