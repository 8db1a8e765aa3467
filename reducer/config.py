"""The reducer's settings: arguments beat the environment, which beats a file and the defaults."""

from __future__ import annotations

import os
import re
import resource
import tomllib
from collections.abc import Mapping  # noqa: TC003 (a field's type)
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

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
from reducer.engine.limits import ConnectionLimits, Limits
from reducer.errors import ConfigError
from reducer.wire.constants import MAX_CHUNK_BYTES, MAX_LANES, MAX_WORLD_SIZE, PORT
from reducer.wire.layout import LARGEST_CHUNK

FILES_BESIDES = 64  # that a reducer has open, besides connections
MOST_HTTP = 1024  # connections of the HTTP port
_SPAN = re.compile(r"([0-9]+)(?:-([0-9]+))?")
# Settings of workers, which a reducer's environment may have, too.
WORKER_SETTINGS = (
    *("servers", "embedded", "encrypt", "job", "generation", "chunk_bytes", "window_bytes"),
    *("timeout", "connect_timeout", "fusion_threshold", "cycle_time", "fallback"),
    *("on_rank_lost", "join", "hierarchy", "wire_dtype", "heartbeat", "patience", "streams"),
    *("wait_for_reducers", "dump", "interface", "libpython", "batch_shares"),
)
_OF_REFERENCE = {"bind", "insecure", "impl", "kernel", "io_threads", "config"}
KernelName = Literal["avx512", "avx2", "neon", "generic", "numpy"]
ImplName = Literal["compiled", "plain"]
Seconds = Annotated[
    float, BeforeValidator(units.duration), Field(gt=0, le=3600, allow_inf_nan=False)
]


