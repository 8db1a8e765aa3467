"""One rank of test_fallback: all-reduces until it is told to stop, and checks every result.

Started as ``python -m tests.integration.fallback_rank SPEC`` with the launcher's usual environment.
All contributions are small whole numbers, so that sums are the same in any order.
"""

import json
import logging
import sys
import threading

import numpy as np
import torch
import torch.distributed as dist

import worker_client
from harness.reports import report
from reducer.errors import ReductionError

KINDS = [  # dtype, op, elements; several chunks to each reducer, one, less than one, none
    (torch.float32, "mean", 300_000),
    (torch.bfloat16, "sum", 70_001),
    (torch.float16, "mean", 1_000),
    (torch.float64, "max", 9_999),
    (torch.int64, "sum", 5),
    (torch.uint8, "min", 40_000),
    (torch.float32, "sum", 0),
    (torch.int8, "product", 77),
    (torch.int32, "sum", 200_000),
]
IN_FLIGHT = 5
STOP_EVERY = 4


class Said(logging.Handler):
    """Counts what is said of the fallback."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.count = self.back = 0

    def emit(self, record):
        self.count += "go through the process group" in record.getMessage()
        self.back += "go through them again" in record.getMessage()


def contribution(number, rank):
    dtype, op, count = KINDS[number % len(KINDS)]
    rng = np.random.default_rng([number, rank])
    values = torch.from_numpy(rng.integers(1, 4, count)).to(dtype)
    if op == "max" and rank == 1:
        values[::7] = torch.nan
    return values


def expected(number, world_size):
    dtype, op, _ = KINDS[number % len(KINDS)]
    inputs = torch.stack([contribution(number, rank).double() for rank in range(world_size)])
    if op == "mean":  # in fp32, and rounded once
        return (inputs.sum(0).float() * (torch.tensor(1.0) / world_size)).to(dtype)
    reductions = {"sum": inputs.sum, "max": inputs.amax, "min": inputs.amin, "product": inputs.prod}
    return reductions[op](0).to(dtype)


def step(client, first):
    """Make some all-reduces at once; return what was wrong."""
    tensors = [contribution(first + at, client.rank) for at in range(IN_FLIGHT)]
    works = [
        client.all_reduce(tensor, op=KINDS[(first + at) % len(KINDS)][1])
        for at, tensor in enumerate(tensors)
    ]
    for at, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        try:
            work.wait(60)
        except ReductionError as error:
            return f"{type(error).__name__}: {error}"
        right = expected(first + at, client.world_size)
        exact = tensor.dtype is not torch.float32 or client.world_size in {1, 2, 4}
        tolerance = 0.0 if exact else 3e-7
        if not torch.allclose(tensor, right, rtol=tolerance, atol=0.0, equal_nan=True):
            return f"call {first + at}: wrong"
    return ""


def disagree(client):
    """Ask for something else at rank 0 than elsewhere; return what came of it."""
    try:
        client.all_reduce(torch.ones(100 + (client.rank == 0)), op="sum").wait(60)
    except ReductionError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main():
    said = Said()
    logging.getLogger("worker_client").addHandler(said)
    dist.init_process_group("gloo")
    client = worker_client.init()
    told = threading.Event()
    threading.Thread(target=lambda: sys.stdin.readline() and told.set(), daemon=True).start()
    number, stop, error = 0, torch.zeros(1), ""
    while not (stop.item() or error):
        error = step(client, number * IN_FLIGHT)
        counters = client.counters
        gone = counters.fallbacks, counters.returns
        report("step", step=number, error=error, fallbacks=gone[0], returns=gone[1])
        number += 1
        if number % STOP_EVERY == 0 and not error:
            stop.fill_(told.is_set())
            dist.broadcast(stop, 0)
    differ = "" if error else disagree(client)
    after = error or step(client, number * IN_FLIGHT)
    went = {"said": said.count, "back": said.back, "in_use": client.in_use}
    report("end", differ=differ, after=after, **went, **client.counters._asdict())
    if error:
        return
    client.all_reduce(torch.ones(300_000))  # nobody waits for it
    if client.rank == 0:
        client.all_reduce(torch.ones(300_000))  # nor does anybody else make this one
    client.shutdown()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    json.loads(sys.argv[1])
    main()
