"""Bodies of the control messages: what HELLO, WELCOME, ERROR and ABORT carry as JSON.

Records are validated when they are built, so that one which exists is one that may be acted on.
"""

from __future__ import annotations

import json
import string
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from reducer import errors
from reducer.errors import ReductionError, RemoteProtocolError
from reducer.wire.constants import (
    LONGEST_PEER_TIMEOUT_MS,
    MAX_BODY_BYTES,
    MAX_CHUNK_BYTES,
    MAX_JOB_NAME_BYTES,
    MAX_LANES,
    MAX_STREAMS,
    MAX_WORLD_SIZE,
    NO_SEQUENCE,
    NONCE_DIGITS,
    PEER_TIMEOUT_MS,
    PROOF_DIGITS,
    SHARD_ALIGNMENT,
    SHORTEST_PEER_TIMEOUT_MS,
    VERSION_MAJOR,
    ErrorCode,
)
from reducer.wire.header import VERSION, Buffer, version_error

if TYPE_CHECKING:
    from collections.abc import Iterable

ALL_REDUCERS = -1  # a rank could reach none: everything begins anew
LAST_EPOCH = (1 << 32) - 1  # what is lost for this one is not used again in the job
LAST_STAGE = 255  # of an epoch: then all reducers are lost
MOST_EPOCHS = 1 << 31  # no job lives to see as many, so nobody tells of a later one in earnest
MAX_SETTINGS, MAX_SETTING_BYTES = 16, 64  # of a HELLO: how many, and each name and value
MAX_NAMED_RANKS = 128  # of thousands that are missing these tell enough
MAX_INCARNATION_BYTES = 32
MOST_WAITED_S = 1e6  # nobody waits as long
UNLIKE = 2  # times as long: then one of two is slower

_Text = Annotated[str, 0, MAX_SETTING_BYTES]

_Body = TypeVar(
    "_Body", "Hello", "Challenge", "Welcome", "Stream", "Loss", "Stragglers", "Straggler"
)


