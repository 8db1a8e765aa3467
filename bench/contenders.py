"""What is compared: our all-reduce in its topologies, and others', behind one small interface.

A contender lives in one process per rank. Its life is `offer`, `join`, then `bind` for every
buffer, then `close`. Nothing here is timed or counted; `bench.worker` does that.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from harness import ROOT
from harness.oracle import Array

Kind: TypeAlias = Literal["pool", "embedded", "mixed", "gloo", "mpi", "ring"]
OURS = ("pool", "embedded", "mixed")
KEY = "bench"  # what a key of ours is bound to
# Of an all-reduce in Open MPI's component "tuned": number, and bytes of a segment.
ALGORITHMS = {"ring": (4, 0), "segmented": (5, 1 << 20)}
JOIN_S = 120.0


@dataclass(frozen=True)
class Contender:
    """One column of the comparison.

    Attributes:
        kind: which implementation, and for ours which topology.
        reducers: those on hosts of their own.
        wire_dtype: what ours sends float32 as, such as ``bf16``; empty for itself.
        keyed: whether its pool has keys, so that everything is encrypted.
        algorithm: a key of `ALGORITHMS`, which Open MPI is made to use; empty for what it chooses.
        chunk, window: sizes of ours that are forced, such as ``256KiB``; empty for the rules.
        label: what it is called, with reducers of its own; empty for what it is.
        root: the checkout whose code it is.
    """

    kind: Kind
    reducers: int = 0
    wire_dtype: str = ""
    keyed: bool = False
    algorithm: str = ""
    chunk: str = ""
    window: str = ""
    label: str = ""
    root: Path = ROOT

    @property
    def name(self) -> str:
        """A short name, such as ``pool-8``, ``pool-8-bf16-keys``, ``embedded`` or ``gloo``."""
        forced = (self.algorithm, self.chunk, self.window)
        parts = (self.kind, str(self.reducers or ""), self.wire_dtype, "keys" * self.keyed, *forced)
        return self.label or "-".join(part for part in parts if part)

    @property
    def environment(self) -> dict[str, str]:
        """Settings of its workers."""
        forced = {"REDUCTION_CHUNK_BYTES": self.chunk, "REDUCTION_WINDOW_BYTES": self.window}
        return {name: value for name, value in forced.items() if value}

    @property
    def pool(self) -> str:
        """Contenders of which this is the same share their reducers."""
        return self.label or "keys" * self.keyed

    @property
    def ours(self) -> bool:
        """Whether it is our product, and not a baseline."""
        return self.kind in OURS


@dataclass(frozen=True)
class Place:
    """Where a rank is, and who else takes part.

    Attributes:
        leader: address of rank 0's host.
        servers: the reducers as ``host:port``, in the same order at every rank.
        keys: directory of the job's keys, empty for none.
        job: what the job is called at reducers that it shares with others.
    """

    rank: int
    world_size: int
    address: str
    leader: str
    servers: tuple[str, ...] = ()
    wire_dtype: str = ""
    keys: str = ""
    job: str = ""


class AllReduce(ABC):
    """One way to all-reduce."""

    def offer(self) -> str:
        """Open what others connect to and return how, in this implementation's own words."""
        return ""

    def join(self, offers: Sequence[str]) -> None:  # noqa: B027 (mpirun has connected the ranks)
        """Connect, given the offers of all ranks in rank order."""

    @abstractmethod
    def bind(self, *arrays: Array) -> Callable[[], object]:
        """Return a call that sums arrays over all ranks, in place, and waits for the end.

        Those of several arrays are begun one after the other, before the first one is waited for,
        where the implementation can do that.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave."""


