"""Rules of the reducer as transcripts: what peers say to it, and everything that it answers.

A transcript is a title and, indented, its lines, which longer indented ones continue:

    A rank may come back but not start anew
        ranks 2                                     # they are here if no line begins a job
        0 1 CONTRIBUTION 5 watermark=5 -> 0 1 RESULT
        lose 1
        1@new HELLO -> new StaleGenerationError says="ranks 0 of another run"
        1 HELLO watermark=6 -> 1 WELCOME

To the left of an arrow one or several ranks say something, each over the connection that is called
like it or stands behind an `@`: the type of the message, a sequence number (or a range of them),
and fields that differ from those of `words.Reducer`. Or something else happens (`EVENTS`), or is
so (`STATES`). To the right is who gets what; without an arrow nobody gets anything. Of an answer
the named fields are compared, of an error's text the part that it `says`; `ticket=?it` keeps one
for later lines. A line like `each goes: lose 1 | 1 GOODBYE` makes a transcript of each way, which
is put where `$goes` stands; with several names each way has a word for each.
"""

import shlex
from types import SimpleNamespace

import pytest

from reducer import errors
from reducer.engine import admission, engine
from reducer.engine.allow_list import LOCAL, AllowList
from reducer.engine.limits import Limits
from reducer.errors import CapacityError
from reducer.wire import constants, layout, messages
from reducer.wire.constants import NO_SEQUENCE, DType, Feature, ReduceOp
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import Loss, Stragglers, Stream, Welcome, decode, encode, encode_error
from tests.engine import words
from tests.engine.words import M, Reducer, kinds, told, with_ranks
from worker_client.protocol.operation import refused

BODIES = {M.SHARD_MAP: Loss, M.PING: Stragglers, M.STRAGGLERS: Stragglers, M.WELCOME: Welcome}
OF_HEADER = set(Header._fields) - {"rank"}
KNOWN = (constants, messages, layout, admission, engine, words)
NAMES = {name: value for one in KNOWN for name, value in vars(one).items() if name.isupper()}
NAMES |= {"DType": DType, "Feature": Feature, "ReduceOp": ReduceOp, "number": words.number}
NAMES |= {"bytes": bytes, "range": range, "fingerprint": fingerprint}
NAMES |= {"BOTH": Feature.CREDIT | Feature.STREAMS, "LOCAL": LOCAL}
NAMES |= {"JOB": fingerprint("job"), "MOST": (1 << 64) - 1, "RESULT": bytes(range(64))}

# What is so, as words; a line names all of them, or those of the counters that it is about.
STATES = {
    "counters": lambda reducer, words: [
        f"{name}={getattr(reducer.engine.counters, name)}"
        for name in (word.split("=")[0] for word in words)
    ],
    "dropped": lambda reducer, _: [peer.decode() for peer in reducer.dropped()],
    "given_up": lambda reducer, _: [len(job.given_up) for job in reducer.engine.jobs],
    "healthy": lambda reducer, _: [job.healthy for job in reducer.engine.jobs],
    "held": lambda reducer, _: [reducer.engine.held()],
    "jobs": lambda reducer, _: sorted(
        f"{job.name}={len(job.members)}" for job in reducer.engine.jobs
    ),
    "open": lambda reducer, _: [
        sequence
        for job in reducer.engine.jobs
        for sequence in job.rounds
        if job.rounds.get(sequence).open
    ],
    "reserved": lambda reducer, _: [reducer.engine.members.quotas.reserved()],
    "rounds": lambda reducer, _: sorted(reducer.rounds()),
    "streams": lambda reducer, words: [
        words[0],
        *(peer.decode() for peer in reducer.engine.members.streams(words[0].encode())),
    ],
    "taken": lambda reducer, words: [reducer.served.taken if reducer.compiled else words[0]],
}


# What else may happen.
EVENTS = {
    "allow": lambda reducer, *listed: reducer.do(
        reducer.engine.allow(AllowList(jobs_of_keys(listed)))
    ),
    "close": lambda reducer: reducer.engine.close(),
    "drain": lambda reducer: reducer.do(reducer.engine.drain()),
    "lose": lambda reducer, *peers: to_each(reducer.lose, peers),
    "stop_reading": lambda reducer, peer: reducer.do(reducer.engine.drop(peer.encode(), UNREAD)),
    "unreachable": lambda reducer, *peers: to_each(reducer.unreachable, peers),
}
UNREAD = CapacityError("reads nothing", limit="window")


