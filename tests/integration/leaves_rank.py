"""One rank that trains with leaves; what it prints is a fingerprint of its weights.

python -m tests.integration.leaves_rank COUNT STEPS
"""

import hashlib
import os
import sys

import torch

import worker_client
from tests.ranks import write_result
from worker_client import elastic
from worker_client.leaves import LeafSampler, Leaves

SAMPLES, BATCH = 960, 4


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(300, 10)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(count, steps, client):
    """Return the fingerprint of the weights after so many steps."""
    torch.set_num_threads(1)
    model, optimizer = make()
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 20, generator=numbers)
    y = torch.randint(0, 10, (SAMPLES,), generator=numbers)
    leaves = Leaves(model, count, seed=2, client=client, bucket_bytes=8192)
    sampler = LeafSampler(SAMPLES, count, BATCH, seed=3)
    number = 0
    while number < steps:
        if client.spec.elastic:
            state = elastic.sync(model, optimizer, client=client, number=number)
            number = number if state is None else state["number"]
        for step in leaves.attempts(number):
            for leaf in step:
                samples = sampler.samples(number, leaf)
                torch.nn.functional.cross_entropy(model(x[samples]), y[samples]).backward()
        optimizer.step()
        number += 1
    said = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        said.update(parameter.detach().numpy().tobytes())
    return said.hexdigest()


def main():
    count, steps = map(int, sys.argv[1:3])
    if "REDUCTION_SERVERS" not in os.environ:  # ranks that host them find each other by torch
        torch.distributed.init_process_group("gloo")
    with worker_client.init() as client:
        write_result(train(count, steps, client))


if __name__ == "__main__":
    main()
