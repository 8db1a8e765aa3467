"""One rank of `bench.gain`: asks the command what to expect, and then trains in each of the ways.

Started as ``python -m bench.gain_rank SPEC`` with the launcher's usual environment; it reports on
standard output, one JSON object a line.
"""

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import worker_client
from bench import ddp_models
from bench.ddp_models import Workload
from harness.reports import report
from worker_client import config
from worker_client.client.bootstrap import connect
from worker_client.client.client import Client
from worker_client.commands.gain.run import asked, of_script
from worker_client.outer import OuterOptimizer

WARM_UP = 2  # steps: DDP's first has other buckets


def main(spec: str) -> None:
    given = json.loads(spec)
    model, compute_s, steps, every = (given[at] for at in ("model", "compute_s", "steps", "every"))
    options = asked(None, None, "200us", "", every=every, steps=steps)
    script = ["-m", "bench.gain_train", model, str(compute_s)]
    answer = of_script(script, options, as_json=True)
    if answer is not None:
        report("predicted", **answer.facts())
    work = ddp_models.workload(model, compute_s)
    for number, way in enumerate(given["ways"]):
        servers = config.load().servers if way["reducers"] else ()
        wire = way["wire"] or "none"
        client = connect(servers=servers, wire_dtype=wire, job=f"gain-{number}")
        measure = local if way["kind"] == "diloco" else averaged
        report("measured", way=number, step_s=measure(work, client, steps, every))
        dist.barrier()  # a rank that hosts a reducer leaves when all have their last result
        client.shutdown()
    dist.destroy_process_group()


def averaged(work: Workload, client: Client, steps: int, _: int) -> float:
    """Return the mean seconds of a step whose gradients a client averages."""
    model = DistributedDataParallel(work.build(), gradient_as_bucket_view=True)
    worker_client.attach(model, client)
    trainer = Trainer(work, model)
    trainer.train(WARM_UP)
    dist.barrier()
    return trainer.train(steps)


def local(work: Workload, client: Client, _: int, every: int) -> float:
    """Return the mean seconds of a step of DiLoCo, over the steps from one outer step to the next.

    They begin after one that has been made, as before that links are not known.
    """
    model = work.build()
    outer = OuterOptimizer(model, client, every=every)
    trainer = Trainer(work, model, outer)
    trainer.train(every)
    dist.barrier()
    return trainer.train(every)


class Trainer:
    """Makes steps of a model."""

    def __init__(
        self, work: Workload, model: torch.nn.Module, outer: OuterOptimizer | None = None
    ) -> None:
        self._work, self._model, self._outer = work, model, outer
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        self._step = 0

    def train(self, steps: int) -> float:
        """Return the mean seconds of so many steps."""
        begin = time.perf_counter()
        for _ in range(steps):
            torch.autograd.backward(self._work.loss(self._model, dist.get_rank(), self._step))
            self._optimizer.step()
            self._optimizer.zero_grad()
            if self._outer is not None:
                self._outer.step()
            self._step += 1
        return (time.perf_counter() - begin) / steps


def ways(reducers: int) -> list[dict[str, Any]]:
    """Return what is measured: what the command predicts, but for its ring and no exchange."""
    pool = {"kind": "reducers", "reducers": reducers, "wire": ""}
    found = [pool, {**pool, "reducers": 0}, {**pool, "wire": "bf16"}, {**pool, "wire": "int8"}]
    return [*found, {**pool, "kind": "diloco", "wire": "int8"}]


if __name__ == "__main__":
    main(sys.argv[1])
