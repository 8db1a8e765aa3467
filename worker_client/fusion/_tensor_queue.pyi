import threading
from collections.abc import Sequence
from typing import Any

from reducer.errors import ReductionError
from reducer.wire.constants import ReduceOp
from worker_client.fusion.tensor_queue import Request
from worker_client.work import Lead

class RequestState: ...
class CompiledRequest(RequestState, Request): ...

class CompiledSubmissions:
    requests: dict[str, Any]
    calls: dict[str, int]
    refusal: ReductionError | None
    news_bytes: int
    news_since: float | None
    news_until: float

    def __init__(
        self, changed: threading.Condition, lock: Any, lead: Lead, timeout_s: float, threshold: int
    ) -> None: ...
    def submit(
        self,
        data: Any,
        op: str | ReduceOp,
        name: str,
        timeout: float | str | None,
        exact: bool,
        shape: str = "",
    ) -> Request: ...
    @staticmethod
    def pack(requests: Sequence[Any], into: memoryview) -> None: ...
    @staticmethod
    def unpack(requests: Sequence[Any], packed: memoryview) -> None: ...
