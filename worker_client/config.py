"""The worker's settings: arguments beat the environment, which beats the defaults.

The environment is read here and nowhere else in this package.
"""

from __future__ import annotations

import os
from pathlib import Path  # noqa: TC003 (pydantic reads it)
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from reducer import units
from reducer.errors import ConfigError
from reducer.failpoints import parse
from reducer.wire.constants import (
    LONGEST_PATIENCE_MS,
    MAX_CHUNK_BYTES,
    MAX_JOB_NAME_BYTES,
    PATIENCE_MS,
    SHARD_ALIGNMENT,
    SHORTEST_PATIENCE_MS,
)
from worker_client.launch import Launcher, resolve

if TYPE_CHECKING:
    from worker_client.launch import Resolved

# Settings of the reducer that each rank hosts when there are no REDUCTION_SERVERS.
REDUCER_SETTINGS = (
    "bind",
    "memory_limit",
    "job_memory_limit",
    "max_jobs",
    "max_jobs_per_key",
    "max_rounds",
    "max_ranks",
    "max_chunk_bytes",
    "max_connections",
    "max_connections_per_key",
    "handshake_timeout",
    "drain_timeout",
    "keys",
    "insecure",
    "kernel",
    "threads",
    "io_threads",
    "cpus",
    "impl",
    "http",
    "failpoints",
)

# What the job of the calls that have names is called, after the job.
NAMED = "/named"

# Names that Horovod's users know, with the unit of a bare number; ours win.
_HOROVOD = {"fusion_threshold": ("", "bytes"), "cycle_time": ("ms", "milliseconds")}


def _auto(value: object) -> object:
    return 0 if value == "auto" else value


Seconds = Annotated[
    float, BeforeValidator(units.duration), Field(gt=0, le=1e9, allow_inf_nan=False)
]
AutoBytes = Annotated[ByteSize, BeforeValidator(_auto)]
_SECONDS_OF = TypeAdapter[float](Seconds)
_PATIENCE_OF = TypeAdapter[float](Annotated[float, BeforeValidator(units.duration), Field(ge=0)])


