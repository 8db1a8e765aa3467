"""Errors in the caller's words: which all-reduce failed, and what its ranks called it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from reducer.errors import MismatchError
from reducer.wire.constants import PLACES

if TYPE_CHECKING:
    from reducer.errors import ReductionError
    from worker_client.protocol.operation import Operation

_KEPT = 4096


class Names:
    """Names of the latest all-reduces, by the tags that reducers see in their place."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by tag as errors print it

    def remember(self, operation: Operation) -> None:
        """Keep the name of an all-reduce that has one."""
        self._names[f"#{operation.tag:016x}"] = str(operation.name)
        if len(self._names) > _KEPT:
            del self._names[next(iter(self._names))]

    def restore(self, error: ReductionError) -> ReductionError:
        """Return an error with the caller's names in place of tags."""
        if not isinstance(error, MismatchError) or error.field != "name":
            return error
        expected = self._names.get(str(error.expected), error.expected)
        got = self._names.get(str(error.got), error.got)
        return MismatchError(
            f"all-reduce {(error.sequence or 0) // PLACES}: ranks call it by different names, so "
            f"their order differs: rank {error.rank} says {expected!r}, "
            f"rank {error.other_rank} says {got!r}",
            field=error.field,
            rank=error.rank,
            other_rank=error.other_rank,
            expected=expected,
            got=got,
            sequence=error.sequence,
        )


def refused(rank: int, why: object) -> MismatchError:
    """Return what other ranks hear of a call that one rank cannot make."""
    return MismatchError(
        f"rank {rank} takes no part in this call: {why}",
        field="call",
        rank=rank,
        other_rank=rank,
        expected="the same call at every rank",
        got=str(why),
    )


def own(error: ReductionError, operation: Operation) -> ReductionError:
    """Return an error of this all-reduce alone, which names it."""
    error = copy.copy(error)
    error.name = operation.name
    error.sequence = None if operation.sequence < 0 else operation.sequence // PLACES
    return error
