"""Who takes part in a job that goes on without lost ranks, and with ranks that join."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reducer.errors import RankLostError, renumbered
from reducer.wire.constants import MAX_JOB_NAME_BYTES
from reducer.wire.header import fingerprint
from reducer.wire.layout import mixed_weights

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from reducer.errors import ReductionError
    from worker_client.protocol.link import Link
    from worker_client.protocol.spec import JobSpec

# A reducer that is well answers in milliseconds; one that returns is used again.
REDUCERS_TIMEOUT_S = 1.0
_MARK_BYTES = 17  # of a job's name: what tells its memberships from each other


@dataclass(frozen=True)
class Membership:
    """The ranks that are present, and what they tell reducers.

    Ranks that join get the next numbers, and no number is used twice. Reducers number those that
    are present from 0 on without gaps.
    """

    all: JobSpec  # of the job with all ranks that have ever taken part
    spec: JobSpec  # of this membership
    present: tuple[int, ...]  # ranks of `all`, ascending

    @classmethod
    def whole(cls, spec: JobSpec) -> Membership:
        """Return the membership that a job begins with."""
        return cls(spec, spec, tuple(range(spec.world_size)))

    def without(self, lost: Collection[int], links: Iterable[Link], more: int = 0) -> Membership:
        """Return the membership without ranks of `all`, or that join, and with `more` that join.

        `links`, those of the current membership, know where reducers' lanes are.

        Raises:
            RankLostError: this rank itself is among the lost.
        """
        s = replace(self.all, world_size=self.all.world_size + more)
        if s.rank in lost:
            raise RankLostError("reducers have lost this rank, and others go on", rank=s.rank)
        present = tuple(rank for rank in range(s.world_size) if rank not in lost)
        pool = [at for at in range(len(s.reducers)) if at not in s.hosts]
        hosted = [at for at, host in s.hosts.items() if host in present]
        reducers = tuple(s.reducers[at] for at in pool + hosted)
        lanes: dict[str, list[str]] = {address: [] for address in self.spec.reducers}
        for link in links:
            if link.lane:
                lanes[self.spec.reducers[link.reducer]].append(link.address)
        hosts = {len(pool) + at: present.index(s.hosts[one]) for at, one in enumerate(hosted)}
        weights = mixed_weights(len(present), len(pool)) if hosted else (1,) * len(pool)
        spec = replace(
            s,
            job=marked(s.job, (s.world_size, sorted(lost), reducers)),
            rank=present.index(s.rank),
            world_size=len(present),
            reducers=reducers,
            hosts=hosts,
            weights=weights,
            lanes={at: lanes[address] for at, address in enumerate(reducers)},
            elastic=True,
            reducers_timeout_s=REDUCERS_TIMEOUT_S,
            hosts_wait_s=0.0,  # who does not answer is lost, and the others go on
            fallback=False,
        )
        return Membership(s, spec, present)

    def may_follow(self, before: Membership) -> bool:
        """Whether no other ranks of an earlier membership could go on beside these."""
        left, whole = len(self.present), len(before.present)
        return 2 * left > whole or (2 * left == whole and before.present[0] in self.present)

    def renumbered(self, error: ReductionError) -> ReductionError:
        """Return an error in which ranks are numbered as in `all`."""
        if len(self.present) == self.all.world_size:
            return error
        told = renumbered(error, self.present, "without lost ranks")
        if str(told) == str(error):  # its text may name a rank all the same
            told.args = (f"{error} (numbering the ranks {self.present} from 0 on)",)
        return told


def marked(job: str, what: object) -> str:
    """Return the name of another job of the same owner, which differs for any other `what`."""
    mark = f"{fingerprint(repr((job, what))):016x}"
    return f"{_shortened(job, MAX_JOB_NAME_BYTES - _MARK_BYTES)}~{mark}"


def _shortened(name: str, nbytes: int) -> str:
    return name.encode()[:nbytes].decode(errors="ignore")
