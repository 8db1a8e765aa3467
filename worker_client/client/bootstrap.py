"""How a worker begins: from settings and the launcher's variables to a client that has joined."""

from __future__ import annotations

import atexit
import json
import logging
import random
import secrets
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from reducer.errors import (
    ConfigError,
    DuplicateRankError,
    LocalProtocolError,
    MembershipError,
    MismatchError,
    RankLostError,
    ReductionTimeout,
)
from reducer.units import host_port, is_loopback
from reducer.wire.header import fingerprint
from reducer.wire.layout import mixed_weights
from worker_client import config
from worker_client.client import compose, rendezvous, summary
from worker_client.communicators.newcomers import MembershipRequest
from worker_client.communicators.placement import arrange, host_identity, host_name
from worker_client.launch import LauncherRole
from worker_client.launch.resolved import Launcher
from worker_client.protocol.spec import Heartbeats, JobSpec, file_name
from worker_client.runtime.credentials import Keys
from worker_client.runtime.credentials import load as load_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from reducer.errors import ReductionError
    from worker_client.client.client import Client
    from worker_client.client.hosting import Hosted
    from worker_client.client.rendezvous import Rendezvous
    from worker_client.communicators.communicator import Communicator
    from worker_client.communicators.placement import NodePlace
    from worker_client.communicators.process_group import ProcessGroup
    from worker_client.config import InitSettings, WorkerConfig
    from worker_client.launch.resolved import Resolved

log = logging.getLogger(__name__)
_divisions = [0]  # calls of `connect_subgroup` so far; the same number at every rank


def connect(
    *, group: Rendezvous | None = None, quietly: bool = False, **given: Unpack[InitSettings]
) -> Client:
    """Join a job and return a client of its own; `worker_client.init` describes the arguments.

    `group` is who takes part and how they meet, instead of torch's default process group. A job
    that a command makes `quietly` has no lines in the output when it begins and ends.
    """
    config.refuse_unknown_arguments("connect", given)
    # Which of its ranks take part, if not all, need not be said for each of many groups.
    quietly = quietly or (group is not None and bool(group.name))
    rank, world_size = given.pop("rank", None), given.pop("world_size", None)
    settings = config.load(**given)
    if settings.join:
        return _announced(_join(settings))
    # Explicit ranks may differ from the process group's, which then cannot tell us anything.
    if group is None and rank is None and world_size is None:
        group = rendezvous.current()
    rank, world_size = _identify(rank, world_size, group)
    if settings.impl == "plain":
        return _reference(settings, group, (rank, world_size))
    place = _place(settings, group)
    if group is None or place is None:
        client = enlist(settings, group, (rank, world_size))
    else:
        nodes = [[group.ranks[at] for at in ranks] for ranks in place.nodes]
        across = list(zip(*nodes, strict=True))
        between = group.subgroup(across[place.local_rank], all_of=across)
        node = _node(settings, group, place, nodes)
        client = enlist(settings, between, (between.rank, between.world_size), node=node)
    if not quietly:
        if settings.on_rank_lost == "continue" and config.torchrun_ends_the_others():
            log.warning(
                "REDUCTION_ON_RANK_LOST=continue cannot work like this: when a rank is lost, "
                "torchrun ends the others of its node, and with --max-restarts or a c10d "
                "rendezvous those of all nodes. Start one rank on each node with --node-rank, "
                "--master-addr and --max-restarts 0, or use a launcher that leaves the others alone"
            )
        return _announced(client)
    return client


def _join(settings: WorkerConfig) -> Client:
    """Join a job that runs, as soon as its ranks let this one in.

    Raises:
        ConfigError: settings do not go with that.
        ReductionTimeout: nobody has let this rank in in time.
        ReductionError: as `worker_client.init`.
    """
    _check_join(settings)
    keys = load_keys(settings.keys)
    name = job_name(settings, None, keys, alone=False)
    known = job_spec(settings, name, (0, 1), generation=settings.generation, run="")
    enter = compose.flat(settings, keys)
    until = time.monotonic() + settings.timeout
    error: ReductionError | None = None
    while time.monotonic() < until:
        try:
            membership_request = MembershipRequest(enter, known, settings.connect_timeout, until)
        except _NOT_NOW as why:
            error = why
            time.sleep(JOIN_AGAIN_S * random.uniform(0.5, 1.5))  # noqa: S311 (no secret)
            continue
        who = membership_request.proposal.world_size - 1, membership_request.proposal.world_size
        try:
            return enlist(settings, None, who, membership_request=membership_request)
        except _NOT_NOW as why:
            log.info("not in yet: %s", why)
            error = why
        finally:
            membership_request.close()
    raise ReductionTimeout(
        f"no rank of job {known.job!r} has let this one in within {settings.timeout:g} s"
        f"{f' ({error})' if error else ''}: check that it runs with REDUCTION_ON_RANK_LOST="
        "continue at the same reducers, and that its ranks call worker_client.elastic.sync() or "
        "client.admit() between their steps"
    )


