"""What the parts of one session share (sans I/O)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reducer.wire.constants import MessageType
from reducer.wire.header import Header, fingerprint
from reducer.wire.layout import LARGEST_CHUNK
from worker_client.protocol.agreement import Agreement
from worker_client.protocol.flow_control import FlowControl
from worker_client.protocol.phase import Occurrence, Phase, following
from worker_client.protocol.shard_map import ShardMap, ShardPlan

if TYPE_CHECKING:
    from worker_client.protocol import _flight
    from worker_client.protocol.link import Link
    from worker_client.protocol.spec import JobSpec


class Context:
    """What the parts of one session share; each of them is given it once.

    Args:
        spec: who we are and where the reducers are.
        flight: class of what is in flight.
        large_bytes: from this size on all-reduces say what a link can carry.

    Attributes:
        spec: who we are and where the reducers are.
        phase: of the session.
        links: one for each lane of each reducer, as far as lanes are known.
        flight: what moves over them, and `flow` how much of it may.
        map: which reducers are in use, and `plan` how buffers are cut between them.
        agreement: what ranks agree on.
    """

    def __init__(
        self, spec: JobSpec, flight: type[_flight.CompiledFlight], large_bytes: int
    ) -> None:
        self.spec = spec
        self.phase = Phase.JOINING
        self.links: list[Link] = []
        job = fingerprint(spec.job)
        self._identity = Header(
            MessageType.HELLO, job=job, generation=spec.generation, rank=spec.rank
        )
        self.flight = flight(self._identity, large_bytes)
        reducers = len(spec.reducers)
        self.map = ShardMap(reducers, spec.hosts, adopts=spec.adopts)
        # A card that carries contributions and results alike hardly rests, whatever their size.
        embedded = len(spec.hosts) == reducers
        chunk_bytes = spec.chunk_bytes or (LARGEST_CHUNK if embedded else 0)
        choose = spec.world_size > 1 and not chunk_bytes
        self.agreement = Agreement(choose or spec.replaceable, chunk_bytes, reducers)
        weights = spec.weights or (1,) * reducers
        self.plan = ShardPlan(weights, spec.chunk_bytes, self.agreement.chunk_bytes_of, self.flight)
        self.flow = FlowControl(self.flight, self.agreement.chunk_bytes, spec.window_bytes > 0)
        self._frozen: int | None = None

    def occur(self, occurrence: Occurrence) -> None:
        """Go on to the phase that follows."""
        self.phase = following(self.phase, occurrence)

    @property
    def members(self) -> list[Link]:
        """The links over which something may be said."""
        return [link for link in self.links if link.member]

    @property
    def watermark(self) -> int:
        """Every all-reduce below this number is finished here, or has failed for good."""
        return self.flight.watermark if self._frozen is None else self._frozen

    def freeze(self) -> None:
        """Let the watermark stay: what ends from now on is not finished, but goes on elsewhere."""
        if self._frozen is None:
            self._frozen = self.flight.watermark

    def header(self, kind: MessageType, **fields: Any) -> Header:
        """Return the header of a message."""
        return self._identity._replace(type=kind, watermark=self.watermark, **fields)

    def cut_anew(self, *, afresh: bool = False) -> None:
        """Cut buffers as the map says from now on, and as agreed unless ranks begin afresh."""
        if afresh:
            self.agreement.reset()
        self.plan.use(self.links, self.map.lanes)
        self.flow.chunk_bytes = self.agreement.chunk_bytes