def printable(text: str) -> str:
    """Return text in which what is not printable is escaped as in a Python string.

    So it does nothing to a terminal, and in a log it is one line. Applied again it changes nothing.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _check(value: Any, kind: type, low: int, high: int, what: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RemoteProtocolError(f"{what} must be of type {kind.__name__}, got {value!r:.80}")
    try:
        size = value if isinstance(value, int) else len(str(value).encode())
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise RemoteProtocolError(f"{what} is not valid Unicode") from None
    if not low <= size <= high:
        raise RemoteProtocolError(f"{what} must be between {low} and {high}, got {size}")
    if isinstance(value, str) and not value.isprintable():
        raise RemoteProtocolError(f"{what} must be printable, got {value!r:.80}")


def _check_fields(record: Any) -> None:
    """Check what the annotations of a record's fields say.

    ``Annotated[int, low, high]`` bounds a number and, of `str`, the bytes of a printable text;
    ``Annotated[str, {length, ...}]`` is hexadecimal, and has one of these lengths.
    """
    for name, (kind, *bounds) in _annotated(record.__class__).items():
        value, lengths = getattr(record, name), bounds[0]
        low, high = bounds if len(bounds) == 2 else (0, max(lengths))
        _check(value, kind, low, high, name)
        if len(bounds) == 1 and (len(value) not in lengths or set(value) - set(string.hexdigits)):
            raise RemoteProtocolError(f"{name} must be hexadecimal, of length {sorted(lengths)}")


@cache
def _annotated(kind: type) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(kind, include_extras=True).items()
    return {name: get_args(hint) for name, hint in hints if hasattr(hint, "__metadata__")}


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's settings, which every rank of the job must give alike.

    Attributes:
        job: name of the job, 1 to 128 bytes.
        world_size: number of ranks.
        reducers: how many reducers the job uses.
        reducer_index: which of them this message is meant for.
        chunk_bytes: forced chunk size, 0 for the rule.
        lane: which of that reducer's threads it is meant for; 0 is the one at its address.
        settings: what else ranks must have in common, by the names of variables.
        run: what tells one run of the job from another; "" if its ranks have nothing like that.
        process: what tells one process from another; "" if it does not say.
        patience_ms: how long either end may be silent before the other one gives it up.
        host_name: of the rank's machine, for errors; "" if it does not say.
        auth: the worker's nonce and, in answer to a challenge, its proof behind it; "" without a
            secret.
        version, features: what the sender speaks.
    """

    job: Annotated[str, 1, MAX_JOB_NAME_BYTES]
    world_size: Annotated[int, 1, MAX_WORLD_SIZE]
    reducers: Annotated[int, 1, MAX_WORLD_SIZE]
    reducer_index: int
    chunk_bytes: Annotated[int, 0, MAX_CHUNK_BYTES] = 0
    lane: Annotated[int, 0, MAX_LANES - 1] = 0
    settings: dict[str, str] = field(default_factory=dict)
    run: _Text = ""
    process: _Text = ""
    patience_ms: Annotated[int, SHORTEST_PEER_TIMEOUT_MS, LONGEST_PEER_TIMEOUT_MS] = PEER_TIMEOUT_MS
    host_name: _Text = ""
    auth: Annotated[str, {0, NONCE_DIGITS, NONCE_DIGITS + PROOF_DIGITS}] = ""
    version: Annotated[str, 3, 16] = VERSION
    features: Annotated[int, 0, (1 << 63) - 1] = 0

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_version(self.version)
        _check(self.reducer_index, int, 0, self.reducers - 1, "reducer_index")
        if self.chunk_bytes % SHARD_ALIGNMENT:
            raise RemoteProtocolError(f"chunk_bytes must be a multiple of {SHARD_ALIGNMENT}")
        if not isinstance(self.settings, dict) or len(self.settings) > MAX_SETTINGS:
            raise RemoteProtocolError(f"settings must be an object of at most {MAX_SETTINGS} names")
        for name, value in self.settings.items():
            _check(name, str, 1, MAX_SETTING_BYTES, "a setting's name")
            _check(value, str, 0, MAX_SETTING_BYTES, "a setting")


@dataclass(frozen=True, slots=True)
class Challenge:
    """A reducer's request to prove that the sender of a HELLO knows the job's secret.

    Attributes:
        nonce: the reducer's.
    """

    nonce: Annotated[str, {NONCE_DIGITS}]

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, slots=True)
class Welcome:
    """A reducer's limits.

    Attributes:
        incarnation: hexadecimal, new at every start of the reducer.
        max_chunk_bytes: the largest chunk that it accepts.
        lanes: ports of its other threads, on the same host; lane i is at ``lanes[i - 1]``.
        auth: its proof that it knows the job's secret; "" without one.
        ticket: what further connections of the link show; "" if it has none.
        version: what it speaks.
        features: those that both sides announced.
    """

    incarnation: Annotated[str, 1, MAX_INCARNATION_BYTES]
    max_chunk_bytes: Annotated[int, SHARD_ALIGNMENT, MAX_CHUNK_BYTES] = MAX_CHUNK_BYTES
    lanes: tuple[int, ...] = ()
    auth: Annotated[str, {0, PROOF_DIGITS}] = ""
    ticket: Annotated[str, {0, NONCE_DIGITS}] = ""
    version: Annotated[str, 3, 16] = VERSION
    features: Annotated[int, 0, (1 << 63) - 1] = 0

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_version(self.version)
        if not isinstance(self.lanes, (list, tuple)) or len(self.lanes) >= MAX_LANES:
            raise RemoteProtocolError(f"lanes must be a list of fewer than {MAX_LANES} ports")
        for port in self.lanes:
            _check(port, int, 1, 65535, "a lane's port")
        object.__setattr__(self, "lanes", tuple(self.lanes))  # JSON has lists


