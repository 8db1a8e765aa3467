"""One job on a virtual network, by the rules of production: nothing is averaged.

**What is driven.** Every rank has a `Session` of production with its compiled flight: how a buffer
is cut, what ranks agree on, windows, in which order chunks leave, lanes, streams. Elements are
neither copied nor summed: all ranks share one buffer, which nobody reads.

**What is stated again**, as the compiled parts of production are made for real bytes: what a
reducer does with healthy contributions (`ContributionCounter`), and over which of a link's streams
a message goes. A test holds the first beside the engine.

**What is left out.** Failures, heartbeats of ZMTP (20 bytes each 0.2 s), low-water marks of
sockets, and connecting: a job begins when all are members.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from reducer.engine.engine import PING_INTERVAL_S
from reducer.errors import LocalProtocolError
from reducer.planning.network_model import FRAMING
from reducer.planning.virtual_network import (
    Card,
    Flow,
    LinkQueue,
    LinkRate,
    LocalFlow,
    Processor,
    VirtualClock,
)
from reducer.wire.constants import (
    COMPILED_FEATURES,
    HEADER_BYTES,
    NONCE_DIGITS,
    PLACES,
    DType,
    MessageType,
    ReduceOp,
)
from reducer.wire.header import Header
from reducer.wire.messages import Welcome, encode
from worker_client.protocol import _flight
from worker_client.protocol.flight import AddStreams, Finish, Send
from worker_client.protocol.operation import Operation
from worker_client.protocol.session import LOOK_S, Session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reducer.wire.header import Buffer
    from worker_client.protocol.flight import Action
    from worker_client.protocol.spec import JobSpec

TIMEOUT_S = 3600.0  # of an all-reduce, on the virtual clock

Answer = tuple[int, bytes, "Buffer | None"]  # to a rank: header and payload


class MessageCosts(NamedTuple):
    """What messages cost a processor, seconds: of each, and of each byte of it.

    Attributes:
        worker_message_s, worker_byte_s: of a contribution sent, or a result received.
        reducer_message_s, reducer_byte_s: of a contribution received and summed, or a result sent.
    """

    worker_message_s: float = 0.0
    worker_byte_s: float = 0.0
    reducer_message_s: float = 0.0
    reducer_byte_s: float = 0.0


class Site(NamedTuple):
    """A host's network card, by which it sends, and the switch's port, by which it receives."""

    card: Card
    port: LinkQueue


class Usage(NamedTuple):
    """What a job has used when an all-reduce has ended at the last rank.

    Attributes:
        at_s: when that was, seconds.
        carried: bytes over each link, one way.
        worker_s, reducers_s: processor time of all ranks, and of all reducers.
    """

    at_s: float
    carried: list[int]
    worker_s: float
    reducers_s: float


class ContributionCounter:
    """A reducer's rules for healthy contributions: it counts them, and sums nothing.

    With the last rank's contribution to a chunk its result goes to every rank, beginning with
    another one for each chunk (`send_results` of `reducer/runtime/loop.c`). Only the ranks' own
    question is answered with numbers. A window is granted as it is asked for: that there is memory
    for it is taken for granted.

    Args:
        world_size: ranks of the job.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._watermarks = [0] * world_size
        self._missing: dict[tuple[int, int], int] = {}  # of each chunk: so many ranks
        self._least: dict[int, list[int]] = {}  # of each question, the least numbers

    def welcome(self, frame: bytes, payload: Buffer) -> tuple[bytes, bytes]:
        """Return the answer to a HELLO."""
        del payload
        hello = Header.unpack(frame)
        header = hello._replace(type=MessageType.WELCOME, watermark=0)
        body = Welcome("5", ticket="0" * NONCE_DIGITS, features=COMPILED_FEATURES)
        return header.pack(), encode(body)

    def receive(self, rank: int, frame: bytes, payload: Buffer) -> list[Answer]:
        """Return the answers to any other message, in the order of sending."""
        header = Header.unpack(frame)
        if header.type is MessageType.CREDIT:
            granted = Header(MessageType.CREDIT, window=header.window)
            return [(rank, granted.pack(), None)]
        if header.type is not MessageType.CONTRIBUTION:
            return []  # whom a call waits for, which changes nothing
        self._watermarks[rank] = header.watermark
        n, chunk = self._world_size, (header.sequence, header.offset)
        missing = self._missing.pop(chunk, n) - 1
        if header.sequence % PLACES == 0:
            payload = self._answer(header.sequence, payload)
        if missing:
            self._missing[chunk] = missing
            return []
        result = header._replace(
            type=MessageType.RESULT, watermark=min(self._watermarks), rank=0, since=0, history=0
        ).pack()
        self._least.pop(header.sequence, None)
        turn = header.offset // header.nbytes if header.nbytes else 0
        return [((turn + step) % n, result, payload) for step in range(n)]

    def _answer(self, sequence: int, payload: Buffer) -> bytes:
        layout = struct.Struct(f"<{len(payload) // DType.INT64.itemsize}q")
        said = list(layout.unpack(payload))
        least = self._least[sequence] = list(map(min, said, self._least.get(sequence, said)))
        return layout.pack(*least)


