"""Target ``session``: reducers say anything to a worker, in any order."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fuzz import bodies
from fuzz.engines import elements
from fuzz.headers import mutate
from fuzz.source import Source, check
from fuzz.worker import Call, Worker
from reducer.errors import (
    LocalProtocolError,
    MembershipError,
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionError,
    ReductionTimeout,
    RemoteProtocolError,
    StaleGenerationError,
)
from reducer.wire.constants import (
    FAR_S,
    MAX_STREAMS,
    NO_SEQUENCE,
    NONCE_DIGITS,
    PLACES,
    DType,
    Feature,
    MessageType,
    ReduceOp,
)
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import (
    Challenge,
    Loss,
    Stragglers,
    Stream,
    Welcome,
    decode,
    encode,
    encode_error,
)
from worker_client.protocol.lifecycle import FIRST_PLACE
from worker_client.protocol.spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.protocol.flight import Resumption

M = MessageType
MOST_STEPS = 150  # of one input; what is longer only takes longer
BLOCK = DType.BLOCK8.itemsize
ROUND_TRIPS_S = (0.0, FAR_S, 0.06, 3.0)
TICKET = "a" * NONCE_DIGITS
SIZES = (BLOCK, BLOCK, 4 * BLOCK, 0, 8, 1 << 16)
# Of the first two calls, of the first question, and of none.
NUMBERS = (NO_SEQUENCE, FIRST_PLACE, FIRST_PLACE + PLACES, 2 * PLACES, 3)
ERRORS: tuple[ReductionError, ...] = (
    RankLostError("gone", rank=1),
    ReducerLostError("gone", reducer="a:1"),
    ReductionTimeout("late", missing=(1,)),
    ReductionTimeout("late"),
    MembershipError("who are you?"),
    RemoteProtocolError("what?"),
    StaleGenerationError("later", generation=0, current=1),
    MismatchError("other epoch", field="epoch", rank=0, other_rank=1, expected=0, got=1),
    MismatchError("other name", field="name", rank=0, other_rank=1, expected="#0", got="#1"),
)


class Life:
    """One worker, and reducers that say what the source decides."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.now = 0.0
        reducers = ("a:1", "b:2", "c:3")[: 1 + source.below(3)]
        hosted = source.chance(4)
        world_size = 1 + source.below(3)
        self.worker = Worker(
            JobSpec(
                "job",
                generation=source.below(2),
                rank=source.below(world_size),
                world_size=world_size,
                reducers=reducers,
                window_bytes=source.pick((4096, 0)),
                chunk_bytes=source.pick((BLOCK, BLOCK, 0)),
                fallback=source.chance(3),
                elastic=source.chance(4),
                streams=0,
                resumes=True,
                reducers_timeout_s=source.pick((math.inf, 1.0)),
                hosts={len(reducers) - 1: world_size - 1} if hosted else {},
            )
        )
        self.calls: list[Call] = []
        self.ended: dict[int, type | None] = {}
        self._up: dict[int, float] = {}  # round trips of links
        self._features = Feature(0)  # that the latest WELCOME has named
        self._in_flight: list[tuple[int, Header]] = []
        self._steps: tuple[Callable[[], None], ...] = (
            self._connect,
            self._welcome,
            self._submit,
            self._answer,
            self._answer,
            self._answer_all,
            self._disturb,
            self._error,
            self._tell,
            self._tick,
            self._disconnect,
            self._tick,
            self._garbage,
        )

    def run(self) -> None:
        """Do all that the source says, then leave the job."""
        if self._source.chance(2):
            for link in self.worker.session.links:
                self._reach(link.index)
                self._hear(link.index, Header(M.WELCOME, window=4096), encode(Welcome("1")))
        for _ in range(MOST_STEPS):
            if not self._source.left:
                break
            self._source.pick(self._steps)()
        self._leave()

    def _leave(self) -> None:
        self._do(lambda worker: worker.session.close(LocalProtocolError("closed")))
        session = self.worker.session
        check(session.active == 0, "nothing is in progress after the end")
        check(self.ended.keys() == set(range(len(self.calls))), "every call has ended")
        for link in session.links:
            check(session.flight.stats(link.index).in_flight == 0, "nothing is in flight")

    # -- what a session asks for --------------------------------------------------------------

    def _do(self, act: Callable[[Any], list[Any]]) -> None:
        for kind, *what in self.worker.do(act(self.worker), self.now):
            getattr(self, "_on_" + kind.replace(" ", "_"))(*what)

    def _on_send(self, link: int, frame: bytes, payload: bytes) -> None:
        header = Header.unpack(frame)
        check(0 <= link < len(self.worker.session.links), "a link is one of ours")
        if header.type is not M.CONTRIBUTION:
            return
        check(len(payload) == header.nbytes, "a contribution is as long as it says")
        self._in_flight.append((link, header))
        del self._in_flight[:-64]
        if (number := self._call_of(header.sequence)) is not None:
            self.calls[number].sent.add((header.offset, header.nbytes))

    def _on_finish(self, number: int, error: type | None, _: str, data: bytes) -> None:
        check(number not in self.ended, "a call ends once")
        self.ended[number] = error
        if error is not None:
            check(issubclass(error, ReductionError), f"{error} is an error of ours")
            return
        call = self.calls[number]
        covered = sorted(call.sent)
        check(sum(nbytes for _, nbytes in covered) == call.nbytes, "every byte was reduced")
        for offset, nbytes in covered:
            got = call.results.get(offset, [])
            check(data[offset : offset + nbytes] in got, f"chunk {offset} is one that came")

    def _on_hand_over(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            check(number not in self.ended, "a call ends once")
            self.ended[number] = None

    def _on_reset(self, link: int) -> None:
        self._up.pop(link, None)

    def _on_add_streams(self, link: int, header: bytes, payloads: tuple[bytes, ...]) -> None:
        check(Header.unpack(header).type is M.STREAM, "a further stream begins with STREAM")
        said = [decode(Stream, payload) for payload in payloads]
        numbers = [one.number for one in said]
        check(numbers == list(range(1, 1 + len(said))), f"each number is said once: {numbers}")
        check(0 < len(said) < MAX_STREAMS, f"a link has at most {MAX_STREAMS} connections")
        check(self._up[link] >= FAR_S, "a link has further streams if it is far")
        check({one.ticket for one in said} == {TICKET}, "streams show the ticket of the link")

    def _on_keep(self, link: int, resumption: Resumption) -> None:
        check(link in self._up, "a connection goes on that is there")
        check(Feature.RESUME in self._features, "and if the reducer has said so")
        header, payload = resumption.message(3, 2, 77)
        said = Header.unpack(header)
        check((said.type, said.offset) == (M.RESUME, 77), "a RESUME says what was read")
        check(decode(Stream, payload) == Stream(TICKET, 3, attempt=2), "and of which connection")

    def _on_connect(self, endpoint: str) -> None:
        check(endpoint.rpartition(":")[2].isdigit(), f"{endpoint} has a port")

    # -- what happens -------------------------------------------------------------------------

    def _call_of(self, sequence: int) -> int | None:
        operations = self.worker.operations
        mine = enumerate(operations)
        return next((at for at, operation in mine if operation.sequence == sequence), None)

    def _link(self) -> int:
        return self._source.below(min(255, len(self.worker.session.links)))

    def _hear(self, link: int, header: Header, payload: bytes = b"") -> None:
        self._hear_frame(link, header.pack(), payload)

    def _hear_frame(self, link: int, frame: bytes, payload: bytes) -> None:
        if link not in self._up:
            return
        with suppress(ReductionError):  # no header at all
            header = Header.unpack(frame)
            number = self._call_of(header.sequence)
            if header.type is M.RESULT and number is not None:
                self.calls[number].results.setdefault(header.offset, []).append(payload)
        self._do(lambda worker: worker.session.receive(link, frame, payload, self.now))

    def _connect(self) -> None:
        at = self._source.byte()
        links = min(255, len(self.worker.session.links))
        self._reach(at % links, ROUND_TRIPS_S[at // links % len(ROUND_TRIPS_S)])

    def _reach(self, link: int, round_trip_s: float = 0.0) -> None:
        self._up[link] = round_trip_s
        self._do(lambda worker: worker.session.connected(link, round_trip_s))

    def _disconnect(self) -> None:
        link = self._link()
        if link in self._up:
            del self._up[link]
            self._do(lambda worker: worker.session.disconnected(link, "was cut"))

    def _tick(self) -> None:
        self.now += self._source.pick((0.01, 0.1, 0.3, 1.0, 5.0, 10.0))
        self._do(lambda worker: worker.session.tick(self.now))

    def _submit(self) -> None:
        if len(self.calls) == 40:
            return
        nbytes = self._source.pick(SIZES)
        dtype, op = (
            DType(1 + self._source.below(len(DType))),
            ReduceOp(1 + 2 * self._source.below(3)),
        )
        if dtype.is_block:
            nbytes, op = nbytes // BLOCK * BLOCK, ReduceOp.SUM
        self.calls.append(Call(nbytes, set(), {}))
        self._do(lambda worker: worker.submit(nbytes, dtype, op, self.now))

    # -- what reducers say --------------------------------------------------------------------

    def _welcome(self) -> None:
        source = self._source
        header = Header(M.WELCOME, window=source.pick((4096, 4096, 0, 64, 1 << 40, (1 << 64) - 1)))
        self._features = Feature(source.below(8))
        ticket = TICKET if self._features & ~Feature.CREDIT else ""
        lanes = (5, 6)[: source.below(3)]
        body = encode(Welcome("1", features=self._features, lanes=lanes, ticket=ticket))
        if source.chance(4):
            body = bodies.nearly(Welcome, source)
        elif source.chance(8):
            header, body = Header(M.CHALLENGE), bodies.nearly(Challenge, source)
        self._hear(self._link(), header, body)

    def _result(self, link: int, sent: Header, seed: int) -> None:
        header = sent._replace(type=M.RESULT, rank=0, watermark=0, since=0, history=0)
        payload = elements(seed, sent.nbytes)
        if self._source.chance(8):
            header = mutate(header, self._source)
        if self._source.chance(16):
            payload = payload[:-1] or b"1"
        self._hear(link, header, payload)

    def _answer(self) -> None:
        """Answer one of the contributions that are in flight."""
        source = self._source
        if self._in_flight:
            link, sent = self._in_flight.pop(source.byte() % len(self._in_flight))
            self._result(link, sent, source.byte())

    def _answer_all(self) -> None:
        waiting, self._in_flight = self._in_flight, []
        for link, sent in waiting:
            self._result(link, sent, self._source.byte())

    def _disturb(self) -> None:
        """Say something that suits no contribution, or one that was answered."""
        source = self._source
        header = Header(source.pick(tuple(M)), sequence=source.pick(NUMBERS))
        for _ in range(source.below(4)):
            header = mutate(header, source)
        self._hear(self._link(), header, source.take(source.below(20)))

    def _error(self) -> None:
        source = self._source
        at = self._sequence()
        header = Header(M.ERROR, job=fingerprint("job"), sequence=at)
        body = encode_error(source.pick(ERRORS))
        if source.chance(4):
            body = bodies.body(source)
        self._hear(self._link(), header, body)

    def _sequence(self) -> int:
        active = [*self.worker.session.calls.active.all()]
        if active and self._source.chance(2):
            return active[0].sequence
        return self._source.pick(NUMBERS)

    def _tell(self) -> None:
        """Say what is about the job, not about a chunk."""
        source = self._source
        kind = source.pick((M.PING, M.SHARD_MAP, M.STRAGGLERS, M.RETAINED, M.GOODBYE, M.CREDIT))
        watermark = source.pick(
            (0, FIRST_PLACE, FIRST_PLACE + PLACES, self.worker.session.watermark, (1 << 64) - 1)
        )
        sequence = self._sequence() if kind in {M.STRAGGLERS, M.RETAINED} else NO_SEQUENCE
        header = Header(kind, sequence=sequence, watermark=watermark)
        if kind is M.CREDIT:
            header = header._replace(window=source.pick((0, 4096, 1 << 40, (1 << 64) - 1)))
        body = b""
        if kind is M.SHARD_MAP:
            body = encode(Loss(source.pick((-1, 0, 1, 2, 3)), source.number(32)))
        elif kind is M.STRAGGLERS or (kind is M.PING and source.chance(2)):
            body = encode(Stragglers(source.pick(((0,), (1,), (0, 1, 2), (65535,)))))
        if source.chance(8):
            body = bodies.nearly(source.pick((Loss, Stragglers)), source)
        self._hear(self._link(), header, body)

    def _garbage(self) -> None:
        source = self._source
        frame, payload = source.take(source.below(100)), source.take(source.below(20))
        self._hear_frame(self._link(), frame, payload)


def run(data: bytes) -> None:
    """Let both sessions live through one story."""
    Life(Source(data)).run()
