"""The worker's settings: arguments beat the environment, which beats the defaults.

The environment is read here and nowhere else in this package.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path  # noqa: TC003 (pydantic reads it)
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

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
from reducer.wire.constants import (
    LONGEST_PEER_TIMEOUT_MS,
    MAX_CHUNK_BYTES,
    MAX_JOB_NAME_BYTES,
    MAX_STREAMS,
    PEER_TIMEOUT_MS,
    SHARD_ALIGNMENT,
    SHORTEST_PEER_TIMEOUT_MS,
    DType,
)
from worker_client.launch import Launcher, resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from os import PathLike

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
    "port_buffer",
    "drain_timeout",
    "keys",
    "insecure",
    "kernel",
    "threads",
    "io_threads",
    "cpus",
    "impl",
    "http",
    "timeline",
    "config",
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
AUTO = BeforeValidator(_auto)  # of settings in which 0 stands for that
AutoBytes = Annotated[ByteSize, AUTO]
_SECONDS_OF = TypeAdapter[float](Seconds)
_WAIT = TypeAdapter[float](Annotated[float, BeforeValidator(units.duration), Field(ge=0)])


class WorkerConfig(BaseSettings):
    """How one worker takes part. Field `x` is set by the environment variable ``REDUCTION_X``."""

    model_config = SettingsConfigDict(
        env_prefix="REDUCTION_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    servers: Annotated[tuple[str, ...], NoDecode] = ()
    """Addresses of the reducers, ``host:port,host:port``, the same at every rank. By default those
    that the launcher names (docs/launchers.md), and where it names none every rank hosts a reducer
    (embedded)."""

    embedded: bool | None = None
    """``1``: every rank also hosts a reducer if there are fewer servers than ranks (mixed); ``0``:
    ranks never host one. By default ranks host reducers only if there are no servers."""

    interface: str = ""
    """Where the reducer that this rank hosts listens, and other ranks reach it: an interface's name
    such as ``eth1``, an address, or a network such as ``10.0.0.0/8``, which can be the same at
    every rank. By default the address, IPv4 or IPv6, on the way to where torch's ranks meet, and
    at rank 0's host the one on the way to the others. It takes the place of REDUCTION_BIND. The
    network of the way to a pool is that of REDUCTION_SERVERS."""

    job: Annotated[str | None, BeforeValidator(units.unless_empty)] = None
    """Name of the job on the reducers. By default the ranks agree through the process group on a
    name that no other run has; without a process group it is the launcher's name for the job
    (docs/launchers.md). A run that has neither must be given a name that no other run has at that
    time: MASTER_ADDR and MASTER_PORT alone are no name."""

    generation: int = Field(default=0, ge=0, lt=1 << 32)
    """Version of the job's membership: a later one ends an earlier one of the same job. By default
    the launcher's restart count."""

    chunk_bytes: AutoBytes = Field(default=ByteSize(0), ge=0, le=MAX_CHUNK_BYTES)
    """Bytes of a chunk, a multiple of 64 up to 4 MiB. ``auto`` chooses 32 KiB to 256 KiB by
    the rate of the slowest rank's links and the size of the buffer; 256 KiB where ranks host all
    reducers."""

    window_bytes: AutoBytes = Field(default=ByteSize(0), ge=0)
    """Most bytes that this rank has in flight over all reducers; raised to two chunks for each
    reducer if it is less. ``auto`` follows the measured rate and round trip, up to 16 MiB: enough
    for a 10 Gbit/s link with a round trip of 10 ms. To reducers whose round trip is longer it grows
    up to 256 MiB, as far as they have memory (docs/performance.md#long-distances)."""

    streams: Annotated[int, AUTO] = Field(default=0, ge=0, le=MAX_STREAMS)
    """TCP connections to each thread of each reducer, 1 to 16, which share its chunks: far away,
    losses keep each one of them slow. ``auto`` takes one, and one more for each full 25 ms of the
    round trip when the connection is made, 8 in all. More than one takes the compiled
    implementation at both ends. Each rank decides for itself (docs/performance.md#long-distances).
    """

    port_buffer: Annotated[ByteSize, Field(gt=0)] | None = None
    """Bytes of the switch's port that leads to this host, such as ``1MiB``, so that reducers that
    answer at once do not overflow it (docs/sizing.md#ports-of-a-switch). Where several ranks share
    a host, write the part of each one; where ranks host reducers, half of that, as each reducer has
    as much. By default TCP chooses."""

    timeout: Seconds = 300.0
    """Time after which an all-reduce fails and names the ranks that are missing. Long by default,
    because a rank may load data or write a checkpoint meanwhile."""

    connect_timeout: Seconds = 10.0
    """Time for all reducers to answer when the worker starts."""

    wait_for_reducers: Annotated[
        float, BeforeValidator(units.duration), Field(ge=0, le=1e9, allow_inf_nan=False)
    ] = 0.0
    """How long to wait while no reducer of the pool answers. At the start a worker waits this long
    if it is longer than REDUCTION_CONNECT_TIMEOUT; a reducer whose name has no address yet is one
    that does not answer. In the middle of a job its calls wait, and go on without a lost step when
    a reducer has been started again. Each rank decides for itself."""

    heartbeat: Annotated[Seconds, Field(ge=0.1)] = 0.2
    """Time between two heartbeats that this rank sends to each reducer: 100 ms at least, and half
    of its patience at most. Each rank decides for itself."""

    patience: Annotated[
        Seconds,
        Field(
            ge=SHORTEST_PEER_TIMEOUT_MS / 1000,
            le=LONGEST_PEER_TIMEOUT_MS / 1000,
            validate_default=True,
        ),
    ] = PEER_TIMEOUT_MS / 1000
    """How long a reducer or a rank may be silent before it counts as lost, 0.5 s to 60 s and two
    heartbeats at least, the same at every rank; five round trips of the network come on top. Raise
    it for networks with long pauses, or for
    processes that a debugger stops (docs/failures.md#slow-networks-and-stopped-processes); a
    reducer or rank that vanishes is then noticed later."""

    fusion_threshold: ByteSize = Field(default=ByteSize(64 << 20), ge=0, le=1 << 40)
    """Most bytes of a fusion buffer, in which tensors with names are packed and reduced together.
    ``0`` reduces each tensor by itself. HOROVOD_FUSION_THRESHOLD is honoured."""

    cycle_time: Seconds = 0.001
    """How long a tensor with a name waits for more tensors to be packed with, while no call blocks
    on its result. If more tensors keep coming, it waits 21 times as long at most.
    HOROVOD_CYCLE_TIME, in milliseconds, is honoured."""

    fallback: Literal["error", "process-group"] = "error"
    """What all-reduces do when no reducer is left. ``error``: they fail until a reducer is back.
    ``process-group``: they go through torch's process group until then."""

    on_rank_lost: Literal["error", "continue"] = "error"
    """What all-reduces do when a rank is lost. ``error``: those that need it fail. ``continue``:
    the other ranks make them without it and go on."""

    join: bool = False
    """``1``: join a job that runs already and goes on without lost ranks, as soon as its ranks call
    ``worker_client.elastic.sync()`` or ``client.admit()``. Rank and world size need not be set."""

    hierarchy: Literal["off", "auto"] = "off"
    """``auto``: where several nodes have equally many ranks, more than one, the ranks of a node
    reduce among themselves first, in process groups of torch's, so that the node's network card
    carries each buffer once. Results may then differ in the last place, a rank that is lost ends
    the clients of its node, and small buffers take longer. Elsewhere it has no effect."""

    wire_dtype: Literal["none", "bf16", "fp16", "int8", "fp8_e4m3"] = "none"
    """``bf16`` or ``fp16``: float32 buffers of 16 KiB and more travel in 16 bits for sum, mean, min
    and max, the same at every rank. ``int8`` or ``fp8_e4m3``: in 8 bits, with one float32 scale for
    252 values, for sum and mean. Each contribution is rounded before it is sent, and each result
    once. Tensors on a GPU are cast in host memory (docs/frameworks.md#gradients-on-a-gpu)."""

    batch_shares: Annotated[
        tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], NoDecode
    ] = ()
    """How much of a global batch each rank takes, in the order of ranks, such as ``0.7,0.3``: what
    ``worker_client.batch_part()`` divides a batch by. ``worker-client join`` sets it by the ranks'
    measured speeds (docs/launchers.md#two-machines-at-home). By default all take equally much."""

    keys: Annotated[Path | None, BeforeValidator(units.unless_empty)] = None
    """Directory of the job's keys, DIR/jobs/NAME of ``reducer keygen DIR``, for a pool that demands
    keys (docs/security.md)."""

    encrypt: bool = False
    """``1``: what goes to reducers that ranks host is encrypted. They admit the job's ranks alone
    in any case. A job with ``REDUCTION_KEYS`` encrypts all that it sends (docs/security.md)."""

    impl: Literal["plain", "compiled"] | None = None
    """``compiled``, as by default, or ``plain``: the reference of the protocol in place of the
    client. It makes one blocking all-reduce after the other at reducers of REDUCTION_SERVERS, and
    has neither keys nor anything else beyond the protocol's core. It is for conformance, on
    loopback and private networks."""

    timeline: Annotated[Path | None, BeforeValidator(units.unless_empty)] = None
    """Directory for a file of what happened when, ``JOB-rankN.json``, which Perfetto opens
    (docs/observing.md#a-timeline)."""

    dump: Annotated[Path | None, BeforeValidator(units.unless_empty)] = None
    """Directory for the latest 1,000 calls of each rank, which are written there when one fails
    because of another rank or a reducer, and at the end (docs/observing.md#when-a-call-fails)."""

    libpython: Annotated[Path | None, BeforeValidator(units.unless_empty)] = None
    """Python's shared library, which NCCL's plug-in loads in a program that has no Python, as
    ``worker-client nccl`` says; by default the newest that the system has."""

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

    @field_validator("batch_shares", mode="before")
    @classmethod
    def _split_shares(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) and value.strip() else value or ()

    @field_validator("interface")
    @classmethod
    def _check_interface(cls, value: str) -> str:
        if value and bind_is_set():
            raise ValueError("unset REDUCTION_BIND, which says as well where this rank listens")
        return value

    @field_validator("job")
    @classmethod
    def _check_job(cls, value: str | None) -> str | None:
        most = MAX_JOB_NAME_BYTES - len(NAMED)
        if value is not None and len(value.encode()) > most:
            raise ValueError(f"at most {most} bytes of UTF-8")
        if value is not None and not value.isprintable():
            raise ValueError(f"printable characters only, got {value!r}")
        return value

    @field_validator("chunk_bytes")
    @classmethod
    def _check_chunk(cls, value: ByteSize) -> ByteSize:
        if value % SHARD_ALIGNMENT:
            raise ValueError(f"must be a multiple of {SHARD_ALIGNMENT}")
        return value

    @field_validator("wire_dtype")
    @classmethod
    def _check_wire_dtype(cls, value: str, info: ValidationInfo) -> str:
        chunk_bytes = info.data.get("chunk_bytes", 0)
        if value in {"int8", "fp8_e4m3"} and chunk_bytes % DType.BLOCK8.itemsize:
            raise ValueError(
                f"{value} travels in blocks of {DType.BLOCK8.itemsize} bytes, which chunks must "
                f"not cut: write a multiple of that for REDUCTION_CHUNK_BYTES, got {chunk_bytes}"
            )
        return value

    @field_validator("patience")
    @classmethod
    def _check_peer_timeout(cls, value: float, info: ValidationInfo) -> float:
        heartbeat = info.data.get("heartbeat", 0.0)
        if value < 2 * heartbeat:
            raise ValueError(
                f"write at least two heartbeats, {2 * heartbeat:g}s: with REDUCTION_HEARTBEAT="
                f"{heartbeat:g}s a single one that is late would be a loss"
            )
        return value


