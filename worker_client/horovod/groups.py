"""Ranks that make calls together, those of a job or of a process set, and these calls.

Calls of every framework are made of what is here. All of them are all-reduces. In a broadcast the
others contribute zeros; a gather, an all-to-all and a reduce-scatter move more bytes than
collectives of their own would, and are for weights and metrics, not for every step. Whatever a
caller may have done wrong is found inside `Group.call`, so that the other ranks hear of it.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from reducer.errors import ConfigError, LocalProtocolError, MismatchError, RankLostError
from worker_client._packing import Pack, kinds
from worker_client.collectives import AllGather, Broadcast
from worker_client.fusion.tensor_queue import in_progress
from worker_client.horovod.objects import as_bytes, decode, dense_copy, encode
from worker_client.horovod.ops import LINEAR, Handle, Op, choose, divides, on_the_wire, scale_
from worker_client.staging.arguments import parse_op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from worker_client.client.client import Client
    from worker_client.work import Work

    Tensors = Sequence[torch.Tensor]

_NAME_BYTES = 96


class Group:
    """What calls of this process to the same ranks share.

    `ranks` are numbers of the whole job's ranks, by its client; none if these are the same.
    """

    def __init__(self, client: Client, ranks: tuple[int, ...] = ()) -> None:
        self.client = client
        # The client's numbers of the ranks, by Horovod's, which have no gaps; alike at every rank.
        self.present: tuple[int, ...] = client.present
        self.calls = 0  # that this rank has made since the latest `join()`
        self.optimizers = 0  # that this rank has made, and whose gradients they reduce
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
        """Return the client's number of a rank, which is called as the whole job calls it."""
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

        Joined ranks stand in for calls of the kind ``allreduce`` alone. A call without a name takes
        a number, which is used up whatever becomes of it. The other ranks may make so many
        all-reduces of it; see `part_of`.
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


class Gathering:
    """Payloads of all ranks on their way: an all-reduce of their sizes, and then one of them.

    The second begins where the first ends, in whichever thread that is, so that nobody need wait.
    Its name is told by the first one, and is never used again: whatever becomes of a gather at one
    rank, no part of it can be taken for one of the next.
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
        """Return every rank's payload, in rank order, if no rank is lost whose payload it needs."""
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
        except Exception as error:  # noqa: BLE001 (its waiter gets it)
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


def copies(tensors: Tensors) -> list[torch.Tensor]:
    """Return copies, for a call that leaves what it was given as it is."""
    return [dense_copy(tensor) for tensor in tensors]


def start_allreduce(
    group: Group,
    tensors: Tensors,
    name: str | None,
    how: tuple[int | None, bool | None],
    scales: tuple[float, float],
    prepare: Callable[[Tensors], list[torch.Tensor]],
) -> Handle:
    """Start a reduction of tensors, those of one dtype packed together.

    `how` is the caller's `op` and `average`; `scales` are factors before and after the reduction.
    `prepare` checks the tensors, and returns those that are reduced in place, which the handle has
    in the end.
    """
    dtypes = {getattr(tensor, "dtype", None) for tensor in tensors}
    with group.call("allreduce", name, max(1, len(dtypes))) as base:
        op, targets = choose(*how), prepare(tensors)
        if not targets:
            raise ConfigError("a group has no tensors: pass a list of at least one")
        reduction = parse_op(on_the_wire(op, targets[0].dtype))
        places = group.client.packs(kinds(targets), reduction)
        members = [[targets[at].detach() for at in of] for of in places]
    works: list[Work] = []
    packs: list[Pack | None] = []
    packed: list[torch.Tensor] = []
    for at, of in enumerate(members):
        pack = Pack(of) if len(of) > 1 else None
        packs.append(pack)
        packed.append(of[0] if pack is None else pack.buffer)
        try:
            shapes = short(" ".join(str(tuple(one.shape)) for one in of))
            scale_(packed[at], scales[0])
            wire, part = on_the_wire(op, packed[at].dtype), part_of(base, at)
            works.append(group.client.all_reduce(packed[at], wire, name=part, shape=shapes))
        except BaseException as error:  # of this part the others hear from the client
            for later in range(at + 1, len(members)):
                group.client.decline(error, name=part_of(base, later))
            raise

    def finish() -> list[torch.Tensor]:
        for flat, pack in zip(packed, packs, strict=True):
            if divides(op, flat.dtype):
                flat.div_(group.size, rounding_mode="trunc")
            scale_(flat, scales[1])
            if pack is not None:
                pack.unpack()
        return targets

    return Handle(works, finish)


