"""How a worker begins: who it is, with whom, and over which way."""

from __future__ import annotations

import atexit
import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from reducer.errors import ConfigError
from worker_client import config
from worker_client.client import rendezvous, summary
from worker_client.client.client import Client
from worker_client.client.enlisting import enlist, job_name
from worker_client.client.hierarchical import HierarchicalClient
from worker_client.communicators.node_sockets import meet
from worker_client.communicators.placement import arrange, host_identity
from worker_client.launch import Role
from worker_client.runtime.credentials import load as load_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from worker_client.client.rendezvous import ProcessGroup
    from worker_client.communicators.placement import Place
    from worker_client.config import WorkerConfig

log = logging.getLogger(__name__)


def connect(
    *,
    servers: str | Sequence[str] | None = None,
    embedded: bool | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    job: str | None = None,
    generation: int | None = None,
    chunk_bytes: int | str | None = None,
    window_bytes: int | str | None = None,
    timeout: float | str | None = None,
    connect_timeout: float | str | None = None,
    fusion_threshold: int | str | None = None,
    cycle_time: float | str | None = None,
    on_rank_lost: str | None = None,
    hierarchy: str | None = None,
    wire_dtype: str | None = None,
    keys: str | PathLike[str] | None = None,
    group: ProcessGroup | None = None,
) -> Client:
    """Join a job and return a client of its own; `worker_client.init` describes the arguments.

    `group` is who takes part and how they meet, instead of torch's default process group.
    """
    # Which of its ranks take part, if not all, need not be said for each of many groups.
    part = group is not None and bool(group.name)
    settings = config.load(
        servers=servers,
        embedded=embedded,
        job=job,
        generation=generation,
        chunk_bytes=chunk_bytes,
        window_bytes=window_bytes,
        timeout=timeout,
        connect_timeout=connect_timeout,
        fusion_threshold=fusion_threshold,
        cycle_time=cycle_time,
        on_rank_lost=on_rank_lost,
        hierarchy=hierarchy,
        wire_dtype=wire_dtype,
        keys=keys,
    )
    # Explicit ranks may differ from the process group's, which then cannot tell us anything.
    if group is None and rank is None and world_size is None:
        group = rendezvous.current()
    rank, world_size = _identify(rank, world_size, group)
    who = rank, world_size
    place = _place(settings, group)
    if group is None or place is None:
        client = enlist(settings, group, who, who, lambda _: Client)
    else:
        between = group.part([group.ranks[at] for at in place.across])
        create = partial(_through_node, group, place)
        client = enlist(settings, between, who, (between.rank, between.world_size), create)
    if not part:
        if settings.on_rank_lost == "continue" and config.torchrun_ends_survivors():
            log.warning(
                "REDUCTION_ON_RANK_LOST=continue cannot work like this: when a rank is lost, "
                "torchrun ends the others of its node, and with --max-restarts or a c10d "
                "rendezvous those of all nodes. Start one rank on each node with --node-rank, "
                "--master-addr and --max-restarts 0, or use a launcher that leaves the others alone"
            )
        summary.begin(client)
    return client


def _through_node(group: ProcessGroup, place: Place, topic: str) -> Callable[..., Client]:
    """Return what makes a client whose all-reduces go through this rank's node first."""
    introduce = partial(
        meet,
        place.mates,
        place.local_rank,
        partial(group.share, f"mate/{topic}"),
        partial(group.read, f"mate/{topic}"),
    )
    return partial(HierarchicalClient, place=place, introduce=introduce)


def connect_part(ranks: Sequence[int]) -> Client:
    """Join a job of some ranks of the default process group, this one among them.

    All ranks of the process group call this at the same point, each with those of its own part.
    What `worker_client.init` takes as arguments comes from the environment.

    Args:
        ranks: as the process group calls them, in the order that they have in the job.

    Raises:
        ConfigError: there is no process group; and as `worker_client.init`.
    """
    group = rendezvous.current()
    if group is None:
        raise ConfigError(
            "there is no process group: call torch.distributed.init_process_group() first"
        )
    part = group.part(ranks)
    who = part.rank, part.world_size
    client = enlist(config.load(), part, who, who, lambda _: Client)
    summary.begin(client)
    return client


