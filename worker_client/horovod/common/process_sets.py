"""Process sets: some ranks of the job that make calls among themselves.

Each is a job of its own at the same reducers, which its ranks join when it is added.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from reducer.errors import ConfigError
from worker_client.horovod.groups import Group
from worker_client.horovod.job import CURRENT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worker_client.horovod.job import HorovodJob

__all__ = ["ProcessSet", "add_process_set", "init", "remove_process_set"]


class ProcessSet:
    """Some ranks of the job, as ``hvd.rank()`` numbers them: `ranks`, ascending.

    It can be used between `add_process_set` and `remove_process_set`.

    Raises:
        ConfigError: these are no numbers, or not of several ranks.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        try:
            self.ranks: list[int] = sorted(ranks)
        except TypeError:
            self.ranks = []
        if not self.ranks or any(type(rank) is not int for rank in self.ranks):
            raise ConfigError(f"a process set is made of a list of ranks, such as [0, 1]: {ranks}")
        if len(set(self.ranks)) < len(self.ranks):
            raise ConfigError(f"a rank may be in a process set once: {self.ranks}")
        self._number: int | None = None
        self._group: Group | None = None  # at its own ranks

    @property
    def process_set_id(self) -> int | None:
        """Its number, the same at every rank; None while it cannot be used."""
        return self._number

    @property
    def group(self) -> Group:
        """Its ranks, if it was added, and this rank is among them."""
        if self.process_set_id is None:
            raise ConfigError(f"{self} is not in use: give it to hvd.add_process_set() first")
        if self._group is None:
            raise ConfigError(
                f"rank {CURRENT.rank()} is not in {self}, and cannot take part in its calls"
            )
        return self._group

    def included(self) -> bool | None:
        """Whether this rank is one of them; None while it cannot be used."""
        return None if self.process_set_id is None else CURRENT.rank() in self.ranks

    def size(self) -> int | None:
        """Return how many ranks it has; None while it cannot be used."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the number that this rank must have among them; None while it cannot be used."""
        return None if self.process_set_id is None else self.group.rank

    def begin(self, job: HorovodJob, number: int) -> None:
        """Let it be used, as that process set of the job."""
        ranks = tuple(self.ranks)
        if job.rank in ranks:
            self._group = Group(job.client.subgroup(f"set{number}", ranks), ranks)
        self._number = number
        job.process_sets[number] = self

    def end(self) -> None:
        """Let it not be used any more; what is in progress among its ranks fails."""
        if self._group is not None:
            self._group.client.shutdown()
        self._number = self._group = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalSet(ProcessSet):
    """All ranks of the job, which calls without ``process_set=`` are made to."""

    def __init__(self) -> None:
        """There is nothing to be given."""

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        return list(range(CURRENT.size())) if CURRENT.is_initialized() else []

    @property
    def group(self) -> Group:
        return CURRENT.job


ALL_RANKS = _GlobalSet()


def group_of(process_set: Any) -> Group:
    """Return the ranks that a call is made to."""
    if not isinstance(process_set, ProcessSet):
        raise ConfigError(
            f"process_set= takes what hvd.add_process_set() returns, got {process_set!r}"
        )
    return process_set.group


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Let some ranks make calls among themselves; every rank of the job calls this alike.

    It takes the ranks, or a `ProcessSet` of them, and returns what calls take as ``process_set=``.

    Raises:
        ConfigError: there is such a rank set already, or no such rank; or the job's ranks host
            reducers, or it goes on without reducers or ranks, as `Client.subgroup` says.
        MismatchError: another rank was refused it.
        ReductionError: as `Client.subgroup`.
    """
    one = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    job = CURRENT.job
    with job.call("add_process_set", None) as wire:
        if one.process_set_id is not None:
            raise ConfigError(f"{one} is in use already")
        if absent := [rank for rank in one.ranks if not 0 <= rank < job.size]:
            raise ConfigError(f"ranks {absent} are not in a world of size {job.size}")
        if one.ranks in [ALL_RANKS.ranks, *(other.ranks for other in job.process_sets.values())]:
            raise ConfigError(f"there is a process set of ranks {one.ranks} already: use that")
        job.client.check_subgroups()
        mine = json.dumps(one.ranks).encode()
    _check_all_say(mine, wire, "added")
    job.process_sets_made += 1
    one.begin(job, job.process_sets_made)
    return one


def remove_process_set(process_set: ProcessSet) -> bool:
    """Let a process set not be used any more; every rank of the job calls this alike.

    What is in progress among its ranks fails. Return whether there was such a set; that of all
    ranks stays.

    Raises:
        ConfigError: ranks have removed different ones.
        ReductionError: as `Client.all_reduce`.
    """
    job, number = CURRENT.job, process_set.process_set_id
    if not number:
        return False
    with job.call("remove_process_set", None) as wire:
        mine = json.dumps(number).encode()
    _check_all_say(mine, wire, "removed")
    job.process_sets.pop(number).end()
    return True


def _check_all_say(mine: bytes, wire: str, done: str) -> None:
    said = CURRENT.job.gather(mine, wire).wait()
    if any(other != mine for other in said):
        given = b", ".join(said).decode()
        raise ConfigError(f"ranks have {done} different process sets: {given}, in rank order")


def init(comm: object = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Join the job; nothing happens if that was done.

    Rank and size are those of the process group if there is one, else of torchrun or Open MPI's
    mpirun. Where the launcher gives MASTER_PORT, a process group with Gloo is made, by which ranks
    can host reducers themselves, and kept until this process ends. Without servers and launcher,
    this rank is the whole job.

    Args:
        comm: must be None: a job has all ranks.
        process_sets: those to add at once, as `add_process_set` does; ``"dynamic"`` for none yet.

    Raises:
        ConfigError: a setting is missing or wrong, or `comm` is given; and as `add_process_set`.
        ReductionError: as `worker_client.init`.
    """
    if comm is not None:
        raise ConfigError(
            "a job has all ranks: call hvd.init() without comm=, and give process_set= to calls"
        )
    if CURRENT.is_initialized():
        return
    CURRENT.init()
    if process_sets is not None and process_sets != "dynamic":
        for one in process_sets:
            add_process_set(one)  # type: ignore[arg-type]
