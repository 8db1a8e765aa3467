"""The job of this process: `init()`, `shutdown()`, who takes part, and who is where."""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # what torch.distributed.HashStore is

import worker_client
from reducer.errors import ConfigError, RankLostError, ReductionError
from reducer.units import host_port
from worker_client import config
from worker_client.collectives import all_gather_bytes
from worker_client.communicators.placement import host_identity
from worker_client.horovod.groups import Group
from worker_client.launch import Launcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker_client.client.client import Client
    from worker_client.horovod.groups import Part

_FAREWELL_S = 5.0  # how long a rank that hosts a reducer waits for the others at the end

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a rank is among the processes of its host, and its host among others."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


class Job(Group):
    """All ranks, and what else calls of this process share.

    Args:
        client: the job's.

    Attributes:
        place: where this rank is.
        parts: the process sets by their numbers, the same at every rank.
        parts_made: how many there were so far.
        in_elastic_function: whether it is in the function of ``hvd.elastic.run``, which may be
            called again.
    """

    place: Place

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.present = ()  # not known yet; from here on the same until the next `renew`
        self.parts: dict[int, Part] = {}
        self.parts_made = 0
        self.in_elastic_function = False
        self.renew()

    def renew(self, *, afresh: bool = False) -> bool:
        """Let ranks in that wait for it, and see who takes part; every rank calls this alike.

        Args:
            afresh: this rank has made other calls than the others, perhaps: all count their calls
                without names anew.

        Returns:
            Whether ranks have left or joined, or one begins afresh; the same at every rank.

        Raises:
            ReductionError: as `Client.admit` and `Client.all_reduce`.
        """
        if self.client.admits:
            self.client.admit()
        while True:
            try:
                mine = [*_whereabouts(), self._renewals, afresh]
                ranks = all_gather_bytes(self.client, json.dumps(mine).encode())
            except RankLostError as error:
                if error.rank in self.client.present:
                    raise
                continue  # all go on without it, and have found that out alike
            present = tuple(ranks)
            told = [json.loads(said) for said in ranks.values()]
            if present == self.present and not any(one[-1] for one in told):
                return False
            everybody = len(present) == self.client.world_size
            places = [one[:3] for one in told]
            self.place = _find_place(places, present.index(self.client.rank), everybody=everybody)
            self.present = present
            self._renewals = 1 + max(one[-2] for one in told)
            self.calls = self._joins = 0  # ranks that have joined count from here
            self._numbers.clear()
            return True

    @contextmanager
    def elastic_function(self) -> Iterator[None]:
        """Keep `in_elastic_function` true for as long as the function of a run is called."""
        self.in_elastic_function = self.client.spec.elastic
        try:
            yield
        finally:
            self.in_elastic_function = False

    def begin_join(self) -> int:
        """Begin a new count of calls without a name, as all ranks do; return `calls`."""
        calls, self.calls = self.calls, 0
        self._joins += 1
        self._numbers.clear()
        return calls

    def leave(self) -> None:
        """Leave, after the other ranks have their last result if this one hosts a reducer."""
        for part in self.parts.values():
            if part.group is not None:
                part.group.client.shutdown()
        failing = sys.exc_info()[0] is not None or hasattr(sys, "last_value")
        if self.client.usable and self.client.spec.hosts and not failing:
            self._say_farewell()
        self.client.shutdown()

    def _say_farewell(self) -> None:
        farewell = np.zeros(1, np.uint8)
        try:
            self.client.all_reduce(
                farewell, "max", name="horovod.shutdown", timeout=_FAREWELL_S
            ).wait()
        except ReductionError as error:  # every result that a caller waited for is here already
            log.info("not all ranks have said farewell: %s", error)


