"""One rank of `torture.leaves`: a training with leaves, which prints its steps and at last a hash.

    python -m torture.leaves_rank STEPS LEAVES [join]

Its settings are in its environment.
"""

import hashlib
import os
import sys

import torch

import worker_client
from harness.processes import say
from worker_client import elastic
from worker_client.client.client import Client
from worker_client.leaves import LeafSampler, Leaves

SAMPLES, BATCH, WIDTH = 4000, 4, 64


def main() -> None:
    """Train, beside ranks that die and join."""
    steps, count = map(int, sys.argv[1:3])
    if "REDUCTION_SERVERS" not in os.environ:  # ranks that host them find each other by torch
        torch.distributed.init_process_group("gloo")
    with worker_client.init(join="join" in sys.argv) as client:
        say({"fingerprint": train(client, steps, count)})


def train(client: Client, steps: int, count: int) -> str:
    """Return a fingerprint of the weights after so many steps of `count` leaves."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(WIDTH, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(SAMPLES, 20)
    y = x[:, :10].argmax(dim=1)
    leaves = Leaves(model, count, seed=2, client=client, bucket_bytes=4096)
    sampler = LeafSampler(SAMPLES, count, BATCH, seed=3)
    number = 0
    while number < steps:
        if client.spec.elastic:
            state = elastic.sync(model, optimizer, client=client, number=number)
            number = number if state is None else state["number"]
        say({"step": number, "present": client.present})
        for step in leaves.attempts(number):
            for leaf in step:
                samples = sampler.samples(number, leaf)
                loss = torch.nn.functional.cross_entropy(model(x[samples]), y[samples])
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        number += 1
    said = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        said.update(parameter.detach().numpy().tobytes())
    return said.hexdigest()


if __name__ == "__main__":
    main()
