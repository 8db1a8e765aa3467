"""What is done with every named tensor: the plain twin."""

from __future__ import annotations

import copy
import threading
import time
from typing import TYPE_CHECKING, Any

from reducer.errors import ConfigError, ReductionError
from worker_client.fusion.negotiation import Tensor
from worker_client.fusion.request import Request
from worker_client.staging.arguments import parse
from worker_client.staging.host_buffer import HostBuffer, host_buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reducer.wire.constants import ReduceOp
    from worker_client.fusion.request import MakeSubmissions
    from worker_client.work import Lead


def twin(implementation: str) -> MakeSubmissions:
    """Return the twin that goes with an implementation, ``compiled`` or ``plain``.

    Raises:
        ConfigError: the compiled one was not built.
    """
    if implementation == "plain":
        return PlainSubmissions
    try:
        from worker_client.fusion import _submissions  # noqa: PLC0415 (may not be there)
    except ImportError as error:
        raise ConfigError(
            f"the compiled fusion was not built: install a C compiler and reinstall ({error})"
        ) from None
    return _submissions.CompiledSubmissions


class PlainRequest(Request):
    """See `Request`."""

    __slots__ = (
        "_ended",
        "_error",
        "_future",
        "_lead",
        "_lock",
        "_result",
        "_view",
        "begun",
        "call",
        "data",
        "deadline",
        "missing",
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
        self._lead = lead
        self._ended = False
        self._result = None
        self._error = None
        self._future = None
        self._lock = threading.Lock()

    @property
    def view(self) -> memoryview:
        """As of `Request`."""
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

    def submit(
        self, data: Any, op: str | ReduceOp, name: str, timeout: float | str | None
    ) -> Request:
        """As of `Submissions`."""
        buffer = host_buffer(data)
        reduction, timeout_s = parse(buffer.dtype, op, name, timeout, self._timeout_s)
        tensor = Tensor(name, buffer.dtype, reduction, buffer.view.nbytes)
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
        """As of `Submissions`."""
        begin = 0
        for request in requests:
            end = begin + request.tensor.nbytes
            into[begin:end] = request.view
            begin = end

    @staticmethod
    def unpack(requests: Sequence[Request], packed: memoryview) -> None:
        """As of `Submissions`."""
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