def start_broadcast(client: Client, tensor: torch.Tensor, root: int, wire: str) -> Handle:
    """Start a broadcast in place of the client's rank `root`, which is called `wire`."""
    target = tensor.detach()
    data = target.contiguous().cpu()  # in place, of a contiguous one in host memory
    what = f"{data.dtype} {tuple(data.shape)}"
    one = Broadcast(client, as_bytes(data).numpy(), root, what)
    work = client.all_reduce(one.sent, "sum", name=wire)

    def finish() -> torch.Tensor:
        as_bytes(data).numpy()[:] = one.received()
        if data.data_ptr() != target.data_ptr():
            target.copy_(data)
        return tensor

    return Handle([work], finish)


def check_device(tensor: torch.Tensor) -> None:
    """Refuse a tensor that cannot be broadcast: it has no elements."""
    if tensor.is_meta:
        raise ConfigError("a tensor on meta cannot be broadcast: use tensor.to_empty()")


def start_allgather(group: Group, tensor: torch.Tensor, name: str | None) -> Handle:
    """Start to gather every rank's tensor; the handle has a list of them, in rank order."""
    with group.call("allgather", name) as wire:
        rows = dense_copy(tensor).reshape(tensor.shape or 1)
        payload = encode([rows, []])
    gathering = group.gather(payload, wire)

    def finish() -> list[torch.Tensor]:
        return [part for part, _ in _received("allgather", group, rows, gathering.wait())]

    return Handle([gathering], finish)


def start_alltoall(group: Group, tensor: torch.Tensor, splits: Any, name: str | None) -> Handle:
    """Start an all-to-all; the handle has the received rows, and how many each rank has sent."""
    with group.call("alltoall", name) as wire:
        rows = dense_copy(tensor)
        if rows.dim() == 0:
            raise ConfigError("alltoall takes tensors of one dimension or more: use reshape(1)")
        payload = encode([rows, _split(group, rows.shape[0], splits)])
    gathering = group.gather(payload, wire)

    def finish() -> tuple[torch.Tensor, list[int]]:
        received = _received("alltoall", group, rows, gathering.wait())
        at = group.rank
        parts = [part[sum(counts[:at]) :][: counts[at]] for part, counts in received]
        return torch.cat(parts), [len(part) for part in parts]

    return Handle([gathering], finish)


def _split(group: Group, rows: int, splits: Any) -> list[int]:
    """Return how many rows go to each rank."""
    if splits is None:
        if rows % group.size:
            raise ConfigError(
                f"{rows} rows cannot be divided among {group.size} ranks equally: give splits="
            )
        return [rows // group.size] * group.size
    given = torch.as_tensor(splits)
    if given.dtype not in {torch.int32, torch.int64} or given.dim() != 1:
        raise ConfigError(f"splits= must be a list, or a tensor, of integers, got {splits}")
    counts: list[int] = given.tolist()
    if len(counts) != group.size or min(counts) < 0 or sum(counts) > rows:
        raise ConfigError(
            f"splits= must be {group.size} numbers of rows, of {rows} in all at most, got {counts}"
        )
    return counts


def _received(
    kind: str, group: Group, mine: torch.Tensor, payloads: list[bytes]
) -> list[tuple[torch.Tensor, list[int]]]:
    """Return each rank's rows, and how many of them go to each rank, if all fit together."""
    received = [decode(payload) for payload in payloads]
    for rank, (rows, _) in enumerate(received):
        if (rows.dtype, rows.shape[1:]) != (mine.dtype, mine.shape[1:]):
            what = f"{kind}, in which only the first dimension may differ"
            one, other = (
                (at, f"{of.dtype} of shape {tuple(of.shape)}")
                for at, of in ((group.rank, mine), (rank, rows))
            )
            raise MismatchError.between(what, "dtype or shape", one, other)
    return [(rows.to(mine.device), splits) for rows, splits in received]


def start_sparse(group: Group, tensor: torch.Tensor, name: str | None, op: Op) -> Handle:
    """Start the reduction of a sparse tensor: all ranks' indices and values, added up."""
    if not tensor.is_sparse:
        raise ConfigError("sparse_allreduce_async takes a sparse tensor: use hvd.allreduce_async")
    if op not in LINEAR:
        raise ConfigError("a sparse tensor can be reduced by op=hvd.Average or op=hvd.Sum")
    own = tensor.coalesce()
    of_indices, of_values = (
        start_allgather(group, part, None if name is None else f"{name}.{what}")
        for part, what in ((own.indices().t(), "indices"), (own.values(), "values"))
    )

    def finish() -> torch.Tensor:
        parts = of_values.wait()
        indices, values = torch.cat(of_indices.wait()), torch.cat(parts)
        if op is Op.AVERAGE:
            values /= len(parts)
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True)
        return total.coalesce()

    return Handle([of_indices, of_values], finish)
