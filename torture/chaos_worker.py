"""One rank of `torture.chaos`: trains until it is told to stop, and reports after each step.

Started as ``python -m torture.chaos_worker SPEC`` with the launcher's usual environment; it reports
on standard output, one JSON object a line. Whatever happens to reducers, the weights after a
step depend on nothing but its number.
"""

import json
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import worker_client
from harness.reports import digest, report
from reducer.errors import ReductionError

LAYERS = (211, 307, 401, 293, 277, 11)  # numbers that chunks and SIMD lanes do not divide
BUCKET_CAP_MB = 0.4  # cuts the 1.5 MB of gradients into 4 buckets, of 0.3 to 0.5 MB
BATCH = 8
STOP_EVERY = 8  # steps between two at which ranks may stop


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width, after in pairwise(LAYERS):
        layers += [nn.Linear(width, after), nn.Tanh()]
    return nn.Sequential(*layers)


class Trainer:
    """A model, its optimizer, and data that depend on seed, step and rank alone."""

    def __init__(self, seed: int) -> None:
        self.model = DistributedDataParallel(build(), bucket_cap_mb=BUCKET_CAP_MB)
        self._seed = seed
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self, number: int) -> None:
        """Make one step.

        Raises:
            ReductionError: the step is lost.
        """
        generator = torch.Generator()
        generator.manual_seed((self._seed << 40) + (number << 10) + dist.get_rank())
        images = torch.randn(BATCH, LAYERS[0], generator=generator)
        wanted = torch.randn(BATCH, LAYERS[-1], generator=generator)
        self._optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(self.model(images), wanted))
        self._optimizer.step()

    def digest(self) -> str:
        """Return a fingerprint of all weights' bits."""
        return digest(parameter.detach() for parameter in self.model.parameters())


def train(*, seed: int, steps: int | None) -> None:
    """Train; report each step, and the weights wherever ranks may stop.

    `steps`, after which to stop, are a multiple of `STOP_EVERY`; None: when standard input says.
    """
    trainer = Trainer(seed)
    client = worker_client.attach(trainer.model)
    told = threading.Event()
    threading.Thread(target=_listen, args=(told,), daemon=True).start()
    number, stop = 0, torch.zeros(1)
    while not stop.item():
        began, error = time.monotonic(), ""
        try:
            trainer.step(number)
        except ReductionError as refusal:
            error = f"{type(refusal).__name__}: {refusal}"
        ended = time.monotonic()
        report("step", step=number, began=began, ended=ended, error=error, uses=client.in_use)
        number += 1
        if number % STOP_EVERY == 0:
            stop.fill_(told.is_set() if steps is None else number >= steps)
            dist.broadcast(stop, 0)  # so that all ranks stop at the same step
            report("weights", step=number, digest=trainer.digest())
    report("end", **client.counters._asdict())


def _listen(told: threading.Event) -> None:
    sys.stdin.readline()
    told.set()


def main(spec: str) -> None:
    torch.set_num_threads(1)  # several ranks share the machine, and sums must not depend on it
    dist.init_process_group("gloo")
    try:
        arguments: dict[str, Any] = json.loads(spec)
        train(**arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