def to_each(act, peers):
    return [send for peer in peers for send in act(peer.encode())]


def jobs_of_keys(listed):
    """What an allow-list says: keys, each for a job."""
    return {key: frozenset({job}) for key, job in (each.split("=") for each in listed)}


def transcripts(text, first=""):
    """A test with a case for each transcript; some lines may come first in all of them."""
    ((_, before),) = parse(f"First\n{first}")
    cases = [
        pytest.param(before + lines, id=title.replace(" ", "_")) for title, lines in parse(text)
    ]

    @pytest.mark.parametrize("lines", cases)
    def test(implementation, lines):
        Play(implementation).run(lines)

    return test


def parse(text):
    """Yield titles and what their lines say, as tokens."""
    found = []
    for line in text.splitlines():
        tokens = shlex.split(line, comments=True) if line.startswith(" ") else []
        if line and not line.startswith(" "):
            found.append((line, []))
        elif tokens and line.startswith(" " * 5):
            found[-1][1][-1].extend(tokens)
        elif tokens:
            found[-1][1].append(tokens)
    for title, lines in found:
        yield from ways(title, lines)


def ways(title, lines):
    """Yield a transcript for each of the ways that it may go."""
    for at, line in enumerate(lines):
        if line[0] == "each":
            end = next(at for at, token in enumerate(line) if token.endswith(":")) + 1
            names = ["$" + token.strip(",:") for token in line[1:end]]
            for way in split(line[end:], "|"):
                rest = [put(each, names, way) for each in lines[:at] + lines[at + 1 :]]
                yield from ways(f"{title}, {' '.join(way)}", rest)
            return
    yield title, lines


def put(tokens, names, way):
    """Put a way where its name stands, or each word of it where the name of that stands."""
    if len(names) == 1:
        tokens = [part for token in tokens for part in (way if token == names[0] else [token])]
    for name, part in zip(names, way, strict=False):
        tokens = [token.replace(name, part) for token in tokens]
    return tokens


def split(tokens, separator):
    parts = [[]]
    for token in tokens:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


