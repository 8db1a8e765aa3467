"""The job of this process: `init()`, `shutdown()`, who takes part, and who is where."""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
    from worker_client.client.client import Client

_FAREWELL_S = 5.0  # how long a rank that hosts a reducer waits for the others at the end

log = logging.getLogger(__name__)


class HorovodPlace(NamedTuple):
    """Where a rank is among the processes of its host, and its host among others."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


class _Part(Protocol):
    """What a process set is to its job."""

    ranks: list[int]

    def end(self) -> None: ...


class HorovodJob(Group):
    """All ranks, and what else calls of this process share."""

    place: HorovodPlace  # of this rank

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.present = ()  # not known yet; from here on the same until the next `renew`
        self.process_sets: dict[int, _Part] = {}  # by numbers that all ranks know
        self.process_sets_made = 0
        self.in_elastic_function = False  # that of hvd.elastic.run, which may be called again
        self.renew()

    def renew(self, *, afresh: bool = False) -> bool:
        """Let ranks in that wait for it, and see who takes part; every rank calls this alike.

        A rank that has made other calls than the others, perhaps, begins `afresh`: all count their
        calls without names anew. Return whether ranks have left or joined, or one begins afresh.
        """
        if self.client.admits:
            self.client.admit()
        told = config.launch()
        where = [host_identity(), told.local_rank, told.local_world_size]
        while True:
            try:
                mine = [*where, self._renewals, afresh]
                ranks = all_gather_bytes(self.client, json.dumps(mine).encode())
            except RankLostError as error:
                if error.rank in self.client.present:
                    raise
                continue  # all go on without it, and have found that out alike
            present = tuple(ranks)
            said = [json.loads(one) for one in ranks.values()]
            if present == self.present and not any(one[-1] for one in said):
                return False
            everybody = len(present) == self.client.world_size
            places = [one[:3] for one in said]
            self.place = _find_place(places, present.index(self.client.rank), everybody=everybody)
            self.present = present
            self._renewals = 1 + max(one[-2] for one in said)
            self.calls = self._joins = 0  # ranks that have joined count from here
            self._numbers.clear()
            return True

    def begin_join(self) -> int:
        """Begin a new count of calls without a name, as all ranks do; return `calls`."""
        calls, self.calls = self.calls, 0
        self._joins += 1
        self._numbers.clear()
        return calls

    def leave(self) -> None:
        """Leave, after the other ranks have their last result if this one hosts a reducer."""
        for one in self.process_sets.values():
            one.end()
        failing = sys.exc_info()[0] is not None or hasattr(sys, "last_value")
        if self.client.usable and self.client.spec.hosts and not failing:
            name, farewell = "horovod.shutdown", np.zeros(1, np.uint8)
            try:
                self.client.all_reduce(farewell, "max", name=name, timeout=_FAREWELL_S).wait()
            except ReductionError as error:  # every result that a caller waited for is here already
                log.info("not all ranks have said farewell: %s", error)
        self.client.shutdown()


class Current:
    """The job that `init` made, for calls that name none."""

    def __init__(self) -> None:
        self._job: HorovodJob | None = None
        self._made_group = False

    @property
    def job(self) -> HorovodJob:
        """The job, if there is one."""
        if self._job is None:
            raise ConfigError("there is no job yet, or no longer: call hvd.init() first")
        return self._job

    def init(self) -> None:
        """Join the job, as ``hvd.init`` says; nothing happens if that was done."""
        if self.is_initialized():
            return
        self._made_group = _make_group() or self._made_group
        self._job = HorovodJob(worker_client.init())
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

    def rank(self) -> int:
        """Return the number of this worker among all."""
        return self.job.rank

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:  # noqa: ARG002
        """Write what happens from now on to a file, which Perfetto opens; each rank has its own.

        `file_path` is that of rank 0; others have ``.rankN`` before its suffix. `mark_cycles`
        changes nothing: rounds of negotiation are shown anyway.

        Raises:
            ConfigError: there is no job, or the file cannot be written.
        """
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


def _find_place(whereabouts: list[list[Any]], rank: int, *, everybody: bool) -> HorovodPlace:
    """Return where a rank is; `everybody`: none was ever lost, and launchers' sizes are true."""
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
    return HorovodPlace(
        local_ranks[rank], sizes[rank], peers.index(rank), len(peers), len(set(sizes)) == 1
    )


CURRENT = Current()