class ReducerConfig(BaseSettings):
    """How one reducer runs. Field `x` can be set by the environment variable ``REDUCTION_X``."""

    model_config = SettingsConfigDict(
        env_prefix="REDUCTION_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    bind: str = f"tcp://127.0.0.1:{PORT}"
    """Where to listen, ``tcp://HOST:PORT``; port 0 takes a free one. An address that other machines
    reach needs REDUCTION_KEYS or REDUCTION_INSECURE. A reducer that a rank hosts chooses its
    address itself."""

    memory_limit: Annotated[ByteSize, Field(gt=0)] = ByteSize(8 << 30)
    """Bytes for contributions and results of all jobs together, such as ``8GiB``. A job that does
    not fit is refused before it takes any memory. Where the machine, its container (cgroup) or
    ``ulimit -v`` has not as much for this process by itself, it is what they have, and the log says
    so."""

    job_memory_limit: Annotated[ByteSize, Field(gt=0)] | None = None
    """Bytes of REDUCTION_MEMORY_LIMIT that one job may take; by default all of them, as for a pool
    of one job. Set it where jobs do not trust each other (docs/security.md#limits)."""

    max_jobs: int = Field(default=256, ge=1)
    """Jobs that the reducer admits at once. It serves all of them in turn."""

    max_jobs_per_key: int = Field(default=64, ge=1)
    """Jobs of one key that a pool with keys admits at once. A run counts as two jobs if its calls
    have names. The jobs of a key share one job's memory limit."""

    max_rounds: int = Field(default=1 << 17, ge=1)
    """All-reduces that a job may have begun at each thread and not finished at all ranks; on a pool
    with keys, all jobs of one key together. A window of 128 MiB holds no more, however small they
    are."""

    max_ranks: int = Field(default=4096, ge=1, le=MAX_WORLD_SIZE)
    """Ranks that a job may have. Each rank has a connection to each thread, and messages are taken
    from all connections in turn: a job's share of a reducer grows with its ranks."""

    max_chunk_bytes: Annotated[ByteSize, Field(ge=LARGEST_CHUNK, le=MAX_CHUNK_BYTES)] = ByteSize(
        MAX_CHUNK_BYTES
    )
    """Bytes of the largest chunk that a job may have, 256 KiB (the largest that a job chooses by
    itself) to 4 MiB. A connection that sends a larger message is closed."""

    max_connections: int = Field(default=8192, ge=1)
    """Connections to all threads together, but for further streams; fewer if the process may not
    open so many files. At the limit the oldest connection that belongs to no job makes way for
    another one; while all belong to jobs, no other is accepted."""

    max_connections_per_key: int | None = Field(default=None, ge=1)
    """Connections that the members with one key may have on a pool with keys; by default half of
    REDUCTION_MAX_CONNECTIONS. Each rank has one to each thread, and one more there if its calls
    have names; each of these may be several (REDUCTION_STREAMS), as long as half are free."""

    handshake_timeout: Seconds = 5.0
    """Time for a new connection's handshake, such as ``5s``. A connection that belongs to no job
    after twice this time is closed. An honest worker needs two round trips."""

    port_buffer: Annotated[ByteSize, Field(gt=0)] | None = None
    """Bytes of the switch's port that leads to this host, such as ``1MiB``, so that ranks that send
    at once do not overflow it (docs/sizing.md#ports-of-a-switch). Where several processes share a
    host, write the part of each one. By default TCP chooses."""

    drain_timeout: Seconds = 8.0
    """How long the reducer goes on after a SIGTERM for jobs that have no other reducer, until
    another one is back (rolling restart). Keep it well below the time after which it is killed,
    such as the 10 s of `docker stop`."""

    keys: Annotated[Path | None, BeforeValidator(units.unless_empty)] = None
    """Directory of the pool's keys and allow-list, from ``reducer keygen`` (docs/security.md).
    Connections without a key on the list are refused, and everything is encrypted. The list is read
    again when it changes."""

    insecure: bool = False
    """Whether to listen beyond this machine without keys. With ``1``, any host that reaches the
    port can take part."""

    kernel: KernelName | None = None
    """Which kernel variant sums: ``avx512``, ``avx2``, ``neon``, ``generic`` or ``numpy``; by
    default the CPU's best. All give the same bits."""

    threads: int = Field(default=1, ge=1, le=MAX_LANES)
    """Threads that serve, each with a port and a share of the memory of its own: PORT, PORT + 1 and
    so on, or free ones if the port is 0. One moves about 15 Gbit/s."""

    io_threads: int = Field(default=1, ge=1, le=64)
    """Threads of libzmq in the reference reducer (``plain``); the compiled one has none."""

    cpus: Annotated[tuple[int, ...] | None, NoDecode] = None
    """CPUs on which the serving threads may run, such as ``0-3,8``; by default all."""

    impl: ImplName | None = None
    """``compiled`` or ``plain``, by default the compiled one. ``plain`` is the reference reducer,
    for conformance (docs/conformance.md): in Python, for one job, without keys and limits, on
    loopback and private networks. It refuses settings that it does not know."""

    http: str | None = None
    """Where ``reducer serve`` answers probes, metrics and ``reducer status``: ``HOST:PORT``, or
    ``PORT`` on this machine alone; ``off`` by default. Read-only, but without keys: any host that
    reaches it learns names and sizes of jobs. A reducer that a rank hosts has none."""

    timeline: Annotated[Path | None, BeforeValidator(units.unless_empty)] = None
    """Directory for a file of what happened when, ``reducer-HOST-PORT.json``, which Perfetto opens
    (docs/observing.md#a-timeline). Workers write theirs to the same variable's directory."""

    config: Annotated[Path | None, BeforeValidator(units.unless_empty)] = None
    """File of settings in TOML that ``reducer serve`` reads at its start. A reducer that a rank
    hosts reads none."""

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

    @model_validator(mode="after")
    def _check_exposure(self) -> ReducerConfig:
        if not self.insecure and self.keys is None and not units.is_loopback(self.bind):
            raise ValueError(
                f"{self.bind} can be reached from other machines, and nothing would check who "
                "connects: pass --keys with a directory that `reducer keygen` made, or pass "
                "--insecure if the network is private (or bind 127.0.0.1)"
            )
        return self

    def check_for_reference(self) -> None:
        """Refuse what the reference reducer cannot do.

        Raises:
            ConfigError: a setting demands it; the message names the setting.
        """
        for name, field in type(self).model_fields.items():
            if name not in _OF_REFERENCE and getattr(self, name) != field.default:
                raise ConfigError(
                    f"{name}: the reference reducer (REDUCTION_IMPL=plain) has no such setting: "
                    "leave it out, or use the compiled one"
                )
        if self.kernel not in {None, "numpy"}:
            raise ConfigError(
                f"kernel: the reference reducer (REDUCTION_IMPL=plain) sums with numpy, not "
                f"{self.kernel}: leave it out, or use the compiled one"
            )
        if not units.is_private(self.bind):
            raise ConfigError(
                f"bind: the reference reducer (REDUCTION_IMPL=plain) serves loopback and private "
                f"networks, and {self.bind} may be reached from elsewhere: bind the machine's "
                "address in the private network, such as tcp://10.0.0.1:5555, or use the compiled "
                "one"
            )

    def limits(self) -> Limits:
        """Return what each thread admits."""
        most = self.job_memory_limit
        of_key = self.max_connections_per_key
        connections = self.connection_limits().max_connections
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
            max_streams=connections // 2,  # the other half is for first connections
        )

    @property
    def http_connections(self) -> int:
        """Clients of the HTTP port that may be connected: a part of the files it may open."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return MOST_HTTP if files == resource.RLIM_INFINITY else min(files // 8, MOST_HTTP)

    def connection_limits(self) -> ConnectionLimits:
        """Return what each thread allows connections, with the files that may be opened."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = 2 * self.max_connections  # with further streams, of which there are not as many
        if files != resource.RLIM_INFINITY:
            beside = FILES_BESIDES + (self.http_connections if self.http else 0)
            most = min(most, max(files - beside, files // 2))
        first, most = (max(1, n // self.threads) for n in (min(self.max_connections, most), most))
        port = int(self.port_buffer or 0) // self.threads
        return ConnectionLimits(first, 2 * self.handshake_timeout, most, port)


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


class Written(NamedTuple):
    """What a file of settings says.

    Attributes:
        path: of the file; None: there is none.
        values: by the settings' names, checked for nothing but these.
    """

    path: Path | None = None
    values: Mapping[str, object] = MappingProxyType({})


def load(**arguments: object) -> ReducerConfig:
    """Build the configuration from arguments (None: not given) and the environment.

    Raises:
        ConfigError: a value is wrong or a ``REDUCTION_`` variable unknown; the message names it,
            and says what to write.
    """
    return _load(arguments, Written())


def load_with_file(**arguments: object) -> ReducerConfig:
    """Build the configuration as `load` does, with the file that `config` names below both.

    Raises:
        ConfigError: as of `load`; or the file cannot be read, is no TOML or has an unknown key. The
            message names the file as well, if the mistake is there.
    """
    named = arguments.get("config")
    if named is None:
        named = next((text for name, text in os.environ.items() if _setting(name) == "config"), "")
    path = units.unless_empty(named)
    return _load(arguments, Written() if path is None else read_file(Path(str(path))))


def _load(arguments: Mapping[str, object], written: Written) -> ReducerConfig:
    known = (*ReducerConfig.model_fields, *WORKER_SETTINGS)
    if unknown := units.unknown_setting(os.environ, known):
        raise ConfigError(unknown)
    given = {name: value for name, value in arguments.items() if value is not None}
    beaten = given.keys() | {_setting(variable) for variable in os.environ}
    used = {name: value for name, value in written.values.items() if name not in beaten}
    try:
        return ReducerConfig(**{**used, **given})  # type: ignore[arg-type]
    except ValidationError as error:
        raise ConfigError(explain(error, Written(written.path, used))) from None


def _setting(variable: str) -> str:
    """Return the setting that a variable of the environment is of; nothing if it is of none."""
    name = variable.upper()
    return name.removeprefix(units.PREFIX).lower() if name.startswith(units.PREFIX) else ""


def read_file(path: Path) -> Written:
    """Read a file of settings: TOML, whose keys are the names of the settings.

    Raises:
        ConfigError: it cannot be read or is no TOML, or a key is no setting of a reducer's file.
    """
    try:
        data = path.read_bytes()
        values = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(
            f"{path}, the file of settings, cannot be read: {error.strerror}"
        ) from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path} is no TOML: line {line} has bytes that are no UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        last = f"at line {len(data.splitlines())}, the last"
        said = str(error).replace("at end of document", last)
        raise ConfigError(f"{path} is no TOML: {said[:1].lower()}{said[1:]}") from None
    known = sorted(ReducerConfig.model_fields.keys() - {"config"})
    for key in values:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}: {_meant(key, known)}")
    for key, value in values.items():
        values[key] = _of_toml(key, value)
    return Written(path, values)


def _meant(key: str, known: list[str]) -> str:
    name = key.strip().lower().removeprefix(units.PREFIX.lower()).replace("-", "_")
    if name == "config":
        return "a file cannot name another one"
    if name in WORKER_SETTINGS:
        return "it is a setting of workers, which read their environment alone"
    meant = get_close_matches(name, known, 1)
    return f"did you mean {meant[0]}?" if meant else f"known are {', '.join(known)}"


def _of_toml(key: str, value: Any) -> object:
    """Return a value as an argument has it: TOML tells numbers and true from text."""
    if key == "http" and type(value) is int:
        return str(value)  # a port
    if key == "cpus" and isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, bool) and key != "insecure":
        return str(value).lower()  # pydantic would take true for the number 1
    return value


def explain(error: ValidationError, written: Written) -> str:
    """Say in one line per mistake what is wrong with which setting, and in which file if in one."""
    lines = []
    for mistake in error.errors():
        name = ".".join(map(str, mistake["loc"]))
        message = units.what_to_write(mistake, "8GiB or 8589934592")
        got = f" (got {mistake['input']!r})" if mistake["type"] != "value_error" else ""
        where = f"{written.path}: " if name and mistake["loc"][0] in written.values else ""
        lines.append(f"{where}{name}: {message}{got}" if name else message)
    return "\n".join(lines)