class Play:
    """A reducer to which the lines of a transcript happen.

    Attributes:
        names: what values may name.
    """

    def __init__(self, implementation):
        self.implementation = implementation
        self.reducer = None
        self.names = dict(NAMES)

    def run(self, lines):
        if lines[0][0] not in {"ranks", "new"}:
            self.begin("ranks", ["2"])
        for line in lines:
            left, *right = split(line, "->")
            sends = self.happen(*left) or []
            wanted = answers(*right[0]) if right else []
            said = [f"{send.peer.decode()} {name_of(send)} {told([send]) or ''}" for send in sends]
            assert self.same(sends, wanted), f"{' '.join(line)}\nsaid: {', '.join(said)}"

    def happen(self, *tokens):
        """Let what a line says happen, and return what is answered."""
        event, *others = tokens
        if event in STATES:
            found = STATES[event](self.reducer, others)
            said = [str(self.value(token)) for token in others]
            assert list(map(str, found)) == said, f"{event}: {found}, not {said}"
            return []
        if event in {"new", "ranks"}:
            return self.begin(event, others)
        if event in EVENTS:
            return EVENTS[event](self.reducer, *others)
        if event in {"later", "time"}:  # so much time passes, or it is now so late
            self.reducer.now = self.value(others[0]) + (event == "later") * self.reducer.now
            return self.reducer.tick()
        if event == "pings":  # the same; PINGs are said, too
            return self.reducer.do(self.reducer.engine.tick(self.value(others[0])))
        at = next(at for at, token in enumerate(tokens) if token in M.__members__)
        given, fields = self.arguments(tokens[at + 1 :])
        first = None if not given or isinstance(given[0], str) else given.pop(0)
        sequences = first if isinstance(first, range) else [first]
        return [
            send
            for who in tokens[:at]
            for sequence in sequences
            for send in self.say(M[tokens[at]], who, sequence, *given, **fields)
        ]

    def say(self, kind, who, sequence, /, *given, **fields):
        rank, _, peer = who.rpartition("@")
        rank, peer = int(rank or (peer if peer.isdigit() else 0)), peer.encode()
        if "bytes" in fields:
            fields["payload"] = bytes(fields.pop("bytes"))
        if "result" in given:
            fields["payload"] = NAMES["RESULT"]
        if kind is M.HELLO:
            return self.reducer.hello(rank, peer=peer, **fields)
        if kind is M.CONTRIBUTION:
            return self.reducer.contribute(rank, sequence or 0, peer=peer, **fields)
        if kind is M.RETAINED:
            return self.reducer.retain(rank, sequence or 0, peer=peer, **fields)
        if kind is M.STREAM:
            key, body = fields.pop("key", ""), encode(Stream(**fields))
            return self.reducer.served.receive(peer, Header(kind).pack(), body, key)
        body = b""
        if kind is M.SHARD_MAP and fields:
            body, fields = encode(Loss(**fields)), {}
        if kind is M.ABORT and given:
            of_header = {name: fields.pop(name) for name in OF_HEADER & fields.keys()}
            body, fields = encode_error(reason(*given, **fields)), of_header
        sequence = NO_SEQUENCE if sequence is None else sequence
        return self.reducer.say(rank, kind, sequence, body, peer=peer, **fields)

    def arguments(self, tokens):
        given = [self.value(token) for token in tokens if "=" not in token]
        named = [token.split("=", 1) for token in tokens if "=" in token]
        return given, {name: self.value(value) for name, value in named}

    def value(self, text):
        """What an expression stands for, or the text itself."""
        try:
            return eval(text, {"__builtins__": {}}, self.names)  # noqa: S307
        except (NameError, SyntaxError):
            return text

    def same(self, sends, wanted):
        """Whether each peer gets what is wanted, in this order, and nobody anything else."""
        return all(
            self.alike(
                [send for send in sends if send.peer.decode() == peer],
                [answer for to, *answer in wanted if to == peer],
            )
            for peer in {send.peer.decode() for send in sends} | {peer for peer, *_ in wanted}
        )

    def alike(self, sends, wanted):
        return len(sends) == len(wanted) and all(
            name_of(send) == name and all(self.has(send, *field) for field in fields)
            for send, (name, fields) in zip(sends, wanted, strict=True)
        )

    def has(self, send, name, text):
        """Whether a field of an answer is as it should be."""
        (kind,), error = kinds([send]), told([send]).get(send.peer)
        if name in {"says", "text"}:
            return text == str(error) if name == "text" else text in str(error)
        payload = None if send.payload is None else bytes(send.payload)
        said = [error] if error else [Header.unpack(send.header), SimpleNamespace(payload=payload)]
        if kind in BODIES and payload:
            said.insert(0, decode(BODIES[kind], payload))
        found = next(getattr(each, name) for each in said if hasattr(each, name))
        if text.startswith("?"):
            self.names[text[1:]] = found
        return text.startswith("?") or found == self.value(text)

    def begin(self, event, tokens):
        """There is a reducer: a new one, or one that so many ranks of a job have joined."""
        given, fields = self.arguments(tokens)
        limits = Limits(**{name: fields.pop(name) for name in Limits._fields if name in fields})
        make = Reducer if event == "new" else with_ranks
        self.reducer = make(self.implementation, *given, limits=limits, **fields)


def reason(name, **fields):
    """Why a call is given up; REFUSED if the rank cannot make it."""
    if name == "REFUSED":
        return refused(1, "it is odd")
    of = {"reducer": "here:1"} if name == "ReducerLostError" else {}
    return getattr(errors, name)("gone", **of, **fields)


def answers(*tokens):
    """Who is to get what: peers, a type of messages or errors, and fields."""
    found, peers = [], []
    for token in tokens:
        word = token.rstrip(",")
        if word in M.__members__ or hasattr(errors, word):
            fields = []
            found += [(peer, word, fields) for peer in peers]
            peers = []
        elif "=" in word:
            fields.append(word.split("=", 1))
        else:
            peers.append(word)
    return found


def name_of(send):
    """The type of a message, or of the error that it brings."""
    error = told([send]).get(send.peer)
    return kinds([send])[0].name if error is None else type(error).__name__
