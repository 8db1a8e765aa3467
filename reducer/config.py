"""The reducer's settings: arguments beat the environment, which beats the defaults."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path  # noqa: TC003 (pydantic reads it)
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from reducer import units
from reducer.engine.limits import Limits, Patience
from reducer.errors import ConfigError
from reducer.failpoints import parse
from reducer.wire.constants import MAX_CHUNK_BYTES, MAX_LANES, MAX_WORLD_SIZE
from reducer.wire.layout import LARGEST_CHUNK

FILES_BESIDES = 64  # that a reducer has open, besides connections
_SPAN = re.compile(r"([0-9]+)(?:-([0-9]+))?")
# Of workers, which may have the environment of a reducer.
WORKER_SETTINGS = (
    *("servers", "embedded", "job", "generation", "chunk_bytes", "window_bytes", "timeout"),
    *("connect_timeout", "fusion_threshold", "cycle_time", "autotune", "fallback"),
    *("on_rank_lost", "hierarchy", "wire_dtype", "heartbeat", "patience", "wait_for_reducers"),
)
Seconds = Annotated[
    float, BeforeValidator(units.duration), Field(gt=0, le=3600, allow_inf_nan=False)
]


class ReducerConfig(BaseSettings):
    """How one reducer runs. Field `x` can be set by the environment variable ``REDUCTION_X``."""

    model_config = SettingsConfigDict(
        env_prefix="REDUCTION_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    bind: str = "tcp://127.0.0.1:5555"
    """Where to listen, ``tcp://HOST:PORT``; port 0 takes a free one. Only this machine by default;
    for more it takes `keys`."""

    memory_limit: Annotated[ByteSize, Field(gt=0)] = ByteSize(8 << 30)
    """Bytes that contributions and results of all jobs may take; a job that does not fit is refused
    before it takes any."""

    job_memory_limit: Annotated[ByteSize, Field(gt=0)] | None = None
    """Bytes of these that one job may take; all of them by default, as for a pool of one job. Set
    it where jobs do not trust each other."""

    max_jobs: int = Field(default=256, ge=1)
    """Jobs that may be here at once; what a reducer does for each, it does for all in turn."""

    max_jobs_per_key: int = Field(default=64, ge=1)
    """Of these, jobs that may be one key's, on a pool with keys: a run is two jobs if its calls
    have names. The limit on one job's memory is for all jobs of a key together."""

    max_rounds: int = Field(default=1 << 17, ge=1)
    """All-reduces that a job may have begun here, at each thread, and not finished at all ranks; on
    a pool with keys, all jobs of one key. A window of 128 MiB holds no more, however small."""

    max_ranks: int = Field(default=4096, ge=1, le=MAX_WORLD_SIZE)
    """Ranks of one job, which are also its connections to each thread: libzmq takes messages from
    all connections in turn, so a job's share of a reducer grows with them."""

    max_chunk_bytes: Annotated[ByteSize, Field(ge=LARGEST_CHUNK, le=MAX_CHUNK_BYTES)] = ByteSize(
        MAX_CHUNK_BYTES
    )
    """The largest chunk, and so the largest message: a connection that sends a larger one is
    closed. From 1 MiB, the largest that a job chooses by itself, to 4 MiB."""

    max_connections: int = Field(default=8192, ge=1)
    """Connections to all threads. Beyond it the oldest are closed that belong to no member of a
    job. A process's limit on open files makes it less."""

    max_connections_per_key: int | None = Field(default=None, ge=1)
    """Of these, connections of members that have one key, on a pool with keys; half of them by
    default. Each rank has one to each thread, and one more there if its calls have names."""

    handshake_timeout: Seconds = 5.0
    """Time in which a new connection must finish libzmq's handshake; and in twice as much it must
    be a job's, or it is closed. An honest worker needs two round trips."""

    drain_timeout: Seconds = 8.0
    """How long it goes on, after a SIGTERM, for jobs that have no other reducer: until another one
    is back, in a rolling restart. Less than what kills it then, such as Docker's ten seconds."""

    keys: Path | None = None
    """Directory with the pool's keys and its allow-list, from ``reducer keygen``: who has no key
    that is on the list is refused, and everything is encrypted. The list is read again when it
    changes."""

    insecure: bool = False
    """Listen beyond this machine without keys, although any host that reaches the port may then
    take part."""

    kernel: str | None = None
    """Which kernel variant sums: avx512, avx2, generic or numpy; the CPU's best by default. All
    give the same bits."""

    threads: int = Field(default=1, ge=1, le=MAX_LANES)
    """Threads that serve, each with a port and a share of the memory of its own: PORT, PORT + 1 and
    so on, or free ones if the port is 0. One moves about 15 Gbit/s."""

    io_threads: int = Field(default=1, ge=1, le=64)
    """libzmq's threads that move bytes, for each thread that serves."""

    cpus: Annotated[tuple[int, ...] | None, NoDecode] = None
    """CPUs on which the serving threads and libzmq's may run, such as ``0-3,8``; all by default."""

    impl: Literal["compiled", "plain"] | None = None
    """Which loop serves: the compiled one if it can run, by default. Both do the same."""

    http: str | None = None
    """Where `reducer serve` answers probes and `reducer status`: ``HOST:PORT``, or ``PORT`` on this
    machine alone. Read-only. ``off`` by default: a job's own reducers need none, and those of
    several ranks on a host would ask for the same port."""

    failpoints: str = ""
    """For tests: where this process shall die, stop or be slow, such as ``reducer.placed=kill@3``;
    `reducer.failpoints` knows the places. Nowhere by default."""

    @field_validator("cpus", mode="before")
    @classmethod
    def _split_cpus(cls, value: object) -> object:
        return parse_cpus(value) if isinstance(value, str) else value

    @field_validator("bind")
    @classmethod
    def _check_bind(cls, value: str) -> str:
        host, port = units.address(value)
        return f"tcp://{host}:{port}"

    @field_validator("http")
    @classmethod
    def _check_http(cls, value: str | None) -> str | None:
        return None if value is None or value in {"", "off"} else parse_http(value)

    @field_validator("failpoints")
    @classmethod
    def _check_failpoints(cls, value: str) -> str:
        parse(value)
        return value

    @model_validator(mode="after")
    def _check_exposure(self) -> ReducerConfig:
        if not self.insecure and self.keys is None and not units.is_loopback(self.bind):
            raise ValueError(
                f"{self.bind} can be reached from other machines, and nothing would check who "
                "connects: pass --keys with a directory that `reducer keygen` made, or pass "
                "--insecure if the network is private (or bind 127.0.0.1)"
            )
        return self

    def limits(self) -> Limits:
        """Return what each thread admits."""
        most = self.job_memory_limit
        of_key = self.max_connections_per_key
        connections = self.patience().max_connections
        return Limits(
            max_jobs=self.max_jobs,
            max_jobs_per_key=self.max_jobs_per_key,
            max_ranks=self.max_ranks,
            max_chunk_bytes=int(self.max_chunk_bytes),
            job_memory_limit=None if most is None else int(most) // self.threads,
            max_rounds=self.max_rounds,
            max_connections_per_key=max(
                1, connections // 2 if of_key is None else of_key // self.threads
            ),
        )

    def patience(self) -> Patience:
        """Return what each thread allows connections, with the files that it may open."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        room = self.max_connections
        if files != resource.RLIM_INFINITY:
            room = min(room, max(files - FILES_BESIDES, files // 2))
        return Patience(max(1, room // self.threads), 2 * self.handshake_timeout)


def parse_cpus(text: str) -> tuple[int, ...]:
    """Read a list of CPUs such as ``0-3,8``.

    Raises:
        ValueError: it is none, or this process may not run on one of them.
    """
    match = re.fullmatch(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", text.replace(" ", ""))
    if match is None:
        raise ValueError("write CPUs such as 0-3,8")
    allowed = os.sched_getaffinity(0)
    ends = [(int(first), int(last or first)) for first, last in _SPAN.findall(match[0])]
    few = all(last - first < len(allowed) for first, last in ends)  # others could not be listed
    cpus = {cpu for first, last in ends for cpu in range(first, last + 1)} if few else set()
    if not cpus or not cpus <= allowed:
        raise ValueError(f"this process may run on CPUs {sorted(allowed)}, got {text!r}")
    return tuple(sorted(cpus))


def parse_http(text: str) -> str:
    """Read ``HOST:PORT``, ``:PORT`` or ``PORT``; without a host it is this machine alone.

    Raises:
        ValueError: it is none of these.
    """
    value = f"127.0.0.1:{text.removeprefix(':')}" if text.strip(":").isdecimal() else text
    try:
        host, port = units.address(value)
    except ValueError:
        raise ValueError(f"write it as HOST:PORT, or PORT, or off, got {text!r}") from None
    return f"{host}:{port}"


def load(**arguments: object) -> ReducerConfig:
    """Build the configuration from arguments (None: not given) and the environment.

    Raises:
        ConfigError: a value is wrong or a ``REDUCTION_`` variable unknown; the message names it,
            and says what to write.
    """
    known = (*ReducerConfig.model_fields, *WORKER_SETTINGS)
    if unknown := units.unknown_setting(os.environ, known):
        raise ConfigError(unknown)
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return ReducerConfig(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def explain(error: ValidationError) -> str:
    """Say in one line per mistake what is wrong with which setting."""
    lines = []
    for mistake in error.errors():
        name = ".".join(map(str, mistake["loc"]))
        message = mistake["msg"].removeprefix("Value error, ")
        if mistake["type"].startswith("byte_size"):
            message = "write bytes such as 8GiB or 8589934592"
        got = f" (got {mistake['input']!r})" if mistake["type"] != "value_error" else ""
        lines.append(f"{name}: {message}{got}" if name else message)
    return "\n".join(lines)
