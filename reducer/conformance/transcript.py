"""What is demanded of a reducer: the kit plays the ranks of jobs, by the lines of a table.

`reducer_cases.txt` has the cases: a section of the specification and a demand, and below it what
happens in a job of the case's own:

    5 A contribution that comes again is not counted again
        ranks 2                             a job of two ranks, and both are members (`job`: none)
        0 > CONTRIBUTION 1 float32=1,2      rank 0 says this, with number 1
        0 0b < RESULT 1 float32=3,4         two connections of rank 0 each hear this, next
        0 < ERROR MISMATCH 1 field=op       ... an error with this code, and this in its detail
        0 < nothing 0.3                     ... nothing for so long; `closed`: the connection ends
        1 break | 1 deaf                    its connection ends; it sends and answers no heartbeats

Fields are the body's, or the header's if the message has no body or `h.` stands before them; `at6=`
puts bytes into the header, `cut=` shortens it, `frames=` adds frames, `text=` is the body.
Elements are those of a type (`float32=`), numbers or bits (`0x7fc00000`). `after=1..3` says how
many seconds after the line before. PINGs are passed over where no PING is expected.
"""

from __future__ import annotations

import json
import re
import secrets
import select
import shlex
import socket
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from reducer import units
from reducer.conformance.cases import Case, Result, attempt, demand
from reducer.conformance.peer import PING_S, FailedCaseError, Peer, Received, command
from reducer.errors import ConfigError, ReducerLostError
from reducer.wire.constants import NO_SEQUENCE, DType, ErrorCode, Feature, ReduceOp
from reducer.wire.constants import MessageType as M
from reducer.wire.header import Header, fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator

QUIET_S = 0.3  # for which nothing comes where nothing may
LONGEST_S = 10.0  # that an answer may take before a case fails
HELLO = {
    "version": "1.0",
    "features": 0,
    "reducers": 1,
    "reducer_index": 0,
    "lane": 0,
    "chunk_bytes": 0,
    "h.window": 1 << 20,
    "patience_ms": 10_000,  # where a case does not try what comes of silence
}
NAMES: dict[str, int] = {"NONE": NO_SEQUENCE}
for _codes in (DType, ReduceOp, Feature, ErrorCode):
    NAMES |= {name: int(code) for name, code in _codes.__members__.items()}
WITH_BODY = {M.HELLO, M.WELCOME, M.ABORT, M.STREAM, M.SHARD_MAP, M.STRAGGLERS, M.PING}
RAW = r"at\d+|cut|frames|text"
FORMS = {
    "float32": "f",
    "float64": "d",
    "float16": "e",
    "bfloat16": "H",
    "int8": "b",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
}
BLOCKS = {  # as scale, and q
    "zeros": (0.0, [0] * 252),
    "full": (0.5, [at - 127 for at in range(252)]),
    "ramp": (0.5, [at - 126 for at in range(252)]),
    "mixed": (0.3, [at * 7 % 255 - 127 for at in range(252)]),
    "e4m3": (0.5, [at * 5 % 127 - 128 * (at % 2) for at in range(252)]),
    "positive": (2.0, [at % 127 for at in range(252)]),
}


def cases() -> list[Case]:
    """Return the cases of the table."""
    found: list[tuple[int, str, list[list[str]]]] = []
    for line in files(__package__).joinpath("reducer_cases.txt").read_text().splitlines():
        if line.startswith(" "):
            found[-1][2].append(shlex.split(line, comments=True))
        elif line and not line.startswith("#"):
            section, _, what = line.partition(" ")
            found.append((int(section), what, []))
    return [Case(section, what, partial(_play, steps=steps)) for section, what, steps in found]


def conform(address: str, at_once: int = 8) -> Iterator[Result]:
    """Try every case with the reducer at ``host:port``, some at once: each is a job of its own.

    Raises:
        ConfigError: that is no address.
        ReducerLostError: nothing listens there.
    """
    try:
        _connect(address).close()
    except ValueError as error:
        raise ConfigError(f"the reducer's address: {error}") from None
    except OSError as error:
        why = f"{address} cannot be reached: {error}"
        if isinstance(error, ConnectionRefusedError):
            why = f"nothing listens at {address}"
        text = f"{why}: start a reducer, and name the port that its workers use"
        raise ReducerLostError(text, reducer=address) from None
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(lambda case: attempt(case, address), cases())


