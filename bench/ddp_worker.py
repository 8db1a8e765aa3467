"""One rank of `bench.ddp`: the same training under several ways to average gradients, in turn.

Started as ``python -m bench.ddp_worker SPEC`` with the launcher's usual environment; it reports on
standard output, one JSON object a line.
"""

import json
import sys
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import worker_client
from bench import ddp_models
from bench.ddp_models import Workload
from harness.reports import digest, report

# Gloo adds in another order, so last bits differ, and they grow with the steps. A single sum that
# lacks a rank, has one twice or is another step's is off by a thousandth of a weight and more.
RELATIVE, ABSOLUTE = 1e-4, 1e-5


class Variant:
    """One way to average gradients, with a model of its own.

    Args:
        name: what the reports call it.
        hook: ``reducers``, ``gloo`` (DDP's own all-reduce) or ``no-op`` (gradients stay local).
        cap_mb: DDP's ``bucket_cap_mb``; None: its default, 25 and a first bucket of 1.
        work: what to train.
    """

    def __init__(self, *, name: str, hook: str, cap_mb: int | None, work: Workload) -> None:
        self.name = name
        self.hook = hook
        self.model = DistributedDataParallel(
            work.build(),
            init_sync=False,  # all ranks build the same weights
            bucket_cap_mb=cap_mb,
            gradient_as_bucket_view=True,  # half the memory, and a copy less
        )
        if hook == "reducers":
            worker_client.attach(self.model)
        elif hook == "no-op":
            self.model.register_comm_hook(None, noop_hook)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self._work = work
        self._step = 0

    def train(self, steps: int) -> dict[str, Any]:
        """Train and return the seconds of each step, and of all backward passes and CPU use."""
        ends, backward_s = [time.perf_counter()], 0.0
        cpu_s = time.process_time()
        for _ in range(steps):
            loss = self._work.loss(self.model, dist.get_rank(), self._step)
            start = time.perf_counter()
            torch.autograd.backward(loss)
            backward_s += time.perf_counter() - start
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._step += 1
            ends.append(time.perf_counter())
        return {
            "steps_s": [after - before for before, after in pairwise(ends)],
            "backward_s": backward_s / steps,
            "cpu_s": (time.process_time() - cpu_s) / steps,
        }

    def weights(self) -> list[torch.Tensor]:
        """Return the model's parameters without their history."""
        return [parameter.detach() for parameter in self.model.parameters()]


class Exchange:
    """Times one all-reduce of as many bytes as the model's gradients have, in one buffer."""

    def __init__(self, nbytes: int) -> None:
        self._client = worker_client.init()
        self._buffer = torch.zeros(nbytes // 4)

    def measure(self, hook: str) -> float:
        """Return the seconds that it takes this rank, all having started together."""
        dist.barrier()
        start = time.perf_counter()
        if hook == "reducers":
            self._client.all_reduce(self._buffer, op="mean").wait()
        else:
            dist.all_reduce(self._buffer)
        return time.perf_counter() - start


def unlike(weights: list[torch.Tensor], reference: list[torch.Tensor]) -> tuple[int, float]:
    """Return how many numbers differ by more than rounding, and the largest difference."""
    wrong, largest = 0, 0.0
    for one, other in zip(weights, reference, strict=True):
        difference = (one - other).abs_()
        allowed = other.abs().mul_(RELATIVE).add_(ABSOLUTE)
        wrong += difference.numel() - int((difference <= allowed).sum())  # NaN is wrong
        largest = max(largest, float(difference.max()))
    return wrong, largest


def run(
    *,
    model: str,
    compute_s: float,
    variants: list[dict[str, Any]],
    steps: int,
    warmup: int,
    rounds: int,
) -> None:
    """Train all variants in turn, `rounds` times; report every turn and at the end the weights.

    These are compared with those of the first variant that has the hook ``gloo``. Steps of `warmup`
    are not timed: DDP's first step has one bucket with the whole model, and its second is the first
    with real ones.
    """
    work = ddp_models.workload(model, compute_s)
    contenders = [Variant(work=work, **variant) for variant in variants]
    exchange = Exchange(ddp_models.nbytes(model))
    for contender in contenders:
        contender.train(warmup)
    for hook in ("reducers", "gloo"):
        exchange.measure(hook)
    for number in range(rounds):
        first = number % len(contenders)  # so that nobody always follows the same one
        for contender in contenders[first:] + contenders[:first]:
            dist.barrier()
            report("turn", variant=contender.name, **contender.train(steps))
        for hook in ("reducers", "gloo"):
            report("exchange", hook=hook, seconds=exchange.measure(hook))
    reference = next(one for one in contenders if one.hook == "gloo").weights()
    for contender in contenders:
        if contender.hook != "no-op":
            weights = contender.weights()
            wrong, largest = unlike(weights, reference)
            report(
                "end",
                variant=contender.name,
                digest=digest(weights),
                unlike=wrong,
                largest_difference=largest,
                weights=sum(tensor.numel() for tensor in weights),
            )


def main(spec: str) -> None:
    torch.set_num_threads(1)  # several ranks share the machine
    dist.init_process_group("gloo")
    try:
        run(**json.loads(spec))
        dist.barrier()  # a rank that hosts a reducer leaves when all have their last result
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
