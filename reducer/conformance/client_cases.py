"""What is demanded of a client: the kit plays a reducer to all ranks of a job, several times over.

A client is a program that joins the job, makes three all-reduces or more, FLOAT32 sums among them,
looks at the results, and leaves. It is told by RANK, WORLD_SIZE, REDUCTION_SERVERS and
REDUCTION_JOB who it is, and ends with status 0 if all was well, and another one if not. Each
scenario is a run of it, in which the reducer is healthy, or fails in one way.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reducer.conformance.cases import Case, Result, attempt, demand
from reducer.conformance.peer import FailedCaseError, Peer, Received
from reducer.errors import DuplicateRankError, MismatchError, RankLostError, ReductionError
from reducer.kernels.plain import PlainKernels
from reducer.wire.constants import NO_SEQUENCE, PLACES, DType, ReduceOp
from reducer.wire.constants import MessageType as M
from reducer.wire.header import Header, check_chunk, fingerprint
from reducer.wire.layout import cost
from reducer.wire.messages import Challenge, Hello, Stragglers, decode, encode, encode_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PING_S, LOOK_S, HOLD_S = 0.5, 0.02, 0.1
RANK_LOST = encode_error(RankLostError("rank 1 died", rank=1))
LATER = json.dumps({"code": 77, "message": "later", "detail": {"what": 1}}).encode()
LIMIT_S = 60.0  # for a run
CHUNK, LARGEST = 64 << 10, 256 << 10
_ELEMENTS = {"sequence", "total_bytes", "offset", "nbytes", "epoch", "dtype", "op", "wire_dtype"}
_ELEMENTS |= {"since", "tag", "history"}
USED = {  # fields of the header besides job, generation, rank and watermark, which all may have
    M.HELLO: {"window"},
    M.CONTRIBUTION: _ELEMENTS | {"window"},
    M.RETAINED: _ELEMENTS | {"window"},
    M.ABORT: {"sequence", "epoch", "nbytes"},
    M.STRAGGLERS: {"sequence"},
    M.CREDIT: {"window"},
    M.RESUME: {"offset"},
}


class PlayedLink:
    """One connection of the client's.

    Attributes:
        said: what it has said, and in `before` how much of that before its WELCOME.
        member: it was sent a WELCOME.
        flying: bytes of contributions whose result was not sent, and `most` of them at a time.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.peer = Peer(connection, b"ROUTER")
        self.said: list[Received] = []
        self.hello: Header | None = None
        self.body: Hello | None = None
        self.before = 0
        self.member = False
        self.flying = self.most = 0
        self.answered: set[int] = set()  # all-reduces of which a result or error was sent
        self.closed_at = 0.0

    def of(self, *kinds: M) -> list[tuple[Header, bytes]]:
        """Return what it has said of these types."""
        heard = [(message.header, message.payload) for message in self.said]
        return [(header, data) for header, data in heard if header and header.type in kinds]


