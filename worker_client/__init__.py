"""The worker's side of the reduction server: `init()`, `all_reduce()`, and `attach()` for DDP."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Parameter
    from torch.nn.parallel import DistributedDataParallel
    from typing_extensions import Unpack

    from worker_client.client.client import Client
    from worker_client.config import InitSettings
    from worker_client.work import Work

__all__ = ["Client", "Work", "attach", "batch_part", "init"]

_LAZY = {"Client": "worker_client.client.client", "Work": "worker_client.work"}


def init(**settings: Unpack[InitSettings]) -> Client:
    """Join the job and return the process's client; a second call returns the same one.

    It takes keyword arguments only. What is not given comes from ``REDUCTION_*`` environment
    variables, then from defaults (`worker_client.config.WorkerConfig` describes each).

    Args:
        servers: ``"host:port,host:port"`` or a list, the same at every rank. None given anywhere:
            every rank hosts a reducer for its share.
        embedded: whether every rank hosts a reducer besides the servers, if there are fewer of them
            than ranks; by default only without servers.
        rank: by default the process group's, or the launcher's RANK.
        world_size: by default the process group's, or the launcher's WORLD_SIZE.
        job: name of the job on the reducers.
        generation: membership version; a later one ends an earlier one of the same job.
        chunk_bytes: size of a chunk, such as ``"256KiB"``; ``"auto"`` follows what links carry.
        window_bytes: bytes in flight over all reducers, such as ``"16MiB"``, or ``"auto"``.
        timeout: seconds (or ``"300s"``, ``"5ms"``) after which an all-reduce fails.
        connect_timeout: seconds for all reducers to answer now.
        fusion_threshold: most bytes of a fusion buffer, such as ``"64MiB"``; 0 to pack nothing.
        cycle_time: seconds that a tensor with a name waits for the next one, if nobody waits.
        on_rank_lost: ``"error"``: all-reduces that need a lost rank fail; ``"continue"``: the
            others make them without it and go on, means being over those that are present.
        join: whether this rank joins a job that runs already, with ``on_rank_lost="continue"``, as
            soon as its ranks call `worker_client.elastic.sync` or `Client.admit`.
        hierarchy: ``"auto"``: if several nodes have equally many ranks, those of a node reduce
            among themselves first, so that its network card carries each buffer once, and results
            may differ in the last place; or ``"off"``.
        wire_dtype: ``"bf16"``, ``"fp16"``, ``"int8"`` or ``"fp8_e4m3"``: float32 buffers from 16
            KiB on travel in 16 bits, or 8 and a scale for 252 values, the same at every rank; or
            ``"none"``.
        keys: directory of the job's keys, as `reducer keygen` makes it.
        encrypt: whether connections to reducers that ranks host are encrypted; with keys they are.

    Raises:
        TypeError: there is no argument of this name.
        ConfigError: a setting is wrong or missing; the message says what to write.
        ReducerLostError: a reducer did not answer; the message names it.
        ReductionError: a reducer refused this worker; the class says why.
    """
    import_module("worker_client.config").refuse_unknown_arguments("init", settings)
    client: Client = import_module("worker_client.client.bootstrap").DEFAULT.get(**settings)
    return client


def attach(
    ddp_model: DistributedDataParallel,
    client: Client | None = None,
    *,
    exclude: Callable[[str, Parameter], bool] | None = None,
) -> Client:
    """Let a DDP model's gradients be averaged by the reducers: the one line.

    Args:
        ddp_model: the wrapped model, before its first backward pass.
        client: the one to use; `init()`'s by default.
        exclude: with a wire dtype: called with the name of each of the module's parameters and the
            parameter; returns whether its gradients stay exact, the same at every rank. Those
            smaller than 16 KiB do anyway.

    Returns:
        The client in use.

    Raises:
        ConfigError: the model is wrapped in a way that a communication hook cannot serve; the
            message says what to change.
    """
    used: Client = import_module("worker_client.ddp").attach(ddp_model, client, exclude=exclude)
    return used


def batch_part(samples: int) -> range:
    """Return which samples of a global batch are this rank's, by `REDUCTION_BATCH_SHARES`.

    The ranks' parts follow each other, and together are the batch. Give the number of a rank's
    samples as the weight of its gradients (`worker_client.ddp.ReductionState.weight`): their mean
    is then that of the whole batch.

    Args:
        samples: of the global batch, the same at every rank; at least one for each.

    Raises:
        ConfigError: there are fewer, or shares are not as many as ranks.
    """
    part: range = import_module("worker_client.config").batch_part(samples)
    return part


def __getattr__(name: str) -> Any:
    # Looked up on first use: importing this package loads neither NumPy nor ZeroMQ.
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
