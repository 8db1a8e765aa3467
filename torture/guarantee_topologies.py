"""The topologies of `torture.guarantee`: how reducers and ranks are arranged, and their faults."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab import Lab
from reducer.commands.keygen import keygen
from torture.guarantee_faults import Arena
from torture.guarantee_job import Job, Tally
from torture.guarantee_life import MOST_REST_S, Part
from torture.guarantee_plan import Plan
from torture.guarantee_pool import Reducers

TIMEOUT_S = 4.0
CONNECT_S = 8.0
TROUBLES = 0.015  # of steps
FAULTS = {
    "reducer killed": 16.0,
    "reducer drained": 8.0,
    "reducer stopped": 12.0,
    "pool killed": 3.0,
    "rank killed": 10.0,
    "rank stopped": 12.0,
    "connection reset": 14.0,
    "connections reset": 6.0,
    "job killed": 4.0,
    "rank replaced": 4.0,
}
# Connections to far reducers break, and go on: no call may fail for it.
BREAKS = {"connection reset": 40.0, "connections reset": 40.0}
# A process group takes all ranks at once, so nobody can come in a rank's place.
GROUP = FAULTS | {"rank replaced": 0.0}


@dataclass(frozen=True)
class Topology:
    """One topology.

    Attributes:
        ranks, reducers: numbers of them, one of which is chosen.
        faults: how often each comes, relative to the others.
        jobs: names of jobs on the pool; with several, each has a key of its own.
        group: whether the ranks make a process group.
        embedded: whether ranks host reducers if there are fewer others than ranks.
        local: ranks of a node; 0: no hierarchy.
        exact: whether values are such that the order of additions does not matter.
        elastic: whether a job goes on without a rank.
        admits: whether ranks join it.
        quorum: whether ranks average models, at times without one of them, and make no calls.
        round_trip_ms: between any two hosts of a lab; 0: all are on loopback.
        slack_s: how much later than its timeout a call may end, as docs/failures.md says.
        patience_s: within which there must be good results after a fault.
        settings: arguments of `worker_client.init`.
        environment: of ranks.
    """

    ranks: tuple[int, ...]
    reducers: tuple[int, ...]
    faults: Mapping[str, float]
    jobs: tuple[str, ...] = ("guarantee",)
    group: bool = False
    embedded: bool = False
    local: int = 0
    exact: bool = False
    elastic: bool = False
    admits: bool = False
    quorum: bool = False
    round_trip_ms: float = 0.0
    slack_s: float = 0.0
    patience_s: float = 45.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


TOPOLOGIES = {
    "pool": Topology(ranks=(2, 3, 4), reducers=(2, 3), faults=FAULTS),
    "elastic": Topology(
        ranks=(3, 4),
        reducers=(2,),
        faults=GROUP | {"pool killed": 1.0},
        elastic=True,
        slack_s=25.0,  # the ranks that are left wait for each other, and then begin anew
        patience_s=75.0,
        settings={"on_rank_lost": "continue"},
    ),
    "joining": Topology(
        ranks=(2, 3),
        reducers=(2,),
        faults=GROUP | {"pool killed": 1.0, "job killed": 1.0, "rank joins": 60.0},
        elastic=True,
        admits=True,
        slack_s=25.0,
        patience_s=75.0,
        settings={"on_rank_lost": "continue"},
    ),
    "fallback": Topology(
        ranks=(2, 3),
        reducers=(1, 2),
        faults=GROUP | {"pool killed": 12.0},
        group=True,
        exact=True,
        slack_s=10.0,  # the group's own timeout, several times
        environment={"REDUCTION_FALLBACK": "process-group"},
    ),
    "embedded": Topology(ranks=(2, 3), reducers=(0, 0, 1), faults=GROUP, group=True, embedded=True),
    "hierarchical": Topology(
        ranks=(4,),
        reducers=(0, 2),
        faults=GROUP,
        group=True,
        local=2,
        slack_s=15.0,  # a node waits for the word of all its ranks
        settings={"hierarchy": "auto"},
    ),
    "far": Topology(
        ranks=(2, 3),
        reducers=(2,),
        faults={name: FAULTS[name] / 3 for name in FAULTS} | BREAKS,
        round_trip_ms=20.0,
    ),
    "quorum": Topology(
        ranks=(3, 4),
        reducers=(2,),
        faults=GROUP,
        quorum=True,
        elastic=True,
        slack_s=25.0,  # late ranks one after the other, and reducers that are away
        patience_s=75.0,
    ),
    "two-jobs": Topology(ranks=(2,), reducers=(2,), faults=FAULTS, jobs=("first", "second")),
}


def lab_of(topology: Topology) -> Lab:
    """Return the hosts of a topology: first those of reducers, then of ranks that are far away."""
    reducers = max(topology.reducers)
    if not topology.round_trip_ms:
        return Lab.loopback(max(1, reducers))
    return Lab(reducers + max(topology.ranks), round_trip_ms=topology.round_trip_ms)


def arrange(
    topology: Topology,
    seed: str,
    tally: Tally,
    rng: random.Random,
    *,
    lab: Lab,
    folder: Path,
    margin_s: float,
) -> Arena:
    """Choose settings, start reducers, and make jobs that have yet to begin.

    `seed` is of calls and values, `rng` chooses; `folder` is for keys, and what processes write.
    """
    most = max(topology.reducers)  # their hosts come first
    ranks, count = rng.choice(topology.ranks), rng.choice(topology.reducers)
    options = ["--threads", str(rng.choice((1, 1, 2)))]
    keyed = len(topology.jobs) > 1
    if keyed:
        keygen(folder / "keys", topology.jobs)
        options += ["--keys", str(folder / "keys" / "pool")]
    reducers = Reducers(lab.hosts[:count], options, folder / "reducers") if count else None
    settings = {"connect_timeout": CONNECT_S, **topology.settings}
    if rng.random() < 0.6:
        settings["chunk_bytes"] = rng.choice((64, 1024, 4096, 65536))
    if rng.random() < 0.4:
        settings["fusion_threshold"] = rng.choice((0, 2000))
    if topology.embedded and count:
        settings["embedded"] = count < ranks
    nodes = None
    if topology.local:
        nodes = tuple(rank // topology.local for rank in range(ranks))
    wire_dtypes = ["", "", "bf16", "fp16"]
    if not (topology.local or topology.exact):
        # Where a block begins in a rank's part of a node's sum is no promise, and what is rounded
        # to blocks has no sums that are the same in any order.
        wire_dtypes += ["int8", "fp8_e4m3"]
    wire_dtype = rng.choice(wire_dtypes)
    if wire_dtype in {"int8", "fp8_e4m3"} and "chunk_bytes" in settings:
        settings["chunk_bytes"] = max(settings["chunk_bytes"], 256)
    part = Part(
        servers=() if reducers is None else tuple(reducers.addresses),
        plan=Plan(
            seed=seed,
            ranks=ranks,
            extras=not (topology.elastic or topology.local),
            wire_dtype=wire_dtype,
            troubles=TROUBLES,
            uniform=rng.random() < 0.3,
            ddp=topology.group,
            admits=topology.admits,
        ),
        data=seed,
        exact=topology.exact,
        nodes=nodes,
        elastic=topology.elastic,
        leader="somewhere" if topology.group else "",
        decider=0 if topology.quorum else None,
        timeout_s=TIMEOUT_S,
        margin_s=margin_s,
        slack_s=topology.slack_s,
        most_errors=rng.choice((1, 4, 12)),
        settings=settings,
    )

    patience_s = topology.patience_s
    if topology.elastic:
        # A rank that dies while no reducer is there is waited for: one thread may have nothing but
        # errors until its job is over, each after a call's time and as much to reconcile.
        patience_s = max(patience_s, (part.most_errors + 1) * (2 * TIMEOUT_S + MOST_REST_S))

    def of_rank(rank: int) -> dict[str, Any]:
        environment = dict(topology.environment)
        if nodes is not None:
            environment["GROUP_RANK"] = str(nodes[rank])
        namespace = lab.hosts[most + rank].name if topology.round_trip_ms else ""
        return {"environment": environment, "namespace": namespace}

    jobs = []
    for name in topology.jobs:
        keys = str(folder / "keys" / "jobs" / name) if keyed else None
        mine = replace(part, job=name, keys=keys, data=f"{seed} {name}")
        jobs.append(Job(mine, tally, of_rank, folder))
    return Arena(
        jobs,
        reducers,
        topology.faults,
        tally,
        rng,
        patience_s=patience_s,
        elastic=topology.elastic,
        resumes=topology.round_trip_ms > 0,
        survives_pool="REDUCTION_FALLBACK" in topology.environment,
    )
