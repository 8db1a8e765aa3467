"""From settings to a client: who am I, where are the reducers, what is the job called."""

from __future__ import annotations

import atexit
import logging
import secrets
from typing import TYPE_CHECKING, Any

from reducer.errors import ConfigError
from reducer.failpoints import parse
from reducer.wire.layout import mixed_weights
from worker_client import config, process_group
from worker_client.client import Client
from worker_client.settings import Settings
from worker_client.wire_cast import WIRE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reducer.server import Server
    from worker_client.config import WorkerConfig
    from worker_client.fallback import Fallback
    from worker_client.process_group import ProcessGroup

log = logging.getLogger(__name__)


def connect(
    *,
    servers: str | Sequence[str] | None = None,
    embedded: bool | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    job: str | None = None,
    generation: int | None = None,
    chunk_bytes: int | str | None = None,
    window_bytes: int | str | None = None,
    timeout: float | str | None = None,
    connect_timeout: float | str | None = None,
    on_rank_lost: str | None = None,
    wire_dtype: str | None = None,
) -> Client:
    """Join a job and return a client of its own; `worker_client.init` describes the arguments."""
    settings = config.load(
        servers=servers,
        embedded=embedded,
        job=job,
        generation=generation,
        chunk_bytes=chunk_bytes,
        window_bytes=window_bytes,
        timeout=timeout,
        connect_timeout=connect_timeout,
        on_rank_lost=on_rank_lost,
        wire_dtype=wire_dtype,
    )
    # Explicit ranks may differ from the process group's, which then cannot tell us anything.
    group = process_group.current() if rank is None and world_size is None else None
    rank, world_size = _identify(rank, world_size, group)
    fallback = _fallback(settings, group)
    addresses, weights = settings.servers, (1,) * len(settings.servers)
    hosts: dict[int, int] = {}
    hosted: Server | None = None
    if _hosts_reducer(settings, world_size):
        hosted, own = _embed(group)
        hosts = {len(addresses) + at: at for at in range(world_size)}
        addresses, weights = addresses + own, mixed_weights(world_size, len(addresses))
    try:
        return Client(
            Settings(
                job=_job_name(settings, group),
                generation=settings.generation,
                rank=rank,
                world_size=world_size,
                reducers=addresses,
                window_bytes=int(settings.window_bytes),
                chunk_bytes=int(settings.chunk_bytes),
                fallback=fallback is not None,
                outlive=settings.on_rank_lost == "continue",
                weights=weights,
                hosts=hosts,
                inproc=hosted.inproc if hosted else {},
            ),
            timeout_s=settings.timeout,
            connect_timeout_s=settings.connect_timeout,
            impl=settings.impl,
            io_threads=settings.io_threads,
            context=hosted.context if hosted else None,
            fallback=fallback,
            on_shutdown=hosted.stop if hosted else None,
            failpoints=parse(settings.failpoints),
            wire_dtype=WIRE_DTYPES[settings.wire_dtype],
        )
    except BaseException:
        if hosted is not None:
            hosted.stop()
        raise


class Default:
    """The client that `worker_client.init` made, kept so that the next call returns it."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._arguments: dict[str, Any] = {}

    def get(self, **arguments: Any) -> Client:
        """Return the client, made with these arguments if there is none.

        Raises:
            ConfigError: there is one, made with other arguments.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        if self._client is not None and self._client.usable:
            if given and given != self._arguments:
                raise ConfigError(
                    "worker_client.init() was called before with other arguments: call "
                    "shutdown() on that client first"
                )
            return self._client
        self._client, self._arguments = connect(**given), given
        atexit.register(self._client.shutdown)  # say goodbye, so that nobody waits for us
        return self._client


def _identify(
    rank: int | None, world_size: int | None, group: ProcessGroup | None
) -> tuple[int, int]:
    if group is not None:
        return group.rank, group.world_size
    launched = config.launch()
    rank = launched.rank if rank is None else rank
    world_size = launched.world_size if world_size is None else world_size
    if rank is None or world_size is None:
        raise ConfigError(
            "rank and world size are unknown: start the script with torchrun, call "
            "torch.distributed.init_process_group() first, or pass rank= and world_size="
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in a world of size {world_size}")
    return rank, world_size


def _hosts_reducer(settings: WorkerConfig, world_size: int) -> bool:
    """Whether this rank hosts a reducer: with as many others as ranks, it would have no share."""
    if settings.embedded is False and not settings.servers:
        raise ConfigError(
            "there are no reducers: set REDUCTION_SERVERS=host:port,host:port, or do not set "
            "REDUCTION_EMBEDDED=0"
        )
    if settings.embedded is None:
        return not settings.servers
    return settings.embedded and len(settings.servers) < world_size


def _fallback(settings: WorkerConfig, group: ProcessGroup | None) -> Fallback | None:
    if settings.fallback == "error":
        return None
    if group is None:
        raise ConfigError(
            "REDUCTION_FALLBACK=process-group needs a process group: call "
            "torch.distributed.init_process_group() before worker_client.init(), and leave out "
            "rank= and world_size="
        )
    from worker_client.fallback import Fallback  # noqa: PLC0415 (loads torch)

    return Fallback(process_group.private_group(settings.timeout))


def _embed(group: ProcessGroup | None) -> tuple[Server, tuple[str, ...]]:
    if group is None:
        raise ConfigError(
            "there are no reducers to use: set REDUCTION_SERVERS=host:port,host:port, or call "
            "torch.distributed.init_process_group() first, so that each rank can host one"
        )
    from worker_client import embedded  # noqa: PLC0415 (loads the reducer's code)

    return embedded.start(group)


def _job_name(settings: WorkerConfig, group: ProcessGroup | None) -> str:
    if settings.job is not None:
        return settings.job
    base = config.launch().torchelastic_run_id
    base = base if base and base != "none" else "job"
    if group is None:
        return base if base != "job" else "default"
    if group.rank == 0:
        # Two runs that share a pool must not meet in one job, nor a run its own predecessor.
        group.share("job", f"{base[:24]}-{secrets.token_hex(4)}")
    return group.read("job", 0)


DEFAULT = Default()
