"""One all-reduce in progress, as it was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reducer.wire.constants import PLACES
from reducer.wire.header import fingerprint

if TYPE_CHECKING:
    from reducer.errors import ReductionError
    from reducer.wire.constants import DType, ReduceOp


class Operation:
    """What is asked for; how far it is, the flight knows.

    Args:
        view: the buffer's bytes, writable; the result replaces them chunk by chunk.
        dtype: element type of the buffer.
        op: reduction.
        name: the caller's name for it, compared between ranks; None for none.
        timeout_s: seconds from submission to the deadline.
        call: what all operations of one call have in common, and follow each other with; None for
            a call that is this operation alone.
        refusal: why it cannot be done at this rank: it uses its number up, and the others hear why.

    Attributes:
        data_bytes: of the caller's data that it reduces; `view` may hold less, or something else.
        sequence: its number within the job, given at submission.
        since, history: a checksum of what was asked for before, and the call that it begins with.
        deadline: absolute time by which it must be done, in seconds of the session's clock.
        begun: when it was submitted, by the same clock.
        ask_at: when to ask who is missing, by the same clock.
        ask_last_at: when to ask that for the last time, shortly before the deadline.
        overdue: whether its deadline has passed and the reducers were asked who is missing.
        missing: ranks that it waits for, as a reducer has said.
        quiet: whether others may take their time, so that no warning says whom it waits for.
    """

    __slots__ = (
        "ask_at",
        "ask_last_at",
        "begun",
        "call",
        "data_bytes",
        "deadline",
        "dtype",
        "history",
        "missing",
        "name",
        "op",
        "overdue",
        "quiet",
        "refusal",
        "sequence",
        "since",
        "tag",
        "timeout_s",
        "view",
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
    ) -> None:
        self.view = view
        self.data_bytes = view.nbytes
        self.dtype = dtype
        self.op = op
        self.name = name
        self.tag = fingerprint(name) if name else 0
        self.timeout_s = timeout_s
        self.call = call
        self.refusal = refusal
        self.sequence = -1
        self.since = self.history = 0
        self.deadline = self.begun = self.ask_at = self.ask_last_at = 0.0
        self.overdue = self.quiet = False
        self.missing: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Say which all-reduce this is, for errors and logs."""
        name = f" {self.name!r}" if self.name else ""
        number = "" if self.sequence < 0 else f" {self.sequence // PLACES}"
        return f"all-reduce{number}{name} ({self.view.nbytes} bytes of {self.dtype.name})"


@dataclass
class Unfinished:
    """One all-reduce that some rank may not have finished.

    Attributes:
        number: its sequence number.
        operation: what this rank asked for; None if it has ended here.
        failed: it has ended badly here.
        results: the chunks whose result is here, by offset; all of them if it has ended well.
    """

    number: int
    operation: Operation | None
    failed: bool = False
    results: dict[int, bytes] = field(default_factory=dict)
