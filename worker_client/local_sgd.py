"""Local SGD of PyTorch through a client's reducers: its hook and its averager, for `attach`.

    state = PostLocalSGDState(None, node, start_localSGD_iter=100)
    client = worker_client.ddp.attach(model, wrapper=post_local_sgd(state))
    averager = PeriodicModelAverager(period=4, warmup_steps=100, client=client)
    optimizer = PostLocalSGDOptimizer(optimizer, averager)

Torch's own averagers and hook use a process group. They need nothing of this module if that is one
of the backend ``reduction`` and the model is on the CPU.
"""

# No `from __future__ import annotations`: DDP inspects the hook's annotations as objects.
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch._C._distributed_c10d import GradBucket  # what torch.distributed.GradBucket is
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging import averagers, utils

import worker_client
from worker_client._packing import Pack

if TYPE_CHECKING:
    from worker_client.client.client import Client

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def post_local_sgd(state: PostLocalSGDState) -> Callable[[Hook], Hook]:
    """Return a wrapper of DDP hooks, which then average the gradients of the first steps alone.

    Args:
        state: torch's: from its ``start_localSGD_iter`` on, torch's `post_localSGD_hook` does the
            rest, which averages in the state's subgroup or nowhere. `attach` has made what
            averages before that, so the state's ``process_group`` is not used.

    Returns:
        What takes a hook, such as `worker_client.ddp.reduction_hook`, and returns one.
    """

    def wrap(hook: Hook) -> Hook:
        def post_local_hook(given: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if state.iter < state.start_localSGD_iter:
                state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]
                return hook(given, bucket)
            return post_localSGD_hook(state, bucket)

        return post_local_hook

    return wrap


class PeriodicModelAverager(averagers.PeriodicModelAverager):
    """Torch's averager of parameters, whose means the reducers of a client take.

    Args:
        period: steps from one averaging to the next.
        warmup_steps: steps before the first.
        client: the one to use; `worker_client.init()`'s by default. Its ranks are to be those of
            the default process group, which torch's class asks for.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, client: Optional["Client"] = None
    ) -> None:
        super().__init__(period, warmup_steps)
        self._client = worker_client.init() if client is None else client

    def average_parameters(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, torch.nn.Parameter]]
    ) -> None:
        """Count a step, and average at the end of a period.

        Args:
            params: a model's parameters, or an optimizer's groups; those without a gradient are
                left alone, and must be the same at every rank.

        Raises:
            ReductionError: as `Work.wait`; the parameters are as before, at this rank.
        """
        after = self.step - self.warmup_steps
        self.step += 1
        if after >= 0 and after % self.period == 0:
            self._average(utils.get_params_to_average(params))

    def _average(self, parameters: list[torch.nn.Parameter]) -> None:
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in parameters:
            tensor = parameter.detach()
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        packs = [Pack(tensors) for tensors in alike.values()]
        for work in [self._client.all_reduce(pack.buffer, "mean", exact=True) for pack in packs]:
            work.wait()
        for pack in packs:
            pack.unpack()
