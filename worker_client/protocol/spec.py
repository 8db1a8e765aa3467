"""What a session must know: who we are and where the reducers are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from reducer.wire.constants import PEER_TIMEOUT_MS
from reducer.wire.header import fingerprint
from worker_client.protocol.flow_control import window_limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_LONGEST_NAME = 150  # of a file, for which file systems allow 255 bytes


class Heartbeats(NamedTuple):
    """How a rank and a reducer notice that the other one is gone.

    Attributes:
        every_s: time between two of this rank's.
        peer_timeout_s: how long either may send nothing before the other one gives it up.
    """

    every_s: float = 0.2
    peer_timeout_s: float = PEER_TIMEOUT_MS / 1000


HEARTBEATS = Heartbeats()


@dataclass(frozen=True)
class JobSpec:
    """What a session must know; every rank of a job gives the same but for `rank`.

    Attributes:
        job, generation, rank, world_size: who we are.
        reducers: addresses, ``host:port``, in the same order at every rank.
        window_bytes: forced bytes in flight over all reducers, 0 for what flow control chooses.
        chunk_bytes: forced chunk size, 0 for the rule of the protocol.
        hosts: the rank that hosts a reducer, by the reducer's index; others are the pool's.
        secret: the job's, which these reducers ask ranks to prove that they know; empty for none.
        fallback: hand all-reduces over when no reducer is left, instead of failing them.
        elastic: the ranks that are left will go on elsewhere when one is lost, so what is in
            progress then ends at once.
        streams: connections of each link; 0 for what its round trip asks for.
        port_bytes: of the buffer of the switch's port that leads to this rank, for what reducers
            send; 0 if that is not known.
        resumes: connections to far reducers may go on when they break.
        lanes: addresses of reducers' further threads, by the reducer's index, where known.
        reducers_timeout_s: how long to wait for all reducers at the start, before going on without
            those that have not answered.
        begin_without_s: how long to wait for the others, when some reducers have answered at the
            start, if none of them refuses this worker.
        wait_s: how long to wait for a reducer, if none answers.
        hosts_wait_s: how long to wait at the start for a reducer that a rank hosts and that can be
            reached, if that is longer than for others.
        weights: share of each reducer, relative to the others; equal if empty.
        inproc: endpoints of reducers' threads in this process, by address.
        agreed: what else ranks must have in common, by the names of variables.
        run: what tells this run of the job from another; "" if there is nothing like that.
        process: what tells this process from any other.
        heartbeats: the job's.
        host_name: of this machine, for other ranks' errors.
    """

    job: str
    generation: int
    rank: int
    world_size: int
    reducers: tuple[str, ...]
    window_bytes: int
    chunk_bytes: int = 0
    fallback: bool = False
    elastic: bool = False
    streams: int = 1
    port_bytes: int = 0
    resumes: bool = False
    lanes: Mapping[int, Sequence[str]] = field(default_factory=dict)
    reducers_timeout_s: float = math.inf
    begin_without_s: float = math.inf
    wait_s: float = 0.0
    hosts_wait_s: float = 0.0
    weights: tuple[int, ...] = ()
    hosts: Mapping[int, int] = field(default_factory=dict)
    inproc: Mapping[str, str] = field(default_factory=dict)
    agreed: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    process: str = ""
    heartbeats: Heartbeats = HEARTBEATS
    host_name: str = ""
    secret: bytes = field(default=b"", repr=False)

    def window_per_reducer(self) -> int:
        """Return the most bytes that will be in flight at one reducer."""
        return window_limit(self.window_bytes, self.chunk_bytes, len(self.reducers))

    @property
    def replaceable(self) -> bool:
        """Whether any reducer could replace another one."""
        return len(self.reducers) > 1 and len(self.hosts) < len(self.reducers)

    def may_lack(self, reducer: int) -> bool:
        """Whether a rank may begin without a reducer."""
        return self.replaceable and reducer not in self.hosts

    @property
    def adopts(self) -> bool:
        """Whether calls go on when no reducer is left between which buffers were cut."""
        alone = len(self.reducers) == 1 and not self.hosts
        waits = alone and self.wait_s > 0  # for another process in its place
        return (self.replaceable or waits) and not self.fallback

    def keeps(self, reducer: int) -> bool:
        """Whether results of a reducer are kept: it may be lost, and there is another way then."""
        if reducer in self.hosts:
            return False
        return self.fallback or self.adopts or len(self.reducers) > 1


def file_name(job: str) -> str:
    """Return what files of a job are called after: another name for each job."""
    name = quote(job, safe="")
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}-{fingerprint(job):x}"
