import threading
from collections.abc import Callable, Sequence
from typing import Any

from reducer.errors import ReductionError
from reducer.wire.constants import ReduceOp
from worker_client.fusion.negotiation import Tensor
from worker_client.fusion.tensor_queue import Request
from worker_client.protocol._flight import Durations
from worker_client.work import Lead

class RequestState:
    tensor: Tensor
    call: int
    begun: float
    deadline: float
    warnings: int
    missing: tuple[int, ...]
    residual: memoryview | None
    @property
    def view(self) -> memoryview: ...

class QueueState:
    requests: dict[str, Request]
    calls: dict[str, int]
    refusal: ReductionError | None
    threshold: int
    news_bytes: int
    news_since: float | None
    news_until: float
    @property
    def durations(self) -> Durations: ...
    changed: threading.Condition

    def __init__(
        self, make: Callable[[], Request], lead: Lead, timeout_s: float, threshold: int
    ) -> None: ...
    def ended_well(self, requests: Sequence[Request]) -> None: ...
    def refused(self, name: str) -> ReductionError: ...
    def submit(
        self,
        data: Any,
        op: str | ReduceOp,
        name: str,
        timeout: float | str | None,
        exact: bool,
        shape: str = "",
        residual: memoryview | None = None,
    ) -> Request: ...

def pack(requests: Sequence[Request], into: memoryview) -> None: ...
def unpack(requests: Sequence[Request], packed: memoryview) -> None: ...