def connect_alone(address: str, *, connect_timeout: float) -> Client:
    """Join a new job of one worker at one reducer, to see how both get along.

    Keys and sizes are those of the environment. What this job would do without reducers or ranks is
    left out: it has nobody else.

    Args:
        address: ``host:port``.
        connect_timeout: seconds for the reducer to answer.

    Raises:
        ReductionError: as `worker_client.init`.
    """
    settings = config.load(
        servers=(address,),
        embedded=False,
        connect_timeout=connect_timeout,
        fallback="error",
        on_rank_lost="error",
        hierarchy="off",
        autotune=False,
        wait_for_reducers=0.0,
    )
    # Below the name of the job that it is for, which a key may be bound to.
    name = job_name(settings, None, load_keys(settings.keys), alone=True)
    name = f"{name}/doctor-{secrets.token_hex(4)}"
    alone = 0, 1
    settings = settings.model_copy(update={"job": name})
    return enlist(settings, None, alone, alone, lambda _: Client)


class Default:
    """The client that `worker_client.init` made, kept so that the next call returns it."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._arguments: dict[str, Any] = {}

    @property
    def exists(self) -> bool:
        """Whether there is one already, so that `get` would make none."""
        return self._client is not None and self._client.usable

    def get(self, **arguments: Any) -> Client:
        """Return the client, made with these arguments if there is none.

        Raises:
            ConfigError: there is one, made with other arguments.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        if self._client is not None and self._client.usable:
            if given and given != self._arguments:
                raise ConfigError(
                    "worker_client.init() was called before with other arguments: call "
                    "shutdown() on that client first"
                )
            return self._client
        self._client, self._arguments = connect(**given), given
        atexit.register(self._client.shutdown)  # say goodbye, so that nobody waits for us
        return self._client


def _identify(
    rank: int | None, world_size: int | None, group: ProcessGroup | None
) -> tuple[int, int]:
    if group is not None:
        return group.rank, group.world_size
    launched = config.launch()
    told = launched.identity
    rank = told[0] if rank is None else rank
    world_size = told[1] if world_size is None else world_size
    if rank is None and launched.role is not Role.WORKER:
        raise ConfigError(
            f"this replica is no worker but a {launched.role.value}, as "
            f"{launched.reasons['role']} says: start all replicas with worker-client launch, and "
            "call init() in workers only"
        )
    if rank is None or world_size is None:
        raise ConfigError(
            "rank and world size are unknown: start the script with torchrun or with RANK and "
            "WORLD_SIZE set, call torch.distributed.init_process_group() first, or pass rank= and "
            "world_size="
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in a world of size {world_size}")
    return rank, world_size


def _place(settings: WorkerConfig, group: ProcessGroup | None) -> Place | None:
    """Find this rank's place among nodes, if all-reduces are to go through nodes first."""
    if settings.hierarchy == "off":
        return None
    if settings.fallback != "error" or settings.on_rank_lost != "error" or settings.autotune:
        raise ConfigError(
            "REDUCTION_HIERARCHY=auto can neither go on without reducers nor without a rank, and "
            "has several jobs to tune: leave out REDUCTION_FALLBACK, REDUCTION_ON_RANK_LOST and "
            "REDUCTION_AUTOTUNE, or set REDUCTION_HIERARCHY=off"
        )
    place = None
    if group is not None:
        launched = config.launch().node_rank
        key = host_identity() if launched is None else str(launched)
        place = arrange(group.gather("node", key), group.rank)
    if place is None:
        log.info("no hierarchy: it needs a process group, and nodes with equally many ranks")
    else:
        log.info("hierarchy: %d nodes of %d ranks", len(place.nodes), len(place.mates))
    return place


DEFAULT = Default()
