"""The reference as the client of `worker_client.init`, where ``REDUCTION_IMPL=plain`` asks for it.

It makes blocking all-reduces, and refuses what else a `Client` does. It is a module of its own, as
it alone loads libzmq.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reducer.errors import ConfigError, ReductionError
from reducer.wire.constants import DType, ReduceOp
from worker_client import reference
from worker_client.staging.arguments import parse
from worker_client.staging.host_buffer import host_buffer

if TYPE_CHECKING:
    from worker_client.config import WorkerConfig

# What settings are that the reference does not have.
_WITHOUT = {
    "generation": 0,
    "streams": 0,
    "port_buffer": None,
    "fallback": "error",
    "on_rank_lost": "error",
    "join": False,
    "hierarchy": "off",
    "wire_dtype": "none",
    "keys": None,
    "encrypt": False,
    "timeline": None,
    "dump": None,
}

log = logging.getLogger(__name__)


def needs_compiled(what: str) -> ConfigError:
    """Say that the reference does not do something."""
    return ConfigError(
        f"{what} takes the compiled client: leave out REDUCTION_IMPL=plain, which starts the "
        "reference, or set REDUCTION_IMPL=compiled"
    )


class EndedWork(NamedTuple):
    """The handle of an all-reduce that has been made; see `worker_client.work.Work`."""

    data: Any
    error: ReductionError | None

    def wait(self, timeout: float | str | None = None) -> Any:
        """Return the array or tensor, or raise why it was not reduced."""
        del timeout
        if self.error is not None:
            raise self.error
        return self.data

    def done(self) -> bool:
        """Say that it has ended."""
        return True


class ReferenceClient:
    """One rank of a job, as `worker_client.client.client.Client` for what the reference does.

    It measures nothing, and has no `summary`.

    Raises:
        ConfigError: the settings take the compiled client.
        ReductionError: as `worker_client.init`.
    """

    impl = "plain"

    def __init__(self, settings: WorkerConfig, job: str, rank: int, world_size: int) -> None:
        for name, without in _WITHOUT.items():
            if getattr(settings, name) != without:
                raise needs_compiled(f"REDUCTION_{name.upper()}")
        if settings.embedded or not settings.servers:
            raise needs_compiled("a job whose ranks host reducers")
        log.warning("REDUCTION_IMPL=plain: the reference serves, slowly, for private networks")
        self.rank, self.world_size, self.usable = rank, world_size, True
        self._reference = reference.Client(
            *(settings.servers, job, rank, world_size),
            chunk_bytes=int(settings.chunk_bytes),
            timeout_s=settings.timeout,
            patience_ms=round(1000 * settings.patience),
        )

    def all_reduce(self, data: Any, op: str | ReduceOp = ReduceOp.MEAN, **more: Any) -> EndedWork:
        """Make an all-reduce; as `Client.all_reduce`, of contiguous data in host memory."""
        view, dtype, write_back = host_buffer(data)
        reduction, _ = parse(dtype, op, None, None, 0.0)
        if more or write_back is not None or dtype is DType.BFLOAT16:
            raise needs_compiled("what is not contiguous, of bfloat16, or with a name or the like")
        try:
            self._reference.all_reduce(np.frombuffer(view, dtype.name.lower()), reduction.name)
        except ReductionError as error:
            return EndedWork(data, error)
        return EndedWork(data, None)

    def shutdown(self) -> None:
        """Leave the job. May be called again."""
        if self.usable:
            self.usable = False
            self._reference.close()

    def __enter__(self) -> ReferenceClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> Any:
        raise needs_compiled(f"client.{name}")
