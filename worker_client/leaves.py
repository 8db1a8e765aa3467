"""Steps whose gradients are the same bits for any number of ranks, for a plain loop over torch.

    leaves = Leaves(model, 24, seed=1)                    # a step's batch is cut into 24 leaves
    sampler = LeafSampler(len(data), 24, 32, seed=1)
    for number in range(steps):
        for step in leaves.attempts(number):              # again, where ranks are lost or join
            for leaf in step:                             # those of this rank
                x, y = data[sampler.samples(number, leaf)]
                loss(model(x), y).backward()
        optimizer.step()                                  # .grad has the mean over all leaves

docs/leaves.md says what the sum is, and what cannot be the same.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from reducer.errors import ConfigError, LeavesMovedError, MismatchError
from worker_client.client.bootstrap import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from worker_client.client.client import Client
    from worker_client.work import Work

BUCKET_BYTES = 64 << 20
_WIRE_TYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_BATCH_NORMS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
)
_Samples = list[tuple[int, list[int]]]  # leaves, each with the numbers of its samples
_FACTS = 4  # of a step, beside its gradients: weight, threads, their square, subtrees

log = logging.getLogger(__name__)


class Leaves:
    """Makes steps of leaves with a model's gradients.

    Args:
        model: whose parameters' gradients are summed; those that need none are left alone.
        count: leaves of a step, at all ranks together; one for each rank at least.
        seed: of the random numbers of leaves; the same at every rank.
        client: the one to use; `worker_client.init()`'s by default.
        bucket_bytes: gradients of so many bytes are reduced at a time.

    Raises:
        ConfigError: the model or the job's settings keep a step from being the same.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        count: int,
        *,
        seed: int = 0,
        client: Client | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.client = DEFAULT.get() if client is None else client
        self.count, self.seed = count, seed
        if self.client.wire_dtype not in _WIRE_TYPES:
            raise ConfigError(
                "sums of leaves travel as they are, or as bf16 or fp16: set "
                f"REDUCTION_WIRE_DTYPE to one of these, or leave out {self.client.wire_dtype!r}"
            )
        wire = _WIRE_TYPES[self.client.wire_dtype]
        for name, module in model.named_modules():
            if isinstance(module, _BATCH_NORMS):
                raise ConfigError(
                    f"{name} ({type(module).__name__}) has statistics that depend on how leaves "
                    "are dealt: use GroupNorm or LayerNorm"
                )
        wanted = [each for each in model.parameters() if each.requires_grad]
        on_device = any(each.device.type != "cpu" for each in wanted)
        if on_device and not torch.are_deterministic_algorithms_enabled():
            log.warning(
                "gradients of a device are the same only with "
                "torch.use_deterministic_algorithms(True), and on devices of one kind"
            )
        self.buckets = [_Counter(members, wire) for members in _cut(wanted[::-1], bucket_bytes)]

    def attempts(self, number: int) -> Iterator[LeafStep]:
        """Return a step, and another one for each time that ranks were lost or joined in it.

        Args:
            number: of the step, for the random numbers of its leaves.
        """
        while True:
            step = LeafStep(self, number)
            yield step
            try:
                step.reduce()
            except LeavesMovedError as error:
                log.warning("step %d is made again: %s", number, error)
                continue
            return