def _check_join(settings: WorkerConfig) -> None:
    if settings.on_rank_lost != "continue" or not settings.servers or settings.embedded:
        raise ConfigError(
            "REDUCTION_JOIN=1 joins a job whose ranks go on by themselves, at the reducers of a "
            "pool: set REDUCTION_ON_RANK_LOST=continue and REDUCTION_SERVERS, as at its other "
            "ranks, and leave out REDUCTION_EMBEDDED"
        )
    if settings.fallback != "error" or settings.hierarchy != "off":
        raise ConfigError(
            "REDUCTION_JOIN=1 goes with neither REDUCTION_FALLBACK nor REDUCTION_HIERARCHY: leave "
            "them out, at all ranks of the job"
        )
    if settings.job is None and config.launch().holds_port:
        raise ConfigError(
            "REDUCTION_JOIN=1 under torchrun joins the job of another torchrun, whose name nothing "
            "here tells: set REDUCTION_JOB to one name, at this rank and at those that run already"
        )


def _node(
    settings: WorkerConfig, group: Rendezvous, place: NodePlace, nodes: Sequence[Sequence[int]]
) -> compose.Node:
    """Make the process groups of this rank's node; all ranks of `group` call this alike.

    `nodes` have the ranks as the process group calls them.
    """
    # They load torch, which a rank that has a process group has loaded.
    from worker_client.communicators.node import NodeCommunicator  # noqa: PLC0415
    from worker_client.communicators.node_group import NodeGroup, NodePages  # noqa: PLC0415

    own = group.subgroup(nodes[place.node], all_of=nodes)
    assert own.make_private is not None, "ranks without have no place"
    patience_s = settings.timeout + GROUPS_WAIT_S
    made = {
        topic: [own.make_private(patience_s, backend=own.backends) for _ in range(2)]
        for topic in ("ordered", "named")
    }

    def around(between: Communicator, topic: str) -> NodeCommunicator:
        pages = NodePages(place.peers, place.local_rank, partial(own.gather, f"pages/{topic}"))
        takes_devices = "nccl" in own.backends
        ranks = NodeGroup(pages, made[topic])
        return NodeCommunicator(between, place, ranks, takes_devices=takes_devices)

    return compose.Node(place, around)


def connect_subgroup(ranks: Sequence[int]) -> Client:
    """Join a job of some ranks of the default process group, this one among them.

    All ranks of the process group call this at the same point, each with those of its own subgroup.
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
    _divisions[0] += 1
    subgroup = group.subgroup(ranks, number=_divisions[0])
    return _announced(enlist(config.load(), subgroup, (subgroup.rank, subgroup.world_size)))


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
        wait_for_reducers=0.0,
    )
    # Below the name of the job that it is for, which a key may be bound to.
    name = job_name(settings, None, load_keys(settings.keys), alone=True)
    name = f"{name}/doctor-{secrets.token_hex(4)}"
    return enlist(settings.model_copy(update={"job": name}), None, (0, 1))


def _announced(client: Client) -> Client:
    """Say who takes part in what, and at the client's shutdown what came of it."""
    summary.begins(client.summary(), client.spec, client.impl)
    client.on_end = lambda client: summary.ends(client.summary(), client.spec)
    return client


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
    rank: int | None, world_size: int | None, group: Rendezvous | None
) -> tuple[int, int]:
    if group is not None:
        return group.rank, group.world_size
    launched = config.launch()
    if rank is None or world_size is None:
        launched.check_alone()
    told = launched.identity
    rank = told[0] if rank is None else rank
    world_size = told[1] if world_size is None else world_size
    if rank is None and launched.role is not LauncherRole.WORKER:
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


