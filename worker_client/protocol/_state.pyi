import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any

from reducer.errors import ReductionError
from reducer.wire.constants import DType, ReduceOp
from worker_client.work import Ended, Lead

class OperationState:
    view: memoryview
    dtype: DType
    op: ReduceOp
    name: str | None
    tag: int
    timeout_s: float
    call: object
    refusal: ReductionError | None
    more: bool
    rounded: bool
    residual: memoryview | None
    data: Any
    write_back: Callable[[], object] | None
    ended: Ended | None
    over: bool
    sequence: int
    since: int
    history: int
    deadline: float
    begun: float
    ask_at: float
    ask_last_at: float
    sent: float
    answered: float
    overdue: bool
    quiet: bool
    cut: bool
    pieces: dict[Any, None]
    prepare: Callable[[], object] | None
    error: Exception | None
    _missing: tuple[int, ...]
    _lead: Lead | None
    _ended: bool
    _future: concurrent.futures.Future[Any] | None
    _waiters: tuple[queue.SimpleQueue[None], ...] | None
    _lock: threading.Lock
    _release: Callable[[Exception | None], object] | None
    _claims: Any
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
    ) -> None: ...

class CallMeter:
    calls: int
    pending: int
    bytes_reduced: int
    since: float
    waited_s: float
    failure: str

class MeteredCall:
    pending: bool
    nbytes: int
    def __init__(self, meter: CallMeter) -> None: ...
    def begin(self) -> None: ...
    def __call__(self, error: BaseException | None) -> None: ...

class NumberingState: ...
class PendingState: ...
class PlanState: ...
class SessionState: ...

class DriverState:
    closing: bool