class WorkerConfig(BaseSettings):
    """How one worker takes part. Field `x` is set by the environment variable ``REDUCTION_X``."""

    model_config = SettingsConfigDict(
        env_prefix="REDUCTION_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    servers: Annotated[tuple[str, ...], NoDecode] = ()
    """Addresses of the reducers, ``host:port,host:port``, the same at every rank. Those that a
    launcher names by default (`worker_client.launch`). Empty: every rank hosts a reducer for its
    share (embedded)."""

    embedded: bool | None = None
    """Whether every rank hosts a reducer for a share of each buffer: by default if there are no
    servers. With fewer servers than ranks it makes use of all links (mixed); with as many, none is
    hosted."""

    job: str | None = Field(default=None, min_length=1)
    """Name of the job on the reducers. By default one that no other run has, agreed on through the
    process group, or what the launcher calls it. A run that shares nothing of that kind must be
    given a name, which no other run has at that time."""

    generation: int = Field(default=0, ge=0, lt=1 << 32)
    """Membership version: a later one ends an earlier one of the same job. The launcher's restart
    count by default."""

    chunk_bytes: AutoBytes = Field(default=ByteSize(0), ge=0, le=MAX_CHUNK_BYTES)
    """Size of a chunk, a multiple of 64, at most 4 MiB; ``auto`` (0) follows what links carry."""

    window_bytes: AutoBytes = Field(default=ByteSize(0), ge=0)
    """Bytes in flight over all reducers; ``auto`` (0) follows the measured rate and round trip, up
    to 16 MiB: enough for a 10 Gbit/s link with 10 ms round trip."""

    timeout: Seconds = 300.0
    """Time after which an all-reduce fails, naming who is missing. Long, because a rank may load
    data or write a checkpoint meanwhile."""

    connect_timeout: Seconds = 10.0
    """Time for all reducers to answer when the worker starts."""

    wait_for_reducers: Annotated[
        float, BeforeValidator(units.duration), Field(ge=0, le=1e9, allow_inf_nan=False)
    ] = 0.0
    """How long to wait until a reducer answers, if none does: at the start (`connect_timeout` if
    that is longer; names of reducers that are not known yet are asked for again meanwhile), and
    later, with the calls that are in progress."""

    heartbeat: Annotated[Seconds, Field(ge=0.1)] = 0.2
    """How often this rank sends a sign of life to each reducer: 0.1 s at least. Each rank decides
    for itself."""

    patience: Annotated[
        Seconds,
        Field(ge=SHORTEST_PATIENCE_MS / 1000, le=LONGEST_PATIENCE_MS / 1000, validate_default=True),
    ] = PATIENCE_MS / 1000
    """How long a reducer or a rank may be silent before it is called lost, the same at every rank:
    0.5 s to 60 s, and two heartbeats at least. More for networks with long pauses, or for processes
    that a debugger stops; what is lost without a word is then noticed later."""

    fusion_threshold: ByteSize = Field(default=ByteSize(64 << 20), ge=0, le=1 << 40)
    """Most bytes of a fusion buffer, in which tensors that have names are reduced together; 0:
    each by itself. HOROVOD_FUSION_THRESHOLD is honoured."""

    cycle_time: Seconds = 0.001
    """How long such a tensor waits for the next one, if nobody waits for its result.
    HOROVOD_CYCLE_TIME, in milliseconds, is honoured."""

    autotune: bool = False
    """Whether to find sizes of chunks, windows and fusion buffers that were not given by trying
    some at the start, which takes as long as 600 MB on the links."""

    fallback: Literal["error", "process-group"] = "error"
    """What happens to all-reduces when no reducer is left: they fail until one is back, or go
    through the process group until then."""

    on_rank_lost: Literal["error", "continue"] = "error"
    """What happens to all-reduces when a rank is lost: they fail, or the others make them without
    it, and go on."""

    hierarchy: Literal["off", "auto"] = "off"
    """Whether the ranks of a node reduce among themselves first, so that its network card carries
    each buffer once. ``auto``: if there are several nodes, each with the same number of ranks, more
    than one. Off by default: results may differ in the last place, a failure within a node ends the
    client, and small buffers take longer."""

    wire_dtype: Literal["none", "bf16", "fp16"] = "none"
    """What float32 buffers from 16 KiB on travel as, the same at every rank: ``bf16`` and ``fp16``
    halve the bytes, and round what is sent and the result."""

    keys: Path | None = None
    """Directory of the job's keys, DIR/jobs/NAME of ``reducer keygen DIR``; needed for a pool that
    has keys."""

    impl: Literal["plain", "compiled"] | None = None
    """Whether Python or a compiled loop moves the chunks; by default the compiled one where it was
    built. Both do the same."""

    io_threads: int = Field(default=1, ge=1, le=64)
    """libzmq's threads that move bytes; one carries about 15 Gbit/s."""

    failpoints: str = ""
    """For tests: where this process shall die, stop or be slow, such as ``worker.copied=kill@3``;
    `reducer.failpoints` knows the places. Nowhere by default."""

    @field_validator("servers", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        addresses = value.split(",") if isinstance(value, str) else value
        if not isinstance(addresses, (list, tuple)):
            return addresses
        parsed = [units.address(str(address)) for address in addresses if str(address).strip()]
        if any(not port for _, port in parsed):
            raise ValueError("name a port other than 0")
        cleaned = tuple(f"{host}:{port}" for host, port in parsed)
        if len(set(cleaned)) != len(cleaned):
            raise ValueError(f"an address appears twice in {','.join(cleaned)}")
        return cleaned

    @field_validator("job")
    @classmethod
    def _check_job(cls, value: str | None) -> str | None:
        most = MAX_JOB_NAME_BYTES - len(NAMED)
        if value is not None and len(value.encode()) > most:
            raise ValueError(f"at most {most} bytes of UTF-8")
        return value

    @field_validator("chunk_bytes")
    @classmethod
    def _check_chunk(cls, value: ByteSize) -> ByteSize:
        if value % SHARD_ALIGNMENT:
            raise ValueError(f"must be a multiple of {SHARD_ALIGNMENT}")
        return value

    @field_validator("patience")
    @classmethod
    def _check_patience(cls, value: float, info: ValidationInfo) -> float:
        heartbeat = info.data.get("heartbeat", 0.0)
        if value < 2 * heartbeat:
            raise ValueError(
                f"write at least two heartbeats, {2 * heartbeat:g}s: with REDUCTION_HEARTBEAT="
                f"{heartbeat:g}s a single one that is late would be a loss"
            )
        return value

    @field_validator("failpoints")
    @classmethod
    def _check_failpoints(cls, value: str) -> str:
        parse(value)
        return value


def load(**arguments: Any) -> WorkerConfig:
    """Build the configuration from arguments (None: not given) and the environment.

    Raises:
        ConfigError: a value is wrong or a ``REDUCTION_`` variable unknown; the message names it.
    """
    known = (*WorkerConfig.model_fields, *REDUCER_SETTINGS)
    if unknown := units.unknown_setting(os.environ, known):
        raise ConfigError(unknown)
    given = {name: value for name, value in arguments.items() if value is not None}
    launched = launch()
    if "generation" not in given and "REDUCTION_GENERATION" not in os.environ:
        given["generation"] = launched.restarts
    if "REDUCTION_SERVERS" not in os.environ and launched.reducers:
        given.setdefault("servers", launched.reducers)
    for name, (unit, units_of) in _HOROVOD.items():
        variable = f"HOROVOD_{name.upper()}"
        theirs = os.environ.get(variable)
        if theirs and f"REDUCTION_{name.upper()}" not in os.environ:
            if not theirs.replace(".", "", 1).isdecimal():
                raise ConfigError(f"{variable}: write a number of {units_of}, got {theirs!r}")
            given.setdefault(name, theirs + unit)
    try:
        return WorkerConfig(**given)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def seconds(name: str, value: object) -> float:
    """Read a duration that was given as the argument `name`.

    Raises:
        ConfigError: it is none; the message says what to write.
    """
    return _read(_SECONDS_OF, name, value)


def patience(name: str, value: object) -> float:
    """Read how long to wait at most, given as the argument `name`: from 0 s to infinity.

    Raises:
        ConfigError: it is no duration; the message says what to write.
    """
    return _read(_PATIENCE_OF, name, value)


def _read(durations: TypeAdapter[float], name: str, value: object) -> float:
    try:
        return durations.validate_python(value)
    except ValidationError as error:
        raise ConfigError(_explain(error, name)) from None


def environment() -> dict[str, str]:
    """Return this process's variables, for those that hand them to programs."""
    return dict(os.environ)


def launch() -> Resolved:
    """Find out what the launcher told this process.

    Raises:
        ConfigError: a variable such as RANK is malformed; the message quotes it.
    """
    return resolve(os.environ)


def torchrun_ends_survivors() -> bool:
    """Whether torchrun has started this process such that it ends others when a rank is lost.

    It leaves them alone only where each node has one rank, ranks find each other by a fixed address
    (which goes without a run id), and none is to be restarted.
    """
    told = launch()
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    dynamic = os.environ.get("TORCHELASTIC_RUN_ID") != "none"
    ends_others = told.local_world_size != 1 or dynamic or restarts != "0"
    return told.launcher is Launcher.TORCHRUN and ends_others


def bind_is_set() -> bool:
    """Whether the environment says where an embedded reducer listens."""
    return "REDUCTION_BIND" in os.environ


def _explain(error: ValidationError, argument: str = "settings") -> str:
    mistakes = []
    for mistake in error.errors():
        name = "REDUCTION_" + str(mistake["loc"][0]).upper() if mistake["loc"] else argument
        message = mistake["msg"].removeprefix("Value error, ")
        if mistake["type"].startswith("byte_size"):
            message = "write bytes such as 64MiB or 67108864"
        got = "" if ", got " in message else f" (got {mistake['input']!r})"
        mistakes.append(f"{name}: {message}{got}")
    return "; ".join(mistakes)
