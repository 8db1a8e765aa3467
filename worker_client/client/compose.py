"""What all-reduces go through, put together from a spec; for calls with names, once more."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from reducer.errors import ConfigError
from worker_client.client.admission import Admission
from worker_client.client.client import Client, Departure
from worker_client.client.recording import RecordingClient
from worker_client.communicators.casting import CastingCommunicator
from worker_client.communicators.communicator import FlatCommunicator
from worker_client.communicators.elastic import ElasticCommunicator
from worker_client.communicators.fallback import FallbackCommunicator
from worker_client.communicators.hierarchical import HierarchicalCommunicator
from worker_client.communicators.membership import PATIENCE_S, Membership
from worker_client.config import NAMED
from worker_client.fusion.fusion import Fusion
from worker_client.runtime.trace import Trace
from worker_client.staging.wire_rule import WireRule

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from reducer.wire.constants import DType
    from worker_client.communicators.communicator import Communicator
    from worker_client.communicators.lobby import Application
    from worker_client.communicators.node_sockets import NodeSockets
    from worker_client.communicators.placement import Place
    from worker_client.communicators.process_group import ProcessGroup
    from worker_client.protocol.operation import Unfinished
    from worker_client.protocol.spec import JobSpec
    from worker_client.runtime.credentials import Keys
    from worker_client.runtime.implementation import Implementation


@dataclass(frozen=True)
class Composer:
    """Makes the communicators of one client.

    Attributes:
        implementation: of the flight and the transport.
        io_threads: threads of libzmq that serve the connections.
        context: that of the reducer that this process hosts, if it does.
        keys: what to show to reducers.
        timeout_s: for ranks that are left to reconcile.
        connect_timeout_s: how long to wait for every reducer's welcome.
        wire_dtype: what `rounded` all-reduces travel as, FLOAT16, BFLOAT16 or a type of blocks;
            None if none are.
        place: of this rank, if all-reduces go through nodes first.
        meet: connects to the other ranks of this node, which name the same topic.
        dump: where a client writes its latest calls when one fails; None for nowhere.
    """

    implementation: Implementation
    timeout_s: float
    connect_timeout_s: float
    io_threads: int = 1
    context: Any = None
    keys: Keys | None = None
    wire_dtype: DType | None = None
    place: Place | None = None
    meet: Callable[[str], NodeSockets] | None = None
    dump: Path | None = None
    trace: Trace = field(default_factory=Trace, init=False)

    @property
    def resumes(self) -> bool:
        """Whether connections to far reducers can go on when they break."""
        return self.implementation.name != "plain"

    def streams(self, asked: int) -> int:
        """Return how many connections a link is to have; 0 for what its round trip asks for.

        Raises:
            ConfigError: more than one was asked for, of the plain implementation.
        """
        if self.implementation.name == "plain":
            if asked > 1:
                raise ConfigError(
                    f"REDUCTION_STREAMS={asked} needs the compiled implementation: leave it out, "
                    "or leave out REDUCTION_IMPL=plain and, where the loops were not built, "
                    "install a C compiler and reinstall"
                )
            return 1
        return asked

    def flat(
        self,
        spec: JobSpec,
        left: Callable[[], None] = lambda: None,
        hand_over: Callable[[list[Unfinished]], None] | None = None,
    ) -> FlatCommunicator:
        """Make the innermost communicator."""
        return FlatCommunicator(
            spec,
            self.implementation,
            io_threads=self.io_threads,
            context=self.context,
            keys=self.keys,
            trace=self.trace,
            left=left,
            hand_over=hand_over,
        )

    def client(
        self,
        spec: JobSpec,
        groups: tuple[ProcessGroup, ProcessGroup] | None = None,
        *,
        stop_host: Callable[[], object] | None = None,
        application: Application | None = None,
        fusion_threshold: int = 64 << 20,
        cycle_s: float = 0.001,
    ) -> Client:
        """Make a client that has joined the job.

        Args:
            spec: of the job at the reducers.
            groups: for calls in order and for those with names, if `spec.fallback`.
            stop_host: stops the reducer that this rank hosts.
            application: lets this rank in, where the job runs already.
            fusion_threshold: most bytes of a fusion buffer.
            cycle_s: how long a tensor with a name waits for the next one.

        Raises:
            ReductionError: the job cannot be joined; `worker_client.init` says what can be wrong.
        """
        departure = Departure(stop_host)
        wire = WireRule(self.wire_dtype)
        lost = None if application is None else application.offer.lost
        ordered_group, named_group = groups or (None, None)
        inner = self._inner(spec, departure, ordered_group, lost=lost, joins=lost is not None)

        def named(ranks: int, lost: Collection[int] | None) -> Communicator:
            # Who begins when a reducer is lost already does not wait for it.
            patience_s = math.inf if all(inner.in_use) else PATIENCE_S
            job = f"{spec.job}{NAMED}"
            its = replace(spec, job=job, world_size=ranks, patience_s=patience_s)
            made = self._inner(its, _stay, named_group, announced=True, lost=lost)
            return self._around(made, "named")

        def new_fusion(ranks: int, lost: Collection[int] | None) -> Fusion:
            who = spec.rank, ranks
            if self.place is not None:
                everybody = sum(len(node) for node in self.place.nodes)
                who = self.place.peers[self.place.local_rank], everybody
            return Fusion(
                partial(named, ranks, lost),
                *who,
                threshold=fusion_threshold,
                cycle_s=cycle_s,
                timeout_s=self.timeout_s,
                wire=wire,
                trace=self.trace,
            )

        fusion = new_fusion(spec.world_size, lost)
        admission: Admission | None = None
        if isinstance(inner, ElasticCommunicator):
            newcomer = application is not None
            admission = Admission(inner, self.flat, new_fusion, fusion, newcomer=newcomer)
        make: Callable[..., Client] = Client
        if self.dump is not None:
            # Between nodes each local rank has a job of its own.
            across = None if self.place is None else self.place.across
            make = partial(RecordingClient, self.dump, across)
        client = make(
            self._around(inner, "ordered"),
            fusion,
            wire=wire,
            impl=self.implementation.name,
            timeout_s=self.timeout_s,
            departure=departure,
            trace=self.trace,
            admission=admission,
            enter=None if self.place is not None else replace(self, dump=None).client,
        )
        try:
            if application is not None and admission is not None:
                admission.enter_job(application)
                admission.settle_in(self.timeout_s)
            elif spec.fallback or spec.elastic:
                fusion.open()  # later some of those that it goes on without may be lost
        except BaseException:
            client.shutdown()
            raise
        return client

    def _inner(
        self,
        spec: JobSpec,
        left: Callable[[], None],
        group: ProcessGroup | None,
        *,
        announced: bool = False,
        lost: Collection[int] | None = None,
        joins: bool = False,
    ) -> Communicator:
        """Make the part that survives losses: of reducers, of all of them, of ranks.

        Args:
            spec: of the job.
            left: called once, after the farewell.
            group: to fall back to, if `spec.fallback`.
            announced: whether another communicator's warnings say where all-reduces go.
            lost: ranks that an elastic job goes on without already; None for a job that begins.
            joins: whether this rank joins a job that runs.
        """

        def enter(spec: JobSpec, left: Callable[[], None]) -> Communicator:
            if not spec.fallback or group is None:
                return self.flat(spec, left)
            # An elastic job could not go back: its calls have numbers that others would not know.
            return FallbackCommunicator(
                spec, self.flat, group, left, returns=not spec.elastic, announced=announced
            )

        if not spec.elastic:
            return enter(spec, left)
        whole = Membership.whole(spec)
        return ElasticCommunicator(
            whole if lost is None else whole.without(lost, ()),
            enter,
            left,
            timeout_s=self.timeout_s,
            connect_timeout_s=self.connect_timeout_s,
            joins=joins,
        )

    def _around(self, inner: Communicator, topic: str) -> Communicator:
        """Wait for the reducers, and put the rest around what is inside, which ends if that fails.

        Args:
            inner: what survives losses.
            topic: what ranks of a node call it.

        Raises:
            ReductionError: a reducer, or a rank of this node, did not answer or refused this rank.
        """
        node: NodeSockets | None = None
        try:
            if self.meet is not None:
                node = self.meet(topic)
            inner.join(self.connect_timeout_s)
            if self.wire_dtype is not None:
                inner = CastingCommunicator(inner, self.wire_dtype, whole=inner.spec.elastic)
            if node is not None and self.place is not None:
                return HierarchicalCommunicator(inner, self.place, node)
        except BaseException:
            if node is not None:
                node.close()
            inner.stop()
            raise
        return inner


def _stay() -> None:
    """Do nothing after the farewell of calls with names: the client goes on."""