class Current:
    """The job that `init` made, for calls that name none."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._made_group = False

    @property
    def job(self) -> Job:
        """The job.

        Raises:
            ConfigError: there is none.
        """
        if self._job is None:
            raise ConfigError("there is no job yet, or no longer: call hvd.init() first")
        return self._job

    def init(self) -> None:
        """Join the job, as ``hvd.init`` says; nothing happens if that was done."""
        if self.is_initialized():
            return
        self._made_group = _make_group() or self._made_group
        self._job = Job(worker_client.init())
        # Last, to be called before the new client's own farewell is.
        atexit.unregister(self._exit)
        atexit.register(self._exit)

    def shutdown(self) -> None:
        """Leave the job; `init` may be called again. Nothing happens if there is none."""
        job, self._job = self._job, None
        if job is not None:
            job.leave()

    def _exit(self) -> None:
        self.shutdown()
        # Not sooner: ranks that make another one at once may meet at what is left of the first.
        if self._made_group and dist.is_initialized():
            dist.destroy_process_group()

    def is_initialized(self) -> bool:
        """Whether `init` was called, and `shutdown` was not since."""
        return self._job is not None

    def is_current(self, job: Job) -> bool:
        """Whether this is the job, and not one that was left."""
        return self._job is job

    def rank(self) -> int:
        """Return the number of this worker among all."""
        return self.job.rank

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Write what happens from now on to a file, which Perfetto opens; each rank has its own.

        Args:
            file_path: of rank 0; that of the others has ``.rankN`` before its suffix.
            mark_cycles: is accepted and changes nothing: rounds of negotiation are shown anyway.

        Raises:
            ConfigError: there is no job, or the file cannot be written.
        """
        del mark_cycles
        path = Path(file_path)
        if rank := self.rank():
            path = path.with_suffix(f".rank{rank}{path.suffix}")
        self.job.client.start_timeline(path)

    def stop_timeline(self) -> None:
        """Complete the file; nothing more is written to it."""
        self.job.client.stop_timeline()

    def size(self) -> int:
        """Return the number of workers."""
        return self.job.size

    def local_rank(self) -> int:
        """Return the number of this worker among those of its host."""
        return self.job.place.local_rank

    def local_size(self) -> int:
        """Return the number of workers on this host."""
        return self.job.place.local_size

    def cross_rank(self) -> int:
        """Return the number of this host among those that have this local rank."""
        return self.job.place.cross_rank

    def cross_size(self) -> int:
        """Return the number of hosts that have this local rank."""
        return self.job.place.cross_size

    def is_homogeneous(self) -> bool:
        """Whether all hosts have as many workers."""
        return self.job.place.homogeneous


def _make_group() -> bool:
    """Make a process group if it is missing and can be made; return whether it was."""
    if dist.is_initialized():
        return False
    told = config.launch()
    told.check_alone()
    rank, world_size = told.identity
    if rank is not None and world_size is not None:
        if told.master_addr is None or told.master_port is None:
            return False
        # torchrun's ranks share its own store, which they find by variables of theirs.
        address = f"tcp://{host_port(told.master_addr, told.master_port)}"
        where = None if told.launcher is Launcher.TORCHRUN else address
        dist.init_process_group("gloo", where, rank=rank, world_size=world_size)
        return True
    if config.load().servers:
        return False  # not to be taken for a job of one: who we are is said elsewhere, or missing
    log.info("no launcher: this is a job of one worker")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return True


def _whereabouts() -> list[Any]:
    """Return this process's host, and what the launcher says of its local rank and size."""
    told = config.launch()
    return [host_identity(), told.local_rank, told.local_world_size]


def _find_place(whereabouts: list[list[Any]], rank: int, *, everybody: bool) -> Place:
    """Return where a rank is.

    Args:
        whereabouts: of each rank.
        rank: the one that is asked for.
        everybody: no rank was ever lost, so that what launchers say of sizes is true.
    """
    taken: dict[str, set[int]] = {}  # local ranks, by host
    for host, local_rank, _ in whereabouts:
        taken.setdefault(host, set()).update(() if local_rank is None else [local_rank])
    seen = Counter(host for host, _, _ in whereabouts)
    local_ranks = []
    for host, local_rank, _ in whereabouts:
        free = next(at for at in itertools.count() if at not in taken[host])
        local_ranks.append(free if local_rank is None else local_rank)
        taken[host].add(local_ranks[-1])
    sizes = [
        size if everybody and size is not None else seen[host] for host, _, size in whereabouts
    ]
    peers = [one for one, local_rank in enumerate(local_ranks) if local_rank == local_ranks[rank]]
    return Place(
        local_ranks[rank], sizes[rank], peers.index(rank), len(peers), len(set(sizes)) == 1
    )


CURRENT = Current()
