"""Target ``engine``: workers say anything to a reducer, in any order, and whole jobs among it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from fuzz import bodies
from fuzz.headers import mutate
from fuzz.model import Model
from fuzz.source import Source, check
from fuzz.twins import Twins
from reducer.engine.actions import Close, Resume
from reducer.engine.engine import UNREACHABLE_S
from reducer.engine.limits import Limits
from reducer.errors import RankLostError, ReductionError, ReductionTimeout
from reducer.wire.constants import (
    COMPILED_FEATURES,
    MAX_ROUNDS_AHEAD,
    NONCE_DIGITS,
    DType,
    MessageType,
    ReduceOp,
)
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import Hello, Loss, Stream, Welcome, decode, encode, encode_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzz.twins import Answers

M = MessageType
JOBS = ("a", "b")
MEMORY_LIMIT = 64 << 20
LIMITS = Limits(max_jobs=len(JOBS), max_chunk_bytes=1 << 20, job_memory_limit=40 << 20)
MOST_STEPS = 150  # of one input; what is longer only takes longer
# As libzmq makes them, and one that is too long for the compiled loop.
PEERS = (*(b"\0peer%d"[:5] + b"%d" % n for n in range(5)), b"a long routing id")
AHEAD = MAX_ROUNDS_AHEAD
SEQUENCES = (0, 0, 1, 2, 3, 5, AHEAD - 1, AHEAD, AHEAD + 1, 1 << 40)
CHUNK = 64
BLOCK = DType.BLOCK8.itemsize


class World:
    """Peers of one reducer, and what they say next."""

    def __init__(self, source: Source) -> None:
        self.twins = Twins(MEMORY_LIMIT, LIMITS)
        self.model = Model(self.twins.plain, MEMORY_LIMIT, LIMITS)
        self.now = 0.0
        self._source = source
        self._peers = list(PEERS)
        self._links: dict[str, dict[int, bytes]] = {}  # peers by ticket, and by number
        self._last = (self._peers[0], b"", b"")
        self._answers: Answers = {}  # to that
        # What each peer said it is; the engine may have refused it.
        self._said = {peer: Header(M.HELLO, rank=at % 2) for at, peer in enumerate(self._peers)}
        self._steps: tuple[Callable[[], None], ...] = (
            self._hello,
            self._contribute,
            self._contribute,
            self._contribute_all,
            self._contribute_all,
            self._retain,
            self._claim_all,
            self._abort,
            self._ask,
            self._credit,
            self._lose,
            self._goodbye,
            self._garbage,
            self._change,
            self._again,
            self._tick,
            self._vanish,
            self._drain,
            self._stream,
            self._resume,
        )

    def run(self) -> None:
        """Do all that the source says, then let everybody go."""
        if self._source.chance(2):
            self._join_all()
        for _ in range(MOST_STEPS):
            if not self._source.left:
                break
            self._source.pick(self._steps)()
        for peer in self._peers:
            self._lost(peer)
        for _ in range(3):
            self._pass(2 * UNREACHABLE_S)
            for peer in self._peers:
                self._lost(peer)
        self._pass(2 * UNREACHABLE_S)
        self.model.left()

    # -- what happens -------------------------------------------------------------------------

    def _say(self, peer: bytes, frame: bytes, payload: bytes = b"") -> None:
        self._last = peer, frame, payload
        self.model.ask(peer)
        answers = self.twins.do(lambda twin: twin.receive(peer, frame, payload))
        self.model.spoke(frame, payload, answers)
        for welcomed, messages in answers.items():
            for header, body in messages:
                if Header.unpack(header).type is M.WELCOME:
                    self._links[decode(Welcome, body).ticket] = {0: welcomed}
        self.twins.asked_for(Close)
        for dropped in [one for one in self._peers if one in self.twins.plain.dropped]:
            self._return(dropped)
        self._answers = answers

    def _return(self, peer: bytes) -> None:
        """Let who was dropped come back over a new connection, which has another name."""
        new = bytes([peer[0] + 1 & 0xFF]) + peer[1:]
        self._peers[self._peers.index(peer)] = new
        self._said[new] = self._said.pop(peer)

    def _lost(self, peer: bytes) -> None:
        self.model.answered(self.twins.do(lambda twin: twin.engine.unreachable(peer)))

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.model.answered(self.twins.do(lambda twin: twin.engine.tick(self.now)))

    def _tick(self) -> None:
        self._pass(self._source.pick((0.0, 0.1, 0.5, 1.0, 2.0)))

    def _vanish(self) -> None:
        self._lost(self._source.pick(self._peers))

    def _drain(self) -> None:
        if self._source.chance(16):
            self.model.answered(self.twins.do(lambda twin: twin.engine.drain()))

    def _garbage(self) -> None:
        source = self._source
        frame, payload = source.take(source.below(100)), source.take(source.below(20))
        self._say(source.pick(self._peers), frame, payload)

    def _change(self) -> None:
        """Say the latest message again, with one field changed."""
        peer, frame, payload = self._last
        with suppress(ReductionError):  # that one was no header either
            header = mutate(Header.unpack(frame), self._source)
            self._say(peer, header.pack(), payload)

    def _again(self) -> None:
        """Say the latest message again, perhaps as another peer."""
        peer, frame, payload = self._last
        self._say(self._source.pick((peer, *self._peers)), frame, payload)

    # -- who is there -------------------------------------------------------------------------

    def _join_all(self) -> None:
        source = self._source
        world_size = 1 + source.below(4)
        watermark, chunk_bytes = source.pick(SEQUENCES), source.pick((CHUNK, 0, 1 << 12))
        for rank in range(world_size):
            self._introduce(
                self._peers[rank],
                Header(M.HELLO, rank=rank, watermark=watermark, window=1 << 16),
                Hello(JOBS[0], world_size, 2, 0, chunk_bytes, features=COMPILED_FEATURES),
            )

    def _introduce(self, peer: bytes, header: Header, hello: Hello) -> None:
        header = header._replace(job=fingerprint(hello.job))
        self._said[peer] = header
        self._say(peer, header.pack(), encode(hello))

    def _hello(self) -> None:
        source = self._source
        peer = source.pick(self._peers)
        header = Header(
            M.HELLO,
            generation=source.pick((0, 0, 0, 1, 2)),
            rank=source.below(4),
            watermark=source.pick(SEQUENCES),
            window=source.pick((1 << 16, 0, 1 << 10, 1 << 24)),
        )
        job, world_size = source.pick(JOBS), source.pick((2, 2, 1, 3, 4, 1 << 16))
        chunk_bytes = source.pick((CHUNK, 0, 1 << 12))
        if not source.chance(4):
            hello = Hello(job, world_size, 2, 0, chunk_bytes, features=COMPILED_FEATURES)
            return self._introduce(peer, header, hello)
        if source.chance(2):
            header = mutate(header, source)
        header = header._replace(job=fingerprint(job))
        self._said[peer] = header
        return self._say(peer, header.pack(), bodies.nearly(Hello, source))

    def _show(self, peer: bytes, kind: MessageType) -> tuple[Stream, int, Answers]:
        """Have a peer show a ticket; return that, where it goes on, and the answers."""
        source = self._source
        ticket = source.pick((*self._links, "0" * NONCE_DIGITS))
        shown = Stream(ticket, source.below(4), attempt=source.below(3))
        offset = source.number(64)
        body = bodies.nearly(Stream, source) if source.chance(8) else encode(shown)
        self._say(peer, Header(kind, offset=offset).pack(), body)
        return shown, offset, self._answers

    def _stream(self) -> None:
        """Make a peer a further stream of a link."""
        peer = self._source.pick(self._peers)
        shown, _, answers = self._show(peer, M.STREAM)
        if M.STREAM not in [Header.unpack(frame).type for frame, _ in answers.get(peer, ())]:
            return
        link = self._links[shown.ticket]
        check(shown.number not in link, f"number {shown.number} is good once")
        check(self.model.is_member(link[0]), "a ticket is good while its member is here")
        link[shown.number] = peer
        self._said[peer] = self._said[link[0]]

    def _resume(self) -> None:
        """Have a connection of a link go on over that of a peer."""
        peer = self._source.pick(self._peers)
        shown, offset, _ = self._show(peer, M.RESUME)
        for broken, fresh, at in self.twins.asked_for(Resume):
            link = self._links[shown.ticket]
            check((broken, fresh) == (link.get(shown.number), peer), f"{broken!r} goes on")
            check(at == offset, f"it goes on at {offset}, not at {at}")
            check(self.model.is_member(link[0]), "a ticket is good while its member is here")

    # -- all-reduces --------------------------------------------------------------------------

    def _from(self, peer: bytes, kind: MessageType, sequence: int | None = None) -> Header:
        """Return a header of a peer, with a number near its watermark."""
        said, source = self._said[peer], self._source
        near = said.watermark + source.pick((0, 0, 1, 2, AHEAD - 1, AHEAD))
        at = near if sequence is None else sequence
        header = Header(
            kind,
            job=said.job,
            generation=said.generation,
            sequence=min(at, (1 << 64) - 1),
            watermark=source.pick((said.watermark, 0, at, at + 1)) & ((1 << 64) - 1),
            rank=said.rank,
        )
        # An honest worker's watermark only rises.
        self._said[peer] = said._replace(watermark=max(said.watermark, header.watermark))
        return header

    def _chunk(self, header: Header) -> tuple[Header, int]:
        """Add a chunk's fields; returns its seed as well."""
        source = self._source
        shape = source.below(256)
        dtype, op = DType(1 + shape % len(DType)), ReduceOp(1 + shape // 8 % 5)
        sizes = (BLOCK, BLOCK, 0, CHUNK) if dtype.is_block else (CHUNK, CHUNK, 0, 8)
        nbytes = sizes[shape >> 6]
        chunks = 1 if nbytes == 0 else 1 + source.below(3)
        header = header._replace(
            total_bytes=chunks * nbytes,
            offset=source.below(chunks) * nbytes,
            nbytes=nbytes,
            dtype=dtype,
            op=op,
            wire_dtype=dtype,
        )
        return header, source.byte()

    def _contribute(self) -> None:
        source = self._source
        peer = source.pick(self._peers)
        header, seed = self._chunk(self._from(peer, M.CONTRIBUTION))
        length = header.nbytes + source.pick((0, 0, 0, 0, 0, 0, 8, -8))
        if source.chance(6):
            header = mutate(header, source)
        self._say(peer, header.pack(), elements(seed, max(0, length)))

    def _contribute_all(self) -> None:
        self._by_all(M.CONTRIBUTION)

    def _claim_all(self) -> None:
        """Let all ranks contribute or claim, and those that are asked supply."""
        self._by_all(M.RETAINED)

    def _by_all(self, kind: MessageType) -> None:
        source = self._source
        first, speakers = source.pick(self._peers[:4]), source.byte()
        chunk, seed = self._chunk(self._from(first, kind))
        supplies = source.byte() if kind is M.RETAINED else 0
        key = self._said[first].job, self._said[first].generation
        for at, peer in enumerate(self._peers):
            said = self._said[peer]
            if (said.job, said.generation) != key or speakers >> at & 1:
                continue
            header = chunk._replace(rank=said.rank)
            claims = kind is M.RETAINED and supplies >> at & 1
            header = header._replace(type=M.RETAINED if claims else M.CONTRIBUTION)
            self._say(peer, header.pack(), b"" if claims else elements(seed + at, chunk.nbytes))
        if kind is M.RETAINED:
            self._supply(chunk, seed)

    def _supply(self, chunk: Header, seed: int) -> None:
        for peer in self._peers:
            header = chunk._replace(type=M.RETAINED, rank=self._said[peer].rank)
            self._say(peer, header.pack(), elements(seed, chunk.nbytes))

    def _retain(self) -> None:
        source = self._source
        peer = source.pick(self._peers)
        header, seed = self._chunk(self._from(peer, M.RETAINED))
        if source.chance(4):
            header = mutate(header, source)
        self._say(peer, header.pack(), source.pick((b"", elements(seed, header.nbytes & 127))))

    # -- the rest -----------------------------------------------------------------------------

    def _abort(self) -> None:
        source = self._source
        peer = source.pick(self._peers)
        more = source.pick((0, 0, 0, 1, 3, AHEAD, (1 << 32) - 1))
        header = self._from(peer, M.ABORT)._replace(nbytes=more)
        if source.chance(4):
            return self._say(peer, header.pack(), bodies.body(source))
        error = source.pick((ReductionTimeout("late"), RankLostError("lost", rank=1)))
        return self._say(peer, header.pack(), encode_error(error))

    def _ask(self) -> None:
        peer = self._source.pick(self._peers)
        self._say(peer, self._from(peer, M.STRAGGLERS).pack())

    def _credit(self) -> None:
        peer = self._source.pick(self._peers)
        window = self._source.pick((0, 4096, 1 << 40, (1 << 64) - 1))
        self._say(peer, self._from(peer, M.CREDIT)._replace(window=window).pack())

    def _lose(self) -> None:
        source = self._source
        peer = source.pick(self._peers)
        frame = self._from(peer, M.SHARD_MAP).pack()
        if source.chance(4):
            return self._say(peer, frame, bodies.nearly(Loss, source))
        return self._say(peer, frame, encode(Loss(source.pick((-1, 0, 1, 2)), source.number(32))))

    def _goodbye(self) -> None:
        peer = self._source.pick(self._peers)
        self._say(peer, self._from(peer, M.GOODBYE).pack())


def elements(seed: int, nbytes: int) -> bytes:
    """Return a payload; other seeds give other ones, with all kinds of floating-point values."""
    return bytes((seed * 37 + at * 101 + at // 8) & 0xFF for at in range(nbytes))


def run(data: bytes) -> None:
    """Let both engines live through one story."""
    World(Source(data)).run()