@dataclass(frozen=True, slots=True)
class Stream:
    """A worker's request that this connection be a further stream of a link, or go on as one.

    Attributes:
        ticket: what the WELCOME of that link has told.
        number: of the stream, from 1; 0 is the link's first connection, which may go on.
        auth: proof that the worker knows the job's secret; "" without one.
        attempt: which RESUME for that connection it is, from 1; 0 in STREAM.
    """

    ticket: Annotated[str, {NONCE_DIGITS}]
    number: Annotated[int, 0, MAX_STREAMS - 1]
    auth: Annotated[str, {0, PROOF_DIGITS}] = ""
    attempt: Annotated[int, 0, (1 << 31) - 1] = 0

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, slots=True)
class Loss:
    """SHARD_MAP: a reducer is lost; every rank is to go on without it.

    Attributes:
        reducer: its index among the job's reducers, or `ALL_REDUCERS`.
        epoch: the latest version of the shard map that it is lost for.
        sequence: with `ALL_REDUCERS`, the all-reduce whose failure had the rank begin anew; -1 for
            none.
        stage: of that epoch, the latest that it is lost for.
        incarnation: of the process that was lost, as it called itself; "" if it is not known.
    """

    reducer: Annotated[int, ALL_REDUCERS, MAX_WORLD_SIZE - 1]
    epoch: Annotated[int, 0, LAST_EPOCH]
    sequence: int = -1
    stage: Annotated[int, 0, LAST_STAGE] = 0
    incarnation: Annotated[str, 0, MAX_INCARNATION_BYTES] = ""

    def __post_init__(self) -> None:
        _check_fields(self)
        most = NO_SEQUENCE - 1 if self.reducer == ALL_REDUCERS else -1
        _check(self.sequence, int, -1, most, "sequence")

    def check_epoch(self) -> None:
        """Refuse an epoch after which there would soon be no later one.

        Raises:
            RemoteProtocolError: it is one that no job comes to.
        """
        final = self.reducer != ALL_REDUCERS and self.epoch == LAST_EPOCH
        if self.epoch > MOST_EPOCHS and not final:
            raise RemoteProtocolError(f"no job comes to epoch {self.epoch}")


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for again and again.

    Attributes:
        rank: which.
        cause: ``late``: it begins later than the others; ``slow``: its contributions take longer.
        share: of the last seconds, for how much of the time the others have waited for it alone, 0
            to 1.
        median_s: how long they wait each time, in the median, seconds.
    """

    rank: Annotated[int, 0, MAX_WORLD_SIZE - 1]
    cause: Literal["late", "slow"]
    share: float
    median_s: float

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.cause not in {"late", "slow"}:
            raise RemoteProtocolError(f"a straggler is late or slow, got {self.cause!r:.80}")
        for value in (self.share, self.median_s):
            if not isinstance(value, (int, float)) or not 0 <= value < MOST_WAITED_S:
                raise RemoteProtocolError(f"a straggler has no share or median of {value!r:.80}")

    def __str__(self) -> str:
        """Say who it is, and why."""
        why = "it comes late" if self.cause == "late" else "its link is slow"
        return (
            f"the others wait for rank {self.rank} for {self.share:.0%} of the time, "
            f"{_about(self.median_s)} each: {why}"
        )


@dataclass(frozen=True, slots=True)
class BetweenTwo(Straggler):
    """Of a job of two ranks that host its reducers: of them nobody can tell whose link is slow."""

    def __str__(self) -> str:
        """Say what is known."""
        return Straggler.__str__(self).replace("its link is slow", "the link between them is slow")


def between_two(told: Straggler, others: Iterable[Straggler | None]) -> Straggler:
    """Return what one reducer tells of two ranks that host them.

    Each rank's reducer has its own rank's contributions at once, and the other's over the link
    between them, so it takes the other for slow. It is if the others wait for that one `UNLIKE`
    times as much as it waits for them.

    Args:
        told: of one rank.
        others: what all reducers tell.
    """
    back = [one.share for one in others if one and one.rank != told.rank]
    if told.cause == "late" or (back and told.share >= UNLIKE * max(back)):
        return told
    return BetweenTwo(told.rank, told.cause, told.share, told.median_s)


def _about(seconds: float) -> str:
    """Return a duration in two digits, as `about` of the page does."""
    if seconds < 1e-3:
        return "under 1 ms"
    value, unit = (1e3 * seconds, "ms") if seconds < 0.0995 else (seconds, "s")
    return f"about {value:.{(value < 0.995) + (value < 9.95)}f} {unit}"


def worst(told: Iterable[Straggler | None]) -> Straggler | None:
    """Return the straggler that most reducers tell; of these, for which the others wait longest."""
    ones = [one for one in told if one]
    votes = Counter((one.rank, one.cause) for one in ones)
    return max(ones, key=lambda one: (votes[one.rank, one.cause], one.share), default=None)


@dataclass(frozen=True, slots=True)
class Stragglers:
    """STRAGGLERS from a reducer: the ranks whose contributions an all-reduce waits for.

    Attributes:
        missing: these ranks, at most 128 of them.
        straggler: in a PING: the rank that the others wait for again and again.
    """

    missing: tuple[int, ...]
    straggler: Straggler | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.missing, (list, tuple)) or len(self.missing) > MAX_NAMED_RANKS:
            raise RemoteProtocolError(f"missing must be a list of at most {MAX_NAMED_RANKS} ranks")
        for rank in self.missing:
            _check(rank, int, 0, MAX_WORLD_SIZE - 1, "a missing rank")
        object.__setattr__(self, "missing", tuple(self.missing))
        if isinstance(self.straggler, dict):  # as JSON has it
            object.__setattr__(self, "straggler", _build(Straggler, self.straggler))
        if not isinstance(self.straggler, (Straggler, type(None))):
            raise RemoteProtocolError("straggler must be an object")


def _check_version(version: str) -> None:
    if version.partition(".")[0] != str(VERSION_MAJOR):
        raise version_error(version)


def encode(body: Hello | Challenge | Welcome | Stream | Loss | Stragglers) -> bytes:
    """Return the JSON of a body."""
    return _dump(asdict(body))


def decode(kind: type[_Body], data: Buffer) -> _Body:
    """Read the body of a HELLO, CHALLENGE, WELCOME, STREAM, RESUME, SHARD_MAP or STRAGGLERS.

    Raises:
        RemoteProtocolError: it is no JSON object, or a value is missing, of a wrong type or out of
            bounds.
        VersionError: the peer speaks another major version.
    """
    return _build(kind, _load(data))


def _build(kind: type[_Body], values: dict[str, Any]) -> _Body:
    """Make a record of what an object has for it; what a later version adds is left out."""
    known = {name: values[name] for name in kind.__dataclass_fields__ if name in values}
    try:
        return kind(**known)
    except TypeError as error:  # a name without a default is missing
        raise RemoteProtocolError(f"incomplete {kind.__name__.upper()}: {error}") from None


# One wire code per leaf, with the attributes that travel as the body's `detail`.
_LEAVES: dict[ErrorCode, tuple[type[ReductionError], tuple[str, ...]]] = {
    ErrorCode.PROTOCOL: (errors.RemoteProtocolError, ()),
    ErrorCode.VERSION: (errors.VersionError, ("expected", "got")),
    ErrorCode.UNKNOWN_PEER: (errors.MembershipError, ()),
    ErrorCode.STALE_GENERATION: (errors.StaleGenerationError, ("generation", "current")),
    ErrorCode.DUPLICATE_RANK: (errors.DuplicateRankError, ("rank",)),
    ErrorCode.MISMATCH: (
        errors.MismatchError,
        ("field", "rank", "other_rank", "expected", "got"),
    ),
    ErrorCode.RANK_LOST: (errors.RankLostError, ("rank",)),
    ErrorCode.REDUCER_LOST: (errors.ReducerLostError, ("reducer",)),
    ErrorCode.TIMEOUT: (errors.ReductionTimeout, ("missing",)),
    ErrorCode.CAPACITY: (errors.CapacityError, ("limit",)),
    ErrorCode.AUTH: (errors.AuthError, ()),
    ErrorCode.FAILED: (errors.ReductionError, ()),
}
_KINDS: dict[str, tuple[type, ...]] = {
    "generation": (int,),
    "current": (int,),
    "rank": (int,),
    "other_rank": (int,),
    "expected": (int, str),
    "got": (int, str),
}  # of attributes that are not just text
_CODES = {leaf: code for code, (leaf, _) in _LEAVES.items()}
# At the receiver it is the local side that broke the protocol's rules, not a remote one.
_CODES[errors.LocalProtocolError] = ErrorCode.PROTOCOL


def encode_error(error: ReductionError) -> bytes:
    """Return the body of an ERROR or ABORT that reports `error`, without its `name`, printable."""
    code = _CODES.get(type(error), ErrorCode.FAILED)
    detail = {name: getattr(error, name) for name in _LEAVES[code][1]}
    message = printable(str(error))
    detail = {name: printable(v) if isinstance(v, str) else v for name, v in detail.items()}
    if "missing" in detail:
        detail["missing"] = detail["missing"][:MAX_NAMED_RANKS]
    # What is longer would be refused, and nothing be told.
    for length in (1024, 512, 256, 128, 64, 32):
        detail = {name: v[:length] if isinstance(v, str) else v for name, v in detail.items()}
        values = {"code": int(code), "message": message[:length], "detail": detail}
        body = _dump(values)
        if len(body) <= MAX_BODY_BYTES:
            break
    return body


def decode_error(data: Buffer, sequence: int = NO_SEQUENCE) -> ReductionError:
    """Rebuild the exception that an ERROR or ABORT reports, with printable text.

    Args:
        data: the message's body.
        sequence: its header's sequence number.

    Raises:
        RemoteProtocolError: the body is malformed.
    """
    values = _load(data)
    message, detail = values.get("message"), values.get("detail")
    if not isinstance(message, str) or not isinstance(detail, dict):
        raise RemoteProtocolError("an error body needs `message` and `detail`")
    message = printable(message)
    try:
        code = values["code"]
        unknown = _is_number(code) and code not in _LEAVES
        leaf, names = _LEAVES[ErrorCode.FAILED if unknown else code]
        attributes = {name: detail[name] for name in names}
    except (KeyError, TypeError):
        raise RemoteProtocolError(f"malformed error body for: {message:.200}") from None
    attributes = {name: _attribute(name, value) for name, value in attributes.items()}
    error = leaf(message, **attributes)
    error.sequence = None if sequence == NO_SEQUENCE else sequence
    return error


def _attribute(name: str, value: Any) -> Any:
    # Strict, because a reducer passes on what one worker says to all the others.
    if name == "missing":
        if not isinstance(value, list) or not all(map(_is_number, value)):
            raise RemoteProtocolError("`missing` must be a list of ranks")
        return tuple(value)
    kinds = _KINDS.get(name, (str,))
    if not (int in kinds and _is_number(value)) and not (str in kinds and isinstance(value, str)):
        raise RemoteProtocolError(f"`{name}` cannot be {value!r:.80}")
    return printable(value) if isinstance(value, str) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 64


def _dump(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()


def _load(data: Buffer) -> dict[str, Any]:
    if len(data) > MAX_BODY_BYTES:
        raise RemoteProtocolError(f"a body has at most {MAX_BODY_BYTES} bytes, got {len(data)}")
    try:
        values = json.loads(bytes(data))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise RemoteProtocolError("a body must be one JSON object in UTF-8")
    return values