class LeafStep:
    """One step, or one attempt at it; iterated over, it gives the numbers of this rank's leaves.

    Attributes:
        share: what this rank has of the leaves.
    """

    def __init__(self, leaves: Leaves, number: int) -> None:
        self._leaves, self._number = leaves, number
        self._client = leaves.client
        self.share = self._client.leaves(leaves.count)
        self._weight = 0
        self._works: list[Work] = []
        self._begun = 0  # buckets whose sums are on their way
        for bucket in leaves.buckets:
            bucket.begin(self.share.parts)

    def __iter__(self) -> Iterator[int]:
        """Give the leaves of this rank: what follows each is its forward and backward pass."""
        for number in self.share.numbers:
            with self.leaf(number):
                yield number

    @contextmanager
    def leaf(self, number: int, weight: int | None = None) -> Iterator[None]:
        """Take the gradients of what is done inside for those of a leaf, whose numbers it draws.

        Args:
            number: of the leaf: the next one of `share.numbers`.
            weight: such as how many tokens the leaf has, where its loss is their sum: gradients are
                divided by the weight of all leaves. None for the mean over leaves.
        """
        if number != self._expected:
            raise ConfigError(f"leaf {number} is not the next one, which is {self._expected}")
        self._weight += 1 if weight is None else weight
        last = number == self.share.numbers[-1]
        hooks = self._follow() if last else []
        try:
            with _random_numbers(self._leaves.seed, self._number, number):
                yield
        finally:
            for hook in hooks:
                hook.remove()
        for bucket in self._leaves.buckets[self._begun :]:
            bucket.add()
        if last:
            self._submit(len(self._leaves.buckets))

    @property
    def _expected(self) -> int:
        return self.share.numbers.start + self._leaves.buckets[-1].added

    def _follow(self) -> list[Any]:
        """Send each bucket's sum as soon as the last leaf has its gradients."""
        left = [set(map(id, bucket.members)) for bucket in self._leaves.buckets]

        def done(place: int, member: torch.Tensor) -> None:
            if id(member) not in left[place]:
                raise ConfigError("a leaf has one backward pass: add its losses first")
            left[place].remove(id(member))
            while self._begun < len(left) and not left[self._begun]:
                self._leaves.buckets[self._begun].add()
                self._submit(self._begun + 1)

        return [
            member.register_post_accumulate_grad_hook(partial(done, place))  # type: ignore[no-untyped-call]
            for place, bucket in enumerate(self._leaves.buckets)
            for member in bucket.members
        ]

    def _submit(self, end: int) -> None:
        for bucket in self._leaves.buckets[self._begun : end]:
            self._works.append(self._client.reduce_leaves(bucket.sums, self.share))
        self._begun = end

    def reduce(self) -> None:
        """Wait for the sums of all leaves, and leave their mean in the parameters' ``.grad``.

        Raises:
            LeavesMovedError: ranks were lost or have joined: all ranks make the step again.
            MismatchError: ranks compute with different numbers of threads.
            ReductionError: as `Client.reduce_leaves`.
        """
        if self._expected != self.share.numbers.stop:
            raise ConfigError(f"leaf {self._expected} is missing")
        threads = torch.get_num_threads()
        facts = np.zeros((len(self.share.parts), _FACTS), np.int64)
        facts[:, 1:] = threads, threads**2, 1
        facts[0, 0] = self._weight
        self._works.append(self._client.reduce_leaves(facts, self.share))
        failures = []
        for work in self._works:  # all of them, so that the next call follows at every rank
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 (raised below)
                failures.append(error)
        if failures:
            raise failures[0]
        weight, total, squares, subtrees = facts[0].tolist()
        if total**2 != squares * subtrees:
            raise MismatchError.between(
                "leaves",
                "threads",
                (self._client.rank, threads),
                (self._client.rank, total / subtrees),
                called="torch.get_num_threads(), on which gradients depend",
            )
        for bucket in self._leaves.buckets:
            bucket.finish(weight)


class LeafSampler:
    """Deals samples by the numbers of leaves, so that a leaf's are the same whoever has it.

    Every epoch has another order; what is left of one that fills no step is left out.

    Args:
        length: samples of the data set.
        count: leaves of a step.
        batch: samples of a leaf.
        seed: of the orders; the same at every rank.

    Attributes:
        count: as given.
        steps: of an epoch.
    """

    def __init__(self, length: int, count: int, batch: int, *, seed: int = 0) -> None:
        if length < count * batch:
            raise ConfigError(f"a step takes {count * batch} samples, and there are {length}")
        self.count, self.steps = count, length // (count * batch)
        self._length, self._batch, self._seed = length, batch, seed
        self._epoch, self._order = -1, torch.empty(0)

    def samples(self, step: int, leaf: int) -> list[int]:
        """Return the numbers of a leaf's samples."""
        epoch, within = divmod(step, self.steps)
        if epoch != self._epoch:
            numbers = torch.Generator().manual_seed(_seed(self._seed, epoch))
            self._epoch, self._order = epoch, torch.randperm(self._length, generator=numbers)
        first = (within * self.count + leaf) * self._batch
        samples: list[int] = self._order[first : first + self._batch].tolist()
        return samples


class LeafBatch(NamedTuple):
    """What `leaf_loader` gives of a leaf."""

    leaf: int  # its number
    batch: Any


def leaf_loader(
    data: Any,
    sampler: LeafSampler,
    *,
    client: Client | None = None,
    collate: Callable[[list[Any]], Any] = default_collate,
    **options: Any,
) -> DataLoader[Any]:
    """Return a DataLoader that gives a list of `LeafBatch`, this rank's, for each step of an epoch.

    Each has that epoch's order which ``loader.sampler.set_epoch(epoch)`` says, as Lightning does.

    Args:
        data: a data set with numbered samples.
        sampler: deals them.
        client: the one to use; at the beginning of each epoch `worker_client.init()`'s by default.
            The ranks are the same for the whole epoch.
        collate: makes a leaf's batch of its samples.
        options: of the DataLoader, such as ``num_workers``. What its processes draw at random
            depends on who has which leaf: draw where the leaf is computed.
    """
    dealt = _Dealt(sampler, client)
    return DataLoader(_PerLeaf(data, collate), sampler=dealt, batch_size=None, **options)


