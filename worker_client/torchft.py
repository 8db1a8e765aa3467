"""torchft over reducers: a process group for its manager that is made anew for every quorum.

    from worker_client.torchft import DistributedDataParallel, ProcessGroupReduction

    manager = torchft.Manager(pg=ProcessGroupReduction(), ...)
    model = DistributedDataParallel(manager, model)

All-reduces and reduce-scatters go through reducers, the rest through Gloo, as with the backend
``reduction`` (`worker_client.torch_backend`). Each quorum is a job of its own, ``JOB.torchft.ID``.
"""

# No `from __future__ import annotations`: DDP inspects the hook's annotations as objects.

import secrets

import torch
from torch._C._distributed_c10d import GradBucket, Store, _DistributedBackendOptions
from torchft import ddp
from torchft.manager import Manager
from torchft.process_group import ProcessGroupWrapper

from worker_client.torch_backend import ReductionGroup


class ProcessGroupReduction(ProcessGroupWrapper):  # type: ignore[misc] # (torchft is not looked at)
    """The process group of a quorum's replicas, whose reductions go through reducers.

    Args:
        timeout: of each reduction, and of the meeting of a new quorum's replicas; a timedelta, 60 s
            by default. A replica that dies is noticed sooner, by ``REDUCTION_PATIENCE``.

    Raises:
        ConfigError, ReductionError: not here, but of `configure`: as `worker_client.init`, and what
            torch's store raises. torchft's manager takes them for a failed step.
    """

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return what torch's logs call this group."""
        return "torchft-reduction"

    def shutdown(self) -> None:
        """Leave the quorum's job; what is in progress fails."""
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()

    def _create_pg(self, store: Store, rank: int, world_size: int) -> ReductionGroup:
        options = _DistributedBackendOptions()
        options.store = store
        options.group_rank, options.group_size = rank, world_size
        options.timeout = self._timeout
        # A name of its own: each training numbers its quorums from 1, and a quorum of an earlier
        # one may be there still.
        if rank == 0:
            store.set("reduction/quorum", secrets.token_hex(4))
        options.group_id = f"torchft.{store.get('reduction/quorum').decode()}"
        options.global_ranks_in_group = list(range(world_size))
        group = ReductionGroup(options)
        try:
            if world_size > 1:
                group.join()  # here, where all are: in a step one may be missing
        except BaseException:
            group.shutdown()
            raise
        return group


class DistributedDataParallel(ddp.DistributedDataParallel):  # type: ignore[misc] # (as above)
    """torchft's DDP, whose process goes on when a replica dies in the middle of an all-reduce.

    torchft's own hook asserts then that the all-reduce has a future, which one that failed has not
    (its pull request 294): with any process group, the replicas that are left would end.

    Args:
        manager: of this replica.
        module: to train.
        **kwargs: for torch's DDP.
    """

    @staticmethod
    def _comm_hook(state: Manager, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        # False if it failed: the manager knows, and this step is not committed.
        state.allreduce(buffer).wait()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future