def _connect(address: str) -> socket.socket:
    host, port = units.address(address)
    return socket.create_connection((host.strip("[]"), port), LONGEST_S)


def _play(address: str, steps: list[list[str]]) -> None:
    play = Play(address)
    try:
        for at in filter(None, steps):
            if not play.step(at):
                return
    except FailedCaseError as error:
        said = " ".join(at)
        raise FailedCaseError(f"{said!r}: {error}") from None
    finally:
        play.close()


class PlayedRank:
    """A connection that would be, or is, a rank's.

    Attributes:
        common: what the headers of its messages have in common.
        features: that its HELLO has announced.
    """

    def __init__(self, address: str, common: Header) -> None:
        self.peer = Peer(_connect(address), b"DEALER")
        self.common = common
        self.features = 0
        self.member = False
        self.heard: list[Received] = []  # that no line has asked for yet


class Play:
    """One case: a job of its own, and its ranks' connections by their names."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._name = f"conform-{secrets.token_hex(6)}"
        self._hello: dict[str, Any] = {}
        self._ranks: dict[str, PlayedRank] = {}
        self._known: dict[str, Any] = {}  # what the latest WELCOME said
        self._before = time.monotonic()

    def close(self) -> None:
        """Leave the job."""
        for rank in self._ranks.values():
            if rank.member:
                rank.peer.send(rank.common._replace(type=M.GOODBYE))
            rank.peer.connection.close()

    def step(self, words: list[str]) -> bool:
        """Do what a line says; False: what follows is for another kind of reducer."""
        begun = time.monotonic()
        if words[0] in {"job", "ranks"}:
            _, fields = self._fields(words[2:])
            self._hello = {**HELLO, "job": self._name, "world_size": int(words[1]), **fields}
            for name in map(str, range(int(words[1]) if words[0] == "ranks" else 0)):
                self._say(name, M.HELLO, [])
                self._hear(name, M.WELCOME, [])
        elif words[0] == "needs":
            return bool(self._known.get("features", 0) & Feature[words[1]])
        elif words[1] == "break":
            self._rank(words[0]).peer.connection.close()
            self._ranks.pop(words[0])
        elif words[1] == "deaf":
            self._rank(words[0]).peer.deaf = True
        elif words[1] == "zmtp":
            self._rank(words[0]).peer.say(command(words[2].encode(), b"\0\0" + words[3].encode()))
        elif words[1] == "heard":
            self._heard(self._rank(words[0]).peer, *(word.encode() for word in words[2:]))
        else:
            at = next(at for at, word in enumerate(words) if word in "<>")
            for name in words[:at]:
                if words[at] == ">":
                    self._say(name, M[words[at + 1]], words[at + 2 :])
                elif words[at + 1] in M.__members__:
                    self._hear(name, M[words[at + 1]], words[at + 2 :])
                else:
                    seconds = float(words[at + 2]) if words[at + 2 :] else QUIET_S
                    self._expect_nothing(self._rank(name), words[at + 1], seconds)
        self._before = begun
        return True

    def _rank(self, name: str) -> PlayedRank:
        if name not in self._ranks:
            number = int(name.rstrip("abcdefgh"))
            common = Header(M.HELLO, job=fingerprint(self._name), rank=number)
            rank = self._ranks[name] = PlayedRank(self._address, common)
            while not (rank.peer.ready or rank.peer.closed):
                rank.peer.feed()
        return self._ranks[name]

    def _fields(self, words: list[str]) -> tuple[int | None, dict[str, Any]]:
        """Return the number that leads, if one does, and the fields."""
        number = self._value(words[0]) if words and "=" not in words[0] else None
        pairs = (word.partition("=") for word in words if "=" in word)
        return number, {name: self._value(value, name) for name, _, value in pairs}

    def _value(self, text: str, name: str = "") -> Any:
        if (times := text.partition("*"))[2].isdigit():
            return times[0] * int(times[2])
        if name in FORMS:
            return b"".join(_packed(FORMS[name], one) for one in filter(None, text.split(",")))
        if name in {"block8", "block8_e4m3"}:
            scale, q = BLOCKS[text]
            return struct.pack("<f252b", scale, *q)
        if text.startswith("$"):
            return self._known[text[1:]]
        try:
            return NAMES[text] if text in NAMES else json.loads(text)
        except ValueError:
            return text

    def _say(self, name: str, kind: M, words: list[str]) -> None:
        rank = self._rank(name)
        number, fields = self._fields(words)
        raw = {key: fields.pop(key) for key in list(fields) if re.fullmatch(RAW, key)}
        fields = {**self._hello, **fields} if kind is M.HELLO else fields
        of_header, payload, body = _elements(fields), fields.pop("data", b""), dict[str, Any]()
        if kind in WITH_BODY and kind is not M.STRAGGLERS:
            body = {k: v for k, v in fields.items() if not k.startswith("h.") and v is not None}
            fields = {key[2:]: value for key, value in fields.items() if key.startswith("h.")}
        if kind is M.HELLO:
            rank.features = body.get("features", 0)
            rank.common = rank.common._replace(generation=fields.get("generation", 0))
        payload = str(raw.pop("text", "")).encode() or payload
        of_header |= {} if number is None else {"sequence": number}
        header = rank.common._replace(**{"type": kind, **of_header, **fields}).pack()
        for key in [key for key in raw if key.startswith("at")]:
            put, at = bytes.fromhex(str(raw[key])), int(key[2:])
            header = header[:at] + put + header[at + len(put) :]
        parts = [payload] if payload or kind in {M.CONTRIBUTION, M.RESULT} else []
        parts = [json.dumps(body).encode()] if body and not payload else parts
        rank.peer.send(header[: raw.get("cut", 96)], *parts, *[b""] * raw.get("frames", 0))

    def _hear(self, name: str, kind: M, words: list[str]) -> None:
        rank = self._rank(name)
        code = ErrorCode[words.pop(0)] if kind is M.ERROR else None
        number, fields = self._fields(words)
        after = fields.pop("after", None)
        checksum = fields.pop("crc", None)
        wanted = _elements(fields)
        payload = fields.pop("data", None)
        end = time.monotonic() + LONGEST_S
        while True:
            message = self._next(rank, end, pings=kind is M.PING)
            if message is None or message.header is None:
                why = "the connection was closed" if rank.peer.closed else f"not in {LONGEST_S:g} s"
                raise FailedCaseError(f"{kind.name} did not come: {why}")
            header = message.header
            demand(header.type is kind or kind is M.PING, f"got {message}")
            has_body = header.type in WITH_BODY | {M.ERROR} and message.payload
            body = message.body() if has_body else {}
            again = code is not None and header.sequence == NO_SEQUENCE
            if again and number not in {None, NO_SEQUENCE} and body.get("code") == code:
                continue  # what concerns no single all-reduce is told again and again
            said = {**header._asdict(), **body, **body.get("detail", {})}
            said |= {f"h.{key}": value for key, value in header._asdict().items()}
            wanted |= fields | ({} if number is None else {"sequence": number})
            wrong = {key: said.get(key) for key, value in wanted.items() if said.get(key) != value}
            if kind is not M.PING or (header.type is M.PING and not wrong):
                break  # any PING may be the one
        demand(not wrong, f"{message} has {wrong}")
        demand(payload in (None, message.payload), f"the elements are {message.payload.hex():.80}")
        found = zlib.crc32(message.payload)
        demand(checksum in (None, found), f"the elements' CRC-32 is {found}")
        _check(rank, message, body, code)
        if kind is M.WELCOME:
            rank.member, self._known = True, body
        if after is not None:
            least, most = map(float, str(after).split(".."))
            waited = time.monotonic() - self._before
            demand(least <= waited <= most, f"it came after {waited:.1f} s")

    def _next(self, rank: PlayedRank, end: float, *, pings: bool = False) -> Received | None:
        """Return the next message that comes in time; PINGs are passed over unless wanted."""
        while True:
            while rank.heard:
                message = rank.heard.pop(0)
                demand(message.header is not None, f"got {message}")
                if pings or message.header is None or message.header.type is not M.PING:
                    return message
            left = end - time.monotonic()
            if rank.peer.closed or left <= 0:
                return None
            self._pump(min(left, PING_S))

    def _pump(self, seconds: float) -> None:
        """Hear what comes over any connection, and keep all of them alive."""
        live = [rank for rank in self._ranks.values() if not (rank.peer.closed or rank.peer.deaf)]
        for rank in live:
            rank.peer.heartbeat()
        lines = {rank.peer.connection: rank for rank in live}
        for line in select.select(list(lines), [], [], seconds)[0]:
            lines[line].peer.feed()
            lines[line].heard += lines[line].peer.pending()

    def _expect_nothing(self, rank: PlayedRank, what: str, seconds: float) -> None:
        end = time.monotonic() + (LONGEST_S if what == "closed" else seconds)
        message = self._next(rank, end)
        demand(message is None, f"got {message}")
        ended = "was" if rank.peer.closed else "was not"
        demand(rank.peer.closed == (what == "closed"), f"the connection {ended} closed")

    def _heard(self, peer: Peer, name: bytes, text: bytes = b"") -> None:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            if any(said == name and text in rest for _, said, rest in peer.commands):
                return
            self._pump(PING_S)
        raise FailedCaseError(f"ZMTP's commands were {[said for _, *said in peer.commands]}")


def _packed(form: str, text: str) -> bytes:
    if text.startswith("zeros:"):
        return bytes(int(text[6:]))
    if text.startswith("0x"):
        return int(text, 16).to_bytes(struct.calcsize(form), "little")
    return struct.pack(f"<{form}", float(text) if form in "fde" else int(text))


def _elements(fields: dict[str, Any]) -> dict[str, Any]:
    """Take the elements out of fields, as `data`; return what the header says of them."""
    name = next((name for name in fields if name.upper() in DType.__members__), None)
    if name is None:
        return {}
    data = fields["data"] = fields.pop(name)
    dtype = fields.pop("dtype", int(DType[name.upper()]))
    size = {"total_bytes": len(data), "nbytes": len(data)}
    return {"op": int(ReduceOp.SUM), "dtype": dtype, "wire_dtype": dtype, **size}


def _check(
    rank: PlayedRank, message: Received, body: dict[str, Any], code: ErrorCode | None
) -> None:
    """Check what holds for every message of a type."""
    header = message.header
    assert header is not None
    if code is not None:
        demand(body.get("code") == code, f"its code is not {code.name}: {body}")
        text = body.get("message")
        demand(isinstance(text, str) and text and text.isprintable(), f"its message is {text!r}")
        demand(isinstance(body.get("detail"), dict), "it has no detail, an object")
    if header.type is M.RESULT:
        mine = {"rank": 0, "since": 0, "history": 0, "nbytes": len(message.payload)}
        mine |= {} if rank.features & Feature.LEAVES else {"window": 0}
        mine |= {"job": rank.common.job, "generation": rank.common.generation}
        mine |= {"wire_dtype": header.dtype}
        wrong = {
            name: getattr(header, name) for name in mine if getattr(header, name) != mine[name]
        }
        demand(not wrong, f"a RESULT has {wrong}")
    if header.type is M.WELCOME:
        demand(str(body.get("version")).startswith("1."), f"its version: {body}")
        demand(not body.get("features", 0) & ~rank.features, f"features not announced: {body}")
        wanted = 32 * bool(body.get("features", 0) & (Feature.STREAMS | Feature.RESUME))
        demand(len(body.get("ticket", "")) == wanted, f"its ticket: {body}")
        incarnation = body.get("incarnation")
        digits = isinstance(incarnation, str) and set(incarnation) <= set("0123456789abcdefABCDEF")
        demand(digits and incarnation, f"its incarnation: {body}")
        demand(all(0 < port < 65536 for port in body.get("lanes", [])), f"its lanes: {body}")
