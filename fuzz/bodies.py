"""Target ``body``: the JSON of every message that has some."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

from fuzz.source import EDGES, Source, check
from reducer.errors import ReductionError
from reducer.wire.constants import MAX_BODY_BYTES, ErrorCode
from reducer.wire.messages import (
    Challenge,
    Hello,
    Loss,
    Stragglers,
    Stream,
    Welcome,
    decode,
    decode_error,
    encode,
    encode_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Body: TypeAlias = Hello | Challenge | Welcome | Loss | Stragglers | Stream
KINDS: tuple[type[Body], ...] = (Hello, Challenge, Welcome, Loss, Stragglers, Stream)
_TEXTS = ("", "a", "job", "1.0", "1.7", "2.0", "1", "epoch", "\ud800", "é" * 64, "\0", "x" * 2000)
_VALUES: tuple[Any, ...] = (
    *EDGES,
    *_TEXTS,
    -1,
    1 << 64,
    10**400,
    1.0,
    1e308,
    float("nan"),
    True,
    False,
    None,
    [],
    [0, 1],
    [1 << 16],
    [-1],
    ["a"],
    [True],
    list(range(200)),
    {},
    {"a": 1},
)
_DETAILS = ("rank", "other_rank", "expected", "got", "field", "missing", "limit", "reducer")
_MORE = ("generation", "current", "unknown")


def body(source: Source) -> bytes:
    """Return a body: any bytes, or an object with names of ours and values of any kind."""
    if source.chance(4):
        return source.take(source.left)
    fields = [name for kind in KINDS for name in kind.__dataclass_fields__]
    if source.chance(2):
        return json.dumps(error_values(source)).encode()
    return json.dumps(_values(source, fields)).encode()


def nearly(kind: type[Body], source: Source) -> bytes:
    """Return a body of this kind with up to three values changed."""
    sound: dict[Any, dict[str, Any]] = {
        Hello: {"job": "job", "world_size": 2, "reducers": 2, "reducer_index": 0},
        Challenge: {"nonce": "0" * 32},
        Welcome: {"incarnation": "1"},
        Loss: {"reducer": 0, "epoch": 0},
        Stragglers: {"missing": [0, 1]},
        Stream: {"ticket": "0" * 32, "number": 1},
    }
    values = sound[kind]
    for _ in range(source.below(4)):
        values[source.pick(tuple(kind.__dataclass_fields__))] = source.pick(_VALUES)
    return json.dumps(values).encode()


def error_values(source: Source) -> dict[str, Any]:
    """Return what the body of an ERROR or ABORT may hold."""
    detail: dict[str, Any] = {
        "generation": 0,
        "current": 1,
        "rank": source.below(4),
        "other_rank": 1,
        "expected": 1,
        "got": 2,
        "field": "dtype",
        "missing": [0],
        "limit": "rounds",
        "reducer": "here:1",
    }
    detail |= _values(source, [*_DETAILS, *_MORE])
    code: Any = source.pick(tuple(map(int, ErrorCode)))
    values = {"code": code, "message": source.pick(_TEXTS), "detail": detail}
    if source.chance(8):
        values[source.pick(("code", "message", "detail"))] = source.pick(_VALUES)
    return values


def _values(source: Source, names: list[str]) -> dict[str, Any]:
    return {source.pick(names): source.pick(_VALUES) for _ in range(source.below(5))}


def run(data: bytes) -> None:
    """Read a body as every kind of message."""
    source = Source(data)
    kind = source.pick((*KINDS, None))
    text = body(source) if kind is None else nearly(kind, source)
    for each in KINDS:
        record = _typed(decode, each, text)
        if record is not None:
            again = _typed(decode, each, encode(record))
            check(again == record, f"{record} survives the wire")
    error = _typed(decode_error, text, 7)
    if error is None:
        return
    said = encode_error(error)
    check(len(said) <= MAX_BODY_BYTES, f"what passes on an error fits: {len(said)} bytes")
    passed_on = decode_error(said, 7)
    check(type(passed_on) is type(error), f"{error!r} is passed on as {passed_on!r}")
    check(encode_error(passed_on) == said, "what was passed on once does not change any more")
    check(error.sequence == 7, "an error knows its all-reduce")


def _typed(read: Callable[..., Any], *what: Any) -> Any:
    """Return what was read, or None if it was refused with a typed error."""
    try:
        return read(*what)
    except ReductionError:
        return None
