"""One rank of the demo: a small convolutional network learns handwritten digits.

Started as ``python -m worker_client.commands.demo.train SPEC`` with the launcher's usual
environment; it reports on standard output, one JSON object a line.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import worker_client
from worker_client.ddp import DEFAULT_BUCKET_CAP_MB

TEST_IMAGES = 360  # of 1797


class Digits(nn.Module):
    """Two convolutions and two linear layers for 8x8 grey images of ten digits.

    All layers are smooth. Gloo adds in another order than reducers do, so gradients differ in their
    last bits, which ReLU and max pooling amplify wherever one turns the other way: after 8 epochs
    of 4 workers weights differ by 1e-2 with those, and by 1e-7 with these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.GroupNorm(8, 32),  # unlike BatchNorm it keeps no state of each rank's own images
            nn.GELU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.GroupNorm(8, 64),
            nn.GELU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
        )
        self.classify = nn.Sequential(nn.Linear(64 * 16, 128), nn.GELU(), nn.Linear(128, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return ten scores per image; `images` has shape (n, 1, 8, 8)."""
        scores: torch.Tensor = self.classify(self.features(images))
        return scores


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (1797, 1, 8, 8) in [0, 1] and labels (1797,), shuffled alike at every rank."""
    images, labels = load_digits(return_X_y=True)
    scaled = torch.tensor(images / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(scaled), generator=torch.Generator().manual_seed(0))
    return scaled[order], torch.tensor(labels)[order]


def report(event: str, **values: Any) -> None:
    """Tell the parent process."""
    print(json.dumps({"event": event, "rank": dist.get_rank(), **values}), flush=True)  # noqa: T201


def digest(state: dict[str, torch.Tensor]) -> str:
    """Return a fingerprint of every bit of a model's state."""
    fingerprint = hashlib.sha256()
    for name, tensor in state.items():
        fingerprint.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        fingerprint.update(tensor.contiguous().numpy().tobytes())
    return fingerprint.hexdigest()


def end_with_parent() -> None:
    """End this process when its standard input ends, as it does however the parent dies."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def train(*, through_reducers: bool, epochs: int, batch: int, weights_to: str) -> None:
    """Train; report each step's loss, at the end accuracy, speed and a digest of the weights.

    Rank 0's final weights go to the file `weights_to`, as one flat NumPy array.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Digits(), bucket_cap_mb=DEFAULT_BUCKET_CAP_MB)
    client = worker_client.attach(model) if through_reducers else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    images, labels = load()
    training = len(images) - TEST_IMAGES
    steps = training // (batch * world_size)
    start = time.perf_counter()
    for epoch in range(epochs):
        order = torch.randperm(training, generator=torch.Generator().manual_seed(epoch))
        for step in range(steps):
            first = (step * world_size + rank) * batch
            mine = order[first : first + batch]
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            report("step", loss=loss.item(), of=epochs * steps)
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        guessed = model.module(images[training:]).argmax(1)
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    if rank == 0:
        np.save(weights_to, weights.numpy())
    report(
        "end",
        accuracy=(guessed == labels[training:]).float().mean().item(),
        samples_per_s=epochs * steps * batch * world_size / seconds,
        bytes_reduced=client.bytes_reduced if client else 0,
        digest=digest(model.module.state_dict()),
    )
    if client:
        client.shutdown()


def main(spec: str) -> None:
    """Run one rank as `spec`, a JSON object of `train`'s arguments, says."""
    end_with_parent()
    logging.basicConfig()  # warnings and no more: what is said last tells why a rank failed
    torch.set_num_threads(1)  # several ranks share the machine, and sums must not depend on it
    dist.init_process_group("gloo")
    try:
        train(**json.loads(spec))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # A thread of Gloo may still let go of the last work, and would abort this process if the
    # interpreter ended meanwhile (PyTorch's pull request 179291).
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