def _place(settings: WorkerConfig, group: Rendezvous | None) -> NodePlace | None:
    """Find this rank's place among nodes, if all-reduces are to go through nodes first."""
    if settings.hierarchy == "off":
        return None
    place = None
    if group is not None and group.make_private is not None:
        launched = config.launch().node_rank
        key = host_identity() if launched is None else str(launched)
        place = arrange(group.gather("node", key), group.rank)
    if place is None:
        log.warning(
            "REDUCTION_HIERARCHY=auto has no effect: it takes a process group of torch's, and "
            "several nodes of equally many ranks, more than one"
        )
    else:
        log.info("hierarchy: %d nodes of %d ranks", len(place.nodes), len(place.peers))
    return place


DEFAULT = Default()


JOIN_AGAIN_S = 0.3  # between two attempts to join a job that runs
# Another rank joins right now, or the ranks have changed meanwhile: a later attempt may succeed.
_NOT_NOW = (
    *(DuplicateRankError, LocalProtocolError, MembershipError, RankLostError, ReductionTimeout),
)
GROUPS_WAIT_S = 60.0  # of a node's process groups, beyond a call's timeout, which ends it first
BEGIN_WITHOUT_S = 3.0  # longer than a reducer that is well takes to answer anywhere


def enlist(
    settings: WorkerConfig,
    group: Rendezvous | None,
    who: tuple[int, int],
    *,
    node: compose.Node | None = None,
    membership_request: MembershipRequest | None = None,
) -> Client:
    """Join a job at the reducers, as rank and world size `who`; with a `node`, one between nodes.

    `membership_request` lets this rank in, where the job runs already.
    """
    groups = _process_groups(settings, group)
    keys = load_keys(settings.keys)
    hosts = hosts_reducer(settings, who[1])
    if group is not None:
        _agree_on_topology(group, Topology(hosts, settings.servers))
    if settings.encrypt and settings.servers and settings.keys is None:
        raise ConfigError(
            "REDUCTION_ENCRYPT=1 alone encrypts nothing that goes to the reducers of "
            "REDUCTION_SERVERS: give these keys (reducer keygen DIR, reducer serve --keys DIR/pool)"
            " and set REDUCTION_KEYS, which encrypts everything"
        )
    hosted = _embed(settings, group) if hosts else None
    server = None if hosted is None else hosted.server
    if hosted is not None:
        keys = replace(keys, hosts=hosted.curves)
    try:
        name = job_name(settings, group, keys, alone=who[1] == 1)
        if membership_request is None:
            generation, run = settings.generation, _run(settings, group, who[1])
        else:
            generation, run = (
                membership_request.proposal.generation,
                membership_request.proposal.run,
            )
        client = compose.client(
            settings,
            job_spec(settings, name, who, generation=generation, run=run, hosted=hosted),
            keys=keys,
            server=server,
            node=node,
            groups=groups,
            membership_request=membership_request,
        )
    except BaseException:
        if server is not None:
            server.stop()
        raise
    if settings.timeline is not None:
        try:
            file = f"{file_name(name)}-rank{who[0]}.json"
            client.start_timeline(settings.timeline / file)
        except BaseException:
            client.shutdown()
            raise
    return client


def _reference(settings: WorkerConfig, group: Rendezvous | None, who: tuple[int, int]) -> Client:
    from worker_client.client.reference_client import (  # noqa: PLC0415 (loads libzmq)
        ReferenceClient,
    )

    job = job_name(settings, group, Keys(), alone=who[1] == 1)
    return cast("Client", ReferenceClient(settings, job, *who))  # so much of one as it has