class _Flight(_flight.CompiledFlight):
    """A flight that keeps no results: nobody loses a reducer here."""

    def add_link(self, window: int, retain: bool, in_place: bool = False) -> None:
        del retain
        super().add_link(window, retain=False, in_place=in_place)


class SimulatedReducer:
    """One thread of a reducer: its rules, and its ends of connections.

    Attributes:
        processor: that it runs on.
        flows: to each rank, over each stream, with the rank's number of the link.
    """

    def __init__(self, job: SimulatedJob, rules: ContributionCounter, site: Site) -> None:
        self.rules = rules
        self.site = site
        self.processor = Processor(job.clock)
        self.flows: dict[int, tuple[int, list[Flow | LocalFlow]]] = {}
        self._job = job

    def receive(self, rank: int, frame: bytes, payload: Buffer) -> None:
        """Take a message that has come."""
        costs = self._job.costs
        seconds = costs.reducer_message_s + len(payload) * costs.reducer_byte_s
        self.processor.do(seconds, self._take, rank, frame, payload)

    def _take(self, rank: int, frame: bytes, payload: Buffer) -> None:
        costs = self._job.costs
        for to, header, body in self.rules.receive(rank, frame, payload):
            nbytes = 0 if body is None else len(body)
            seconds = costs.reducer_message_s + nbytes * costs.reducer_byte_s
            self.processor.do(seconds, self._send, to, header, body or b"")

    def _send(self, rank: int, header: bytes, body: Buffer) -> None:
        link, flows = self.flows[rank]
        flow = flows[0] if len(flows) == 1 else min(flows, key=_backlog)
        flow.send(HEADER_BYTES + FRAMING + len(body), link, header, body)

    def ping(self) -> None:
        """Tell every rank that it lives, again and again."""
        clock = self._job.clock
        for rank in self.flows:
            self._send(rank, Header(MessageType.PING).pack(), b"")
        clock.at(clock.now + PING_INTERVAL_S, self.ping)


class SimulatedWorker:
    """One rank: its session, and its ends of connections.

    Attributes:
        session: of production.
        processor: that it runs on.
        largest_chunk: of its contributions, bytes.
    """

    def __init__(self, job: SimulatedJob, spec: JobSpec, site: Site) -> None:
        self.session = Session(spec, _Flight)
        self.processor = Processor(job.clock)
        self.largest_chunk = 0
        self._job, self._site, self._rank = job, site, spec.rank
        self._flows: list[list[Flow | LocalFlow]] = []
        self._calls = 0

    def join(self, round_trip_s: float) -> None:
        """Become a member at every reducer, at once."""
        session, job = self.session, self._job
        for link in session.links:
            self._flows.append([])
            lane = self._connect(link.index)
            for hello in session.connected(link.index, round_trip_s):
                assert isinstance(hello, Send)
                welcome = lane.rules.welcome(hello.header, hello.payload or b"")
                self._act(session.receive(link.index, *welcome, job.clock.now))
        self.look()

    def begin(self) -> None:
        """Ask for the next all-reduce, if there is one."""
        if self._calls < self._job.calls:
            self._calls += 1
            view = self._job.buffer
            operation = Operation(view, DType.FLOAT32, ReduceOp.SUM, None, TIMEOUT_S)
            self._act(self.session.submit(operation, self._job.clock.now))

    def look(self) -> None:
        """Have the session see the clock, again and again."""
        clock = self._job.clock
        self._act(self.session.tick(clock.now))
        clock.at(clock.now + LOOK_S, self.look)

    def receive(self, link: int, frame: bytes, payload: Buffer) -> None:
        """Take a message that has come."""
        costs = self._job.costs
        seconds = costs.worker_message_s + len(payload) * costs.worker_byte_s
        self.processor.do(seconds, self._take, link, frame, payload)

    def _take(self, link: int, frame: bytes, payload: Buffer) -> None:
        session, now = self.session, self._job.clock.now
        if len(payload) and not isinstance(payload, bytes):  # elements, which stay where they are
            done = session.flight.take_placed(link, frame, len(payload), now)
            if done is None:
                raise LocalProtocolError(f"rank {self._rank} has no use for a simulated result")
            self._act(session.completed(done, now) if done else [])
        else:
            self._act(session.receive(link, frame, payload, now))

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Finish):
                if action.error is not None:
                    raise action.error
                self._job.ended(self._calls)
                self._job.clock.at(self._job.clock.now, self.begin)
            elif isinstance(action, AddStreams):
                for _ in action.payloads:
                    self._connect(action.link)
            elif isinstance(action, Send):
                self._send(action.link, action.header, action.payload or b"")
        for send in self.session.flight.refill(self._job.clock.now):
            payload = send.payload or b""
            self.largest_chunk = max(self.largest_chunk, len(payload))
            asks = Header.unpack(send.header).sequence % PLACES == 0
            self._send(send.link, send.header, bytes(payload) if asks else payload)

    def _connect(self, index: int) -> SimulatedReducer:
        """Give a link one more connection; return where it leads to."""
        link = self.session.links[index]
        lane = self._job.reducers[link.reducer][link.lane]
        up, down = self._job.connect(self._site, self.receive, lane)
        self._flows[index].append(up)
        lane.flows.setdefault(self._rank, (index, []))[1].append(down)
        return lane

    def _send(self, link: int, header: bytes, payload: Buffer) -> None:
        costs = self._job.costs
        flows = self._flows[link]
        flow = flows[0] if len(flows) == 1 else min(flows, key=_backlog)
        seconds = costs.worker_message_s + len(payload) * costs.worker_byte_s
        nbytes = HEADER_BYTES + FRAMING + len(payload)
        self.processor.do(seconds, flow.send, nbytes, self._rank, header, payload)


