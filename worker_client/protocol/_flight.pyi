import concurrent.futures
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from reducer.errors import ReductionError
from reducer.wire.constants import DType, ReduceOp
from reducer.wire.header import Buffer, Header
from reducer.wire.leaves import Share
from worker_client.protocol.flight import Carried, LinkShard, LinkStats, Send
from worker_client.protocol.operation import Operation
from worker_client.work import Ended, Lead

STRAGGLER_S: float
LAST_S: float

class Call:
    number: int

class Durations:
    @property
    def count(self) -> int: ...
    def add(self, seconds: float) -> None: ...
    def merge(self, others: Durations) -> None: ...
    def quantile(self, share: float) -> float: ...

class CallMeter:
    @property
    def durations(self) -> Durations: ...
    calls: int
    pending: int
    bytes_reduced: int
    since: float
    waited_s: float
    failure: str

class MeteredCall(Call):
    pending: bool
    nbytes: int
    def __init__(self, meter: CallMeter) -> None: ...
    def begin(self) -> None: ...
    def __call__(self, error: BaseException | None) -> None: ...

class OperationState(Call):
    view: memoryview
    dtype: DType
    op: ReduceOp
    name: str | None
    tag: int
    timeout_s: float
    call: Call | None
    refusal: ReductionError | None
    more: bool
    rounded: bool
    residual: memoryview | None
    data: Any
    write_back: Callable[[], object] | None
    ended: Ended | None
    @property
    def leaves(self) -> Share | None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def cuts_apart(self) -> bool: ...
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
    unwatched: bool
    cut: bool
    pieces: dict[Any, None]
    fill: Callable[[], object] | None
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
        call: Call | None = None,
        refusal: ReductionError | None = None,
        more: bool = False,
        rounded: bool = False,
        residual: memoryview | None = None,
        data: Any = None,
        write_back: Callable[[], object] | None = None,
        lead: Lead | None = None,
        ended: Ended | None = None,
        leaves: Share | None = None,
    ) -> None: ...

class CompiledFlight:
    earliest: float
    measured_since: float
    large_ended: float
    def __init__(self, identity: Header, large_bytes: int = ...) -> None: ...
    def add_link(self, window: int, retain: bool, in_place: bool = False) -> None: ...
    @property
    def watermark(self) -> int: ...
    @property
    def reached(self) -> int: ...
    @property
    def retained_bytes(self) -> int: ...
    @property
    def active(self) -> int: ...
    @property
    def busy_s(self) -> float: ...
    @property
    def unowned(self) -> Durations: ...
    @property
    def large(self) -> int: ...
    @property
    def fast_path_limit(self) -> float: ...
    lacks_leaves: bool
    @property
    def end_of_numbers(self) -> int: ...
    def set_steady(self, until: float, epoch: int = 0) -> None: ...
    def number(self, operation: Operation) -> None: ...
    def forget_history(self, failed: Operation) -> None: ...
    def forget_cuts(self, turns: int) -> None: ...
    def begin(self, operation: Operation, now: float) -> bool: ...
    def submit(
        self,
        operation: Operation,
        shards: Sequence[LinkShard],
        chunk_bytes: int,
        epoch: int,
        now: float = 0.0,
    ) -> None: ...
    def find(self, sequence: int) -> Operation | None: ...
    def all(self) -> list[Operation]: ...
    def open(self, link: int) -> None: ...
    def suppress_pings(self, link: int, pings_suppressed: bool) -> None: ...
    def measure_anew(self, link: int) -> None: ...
    def set_window(self, link: int, nbytes: int) -> None: ...
    def stats(self, link: int) -> LinkStats: ...
    def link_bytes(self, link: int) -> tuple[int, int]: ...
    def refill(self, now: float) -> list[Send]: ...
    def take(
        self, link: int, frame: Buffer, payload: Buffer, now: float
    ) -> list[Operation] | None: ...
    def take_placed(
        self, link: int, frame: bytes, nbytes: int, now: float
    ) -> list[Operation] | None: ...
    def expects(self, link: int, sequence: int, offset: int) -> bool: ...
    def waits_for(self, link: int, sequence: int) -> bool: ...
    def forget(self, link: int, sequence: int) -> None: ...
    def end(self, sequence: int) -> None: ...
    def needs(self, link: int) -> list[int]: ...
    def shut(self, link: int) -> None: ...
    def carried(self, link: int, sequence: int | None = None) -> list[Carried]: ...
    def move(self, sequence: int, offset: int, link: int) -> None: ...
    def retained(self, sequence: int, offset: int) -> tuple[bytes, Buffer] | None: ...
    def confirm(self, reached: int) -> None: ...
