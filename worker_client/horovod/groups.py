"""Ranks that make calls together: those of a job, or of a process set."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from reducer.errors import ConfigError, LocalProtocolError, RankLostError
from worker_client.collectives import AllGather
from worker_client.fusion.tensor_queue import in_progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker_client.client.client import Client
    from worker_client.work import Work

_NAME_BYTES = 96


class Group:
    """What calls of this process to the same ranks share.

    Args:
        client: of their job.
        ranks: numbers of the whole job's ranks, by the client's; none if these are the same.

    Attributes:
        present: the client's numbers of the ranks that take part, by Horovod's, which have no gaps.
            The same at every rank.
        calls: how many this rank has made since the latest `join()`.
        optimizers: how many this rank has made whose gradients they reduce.
    """

    def __init__(self, client: Client, ranks: tuple[int, ...] = ()) -> None:
        self.client = client
        self.present: tuple[int, ...] = client.present
        self.calls = 0
        self.optimizers = 0
        self._ranks = ranks
        self._gathers = 0
        self._gathering: WeakValueDictionary[str, Gathering] = WeakValueDictionary()
        self._renewals = 0  # the same at every rank
        self._joins = 0
        self._numbers: Counter[str] = Counter()  # of calls without a name, by kind

    @property
    def rank(self) -> int:
        """Number of this rank among them."""
        return self.present.index(self.client.rank)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.present)

    @property
    def alone(self) -> bool:
        """Whether there is no other rank, and never will be."""
        return self.client.world_size == 1 and not self.client.admits

    def number(self, rank: int) -> int:
        """Return the client's number of a rank, which is called as the whole job calls it.

        Raises:
            ConfigError: there is no such rank.
        """
        if self._ranks:
            if rank not in self._ranks:
                raise ConfigError(f"root {rank} is not in the process set of {list(self._ranks)}")
            return self._ranks.index(rank)
        if not 0 <= rank < self.size:
            raise ConfigError(f"root {rank} is not a rank of a world of size {self.size}")
        return self.present[rank]

    @contextmanager
    def call(self, kind: str, name: str | None, parts: int = 1) -> Iterator[str]:
        """Name a call between ranks, and tell the others if it is refused within this context.

        Args:
            kind: beginning of its name. Joined ranks stand in for an ``allreduce`` alone.
            name: the caller's; None takes a number, which is used up whatever becomes of the call.
            parts: all-reduces that the other ranks may make of it; see `part_of`.

        Raises:
            ConfigError: a gather of this name is in progress.
        """
        if name is None:
            name = f"noname.{self._renewals}.{self._joins}.{self._numbers[kind]}"
            self._numbers[kind] += 1
        wire = short(f"{kind}.{name}")
        try:
            latest = self._gathering.get(wire)
            if latest is not None and not latest.done():
                raise in_progress(wire)
            yield wire
        except BaseException as error:
            for at in range(parts):
                self.client.decline(error, name=part_of(wire, at))
            raise
        self.calls += 1

    def gather(self, payload: bytes, wire: str) -> Gathering:
        """Start to gather every rank's payload."""
        self._gathers += 1
        gathering = self._gathering[wire] = Gathering(self, payload, wire, self._gathers)
        return gathering


class Part(NamedTuple):
    """Some of a job's ranks, ascending, and the group that they are; None at a rank of no such."""

    ranks: tuple[int, ...]
    group: Group | None


class Gathering:
    """Payloads of all ranks on their way: an all-reduce of their sizes, and then one of them.

    The second begins where the first ends, in whichever thread that is, so that nobody need wait.
    Its name is told by the first one, and is never used again: whatever becomes of a gather at one
    rank, no part of it can be taken for one of the next.

    Args:
        group: who gathers.
        payload: this rank's.
        wire: name of the call.
        number: of this rank's gathers.
    """

    def __init__(self, group: Group, payload: bytes, wire: str, number: int) -> None:
        self._group = group
        self._wire = wire
        self._bytes = AllGather(group.client, payload, number)
        self._second: Work | None = None
        self._error: Exception | None = None
        self._begun = threading.Event()  # one of the two is there
        self._first = group.client.all_reduce(self._bytes.asked, "sum", name=wire)
        self._first.future().add_done_callback(lambda _: self._go_on())

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        second = self._second
        return self._begun.is_set() and (second is None or second.done())

    def wait(self) -> list[bytes]:
        """Return every rank's payload, in rank order.

        Raises:
            RankLostError: the job goes on without a rank whose payload belongs to them.
            ReductionError: as `Client.all_reduce`.
        """
        self._first.ends_within(math.inf)
        self._begun.wait()
        if self._second is None:
            raise self._error or LocalProtocolError("the gather was interrupted")
        self._second.wait()
        payloads = self._bytes.received()
        for number in self._group.present:
            if number not in payloads:
                raise RankLostError(f"rank {number}, whose data is needed, is lost", rank=number)
        return list(payloads.values())

    def _go_on(self) -> None:
        try:
            if self._first.error is not None:
                raise self._first.error
            name = f"{self._wire}#{self._bytes.number}"
            self._second = self._group.client.all_reduce(self._bytes.payloads(), "sum", name=name)
        except Exception as error:  # noqa: BLE001 (whoever waits gets it)
            self._error = error
        finally:
            self._begun.set()


def short(name: str) -> str:
    """Return a name, if it is short enough to be told to other ranks; else a digest of it."""
    if len(name.encode()) <= _NAME_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{name.encode()[: _NAME_BYTES - 33].decode(errors='ignore')}~{digest}"


def part_of(wire: str, at: int) -> str:
    """Return what an all-reduce of a call that consists of several is called between ranks."""
    return f"{wire}#{at}" if at else wire
