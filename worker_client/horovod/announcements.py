"""What a rank is about to do, told to those that have joined early and must take part.

A rank that has called `join()` has no more calls of its own, and still contributes to those of
others. So each call is announced by an all-reduce of its own, a few hundred bytes that travel
beside the call's data and that nobody but a joined rank waits for. Every rank makes the same
announcements in the same order.

An announcement has a byte for each rank, 1 if it is active, then the call's description, then its
complement; the reduction is the maximum, to which joined ranks contribute zeros. Description and
complement still fit together unless two ranks announced different calls.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reducer.errors import ConfigError

if TYPE_CHECKING:
    from worker_client.client import Client
    from worker_client.work import Work

_HEAD = struct.Struct("<BBBBq")  # kind, op, dtype, length of the name, size
_NAME_BYTES = 96
_BYTES = _HEAD.size + _NAME_BYTES
# Names are used again after so many, so that what is learnt about a name stays of use.
_SLOTS = 8


class Kind(IntEnum):
    """What is announced."""

    STEP = 1
    """The gradients of an optimizer; the size is its number."""

    ALL_REDUCE = 2
    """An all-reduce of so many elements."""

    OTHER = 3
    """What joined ranks cannot take part in."""


class Call(NamedTuple):
    """The description of a call.

    Attributes:
        kind: what it is.
        name: what the all-reduce is called between ranks.
        op, dtype: numbers of `ops.Op` and of the wire's dtypes; 0 if there are none.
        size: elements, or the optimizer's number.
    """

    kind: Kind
    name: str
    op: int = 0
    dtype: int = 0
    size: int = 0


class Announcements:
    """The announcements of one job, made and heard.

    Args:
        client: the job's.

    Attributes:
        calls: how many were made or heard that are no steps, which ranks may announce sooner or
            later than others do; the same at every rank between two calls.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._last: deque[Work] = deque(maxlen=_SLOTS)
        self._latest: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        self._number = 0
        self.calls = 0

    def make(self, call: Call) -> list[Work]:
        """Announce a call of this rank.

        Returns:
            What to wait for together with the call: nothing, if there is no other rank.
        """
        self.calls += call.kind is not Kind.STEP
        description = np.zeros(_BYTES, np.uint8)
        name = call.name.encode()
        head = _HEAD.pack(call.kind, call.op, call.dtype, len(name), call.size)
        described = head + name
        description[: len(described)] = np.frombuffer(described, np.uint8)
        active = np.zeros(self._client.world_size, np.uint8)
        active[self._client.rank] = 1
        return self._start(np.concatenate([active, description, 255 - description]))

    def active(self) -> list[int]:
        """Wait for the latest announcement, and return the ranks that were active then.

        Raises:
            ReductionError: as `Client.all_reduce`.
        """
        if self._last:
            self._last[-1].wait()
        if self._latest is None:
            return list(range(self._client.world_size))
        return _ranks(self._latest[: self._client.world_size])

    def hear(self) -> tuple[list[int], Call | None]:
        """Wait for the active ranks' next announcement.

        Returns:
            The ranks that are active, and their call; None if there is no active rank any more.

        Raises:
            ConfigError: active ranks made different calls.
            ReductionError: as `Client.all_reduce`.
        """
        heard = np.zeros(self._client.world_size + 2 * _BYTES, np.uint8)
        for work in self._start(heard):
            work.wait()
        active, description, complement = np.split(
            heard, [self._client.world_size, self._client.world_size + _BYTES]
        )
        ranks = _ranks(active)
        if not ranks:
            return [], None
        if not np.array_equal(description, 255 - complement):
            raise ConfigError(
                f"ranks {ranks} make different calls while rank {self._client.rank} has joined: "
                "until all have joined, every rank must make the same calls in the same order"
            )
        data = description.tobytes()
        kind, op, dtype, length, size = _HEAD.unpack_from(data)
        name = data[_HEAD.size : _HEAD.size + length].decode()
        self.calls += kind != Kind.STEP
        return ranks, Call(Kind(kind), name, op, dtype, size)

    def _start(self, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> list[Work]:
        number, self._number = self._number, self._number + 1
        self._latest = data
        if self._client.world_size == 1:
            return []
        if len(self._last) == _SLOTS:
            self._last[0].wait()  # its name is about to be used again
        work = self._client.all_reduce(data, "max", name=f"horovod.call.{number % _SLOTS}")
        self._last.append(work)
        return [work]


def _ranks(active: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> list[int]:
    return [int(rank) for rank in np.flatnonzero(active)]


def short(name: str) -> str:
    """Return the name if an announcement has room for it, else a digest with its beginning."""
    if len(name.encode()) <= _NAME_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{name.encode()[: _NAME_BYTES - 33].decode(errors='ignore')}~{digest}"
