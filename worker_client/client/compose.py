"""What all-reduces go through, put together from the settings; for calls with names, once more."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import ConfigError
from worker_client.client.client import Client
from worker_client.client.membership_change import MembershipChange, Resources
from worker_client.client.recording import CallLog
from worker_client.communicators.casting import CastingCommunicator
from worker_client.communicators.communicator import FlatCommunicator
from worker_client.communicators.elastic import ElasticCommunicator
from worker_client.communicators.fallback import FallbackCommunicator
from worker_client.communicators.membership import REDUCERS_TIMEOUT_S, Membership
from worker_client.config import NAMED
from worker_client.fusion.fusion import Fusion
from worker_client.runtime.trace import Trace
from worker_client.staging.wire_rule import WIRE_DTYPES, WireRule

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from reducer.server import Server
    from worker_client.communicators.communicator import Communicator
    from worker_client.communicators.newcomers import MembershipRequest
    from worker_client.communicators.placement import NodePlace
    from worker_client.communicators.process_group import ProcessGroup
    from worker_client.config import WorkerConfig
    from worker_client.protocol.spec import JobSpec
    from worker_client.runtime.credentials import Keys


class Node(NamedTuple):
    """The node of a rank whose all-reduces go through nodes first.

    Attributes:
        place: this rank's.
        around: puts what the node's ranks do among themselves around a communicator between nodes;
            called with what they call it.
    """

    place: NodePlace
    around: Callable[[Communicator, str], Communicator]


def flat(
    settings: WorkerConfig,
    keys: Keys | None = None,
    server: Server | None = None,
    trace: Trace | None = None,
) -> partial[FlatCommunicator]:
    """Return what makes an innermost communicator; `server` is the reducer of this process.

    Raises:
        ConfigError: the reference was asked for, which has none.
    """
    if settings.impl == "plain":
        raise ConfigError(
            "REDUCTION_IMPL=plain starts the reference, which is for a job of its own at reducers "
            "that run already: leave it out, or set REDUCTION_IMPL=compiled"
        )
    return partial(
        FlatCommunicator,
        context=None if server is None else server.context,
        keys=keys,
        trace=trace,
    )


def client(
    settings: WorkerConfig,
    spec: JobSpec,
    *,
    keys: Keys | None = None,
    server: Server | None = None,
    node: Node | None = None,
    groups: tuple[ProcessGroup, ProcessGroup] | None = None,
    membership_request: MembershipRequest | None = None,
) -> Client:
    """Make a client that has joined the job; it stops the reducer `server` that this rank hosts.

    `groups` are for calls in order and for those with names, if `spec.fallback`;
    `membership_request` lets this rank in, where the job runs already.

    Raises:
        ReductionError: the job cannot be joined; `worker_client.init` says what can be wrong.
    """
    trace = Trace()
    enter = flat(settings, keys, server, trace)
    ordered_group, named_group = groups or (None, None)
    lost = None if membership_request is None else membership_request.proposal.lost
    named = _named(
        settings, spec, enter, named_group, node=node, trace=trace, in_use=lambda: inner.in_use
    )
    resources = Resources(named(spec.world_size, lost), None if server is None else server.stop)
    joins = membership_request is not None
    left = resources.release
    inner = surviving(settings, spec, enter, ordered_group, left=left, lost=lost, joins=joins)
    membership_change: MembershipChange | None = None
    if isinstance(inner, ElasticCommunicator):
        ranks_of = tuple if node is None else node.place.ranks_of
        membership_change = MembershipChange(
            inner, enter, named, resources, newcomer=joins, ranks_of=ranks_of
        )
    ordered = around(settings, inner, "ordered", node)
    alone = settings.model_copy(update={"dump": None})
    made = Client(
        ordered,
        resources,
        wire=WireRule(WIRE_DTYPES[settings.wire_dtype]),
        timeout_s=settings.timeout,
        trace=trace,
        membership_change=membership_change,
        enter=None if node is not None else partial(client, alone, keys=keys),
    )
    if settings.dump is not None:
        # Between nodes each local rank has a job of its own.
        across = None if node is None else node.place.across
        made.observer = CallLog(settings.dump, made, ordered, resources, across)
    try:
        if membership_request is not None and membership_change is not None:
            membership_change.enter_job(membership_request)
            membership_change.begin_membership(settings.timeout)
        elif spec.fallback or spec.elastic:
            resources.fusion.open()  # later some of those that it goes on without may be lost
    except BaseException:
        made.shutdown()
        raise
    return made


def _named(
    settings: WorkerConfig,
    spec: JobSpec,
    enter: Callable[..., FlatCommunicator],
    group: ProcessGroup | None,
    *,
    node: Node | None,
    trace: Trace,
    in_use: Callable[[], list[bool]],
) -> Callable[[int, Collection[int] | None], Fusion]:
    """Return what makes a fusion, of so many ranks, some of them lost."""

    def make(ranks: int, lost: Collection[int] | None) -> Communicator:
        # Who begins when a reducer is lost already does not wait for it.
        reducers_timeout_s = math.inf if all(in_use()) else REDUCERS_TIMEOUT_S
        named_spec = replace(
            spec, job=f"{spec.job}{NAMED}", world_size=ranks, reducers_timeout_s=reducers_timeout_s
        )
        return around(
            settings, surviving(settings, named_spec, enter, group, lost=lost), "named", node
        )

    def fusion(ranks: int, lost: Collection[int] | None) -> Fusion:
        who = spec.rank, ranks
        if node is not None:  # all ranks of all nodes take part
            who = node.place.peers[node.place.local_rank], sum(map(len, node.place.nodes))
        return Fusion(
            partial(make, ranks, lost),
            *who,
            threshold=int(settings.fusion_threshold),
            cycle_s=settings.cycle_time,
            timeout_s=settings.timeout,
            wire=WireRule(WIRE_DTYPES[settings.wire_dtype]),
            trace=trace,
        )

    return fusion


def surviving(
    settings: WorkerConfig,
    spec: JobSpec,
    enter: Callable[..., FlatCommunicator],
    group: ProcessGroup | None,
    *,
    left: Callable[[], None] | None = None,
    lost: Collection[int] | None = None,
    joins: bool = False,
) -> Communicator:
    """Make the part that survives losses: of reducers, of all of them, of ranks.

    `enter` makes the innermost ones. `left` is called once, after the farewell; it is None for
    calls with names, with which the client does not end, nor say where all-reduces go. `lost` are
    ranks that an elastic job goes on without already, None for a job that begins; `joins`: this
    rank joins one that runs.
    """
    announced = left is None

    def membership(spec: JobSpec, left: Callable[[], None]) -> Communicator:
        if not spec.fallback or group is None:
            return enter(spec, left)
        # An elastic job could not go back: its calls have numbers that others would not know.
        return FallbackCommunicator(
            spec, enter, group, left, returns=not spec.elastic, announced=announced
        )

    if not spec.elastic:
        return membership(spec, left or _stays_in_job)
    whole = Membership.whole(spec)
    return ElasticCommunicator(
        whole if lost is None else whole.without(lost, ()),
        membership,
        left or _stays_in_job,
        timeout_s=settings.timeout,
        connect_timeout_s=settings.connect_timeout,
        joins=joins,
    )


def around(
    settings: WorkerConfig, inner: Communicator, topic: str, node: Node | None = None
) -> Communicator:
    """Wait for the reducers, and put the rest around what is inside, which ends if that fails.

    `topic` is what ranks of a node call it.

    Raises:
        ReductionError: a reducer did not answer or refused this rank.
    """
    wire_dtype = WIRE_DTYPES[settings.wire_dtype]
    try:
        inner.join(settings.connect_timeout)
        if wire_dtype is not None:
            inner = CastingCommunicator(inner, wire_dtype, whole=inner.spec.elastic)
        return inner if node is None else node.around(inner, topic)
    except BaseException:
        inner.stop()
        raise


def _stays_in_job() -> None:
    """Do nothing after the farewell of calls with names: the client goes on."""