class InitSettings(TypedDict, total=False):
    """Arguments of `worker_client.init`, which describes them; None is the same as not given."""

    servers: str | Sequence[str] | None
    embedded: bool | None
    rank: int | None
    world_size: int | None
    job: str | None
    generation: int | None
    chunk_bytes: int | str | None
    window_bytes: int | str | None
    timeout: float | str | None
    connect_timeout: float | str | None
    fusion_threshold: int | str | None
    cycle_time: float | str | None
    on_rank_lost: str | None
    join: bool | None
    hierarchy: str | None
    wire_dtype: str | None
    keys: str | PathLike[str] | None
    encrypt: bool | None


def refuse_unknown_arguments(function: str, names: Iterable[str]) -> None:
    """Raise what Python raises for keyword arguments that a function does not have.

    Args:
        function: its name, for the error.
        names: those of the arguments that it was called with.

    Raises:
        TypeError: one of them is not in `InitSettings`; the message suggests a similar one.
    """
    known = InitSettings.__annotations__
    for name in names:
        if name not in known:
            similar = get_close_matches(name, known, 1)
            hint = f". Did you mean {similar[0]!r}?" if similar else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


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


def wait_s(name: str, value: object) -> float:
    """Read how long to wait at most, given as the argument `name`: from 0 s to infinity.

    Raises:
        ConfigError: it is no duration; the message says what to write.
    """
    return _read(_WAIT, name, value)