def job_spec(
    settings: WorkerConfig,
    job: str,
    who: tuple[int, int],
    *,
    generation: int,
    run: str,
    hosted: Hosted | None = None,
) -> JobSpec:
    """Return what a session of the job must know; `hosted` are the reducers of all ranks."""
    rank, world_size = who
    addresses, weights = settings.servers, (1,) * len(settings.servers)
    hosts: dict[int, int] = {}
    if hosted is not None:
        hosts = {len(addresses) + at: at for at in range(world_size)}
        addresses, weights = addresses + hosted.addresses, mixed_weights(world_size, len(addresses))
    return JobSpec(
        job=job,
        generation=generation,
        rank=rank,
        world_size=world_size,
        reducers=addresses,
        window_bytes=int(settings.window_bytes),
        chunk_bytes=int(settings.chunk_bytes),
        streams=settings.streams,
        port_bytes=int(settings.port_buffer or 0),
        resumes=True,
        fallback=settings.fallback != "error",
        elastic=settings.on_rank_lost == "continue",
        begin_without_s=min(BEGIN_WITHOUT_S, settings.connect_timeout / 2),
        wait_s=settings.wait_for_reducers,
        hosts_wait_s=settings.timeout,
        weights=weights,
        hosts=hosts,
        inproc={} if hosted is None else hosted.server.inproc,
        agreed=_agreed(settings),
        run=run,
        process=secrets.token_hex(8),
        heartbeats=Heartbeats(settings.heartbeat, settings.patience),
        host_name=host_name(),
        secret=b"" if hosted is None else hosted.secret,
    )


def _agreed(settings: WorkerConfig) -> dict[str, str]:
    """Return what else ranks must have in common, by the names of variables."""
    return {
        "REDUCTION_ENCRYPT": str(int(_encrypts(settings))),
        "REDUCTION_FALLBACK": settings.fallback,
        "REDUCTION_FUSION_THRESHOLD": str(int(settings.fusion_threshold)),
        "REDUCTION_ON_RANK_LOST": settings.on_rank_lost,
        "REDUCTION_WIRE_DTYPE": settings.wire_dtype,
    }


def job_name(settings: WorkerConfig, group: Rendezvous | None, keys: Keys, *, alone: bool) -> str:
    """Return what the job is called: as was told, or else a name that its ranks agree on.

    Raises:
        ConfigError: its ranks, unless there is one `alone`, have nothing that other runs have not.
    """
    if settings.job is not None:
        return settings.job if group is None else group.named(settings.job)
    launched = config.launch()
    base = launched.job
    # The pool wants names that begin as the key's.
    prefix = f"{keys.job}/" if keys.job else ""
    if group is None:
        if launched.holds_port and (nonce := _meeting_place(settings, launched)):
            base = f"{(base or 'run')[:24]}-{nonce}"  # another run may have the same id
        elif alone:
            base = base or secrets.token_hex(8)
        if not base:
            raise ConfigError(
                "this run has no name, so nothing tells its ranks from those of another run that "
                "uses the same reducers (MASTER_ADDR and MASTER_PORT do not: another run may have "
                f"the same): set REDUCTION_JOB={prefix}NAME, the same at every rank and another "
                "one for each run; or start it with a launcher such as torchrun, or call "
                "torch.distributed.init_process_group() first"
            )
        return f"{prefix}{base}"
    if group.rank == 0:
        # Two runs that share a pool must not meet in one job, nor a run its own predecessor.
        group.share("job", group.named(f"{prefix}{(base or 'job')[:24]}-{secrets.token_hex(4)}"))
    return group.read("job", 0)


def _run(settings: WorkerConfig, group: Rendezvous | None, world_size: int) -> str:
    """Return what the ranks of this run have in common, and another run of the job has not."""
    if group is not None:
        if group.rank == 0:
            group.share("run", secrets.token_hex(8))
        return group.read("run", 0)
    launched = config.launch()
    place = _meeting_place(settings, launched)
    # torchrun that goes on with more or fewer ranks does not count that as a restart.
    ranks = f".{world_size}" if launched.launcher is Launcher.TORCHRUN else ""
    return f"{place}.{launched.restarts}{ranks}" if place else ""


def _meeting_place(settings: WorkerConfig, launched: Resolved) -> str:
    """Return what stands for where the ranks meet; "" if they may call that differently."""
    if launched.master_addr is None or launched.master_port is None:
        return ""
    if launched.holds_port:
        try:
            return rendezvous.nonce_of_torchrun(
                launched.master_addr, launched.master_port, settings.connect_timeout
            )
        except MembershipError as error:
            if settings.job is None:
                raise
            log.info("%s: going on with the name of the job", error)
    place = host_port(launched.master_addr, launched.master_port)
    local = launched.local_world_size
    if is_loopback(place) and local not in {None, launched.world_size}:
        return ""  # on another node it is called something else
    if is_loopback(place) or (local is not None and local == launched.world_size):
        place = f"{place} of {host_identity()}"  # another host may have the same name
    return f"{fingerprint(place):016x}"