class _Dealt(DistributedSampler[_Samples]):
    """Gives this rank's leaves and their samples, step by step.

    Frameworks put their own in the place of any sampler that is no DistributedSampler, and tell it
    the number of the epoch.
    """

    def __init__(self, sampler: LeafSampler, client: Client | None) -> None:
        super().__init__(range(sampler.steps), num_replicas=1, rank=0)  # type: ignore[arg-type]
        self._sampler, self._client = sampler, client

    def __iter__(self) -> Iterator[_Samples]:
        client = DEFAULT.get() if self._client is None else self._client
        numbers = client.leaves(self._sampler.count).numbers
        first = self.epoch * self._sampler.steps
        for step in range(first, first + self._sampler.steps):
            yield [(leaf, self._sampler.samples(step, leaf)) for leaf in numbers]


class _PerLeaf(Dataset[list[LeafBatch]]):
    """A data set whose items are steps of a rank."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._data, self._collate = data, collate

    def __getitem__(self, leaves: _Samples) -> list[LeafBatch]:
        return [
            LeafBatch(leaf, self._collate([self._data[one] for one in samples]))
            for leaf, samples in leaves
        ]


class _Counter:
    """Gradients of some parameters, and their sums over leaves so far, added as a counter adds.

    Attributes:
        members: the parameters.
        sums: of each subtree of this rank's contribution, one row.
        added: leaves of the step that are in.
    """

    def __init__(self, members: Sequence[torch.nn.Parameter], wire: torch.dtype | None) -> None:
        self.members = members
        kind = members[0].dtype
        self._dtype = wire if wire is not None and kind == torch.float32 else kind
        self._size = sum(member.numel() for member in members)
        self._nodes: list[torch.Tensor] = []  # from the largest subtree to the latest leaf
        self._spare: list[torch.Tensor] = []
        self._parts: Sequence[range] = ()
        self.sums = torch.empty(0)
        self.added = 0

    def begin(self, parts: Sequence[range]) -> None:
        """Be ready for the leaves of a step."""
        self._spare += self._nodes
        self._nodes, self._parts, self.added = [], parts, 0
        if len(self.sums) != len(parts):
            self.sums = torch.empty(len(parts), self._size, dtype=self._dtype)
        for member in self.members:
            member.grad = None

    def add(self) -> None:
        """Add the next leaf's gradients, which `.grad` has."""
        leaf = self._parts[0].start + self.added
        part = next(place for place, part in enumerate(self._parts) if leaf in part)
        node = self._spare.pop() if self._spare else torch.empty(self._size, dtype=self._dtype)
        at = 0
        for member in self.members:
            room = node[at : at + member.numel()]
            at += member.numel()
            if member.grad is None:
                room.zero_()
            else:
                room.copy_(member.grad.reshape(-1))
            member.grad = None
        self.added += 1
        count = leaf + 1 - self._parts[part].start  # of this subtree's, the last one included
        whole = leaf + 1 == self._parts[part].stop
        keep = 0 if whole else count.bit_count() - 1
        while len(self._nodes) > keep:
            left = self._nodes.pop()
            left += node
            self._spare.append(node)
            node = left
        if whole:
            self.sums[part].copy_(node)
            self._spare.append(node)
        else:
            self._nodes.append(node)

    def finish(self, weight: int) -> None:
        """Give the parameters their gradients, divided by the weight of all leaves."""
        at, total = 0, self.sums[0]
        for member in self.members:
            part = total[at : at + member.numel()].to(member.device, member.dtype)
            member.grad = part.div_(weight).view_as(member)
            at += member.numel()


def _cut(
    parameters: Sequence[torch.nn.Parameter], most_bytes: int
) -> Iterator[list[torch.nn.Parameter]]:
    """Cut parameters, in their order, into buckets of one type."""
    bucket: list[torch.nn.Parameter] = []
    for each in parameters:
        nbytes = sum(member.nbytes for member in bucket)
        if bucket and (each.dtype != bucket[0].dtype or nbytes + each.nbytes > most_bytes):
            yield bucket
            bucket = []
        bucket.append(each)
    if not bucket:
        raise ConfigError("the model has no parameter that needs a gradient")
    yield bucket


@contextmanager
def _random_numbers(*what: int) -> Iterator[None]:
    """Draw from a state that follows from these numbers alone, in torch, NumPy and Python."""
    seed = _seed(*what)
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def _seed(*what: int) -> int:
    said = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(said, "little") >> 1