def _read(durations: TypeAdapter[float], name: str, value: object) -> float:
    try:
        return durations.validate_python(value)
    except ValidationError as error:
        raise ConfigError(_explain(error, name)) from None


def environment() -> dict[str, str]:
    """Return this process's variables, for those that hand them to programs."""
    return dict(os.environ)


def be_alone(port: int) -> None:
    """Make this process, which no launcher has started, the one rank of a job of torch's."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**alone, "MASTER_PORT": str(port)})


def launch() -> Resolved:
    """Find out what the launcher told this process.

    Raises:
        ConfigError: a variable such as RANK is malformed; the message quotes it.
    """
    return resolve(os.environ)


def batch_part(samples: int) -> range:
    """Return which samples of a global batch are this rank's; see `worker_client.batch_part`."""
    shares, (rank, world_size) = load().batch_shares, launch().identity
    rank, world_size = rank or 0, world_size or 1
    shares = shares or (1.0,) * world_size
    if len(shares) != world_size:
        raise ConfigError(
            f"REDUCTION_BATCH_SHARES has {len(shares)} shares, and the job {world_size} ranks: "
            "write one for each, in the order of ranks"
        )
    if samples < world_size:
        raise ConfigError(f"a batch of {samples} samples is too small for {world_size} ranks")
    # Each has one; the rest is cut where the shares of the ranks before end.
    first, after = (
        upto + round((samples - world_size) * sum(shares[:upto]) / sum(shares))
        for upto in (rank, rank + 1)
    )
    return range(first, after)


def torchrun_ends_the_others() -> bool:
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
        message = units.what_to_write(mistake, "64MiB or 67108864")
        if mistake["loc"][:1] == ("streams",):
            message = f"write auto, or a number from 1 to {MAX_STREAMS}"
        got = "" if ", got " in message else f" (got {mistake['input']!r})"
        mistakes.append(f"{name}: {message}{got}")
    return "; ".join(mistakes)
