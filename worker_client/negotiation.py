"""What the ranks tell each other of the tensors that they have for reduction (sans I/O).

Ranks submit named tensors in any order and at different times, but all-reduces must be the same
calls in the same order everywhere. So in rounds every rank says which tensors it has, and those
that all ranks have are reduced, in an order that all derive from the same bytes. A tensor is
announced once, with its name, dtype, reduction and size; from then on it is a bit at the index that
all ranks gave it.

A round is one sum of bytes, in which every rank has a section of its own, and zeros elsewhere:

    1 byte    1, unless the rank takes no part
    4 bytes   length of its announcements, little-endian
    T/8 bytes which of the T known tensors it has, a bit each

and, if anybody announces something, a second sum with all announcements, JSON, in rank order.
"""

from __future__ import annotations

import json
import struct
import zlib
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reducer.errors import MismatchError
from reducer.wire.constants import DType, ReduceOp

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MOST_KNOWN = 8192  # tensors; beyond that all ranks forget them, and announce again what they have

_HEAD = struct.Struct("<BI")


class Key(NamedTuple):
    """What must be equal at all ranks for a tensor to be reduced."""

    name: str
    dtype: DType
    op: ReduceOp
    nbytes: int


class Decision(NamedTuple):
    """What a round has shown; the same at every rank but for `waiting`'s keys.

    Attributes:
        ready: tensors that every rank has, in the order in which to reduce them.
        mismatched: tensors that ranks have under one name with different properties, and why.
        waiting: ranks that a tensor of this rank waits for.
    """

    ready: list[Key]
    mismatched: dict[str, MismatchError]
    waiting: dict[Key, tuple[int, ...]]


class Negotiation:
    """One rank's part in the rounds.

    Args:
        rank, world_size: who we are.

    A round is `ask`, a sum over all ranks of what it returns, `hear`, for announcements another
    sum, and `decide`. If any of this fails, `reset`: other ranks may have heard more or less.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._mine: list[Key] = []
        self._said = b""
        self._ends: list[int] = []
        self._lengths: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forget all tensors that ranks have announced."""
        self._known: list[Key] = []
        self._indices: dict[Key, int] = {}
        self._by_name: dict[str, list[int]] = {}
        self.state = 0
        """A checksum of what is known: ranks whose sums differ in it cannot go on together."""

    def ask(self, mine: Iterable[Key]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Begin a round; return what is to be summed, uint8.

        Args:
            mine: the tensors that this rank has, no two of a name.
        """
        self._mine = list(mine)
        has = np.zeros(len(self._known), np.uint8)
        news = []
        for key in self._mine:
            index = self._indices.get(key)
            if index is None:
                news.append((key.name, int(key.dtype), int(key.op), key.nbytes))
            else:
                has[index] = 1
        self._said = json.dumps(news, separators=(",", ":")).encode() if news else b""
        section = _HEAD.pack(1, len(self._said)) + np.packbits(has).tobytes()
        buffer = np.zeros((self._world_size, len(section)), np.uint8)
        buffer[self._rank] = np.frombuffer(section, np.uint8)
        self._sections = buffer
        return buffer.reshape(-1)

    def hear(self) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """Read the sum; return what is to be summed now, uint8, if ranks announce something."""
        heads = [_HEAD.unpack_from(section.tobytes()) for section in self._sections]
        self._present = [rank for rank, (present, _) in enumerate(heads) if present]
        self._lengths = [length for _, length in heads]
        self._ends = np.cumsum(self._lengths).tolist()
        total = self._ends[-1]
        self._announced = np.zeros(total, np.uint8)
        if not total:
            return None
        end = self._ends[self._rank]
        self._announced[end - len(self._said) : end] = np.frombuffer(self._said, np.uint8)
        return self._announced

    def decide(self) -> Decision:
        """End the round with all announcements."""
        announced = {rank: list(self._announcements(rank)) for rank in self._present}
        bits = self._sections[:, _HEAD.size :]
        known = np.unpackbits(bits, axis=1, count=len(self._known))[self._present].astype(bool)
        for key in chain.from_iterable(announced.values()):
            self._learn(key)
        has = np.zeros((len(self._present), len(self._known)), bool)
        has[:, : known.shape[1]] = known
        for row, rank in enumerate(self._present):
            has[row, [self._indices[key] for key in announced[rank]]] = True
        complete = np.logical_and.reduce(has, axis=0)
        late = [key for key in self._mine if not complete[self._indices[key]]]
        decision = Decision(
            [self._known[index] for index in np.flatnonzero(complete).tolist()],
            dict(self._mismatches(has)),
            {key: self._without(has[:, self._indices[key]]) for key in late},
        )
        if len(self._known) > MOST_KNOWN:
            self.reset()
        return decision

    def _announcements(self, rank: int) -> Iterator[Key]:
        end, length = self._ends[rank], self._lengths[rank]
        if length:
            for name, dtype, op, nbytes in json.loads(
                self._announced[end - length : end].tobytes()
            ):
                yield Key(name, DType(dtype), ReduceOp(op), nbytes)

    def _without(self, has: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[int, ...]:
        return tuple(rank for rank, it_has in zip(self._present, has, strict=True) if not it_has)

    def _learn(self, key: Key) -> None:
        if key in self._indices:
            return
        self._indices[key] = len(self._known)
        self._by_name.setdefault(key.name, []).append(len(self._known))
        self._known.append(key)
        what = f"{key.name} {key.dtype:d} {key.op:d} {key.nbytes}"
        self.state = zlib.crc32(what.encode(), self.state)

    def _mismatches(
        self, has: np.ndarray[Any, np.dtype[np.bool_]]
    ) -> Iterator[tuple[str, MismatchError]]:
        """Find names under which every rank has something, but not all the same."""
        for name, indices in self._by_name.items():
            if len(indices) == 1:
                continue
            columns = has[:, indices]
            if not columns.any(axis=1).all() or columns.all(axis=0).any():
                continue
            which = columns.argmax(axis=1)  # of the name's tensors, the one that each rank has
            other = int(np.flatnonzero(which != which[0])[0])
            expected, got = (self._known[indices[which[row]]] for row in (0, other))
            yield name, _mismatch(expected, self._present[0], got, self._present[other])


def _mismatch(expected: Key, rank: int, got: Key, other_rank: int) -> MismatchError:
    field = next(name for name in Key._fields if getattr(expected, name) != getattr(got, name))
    says, other_says = (
        value.name if isinstance(value := getattr(key, field), (DType, ReduceOp)) else value
        for key in (expected, got)
    )
    field = "total_bytes" if field == "nbytes" else field
    return MismatchError(
        f"all-reduce {expected.name!r}: ranks disagree on {field}: rank {rank} says {says}, "
        f"rank {other_rank} says {other_says}",
        field=field,
        rank=rank,
        other_rank=other_rank,
        expected=says,
        got=other_says,
    )