class Pool(AllReduce):
    """Ours, with reducers that run already."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._client: Any = None

    def join(self, offers: Sequence[str]) -> None:
        """Connect to the reducers."""
        del offers
        import worker_client  # noqa: PLC0415 (baselines do not load it)

        place = self._place
        self._client = worker_client.init(
            servers=place.servers,
            rank=place.rank,
            world_size=place.world_size,
            job=f"{KEY}/{place.job}",
            wire_dtype=place.wire_dtype or None,
            keys=place.keys or None,
        )

    def bind(self, *arrays: Array) -> Callable[[], object]:
        """As `AllReduce.bind`."""
        return _bound(self._client, arrays)

    def close(self) -> None:
        """Say goodbye to the reducers."""
        if self._client is not None:
            self._client.shutdown()


class Gloo(AllReduce):
    """PyTorch's ``all_reduce`` over Gloo."""

    def __init__(self, place: Place) -> None:
        self._place = place
        # Gloo would listen on whatever the machine's name resolves to.
        os.environ["GLOO_SOCKET_IFNAME"] = _interface(place.address)
        self._torch = import_module("torch")
        self._dist = import_module("torch.distributed")
        self._torch.set_num_threads(1)
        self._store: Any = None

    def offer(self) -> str:
        """Rank 0 opens the store in which the others will find each other, at a free port."""
        if self._place.rank:
            return ""
        self._store = self._open_store(0, leads=True)
        return str(self._store.port)

    def join(self, offers: Sequence[str]) -> None:
        """Make the process group."""
        place = self._place
        self._dist.init_process_group(
            "gloo",
            store=self._store or self._open_store(int(offers[0]), leads=False),
            rank=place.rank,
            world_size=place.world_size,
        )

    def bind(self, *arrays: Array) -> Callable[[], object]:
        """As `AllReduce.bind`."""
        tensors = [self._torch.from_numpy(array) for array in arrays]
        all_reduce = self._dist.all_reduce
        if len(tensors) == 1:
            return lambda: all_reduce(tensors[0])

        def call() -> None:
            for work in [all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

        return call

    def close(self) -> None:
        """End the process group."""
        self._dist.destroy_process_group()

    def _open_store(self, port: int, *, leads: bool) -> Any:
        return self._dist.TCPStore(
            self._place.leader,
            port,
            self._place.world_size,
            is_master=leads,
            timeout=timedelta(seconds=JOIN_S),
            wait_for_workers=False,
        )


class Embedded(Gloo):
    """Ours, with a reducer in every rank, and maybe a pool besides.

    The ranks find each other through a process group.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        os.environ["MASTER_ADDR"] = place.leader  # how an embedded rank learns its own address
        self._client: Any = None

    def join(self, offers: Sequence[str]) -> None:
        """Make the process group, and a client on top of it."""
        super().join(offers)
        import worker_client  # noqa: PLC0415 (baselines do not load it)

        place = self._place
        self._client = worker_client.init(
            servers=place.servers or None, embedded=True, wire_dtype=place.wire_dtype or None
        )

    def bind(self, *arrays: Array) -> Callable[[], object]:
        """As `AllReduce.bind`."""
        return _bound(self._client, arrays)

    def close(self) -> None:
        """Leave when all have their last result, as a rank that hosts a reducer should."""
        self._dist.barrier()
        if self._client is not None:
            self._client.shutdown()
        super().close()


class Mpi(AllReduce):
    """Open MPI through mpi4py; `mpirun` has told the process who it is."""

    def __init__(self, place: Place) -> None:
        del place
        self._mpi = import_module("mpi4py.MPI")

    @property
    def rank(self) -> int:
        """The rank that MPI gave this process."""
        return int(self._mpi.COMM_WORLD.Get_rank())

    def bind(self, *arrays: Array) -> Callable[[], object]:
        """As `AllReduce.bind`."""
        world, in_place, op = self._mpi.COMM_WORLD, self._mpi.IN_PLACE, self._mpi.SUM
        return lambda: [world.Allreduce(in_place, array, op=op) for array in arrays]

    def close(self) -> None:
        """End MPI."""
        self._mpi.Finalize()


def _bound(client: Any, arrays: Sequence[Array]) -> Callable[[], object]:
    if len(arrays) == 1:
        return lambda: client.all_reduce(arrays[0], op="sum").wait()

    def call() -> None:
        for work in [client.all_reduce(array, op="sum") for array in arrays]:
            work.wait()

    return call


def _interface(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    raise OSError(f"no network interface of this host has the address {address}")