def hosts_reducer(settings: WorkerConfig, world_size: int) -> bool:
    """Whether this rank hosts a reducer: with as many others as ranks, it would have no share."""
    if settings.embedded is False and not settings.servers:
        raise ConfigError(
            "there are no reducers: set REDUCTION_SERVERS=host:port,host:port, or do not set "
            "REDUCTION_EMBEDDED=0"
        )
    if settings.embedded is None:
        return not settings.servers
    return settings.embedded and len(settings.servers) < world_size


class Topology(NamedTuple):
    """Where a rank will look for the reducers.

    Attributes:
        hosts: whether it hosts one, and expects that of the others.
        servers: addresses of the pool's.
    """

    hosts: bool
    servers: Sequence[str]

    def __str__(self) -> str:
        pool = [f"the pool {','.join(self.servers)}"] if self.servers else []
        return " and ".join([*pool, *["one in every rank"] * self.hosts])

    def meets(self, other: Topology) -> bool:
        """Whether ranks with these two do not wait for each other at different places."""
        return (self.hosts, bool(self.servers)) == (other.hosts, bool(other.servers))


def _agree_on_topology(group: Rendezvous, mine: Topology) -> None:
    """Find out whether ranks would wait for each other at different places.

    Ranks that use a pool ask rank 0 alone: they are to wait for nobody else. Ranks that host
    reducers wait for each other anyway, and ask all of them.

    Raises:
        MismatchError: another rank uses a pool and this one does not, or the like.
    """
    group.share("topology", json.dumps(mine))
    for rank in range(group.world_size if mine.hosts else 1):
        theirs = Topology(*json.loads(group.read("topology", rank)))
        if not mine.meets(theirs):
            same_pool = set(theirs.servers) == set(mine.servers)
            raise MismatchError.between(
                "start of the job",
                "REDUCTION_EMBEDDED" if same_pool else "REDUCTION_SERVERS",
                (group.ranks[rank], str(theirs)),
                (group.ranks[group.rank], str(mine)),
                called="the reducers to use (REDUCTION_SERVERS, REDUCTION_EMBEDDED)",
            )


def _process_groups(
    settings: WorkerConfig, group: Rendezvous | None
) -> tuple[ProcessGroup, ProcessGroup] | None:
    """Return what to fall back to when no reducer is left, if that is asked for.

    One is for calls in order, and one for those with names.
    """
    if settings.fallback == "error":
        return None
    if group is None:
        raise ConfigError(
            "REDUCTION_FALLBACK=process-group needs a process group: call "
            "torch.distributed.init_process_group() before worker_client.init(), and leave out "
            "rank= and world_size="
        )
    if group.make_private is None:
        raise ConfigError(
            "REDUCTION_FALLBACK=process-group takes all ranks of the process group, and this job "
            "has some of them: leave it out"
        )
    from worker_client.communicators.process_group import (  # noqa: PLC0415 (loads torch)
        ProcessGroup,
    )

    ordered, named = (group.make_private(settings.timeout) for _ in range(2))
    return ProcessGroup(ordered), ProcessGroup(named)


def _encrypts(settings: WorkerConfig) -> bool:
    """Whether what goes to reducers that ranks host is encrypted."""
    return settings.encrypt or settings.keys is not None


def _embed(settings: WorkerConfig, group: Rendezvous | None) -> Hosted:
    if group is None and settings.embedded:
        raise ConfigError(
            "REDUCTION_EMBEDDED=1 needs init_process_group(): call it first, and leave out rank= "
            "and world_size=, or unset REDUCTION_EMBEDDED"
        )
    if group is None:
        raise ConfigError(
            "there are no reducers to use: start some and set REDUCTION_SERVERS=host:port,"
            "host:port, or with PyTorch call torch.distributed.init_process_group() first, so that "
            "each rank can host one"
        )
    from worker_client.client import hosting  # noqa: PLC0415 (loads the reducer's code)

    return hosting.start(group, settings.interface, encrypt=_encrypts(settings))
