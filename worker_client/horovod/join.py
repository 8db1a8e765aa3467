"""`join()`: a rank without data left takes part in what the others still do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reducer.errors import ConfigError
from reducer.wire.constants import DType
from worker_client.horovod.announcements import Call, Kind
from worker_client.horovod.handles import wait_for_all
from worker_client.horovod.job import CURRENT
from worker_client.horovod.ops import Op, neutral, on_the_wire, torch_dtype

if TYPE_CHECKING:
    from worker_client.horovod.handles import Waitable
    from worker_client.horovod.job import Job


def join(device: int = -1) -> int:
    """Wait until every rank has called it, and take part in the others' calls meanwhile.

    Others may go on with all-reduces and with steps of `DistributedOptimizer`; this rank
    contributes what changes nothing (zeros to a sum), and averages are still over all ranks. Its
    own weights stay as they are.

    Args:
        device: -1 for the CPU.

    Returns:
        The highest of the ranks that took part in the last call before all had joined. Every rank
        returns the same.

    Raises:
        ConfigError: another device; or others make a call that needs this rank's data.
        ReductionError: as `Client.all_reduce`.
    """
    if device != -1:
        raise ConfigError(f"join() works on the CPU, got device {device}: leave it out")
    job = CURRENT.job
    # Of the latest call, which this rank may have made itself: so all ranks return the same. After
    # an earlier join() there may be none.
    last = job.announcements.active() or list(range(job.client.world_size))
    works: list[Waitable] = []
    while True:
        active, call = job.announcements.hear()
        if call is None:
            break
        last = active
        done = [work for work in works if work.done()]
        wait_for_all(done)  # which raises the error of one that failed
        works = [work for work in works if work not in done] + _stand_in(job, active, call)
    wait_for_all(works)
    return max(last)


def _stand_in(job: Job, active: list[int], call: Call) -> list[Waitable]:
    """Start what this rank contributes to a call of the active ranks."""
    if call.kind is Kind.STEP:
        optimizer = job.optimizers[call.size]() if call.size < len(job.optimizers) else None
        if optimizer is None:
            raise ConfigError(
                f"ranks {active} step an optimizer (number {call.size}) that rank "
                f"{job.client.rank} has not, or no longer: keep it until after join()"
            )
        started: list[Waitable] = optimizer.stand_in()
        return started
    if call.kind is Kind.ALL_REDUCE:
        dtype = torch_dtype(DType(call.dtype).name.lower())
        data = neutral(Op(call.op), call.size, dtype)
        return [job.client.all_reduce(data, on_the_wire(Op(call.op), dtype), name=call.name)]
    raise ConfigError(
        f"ranks {active} call {call.name}, which needs rank {job.client.rank}'s data, but it has "
        "joined: until all have joined, only all-reduces and optimizer steps are possible"
    )