class SimulatedJob:
    """Ranks that all-reduce one buffer again and again, and their reducers.

    Args:
        specs: of the ranks, in their order.
        rates: of the ranks' hosts, and of those of reducers that no rank hosts.
        delay_s: from a host to another's port.
        buffer_bytes: of every port, 0 for any number.
        segment_bytes: the most that a card takes of a connection at once.
        costs: of messages.
        rules: makes those of a thread, which tests replace; takes the number of ranks.

    Attributes:
        clock: of all.
        buffer: that is reduced.
        calls: how many all-reduces each rank makes.
        usages: at the end of each of them.
    """

    def __init__(
        self,
        specs: Sequence[JobSpec],
        rates: tuple[LinkRate, LinkRate],
        *,
        delay_s: float,
        buffer_bytes: int,
        segment_bytes: int,
        costs: MessageCosts,
        rules: Callable[[int], ContributionCounter] = ContributionCounter,
    ) -> None:
        self.clock = VirtualClock()
        self.costs = costs
        self.buffer = memoryview(b"")
        self.calls = 0
        self.usages: list[Usage] = []
        self._ended: Counter[int] = Counter()  # at so many ranks, by call
        spec = specs[0]

        def site(rate: LinkRate) -> Site:
            card = Card(self.clock, rate, delay_s, segment_bytes)
            return Site(card, LinkQueue(rate, buffer_bytes))

        self.ranks = [site(rates[0]) for _ in specs]
        self.pool = [site(rates[1]) for r in range(len(spec.reducers)) if r not in spec.hosts]
        pool = iter(self.pool)
        self.reducers: list[list[SimulatedReducer]] = []
        for index in range(len(spec.reducers)):
            at = self.ranks[spec.hosts[index]] if index in spec.hosts else next(pool)
            count = 1 + len(spec.lanes.get(index, ()))
            threads = [SimulatedReducer(self, rules(len(specs)), at) for _ in range(count)]
            self.reducers.append(threads)
        self.workers = [
            SimulatedWorker(self, spec, at) for spec, at in zip(specs, self.ranks, strict=True)
        ]
        for worker in self.workers:
            worker.join(2 * delay_s)
        for lanes in self.reducers:
            for lane in lanes:
                self.clock.at(PING_INTERVAL_S, lane.ping)

    def connect(
        self, site: Site, receive: Callable[..., object], lane: SimulatedReducer
    ) -> tuple[Flow | LocalFlow, Flow | LocalFlow]:
        """Connect a rank's host and a thread of a reducer; return both directions."""
        if lane.site is site:
            return LocalFlow(self.clock, lane.receive), LocalFlow(self.clock, receive)
        up = Flow(site.card, lane.site.port, lane.receive)
        return up, Flow(lane.site.card, site.port, receive)

    def ended(self, call: int) -> None:
        """Record that a rank has the result of a call, by its number from 1 on."""
        self._ended[call] += 1
        if self._ended[call] == len(self.workers):
            self.usages.append(self._usage())
            self.clock.stopped = call == self.calls

    def _usage(self) -> Usage:
        links = [link for at in (*self.ranks, *self.pool) for link in (at.card.link, at.port)]
        lanes = [lane for lanes in self.reducers for lane in lanes]
        return Usage(
            self.clock.now,
            [link.carried for link in links],
            sum(worker.processor.busy_s for worker in self.workers),
            sum(lane.processor.busy_s for lane in lanes),
        )

    def run(self, nbytes: int, calls: int) -> None:
        """All-reduce a buffer of so many bytes again and again; each rank begins when it can."""
        self.buffer = memoryview(bytearray(nbytes))
        self.calls = calls
        for worker in self.workers:
            worker.begin()
        self.clock.run()


def _backlog(flow: Flow | LocalFlow) -> int:
    return flow.unsent