class PlayedReducer:
    """A reducer for one job, as a scenario has it.

    Attributes:
        failed_at: when the scenario's fault happened.
        problems: why a connection could not be understood.
        held: chunks that are complete, and not answered yet.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.job = f"conform-{secrets.token_hex(6)}"
        self.links: list[PlayedLink] = []
        self.chunks: dict[tuple[int, int], dict[int, tuple[PlayedLink, Header, bytes]]] = {}
        self.held: list[tuple[int, int]] = []
        self.failed_at = self._held_at = self._ping_at = 0.0
        self.problems: list[str] = []
        self.idle = False

    def step(self) -> None:
        """Hear what has come, and say what is due."""
        open_ = {link.peer.connection: link for link in self.links if not link.peer.closed}
        sources = [self.listener, *open_] if self.listener.fileno() >= 0 else list(open_)
        for ready in select.select(sources, [], [], LOOK_S)[0]:
            if ready is self.listener:
                self.links.append(PlayedLink(self.listener.accept()[0]))
                continue
            try:
                self._read(open_[ready])
            except (FailedCaseError, ReductionError) as error:
                self.problems.append(str(error))
                open_[ready].peer.closed = True
        for link in open_.values():
            link.peer.heartbeat()
            link.closed_at = time.monotonic() if link.peer.closed else 0.0
        if time.monotonic() >= self._ping_at and not self.idle:
            self._ping_at = time.monotonic() + PING_S
            for link in (link for link in open_.values() if link.member):
                link.peer.send(Header(M.PING), *self.scenario.ping)
        if self.held and time.monotonic() > self._held_at + HOLD_S:
            while self.held:  # the latest first
                self.answer(*self.held.pop())

    def _read(self, link: PlayedLink) -> None:
        link.peer.feed()
        for message in link.peer.pending():
            link.said.append(message)
            header = message.header
            if header is None:
                continue
            if header.type is M.HELLO and link.hello is None:
                link.hello, link.body = header, decode(Hello, message.payload)
                if not self.idle:
                    self.scenario.greet(self, link, header)
            elif header.type is M.CONTRIBUTION and link.member and link.body is not None:
                self._take(link, link.body.world_size, header, message.payload)

    def _take(self, link: PlayedLink, ranks: int, header: Header, payload: bytes) -> None:
        link.flying += cost(len(payload))
        link.most = max(link.most, link.flying)
        chunk = self.chunks.setdefault((header.sequence, header.offset), {})
        chunk[header.rank] = link, header, payload
        if len(chunk) < ranks:
            return
        if self.scenario.fault is not None and header.sequence // PLACES == 1:
            self.failed_at = self.failed_at or time.monotonic()
            self.scenario.fault(self, header)
        elif self.scenario.late:
            self.held.append((header.sequence, header.offset))
            self._held_at = time.monotonic()
        else:
            self.answer(header.sequence, header.offset)

    def answer(self, sequence: int, offset: int) -> None:
        """Send a result to all."""
        chunk = self.chunks[sequence, offset]
        inputs = [chunk[rank][2] for rank in sorted(chunk)]
        result = np.empty(len(inputs[0]), np.uint8)
        first = chunk[min(chunk)][1]
        PlainKernels().reduce(inputs, result, DType(first.dtype), ReduceOp(first.op))
        header = first._replace(type=M.RESULT, watermark=0, rank=0, since=0, history=0)
        for link, _, data in chunk.values():
            link.flying -= cost(len(data))
            link.answered.add(sequence)
            link.peer.send(header, result.tobytes())


# -- what a scenario says or does ------------------------------------------------------------------


def _welcome(reducer: PlayedReducer, link: PlayedLink, hello: Header, **body: object) -> None:
    chunk_bytes = link.body.chunk_bytes if link.body else 0
    usual = {"version": "1.0", "incarnation": "c0ffee", "features": 0}
    usual |= {"max_chunk_bytes": chunk_bytes or LARGEST, **body}
    link.member, link.before = True, len(link.said)
    answer = hello._replace(type=M.WELCOME, watermark=0, window=reducer.scenario.window)
    link.peer.send(answer, json.dumps(usual).encode())


def _chat(reducer: PlayedReducer, link: PlayedLink, hello: Header) -> None:
    _welcome(reducer, link, hello, version="1.7", later=[{}])
    error = MismatchError.between("of a call that nobody makes", "op", (0, 1), (0, 2))
    link.peer.send(Header(M.ERROR, sequence=9000 * PLACES + 1), encode_error(error))
    link.peer.send(Header(M.STRAGGLERS, sequence=1), encode(Stragglers((0,))))


def _drain(reducer: PlayedReducer, link: PlayedLink, hello: Header) -> None:
    _welcome(reducer, link, hello)
    link.peer.send(Header(M.GOODBYE))


def _refuse(reducer: PlayedReducer, link: PlayedLink, hello: Header) -> None:
    del reducer
    error = DuplicateRankError("another live worker has this rank", rank=hello.rank)
    link.peer.send(Header(M.ERROR), encode_error(error))


def _challenge(reducer: PlayedReducer, link: PlayedLink, hello: Header) -> None:
    del reducer
    answer = hello._replace(type=M.CHALLENGE, watermark=0, window=0)
    link.peer.send(answer, encode(Challenge("0" * 32)))


def _fail(reducer: PlayedReducer, header: Header, body: bytes = RANK_LOST) -> None:
    said = Header(M.ERROR, job=header.job, generation=header.generation)
    for link in reducer.links:
        link.answered.add(header.sequence)
        link.peer.send(said._replace(sequence=header.sequence), body)


def _garble(reducer: PlayedReducer, header: Header) -> None:
    del header
    for link in reducer.links:
        link.peer.send(Header(M.PING).pack()[:5] + b"\x63" + bytes(90))


def _lengthen(reducer: PlayedReducer, header: Header) -> None:
    size = {"nbytes": header.nbytes + 4, "total_bytes": header.total_bytes + 4}
    wrong = header._replace(type=M.RESULT, watermark=0, rank=0, since=0, history=0, **size)
    for link in reducer.links:
        link.peer.send(wrong, bytes(header.nbytes + 4))


def _stop_sending(reducer: PlayedReducer, header: Header) -> None:
    del header
    reducer.idle = True
    for link in reducer.links:
        link.peer.deaf = True


def _die(reducer: PlayedReducer, header: Header) -> None:
    del header
    reducer.listener.close()
    for link in reducer.links:
        link.peer.closed = True
        link.peer.connection.close()


class CaseRun(NamedTuple):
    """A scenario that is over.

    Attributes:
        statuses: of the client's processes; empty if the kit has not started them.
        hung: it had not ended in time.
    """

    reducer: PlayedReducer
    statuses: list[int]
    hung: bool

    @property
    def members(self) -> list[PlayedLink]:
        """The connections that have said HELLO."""
        return [link for link in self.reducer.links if link.hello is not None]


Check = tuple[int, str, "Callable[[CaseRun], None]"]


class Scenario(NamedTuple):
    """What a reducer does, and what is demanded of the client.

    Attributes:
        goal: what the reducer does, for people.
        checks: sections, demands, and what tries them.
        greet: answers a HELLO.
        fault: takes the place of the second call's results; then the client ends badly.
        well: whether the client is to end well.
        late: results are sent late, and the latest first.
        window: that every rank may have, bytes.
        ping: the body of PINGs, if they have one.
    """

    goal: str
    checks: tuple[Check, ...]
    greet: Callable[[PlayedReducer, PlayedLink, Header], None] = _welcome
    fault: Callable[[PlayedReducer, Header], None] | None = None
    well: bool = True
    late: bool = False
    window: int = 1 << 20
    ping: tuple[bytes, ...] = ()


# -- what is demanded in the healthy scenario -----------------------------------------------------


def _greets(run: CaseRun) -> None:
    for link in run.members:
        greeting = link.peer.greeting
        demand(greeting[10] == 3 and greeting[12:32].rstrip(b"\0") == b"NULL", f"{greeting!r}")
        ready = [said for _, name, said in link.peer.commands if name == b"READY"]
        demand(len(ready) == 1 and b"\x0bSocket-Type\0\0\0\6DEALER" in ready[0], f"{ready}")


def _frames(run: CaseRun) -> None:
    demand(not run.reducer.problems, f"{run.reducer.problems}")
    for link in run.reducer.links:
        for message in link.said:
            demand(message.header is not None and len(message.frames) <= 2, f"got {message}")


def _unused_fields(run: CaseRun) -> None:
    for link in run.members:
        for header, _ in link.of(*M):
            used = USED.get(header.type, set()) | {"type", "job", "generation", "rank", "watermark"}
            rest = {name: value for name, value in header._asdict().items() if name not in used}
            unset = rest.pop("sequence", NO_SEQUENCE) == NO_SEQUENCE
            demand(unset and not any(rest.values()), f"{header.type.name} has {header}")


def _identity(run: CaseRun) -> None:
    for link in run.members:
        said = {(header.job, header.generation, header.rank) for header, _ in link.of(*M)}
        demand(len(said) == 1, f"a connection speaks for several ranks: {said}")
        body = link.body
        demand(body is not None and next(iter(said))[0] == fingerprint(body.job), f"{said}")


def _first(run: CaseRun) -> None:
    for link in run.members:
        kinds = [header.type for header, _ in link.of(*M)]
        demand(kinds[0] is M.HELLO and kinds.count(M.HELLO) == 1, f"it said {kinds[:3]}")
        demand(link.before == 1, f"before its WELCOME it said {kinds[: link.before]}")


def _agree(run: CaseRun) -> None:
    bodies = [encode(link.body) for link in run.members if link.body is not None]
    common = [{**json.loads(body), "process": "", "host_name": ""} for body in bodies]
    demand(all(one == common[0] for one in common), f"the HELLOs differ: {common}")
    demand(len(bodies) == common[0]["world_size"], f"{len(bodies)} HELLOs of {common[0]}")


def _numbers(run: CaseRun) -> None:
    for link in run.members:
        numbers = list(dict.fromkeys(header.sequence for header, _ in link.of(M.CONTRIBUTION)))
        calls = sorted({number // PLACES for number in numbers})
        demand(calls == list(range(len(calls))) and len(calls) >= 3, f"calls {calls}")
        demand(all(number * PLACES + 1 in numbers for number in calls), f"numbers {numbers}")


def _chunks(run: CaseRun) -> None:
    for link in run.members:
        found: dict[int, list[Header]] = {}
        for header, payload in link.of(M.CONTRIBUTION):
            check_chunk(header, len(payload), LARGEST)
            found.setdefault(header.sequence, []).append(header)
        asked = min((number for number in found if number % PLACES == 0), default=NO_SEQUENCE)
        for number, chunks in found.items():
            ends = [0, *(one.offset + one.nbytes for one in chunks)]
            demand([one.offset for one in chunks] == ends[:-1], f"offsets of {number}: {ends}")
            demand(ends[-1] == chunks[0].total_bytes, f"{number} ends at {ends[-1]}")
            forced = link.body.chunk_bytes if link.body else 0
            size = forced or (CHUNK if number < asked else chunks[0].nbytes)
            rest = [one.nbytes for one in chunks[:-1] if one.nbytes != size]
            demand(not rest and chunks[-1].nbytes <= size, f"chunks of {number}: {rest}")


def _history(run: CaseRun) -> None:
    for link in run.members:
        since = history = 0
        seen: set[int] = set()
        for header, _ in link.of(M.CONTRIBUTION):
            if header.sequence in seen:
                continue
            seen.add(header.sequence)
            expected = (since, history) if header.sequence % PLACES else (0, 0)
            demand((header.since, header.history) == expected, f"history of {header}")
            if header.sequence % PLACES:
                asked = header.total_bytes * 256 + header.dtype * 16 + header.op
                history = ((history ^ header.tag) * 0x9E3779B97F4A7C15 + asked) % (1 << 64)


def _watermarks(run: CaseRun) -> None:
    for link in run.members:
        marks = [header.watermark for header, _ in link.of(*M)]
        demand(all(one <= other for one, other in pairwise(marks)), f"watermarks {marks}")
        begun = {header.sequence for header, _ in link.of(M.CONTRIBUTION)}
        open_ = {number for number in begun if number < marks[-1]} - link.answered
        demand(not open_, f"a watermark has passed {open_}, which have no result")


def _window(run: CaseRun) -> None:
    for link in run.members:
        demand(link.most <= run.reducer.scenario.window, f"{link.most} bytes were in flight")


def _pongs(run: CaseRun) -> None:
    for link in run.members:
        pongs = [said for _, name, said in link.peer.commands if name == b"PONG"]
        demand(pongs and set(pongs) == {b"kit"}, f"answers to PINGs of the context 'kit': {pongs}")


def _goodbye(run: CaseRun) -> None:
    for link in run.members:
        kinds = [header.type for header, _ in link.of(*M)]
        demand(M.GOODBYE in kinds and kinds[-1] is M.GOODBYE, f"its last words: {kinds[-3:]}")


# -- and in every one -----------------------------------------------------------------------------


def _ends(run: CaseRun) -> None:
    """Whether the client ends, and as it should."""
    demand(not run.hung, f"it had not ended after {LIMIT_S:g} s")
    demand(run.members, "nobody came")
    wrong = [status for status in run.statuses if (status == 0) != run.reducer.scenario.well]
    demand(not wrong, f"its processes ended with {run.statuses}")


def _stays_out(run: CaseRun) -> None:
    said = [header.type.name for link in run.members for header, _ in link.of(*M)]
    demand(set(said) <= {"HELLO"}, f"it said {sorted(set(said))}")


def _goes_no_further(run: CaseRun) -> None:
    failed = run.reducer.failed_at
    demand(failed, "it has not made a second call")
    for link in run.members:
        late = [m for m in link.said if m.header and m.at > failed + 1.0]
        late = [m for m in late if m.header and m.header.type is M.CONTRIBUTION]
        again = [m for m in late if m.header and m.header.sequence // PLACES == 1]
        demand(not again, f"it goes on with the call that has failed: {again[:1]}")


def _closes(run: CaseRun, within: float) -> None:
    failed = run.reducer.failed_at
    demand(failed, "it has not made a second call")
    for link in (link for link in run.members if link.hello and link.member):
        waited = link.closed_at - failed
        demand(link.closed_at and waited < within, f"it closed after {waited:.1f} s")


def _closes_idle(run: CaseRun) -> None:
    bodies = [link.body for link in run.members if link.body is not None]
    _closes(run, bodies[0].patience_ms / 1000 + 2.0 if bodies else 0.0)
    for link in (link for link in run.members if link.member):
        pings = [at for at, name, _ in link.peer.commands if name == b"PING"]
        demand(any(at > run.reducer.failed_at for at in pings), "it sent no PING of its own")


_WELL: Check = (5, "it ends well", _ends)
_BADLY: Check = (5, "it ends, and says that something was wrong", _ends)
_ONLY_HELLO: Check = (5, "it says nothing but HELLO", _stays_out)
_HANGS_UP: Check = (5, "it ends the connection", partial(_closes, within=5.0))
SCENARIOS = (
    Scenario(
        "a healthy reducer",
        (
            _WELL,
            (1, "the client is a DEALER that speaks ZMTP 3 with the mechanism NULL", _greets),
            (1, "messages have one or two frames, the first of them a header", _frames),
            (2, "fields that a message does not use are zero", _unused_fields),
            (3, "every message has the job, generation and rank of the HELLO", _identity),
            (5, "the first message is a HELLO, and nothing follows before the WELCOME", _first),
            (3, "ranks say the same in HELLO but for process and host_name", _agree),
            (5, "calls are numbered from 0, all-reduces 128 times that and a place", _numbers),
            (8, "a buffer is cut into chunks of one size, each contributed once", _chunks),
            (5, "history is the checksum of what was asked for before", _history),
            (2, "a watermark never goes back, and passes what has a result alone", _watermarks),
            (5, "no more is in flight than the window allows", _window),
            (5, "PINGs of ZMTP are answered with their context", _pongs),
            (5, "the last message is GOODBYE", _goodbye),
        ),
    ),
    Scenario(
        "results come late, the latest first",
        (_WELL, (5, "a window of two chunks is kept", _window)),
        late=True,
        window=2 * CHUNK,
    ),
    Scenario("more is said than must be", (_WELL,), _chat, ping=(encode(Stragglers(())),)),
    Scenario("the reducer says GOODBYE and goes on", (_WELL,), _drain),
    Scenario("the HELLO is refused", (_BADLY, _ONLY_HELLO), _refuse, well=False),
    Scenario(
        "the reducer is of another major version",
        (_BADLY, _ONLY_HELLO),
        partial(_welcome, version="2.0"),
        well=False,
    ),
    Scenario("a secret is to be proved", (_BADLY, _ONLY_HELLO), _challenge, well=False),
    Scenario(
        "the second call fails",
        (_BADLY, (5, "it goes no further with that call", _goes_no_further)),
        fault=_fail,
        well=False,
    ),
    Scenario(
        "the second call fails with a code of a later version",
        (_BADLY,),
        fault=partial(_fail, body=LATER),
        well=False,
    ),
    Scenario("what is said is malformed", (_BADLY, _HANGS_UP), fault=_garble, well=False),
    Scenario("a result has another size", (_BADLY, _HANGS_UP), fault=_lengthen, well=False),
    Scenario(
        "the reducer falls silent",
        (_BADLY, (5, "it ends the connection after the patience", _closes_idle)),
        fault=_stop_sending,
        well=False,
    ),
    Scenario("the reducer dies", (_BADLY,), fault=_die, well=False),
)


def conform(run: Callable[[PlayedReducer], tuple[list[int], bool]]) -> Iterator[Result]:
    """Try every case with a client.

    Args:
        run: runs the client with a reducer, whose `step` it calls until the client has ended;
            returns the statuses of its processes, and whether it had not ended in time.
    """
    for scenario in SCENARIOS:
        reducer = PlayedReducer(scenario)
        try:
            over = CaseRun(reducer, *run(reducer))
        finally:
            reducer.listener.close()
            for link in reducer.links:
                link.peer.connection.close()
        for section, what, check in scenario.checks:
            yield attempt(Case(section, f"{scenario.goal}: {what}", check), over)
