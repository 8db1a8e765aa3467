"""The reference client: the specification (`docs/protocol.md`) as a program.

It is to be read beside that. It shares no rule with the client of this package, and its sockets are
libzmq's. What both take from `reducer.wire` are the specification's tables, the arithmetic of
section 8, which `examples/stranger.py` proves, and that of leaves, of which the reference reducer
has its own. Numbers in brackets are sections.

It makes one all-reduce after the other, in the caller's thread, of NumPy arrays. It has no keys
[10] and no feature but LEAVES, hosts no reducer, and measures no rate. It asks the ranks' question
when it is due, not at calls of its own choice [8], and begins anew where all reducers are lost,
without stages [6]. So it is for conformance, on loopback and private networks.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from reducer import errors
from reducer.errors import MismatchError, ReducerLostError, ReductionError, RemoteProtocolError
from reducer.wire import layout, messages
from reducer.wire.constants import NO_SEQUENCE, PLACES, DType, Feature, ReduceOp
from reducer.wire.constants import MessageType as M
from reducer.wire.header import Header, check_chunk, fingerprint
from reducer.wire.leaves import Share
from reducer.wire.messages import ALL_REDUCERS, Hello, Loss, decode, encode, encode_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

AGREEMENT_NAME, EVERY_LANE = "what the links carry", 64
FROM_REDUCERS = (M.WELCOME, M.RESULT, M.ERROR, M.PING, M.GOODBYE, M.SHARD_MAP, M.RETAINED)
WINDOW, LARGEST_CHUNK = 1 << 20, 4 << 20
RETRY_S, BEGIN_WITHOUT_S, GRACE_S = 0.1, 2.0, 0.3
_FACTOR, _IGNORED = 0x9E3779B97F4A7C15, {M.STRAGGLERS, M.CREDIT}


@dataclass(eq=False, slots=True)
class Chunk:
    """A part of a buffer, and how far it is."""

    of: Operation
    offset: int
    nbytes: int
    home: int  # the reducer that the cut gave it to
    number: int  # in the shard
    link: Link
    sent: bool = False
    done: bool = False
    result: bytes | None = None  # kept while other ranks may need it

    @property
    def cost(self) -> int:
        """What its contribution takes of a window, bytes."""
        return layout.cost(self.nbytes * self.of.parts)

    def contribution(self) -> bytes:
        """Return the payload, with leaves of each node one after another."""
        total = self.of.header.total_bytes
        starts = (total * part + self.offset for part in range(self.of.parts))
        return b"".join(self.of.view[start : start + self.nbytes] for start in starts)


@dataclass(eq=False, slots=True)
class Operation:
    """One all-reduce."""

    header: Header  # what its contributions have in common
    view: memoryview
    deadline: float
    parts: int = 1  # nodes of leaves, whose buffers follow each other in `view`
    chunks: dict[int, Chunk] = field(default_factory=dict)  # by offset
    error: ReductionError | None = None
    aborted: bool = False  # as the deadline has passed

    @property
    def ended(self) -> bool:
        """Whether it has its results, or an error."""
        return self.error is not None or all(chunk.done for chunk in self.chunks.values())


Context = zmq.Context[zmq.Socket[bytes]]


class LinkPhase(Enum):
    """Of a link."""

    NOT_CONNECTED = "not connected"
    JOINING = "HELLO was said"
    MEMBER = "WELCOME was heard"


class Link:
    """The way to one thread (lane) of a reducer: a DEALER socket of libzmq.

    Attributes:
        flying: chunks that were sent, and whose result has not come.
        refusal: why the reducer did not take us.
    """

    def __init__(self, context: Context, reducer: int, lane: int, address: str) -> None:
        self.reducer, self.lane, self.address = reducer, lane, address
        self.state = LinkPhase.NOT_CONNECTED
        self.window = 0
        self.incarnation = ""
        self.refusal: ReductionError | None = None
        self.flying: list[Chunk] = []
        self.opened_at = 0.0
        self._context = context
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None

    @property
    def member(self) -> bool:
        """Whether contributions may be sent."""
        return self.state is LinkPhase.MEMBER

    def open(self, patience_ms: int) -> None:
        """Begin to connect."""
        self.opened_at = time.monotonic()
        self.socket = self._context.socket(zmq.DEALER)
        for option, value in (
            *((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 500), (zmq.RECONNECT_IVL, -1)),
            *((zmq.HEARTBEAT_IVL, 200), (zmq.HEARTBEAT_TIMEOUT, patience_ms)),
        ):
            self.socket.setsockopt(option, value)
        self.monitor = self.socket.get_monitor_socket()
        self.socket.connect(f"tcp://{self.address}")

    def close(self, linger_ms: int = 0) -> None:
        """End the connection; what was not sent is for nobody."""
        self.state, self.flying = LinkPhase.NOT_CONNECTED, []
        if self.socket is not None and self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=linger_ms)
            self.socket = self.monitor = None

    def say(self, header: Header, *payload: bytes) -> None:
        """Send a message."""
        if self.socket is not None:
            with suppress(zmq.Again):  # its connection has ended
                self.socket.send_multipart([header.pack(), *payload], zmq.NOBLOCK)


class Client:
    """One rank of a job.

    Args:
        servers: the reducers' addresses, ``host:port``, the same at every rank.
        job: its name.
        rank, world_size: who we are.
        chunk_bytes: size of chunks; 0 for the rule.
        timeout_s: for joining, and for each all-reduce.
        patience_ms: how long a reducer may be silent.
    """

    def __init__(
        self,
        servers: Sequence[str],
        job: str,
        rank: int,
        world_size: int,
        *,
        chunk_bytes: int = 0,
        timeout_s: float = 60.0,
        patience_ms: int = 1000,
    ) -> None:
        hello = Hello(job, world_size, len(servers), 0, chunk_bytes)
        self._hello = replace(hello, patience_ms=patience_ms, features=int(Feature.LEAVES))
        self._sums_leaves = True  # all reducers do that have been heard
        self._identity = Header(M.HELLO, job=fingerprint(job), rank=rank)
        self._timeout_s = timeout_s
        self._context: Context = zmq.Context()
        self._links = [Link(self._context, at, 0, server) for at, server in enumerate(servers)]
        self._operations: dict[int, Operation] = {}  # in progress, or kept, by number
        self._watermark = self._reached = 0
        self._call, self._since, self._history = -1, 0, 0
        self._agreement: Operation | None = None
        self._failed: dict[int, ReductionError] = {}  # that other ranks may not know of
        self._epoch = 0
        self._bases = {0: self._first_base()}  # lanes of each reducer in use, by epoch
        self._lost = dict.fromkeys(range(len(servers)), -1)  # the latest epoch of a loss
        self._admitted = dict.fromkeys(range(len(servers)), 0)
        self._renewed: Loss | None = None
        self._handlers = {kind: getattr(self, f"_{kind.name.lower()}") for kind in FROM_REDUCERS}
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    # -- what a program asks for

    def all_reduce(self, array: np.ndarray[Any, Any], op: str = "sum", name: str = "") -> None:
        """Replace an array's elements by their reduction over all ranks [5, "Calls"].

        Raises:
            ReductionError: it failed, at every rank or here.
        """
        self._reduce(array, op, fingerprint(name) if name else 0, None)

    def reduce_leaves(self, sums: np.ndarray[Any, Any], leaves: int, op: str = "sum") -> None:
        """Replace ``sums[0]`` by the reduction over all leaves [4, "Leaves"].

        Args:
            sums: of the nodes of this rank, in their order.
            leaves: of all ranks together.
            op: reduction.

        Raises:
            ReductionError: as `all_reduce`; a reducer cannot sum leaves.
        """
        ranks = range(self._hello.world_size)
        share = Share(leaves, tuple(ranks), self._identity.rank)
        if not self._sums_leaves or len(sums) != len(share.parts):
            raise errors.ConfigError(f"a reducer sums no leaves, or {share} is not of {len(sums)}")
        self._reduce(sums, op, 0, share)

    def _reduce(self, array: np.ndarray[Any, Any], op: str, tag: int, share: Share | None) -> None:
        if not array.flags.c_contiguous:
            raise errors.ConfigError("an array that is reduced must be contiguous")
        view = array.reshape(-1).view(np.uint8).data
        dtype, operation = DType[array.dtype.name.upper()], ReduceOp[op.upper()]
        self._call += 1
        leaves, parts = (share.count, len(share.parts)) if share else (0, 1)
        since, history = self._since & 0xFFFFFFFF, self._history
        asked = (len(view) // parts << 8) + (dtype << 4) + operation
        self._history = ((history ^ tag ^ leaves << 32) * _FACTOR + asked) % (1 << 64)
        if self._due():
            self._ask(self._call * PLACES)
        sequence = self._call * PLACES + 1
        header = self._identity._replace(
            type=M.CONTRIBUTION, sequence=sequence, tag=tag, since=since, history=history
        )
        header = header._replace(dtype=dtype, op=operation, window=leaves)
        one = self._begin(header, view, share)
        while not one.ended:
            self._pump()
        self._watermark = sequence + 1
        if one.error is not None:
            raise one.error

    def close(self) -> None:
        """Leave the job."""
        for link in self._links:
            if link.member:
                link.say(self._header(M.GOODBYE))
            link.close(linger_ms=500)
        self._context.term()

    # -- joining

    def _join(self) -> None:
        """Connect to every reducer; go on without those that do not answer [6, "Late reducers"]."""
        end, since = time.monotonic() + self._timeout_s, None
        while not all(link.member for link in self._links):
            self._pump()
            if refusal := next((link.refusal for link in self._links if link.refusal), None):
                raise refusal
            now = time.monotonic()
            if now > end:
                late = next(link for link in self._links if not link.member)
                raise ReducerLostError(f"{late.address} does not answer", reducer=late.address)
            since = since or (now if any(link.member for link in self._links) else None)
            if since is not None and now > since + BEGIN_WITHOUT_S:
                for reducer in {link.reducer for link in self._links if not link.member}:
                    self._take_out(reducer, self._epoch)
                return

    def _connected(self, link: Link) -> None:
        link.state, link.refusal = LinkPhase.JOINING, None
        said = replace(self._hello, reducer_index=link.reducer, lane=link.lane)
        link.say(self._header(M.HELLO)._replace(window=WINDOW), encode(said))

    def _welcome(self, link: Link, header: Header, payload: bytes) -> None:
        welcome = decode(messages.Welcome, payload)
        link.state, link.window = LinkPhase.MEMBER, header.window
        link.incarnation = welcome.incarnation
        self._sums_leaves &= bool(welcome.features & Feature.LEAVES)
        known = sum(other.reducer == link.reducer for other in self._links)
        host = link.address.rpartition(":")[0]
        for lane, port in enumerate(welcome.lanes[known - 1 :], known):
            self._links.append(Link(self._context, link.reducer, lane, f"{host}:{port}"))
        for reducer, epoch in self._lost.items():
            if epoch >= self._admitted[reducer]:
                link.say(self._header(M.SHARD_MAP), encode(Loss(reducer, epoch)))
        if self._renewed is not None:
            link.say(self._header(M.SHARD_MAP), encode(self._renewed))
        for sequence, error in self._failed.items():
            self._abort(link, sequence, error)
        for chunk in self._carried(link):
            self._claim(chunk)

    # -- all-reduces

    def _begin(self, header: Header, view: memoryview, share: Share | None = None) -> Operation:
        """Cut a buffer between the links in use [8], and send what may be sent."""
        dtype, parts = DType(header.dtype), len(share.parts) if share else 1
        total = len(view) // parts
        header = header._replace(epoch=self._epoch, total_bytes=total, wire_dtype=dtype)
        one = Operation(header, view, time.monotonic() + self._timeout_s, parts)
        base = self._bases[self._epoch]
        links = [link for link in self._links if link.lane < base.get(link.reducer, 0)]
        links.sort(key=lambda link: (link.reducer, link.lane))
        lanes = Counter(link.reducer for link in links)
        whole = int(np.lcm.reduce(list(lanes.values())))
        weights = [whole // lanes[link.reducer] for link in links]
        forced = self._hello.chunk_bytes
        shards = layout.shards(total, weights, header.sequence, forced, dtype.itemsize)
        size = forced or layout.SMALLEST_CHUNK
        if not forced and total >= layout.MEASURED_BYTES:
            size = layout.chunk_size_of(total, len(shards), layout.SMALLEST_CHUNK)
        size = share.chunk_bytes(size) if share else size
        for owner, start, end in shards:
            for number, offset in enumerate(range(start, end, size) or (start,)):
                link, nbytes = links[owner], min(size, end - offset)
                one.chunks[offset] = Chunk(one, offset, nbytes, link.reducer, number, link)
        self._operations[header.sequence] = one
        self._move([chunk for chunk in one.chunks.values() if not chunk.link.member])
        self._refill()
        return one

    def _refill(self) -> None:
        """Send what the windows have room for, and what precedes all in flight [5]."""
        waiting = [
            chunk
            for _, one in sorted(self._operations.items())
            for chunk in one.chunks.values()
            if not (chunk.sent or one.error) and chunk.link.member
        ]
        for chunk in waiting:
            link, flying = chunk.link, chunk.link.flying
            full = sum(other.cost for other in (*flying, chunk)) > link.window
            if full and flying and min(map(_place, flying)) < _place(chunk):
                continue
            flying.append(chunk)
            chunk.sent = True
            link.say(self._of(chunk, M.CONTRIBUTION), chunk.contribution())

    def _result(self, link: Link, header: Header, payload: bytes) -> None:
        check_chunk(header, len(payload), LARGEST_CHUNK)
        one = self._operations.get(header.sequence)
        chunk = one.chunks.get(header.offset) if one else None
        if one is None or one.error or chunk is None or chunk not in link.flying:
            return  # of an all-reduce that is over
        expected = one.header._replace(nbytes=chunk.nbytes)
        names = ("total_bytes", "nbytes", "dtype", "op", "window")
        if any(getattr(header, name) != getattr(expected, name) for name in names):
            raise RemoteProtocolError(f"the result at {header.offset} fits no contribution")
        one.view[header.offset : header.offset + header.nbytes] = payload
        link.flying.remove(chunk)
        chunk.done = True
        chunk.result = payload if self._hello.reducers > 1 else None
        self._confirm(header.watermark)

    def _fail(self, one: Operation, error: ReductionError, told_by: Link | None = None) -> None:
        """End an all-reduce badly, and tell all reducers but the one that has told us."""
        if one.ended:
            return
        one.error = error
        sequence = one.header.sequence
        self._failed[sequence] = error
        self._since, self._history = self._call + 1, 0
        for link in self._links:
            link.flying = [chunk for chunk in link.flying if chunk.of is not one]
            if link.member and link is not told_by:
                self._abort(link, sequence, error)

    def _abort(self, link: Link, sequence: int, error: ReductionError) -> None:
        header = self._header(M.ABORT)._replace(sequence=sequence, epoch=self._epoch)
        link.say(header, encode_error(error))

    def _error(self, link: Link, header: Header, payload: bytes) -> None:
        error = messages.decode_error(payload, header.sequence)
        if link.state is LinkPhase.JOINING:
            link.refusal = error
            if isinstance(error, errors.StaleGenerationError):
                link.refusal = error if error.generation != error.current else None
            link.close()
            return
        if isinstance(error, MismatchError) and error.field == "epoch":
            self._renew(1 + max(int(error.expected), int(error.got)), header.sequence)
        if header.sequence != NO_SEQUENCE:
            one = self._operations.get(header.sequence)
            if one is not None:
                self._fail(one, error, link)
        elif type(error) is errors.MembershipError or isinstance(error, RemoteProtocolError):
            self._lose(link)
        else:
            self._fail_all(error)

    def _fail_all(self, error: ReductionError) -> None:
        for one in list(self._operations.values()):
            self._fail(one, error)

    def _ping(self, _link: Link, header: Header, _payload: bytes) -> None:
        self._confirm(header.watermark)

    def _confirm(self, reached: int) -> None:
        """Forget results that every rank has."""
        self._reached = max(self._reached, min(reached, self._watermark))
        stores: tuple[dict[int, Any], ...] = (self._operations, self._failed)
        for kept in stores:
            for sequence in [sequence for sequence in kept if sequence < self._reached]:
                del kept[sequence]

    # -- the ranks' question [8]

    def _due(self) -> bool:
        """Whether ranks are to agree before this call on what they can use."""
        several = self._hello.reducers > 1
        call, needed = self._call + 1, several or not self._hello.chunk_bytes
        turns, rest = divmod(call, 3)
        usual = call % 96 == 0 if call > 96 else rest == 0 and turns & (turns - 1) == 0
        return needed and (several or self._hello.world_size > 1) and usual

    def _ask(self, sequence: int) -> None:
        lanes = [0] * self._hello.reducers
        for link in self._links:
            lanes[link.reducer] += 1
        for link in self._links:
            lanes[link.reducer] *= link.member
        said, asked_in = np.array([0, *lanes], "<i8"), self._epoch
        header = self._identity._replace(
            type=M.CONTRIBUTION, sequence=sequence, tag=fingerprint(AGREEMENT_NAME)
        )
        header = header._replace(dtype=DType.INT64, op=ReduceOp.MIN)
        self._agreement = self._begin(header, said.view(np.uint8).data)
        while not self._agreement.ended:
            self._pump()
        error, self._agreement = self._agreement.error, None
        if error is None and self._epoch == asked_in:
            usable = {reducer: int(most) for reducer, most in enumerate(said[1:]) if most > 0}
            self._use(self._epoch + 1, usable or self._bases[self._epoch])
            for reducer in usable:
                if not any(link.member for link in self._links if link.reducer == reducer):
                    self._take_out(reducer, self._epoch)
        declined = isinstance(error, MismatchError) and error.field == "question"
        known = self._renewed is not None and sequence <= self._renewed.sequence
        if error is not None and not declined and not known:
            self._renew(self._fresh(), sequence)

    # -- reducers that are lost, and come back [6]

    def _first_base(self) -> dict[int, int]:
        alone = len(self._links) == 1
        return {link.reducer: EVERY_LANE if alone else 1 for link in self._links if not link.lane}

    def _use(self, epoch: int, base: dict[int, int]) -> None:
        self._epoch = epoch
        self._bases[epoch] = base
        self._admitted.update(dict.fromkeys(base, epoch))

    def _uses(self, reducer: int, epoch: int) -> bool:
        return reducer in self._bases.get(epoch, {}) and self._lost[reducer] < epoch

    def _fresh(self) -> int:
        return max(self._epoch + 2, 1 + max(self._lost.values()))

    def _lose(self, link: Link) -> None:
        """Go on without a reducer whose connection has ended, or that cannot be understood."""
        present = self._epoch + (self._agreement is not None)
        self._take_out(link.reducer, present, link.incarnation)

    def _take_out(self, reducer: int, epoch: int, incarnation: str = "") -> None:
        """Take a reducer out of use for an epoch and all before, if that is news."""
        links = [link for link in self._links if link.reducer == reducer]
        if epoch <= self._lost[reducer]:
            return
        self._lost[reducer] = epoch
        old = any(c.of.header.epoch <= epoch for link in links for c in self._carried(link))
        if epoch < self._admitted[reducer] and not old:
            return
        present = self._epoch + (self._agreement is not None)
        self._lost[reducer] = max(epoch, present)
        for link in links:
            link.close()
        loss = Loss(reducer, self._lost[reducer], incarnation=incarnation)
        for link in self._links:
            if link.member:
                link.say(self._header(M.SHARD_MAP), encode(loss))
        if not any(self._uses(other, self._epoch) for other in self._bases[self._epoch]):
            # All are lost: what is in flight fails, and everything begins anew.
            sequence = -1 if self._agreement is None else self._agreement.header.sequence
            self._renew(self._fresh(), sequence)
            address = links[0].address
            text = f"reducer {address} was lost, and no other is left"
            self._fail_all(ReducerLostError(text, reducer=address))
        self._move([chunk for link in links for chunk in self._carried(link)])

    def _renew(self, epoch: int, sequence: int) -> None:
        """Begin a later epoch with all reducers, as ranks have lost touch."""
        if epoch <= self._epoch:
            return
        self._use(epoch, self._first_base())
        self._renewed = Loss(ALL_REDUCERS, epoch, sequence)
        for link in self._links:
            if link.member:
                link.say(self._header(M.SHARD_MAP), encode(self._renewed))

    def _carried(self, link: Link) -> list[Chunk]:
        """Return the chunks of a link that some rank may not have."""
        ones = [one for one in self._operations.values() if one.error is None]
        return [chunk for one in ones for chunk in one.chunks.values() if chunk.link is link]

    def _move(self, chunks: list[Chunk]) -> None:
        """Give chunks of lost reducers to their heirs: contributions, or claims on results."""
        for chunk in chunks:
            epoch = chunk.of.header.epoch
            base = list(self._bases.get(epoch, ()))
            if chunk.of.error is not None or chunk.home not in base:
                continue
            if self._uses(chunk.home, epoch):
                continue  # it is not lost, and its connection comes
            place, others = base.index(chunk.home), len(base) - 1
            steps = (place + 1 + (chunk.number + at) % others for at in range(others))
            order = (base[step % len(base)] for step in steps)
            heir = next((one for one in order if self._uses(one, epoch)), None)
            if heir is None:
                continue
            most = self._bases[epoch][heir]
            links = [link for link in self._links if link.reducer == heir and link.lane < most]
            chunk.link, chunk.sent = links[chunk.number % len(links)], chunk.done
            self._claim(chunk)
        self._refill()

    def _claim(self, chunk: Chunk) -> None:
        moved = chunk.link.reducer != chunk.home
        if chunk.link.member and moved and chunk.done and chunk.result is not None:
            chunk.link.say(self._of(chunk, M.RETAINED))

    def _retained(self, link: Link, header: Header, _payload: bytes) -> None:
        """Send a result that a reducer asks for."""
        one = self._operations.get(header.sequence)
        chunk = one.chunks.get(header.offset) if one else None
        if chunk is not None and chunk.result is not None:
            link.say(self._of(chunk, M.RETAINED), chunk.result)

    def _shard_map(self, _link: Link, _header: Header, payload: bytes) -> None:
        loss = decode(Loss, payload)
        loss.check_epoch()
        if loss.reducer == ALL_REDUCERS:
            self._renew(loss.epoch, loss.sequence)
        elif loss.reducer < self._hello.reducers:
            self._take_out(loss.reducer, loss.epoch, loss.incarnation)

    def _goodbye(self, link: Link, _header: Header, _payload: bytes) -> None:
        others = (one for one in self._links if one.member and one.reducer != link.reducer)
        if any(self._uses(one.reducer, self._epoch) for one in others):
            self._lose(link)

    # -- sockets

    def _header(self, kind: M) -> Header:
        return self._identity._replace(type=kind, watermark=self._watermark)

    def _of(self, chunk: Chunk, kind: M) -> Header:
        header = chunk.of.header._replace(type=kind, watermark=self._watermark)
        return header._replace(offset=chunk.offset, nbytes=chunk.nbytes)

    def _pump(self) -> None:
        """Hear what has come, and do what is due."""
        now = time.monotonic()
        for link in self._links:
            if link.socket is None and now > link.opened_at + RETRY_S:
                link.open(self._hello.patience_ms)
        poller = zmq.Poller()
        for link in (link for link in self._links if link.socket is not None):
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
        poller.poll(20)
        for link in list(self._links):
            told = _waiting(link.monitor, recv_monitor_message)
            events = {one["event"] for one in told}
            if zmq.EVENT_HANDSHAKE_SUCCEEDED in events:
                self._connected(link)
            for frames in _waiting(link.socket, zmq.Socket.recv_multipart):
                self._take(link, frames)
            if {zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED}.intersection(events):
                member = link.member
                link.close()
                if member or self._carried(link):
                    self._lose(link)
        for one in list(self._operations.values()):
            if not one.ended and now > one.deadline:
                self._expire(one, now)
        self._refill()

    def _expire(self, one: Operation, now: float) -> None:
        """Give up an all-reduce; a reducer that knows says which ranks were missing."""
        late = errors.ReductionTimeout(f"all-reduce took more than {self._timeout_s} s")
        if not one.aborted:
            one.aborted = True
            for link in self._links:
                if link.member:
                    self._abort(link, one.header.sequence, late)
        elif now > one.deadline + GRACE_S:
            self._fail(one, late)

    def _take(self, link: Link, frames: list[bytes]) -> None:
        """Take one message; a reducer that cannot be understood is lost."""
        try:
            header = Header.unpack(frames[0])
            joins = link.state is LinkPhase.JOINING and header.type in {M.WELCOME, M.ERROR}
            works = link.member and header.type in self._handlers.keys() - {M.WELCOME}
            if len(frames) > 2 or not (joins or works or header.type in _IGNORED):
                raise RemoteProtocolError(f"{header.type.name} is not allowed here")
            if joins or works:
                self._handlers[header.type](link, header, b"".join(frames[1:]))
        except (RemoteProtocolError, errors.VersionError) as error:
            if link.state is LinkPhase.JOINING:
                link.refusal = error
                link.close()
            elif link.member:
                self._lose(link)


def _waiting(socket: zmq.Socket[bytes] | None, receive: Callable[[Any], Any]) -> list[Any]:
    """Return what waits to be read."""
    found = []
    while socket is not None and socket.poll(0):
        found.append(receive(socket))
    return found


def _place(chunk: Chunk) -> tuple[int, int]:
    """Return a chunk's place in the order that is the same at every rank."""
    return chunk.of.header.sequence, chunk.offset
