"""What a session asks of whoever moves it on; one that sends, `Send`, is the flight's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from worker_client.protocol.flight import Send as Send  # noqa: PLC0414 (also from here)

if TYPE_CHECKING:
    from reducer.errors import ReductionError
    from worker_client.protocol.operation import Operation, Unfinished


class Finish(NamedTuple):
    """End an all-reduce: its buffer holds the result, or `error` says why not."""

    operation: Operation
    error: ReductionError | None


class Connect(NamedTuple):
    """Add a connection; the link that it is of counts them in order."""

    endpoint: str


class Reset(NamedTuple):
    """Close a link's connection with all that it has yet to send, and connect anew.

    Nothing reads the callers' memory for it from then on.
    """

    link: int


class HandOver(NamedTuple):
    """Have these calls brought to their end by other means, in this order: no reducer is left."""

    calls: list[Unfinished]


Action = Send | Finish | Connect | Reset | HandOver
