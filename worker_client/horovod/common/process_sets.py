"""Process sets: some ranks of the job that make calls among themselves.

Each is a job of its own at the same reducers, which its ranks join when it is added.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from reducer.errors import ConfigError
from worker_client.horovod.groups import Group, Part
from worker_client.horovod.job import CURRENT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worker_client.horovod.job import Job


class ProcessSet:
    """Some ranks of the job. It can be used between `add_process_set` and `remove_process_set`.

    Args:
        ranks: as ``hvd.rank()`` numbers them.

    Attributes:
        ranks: ascending.

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
        self._job: Job | None = None
        self._number = 0

    @property
    def process_set_id(self) -> int | None:
        """Its number, the same at every rank; None while it cannot be used."""
        job = self._job
        usable = job is not None and CURRENT.is_current(job) and self._number in job.parts
        return self._number if usable else None

    @property
    def group(self) -> Group:
        """Its ranks.

        Raises:
            ConfigError: it was not added, or this rank is not among them.
        """
        if self._job is None or self.process_set_id is None:
            raise ConfigError(f"{self} is not in use: give it to hvd.add_process_set() first")
        group = self._job.parts[self._number].group
        if group is None:
            raise ConfigError(
                f"rank {CURRENT.rank()} is not in {self}, and cannot take part in its calls"
            )
        return group

    def included(self) -> bool | None:
        """Whether this rank is one of them; None while it cannot be used."""
        return None if self.process_set_id is None else CURRENT.rank() in self.ranks

    def size(self) -> int | None:
        """Return how many ranks it has; None while it cannot be used."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's number among them; None while it cannot be used.

        Raises:
            ConfigError: this rank is not among them.
        """
        return None if self.process_set_id is None else self.group.rank

    def begin(self, job: Job, number: int) -> None:
        """Let it be that part of the job."""
        self._job, self._number = job, number

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _AllRanks(ProcessSet):
    """All ranks of the job, which calls without ``process_set=`` are made to."""

    def __init__(self) -> None:
        """There is nothing to be given."""

    @property
    def process_set_id(self) -> int:
        """Its number, always the same."""
        return 0

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        """Numbers of all ranks; none before `init`."""
        return list(range(CURRENT.size())) if CURRENT.is_initialized() else []

    @property
    def group(self) -> Group:
        """All of them.

        Raises:
            ConfigError: there is no job.
        """
        return CURRENT.job


ALL_RANKS = _AllRanks()


def group_of(process_set: Any) -> Group:
    """Return the ranks that a call is made to.

    Raises:
        ConfigError: it is no process set, or one that this rank cannot use.
    """
    if not isinstance(process_set, ProcessSet):
        raise ConfigError(
            f"process_set= takes what hvd.add_process_set() returns, got {process_set!r}"
        )
    return process_set.group


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Let some ranks make calls among themselves; every rank of the job calls this alike.

    Args:
        process_set: the ranks, or a `ProcessSet` of them.

    Returns:
        What calls take as ``process_set=``.

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
        taken = [tuple(ALL_RANKS.ranks), *(part.ranks for part in job.parts.values())]
        if tuple(one.ranks) in taken:
            raise ConfigError(f"there is a process set of ranks {one.ranks} already: use that")
        job.client.check_subgroups()
    given = [json.loads(said) for said in job.gather(json.dumps(one.ranks).encode(), wire).wait()]
    if any(ranks != one.ranks for ranks in given):
        raise ConfigError(f"ranks have added different process sets: {given}, in rank order")
    job.parts_made += 1
    ranks, group = tuple(one.ranks), None
    if job.rank in ranks:
        group = Group(job.client.subgroup(f"set{job.parts_made}", ranks), ranks)
    job.parts[job.parts_made] = Part(ranks, group)
    one.begin(job, job.parts_made)
    return one


def remove_process_set(process_set: ProcessSet) -> bool:
    """Let a process set not be used any more; every rank of the job calls this alike.

    What is in progress among its ranks fails.

    Returns:
        Whether there was such a set; that of all ranks stays.

    Raises:
        ConfigError: ranks have removed different ones.
        ReductionError: as `Client.all_reduce`.
    """
    job, number = CURRENT.job, process_set.process_set_id
    if not number:
        return False
    with job.call("remove_process_set", None) as wire:
        mine = json.dumps(number).encode()
    given = job.gather(mine, wire).wait()
    if any(other != mine for other in given):
        raise ConfigError(
            f"ranks have removed different process sets: {[int(one) for one in given]}, by their "
            "numbers, in rank order"
        )
    group = job.parts.pop(number).group
    if group is not None:
        group.client.shutdown()
    return True


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
