"""One rank of `bench.goodput`: trains by one of its ways, and says each step that it has completed.

    python -m bench.goodput_rank WAY SPEC

Who it is, and whom it works with, is in its environment.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.ddp_models import Simulated, gpt
from harness.processes import say

GLOO_S = 2.0  # of torchft's Gloo: only its neighbors hear at once of one that is killed
# A step: this rank's number, steps that its weights have now, its begin, its share of the batch.
Steps: TypeAlias = Iterator[tuple[int, int, float, float]]


class Spec(NamedTuple):
    """What is trained, as options of `bench.goodput` say, and torchrun's file for checkpoints."""

    ranks: int
    compute_s: float
    leaves: int
    checkpoint_steps: int
    checkpoint: str = ""


def main(way: str, given: str) -> None:
    """Train until killed."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Gloo prints is none of what is said
    torch.set_num_threads(1)
    for rank, number, begun, share in WAYS[way](Spec(*json.loads(given))):
        ended = time.monotonic()
        step = {"rank": rank, "number": number, "begun": begun, "ended": ended, "share": share}
        say({"pid": os.getpid(), **step})


def ours(spec: Spec) -> Steps:
    """Train with leaves, which are dealt among the ranks that there are."""
    import worker_client  # noqa: PLC0415 (other ways do not load it)
    from worker_client import elastic  # noqa: PLC0415
    from worker_client.leaves import Leaves  # noqa: PLC0415

    client = worker_client.init()
    network, optimizer = _network(spec.compute_s / spec.leaves)
    leaves = Leaves(network, spec.ranks * spec.leaves, client=client)
    number, begun = 0, 0.0
    while True:
        state = elastic.sync(network, optimizer, client=client, number=number)
        number = number if state is None else state["number"]
        for step in leaves.attempts(number):
            begun = time.monotonic()
            for _ in step:
                network(torch.rand(())).backward()
        optimizer.step()
        number += 1
        yield client.rank, number, begun, 1.0


def torchft(spec: Spec) -> Steps:
    """Train by torchft over Gloo, each rank as a replica group.

    Its own DDP ends the process where an all-reduce fails; ours is the same but for that.
    """
    from torchft import Manager, Optimizer, ProcessGroupGloo  # noqa: PLC0415

    from worker_client.torchft import DistributedDataParallel as Mended  # noqa: PLC0415

    rank = int(os.environ["RANK"])
    network, inner = _network(spec.compute_s)
    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make_store("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=GLOO_S)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=f"goodput_{rank}",
        hostname="localhost",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    for name, one in (("network", network), ("optimizer", inner)):
        manager.register_state_dict_fn(name, one.load_state_dict, one.state_dict)
    model = Mended(manager, network)
    optimizer = Optimizer(manager, inner)
    while True:
        begun = time.monotonic()
        optimizer.zero_grad()
        model(torch.rand(())).backward()
        number = manager.current_step()
        optimizer.step()
        if manager.current_step() > number:  # not if an all-reduce failed
            yield rank, number + 1, begun, manager.num_participants() / spec.ranks


def torchrun(spec: Spec) -> Steps:
    """Train by DDP over Gloo, from the latest checkpoint."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    network, optimizer = _network(spec.compute_s)
    file, number = Path(spec.checkpoint), 0
    if file.exists():
        number, weights, state = torch.load(file)
        network.load_state_dict(weights)
        optimizer.load_state_dict(state)
    model = DistributedDataParallel(network)
    while True:
        begun = time.monotonic()
        optimizer.zero_grad()
        model(torch.rand(())).backward()
        optimizer.step()
        number += 1
        yield rank, number, begun, 1.0
        if rank == 0 and number % spec.checkpoint_steps == 0:
            written = file.with_suffix(".new")
            torch.save((number, network.state_dict(), optimizer.state_dict()), written)
            written.rename(file)


def _network(compute_s: float) -> tuple[Simulated, torch.optim.Optimizer]:
    """Return a GPT of the sizes of `examples/gpt_text.py`, half a megabyte, whose passes sleep."""
    network = Simulated(gpt(width=64, blocks=2, tokens=48, vocabulary=100), compute_s)
    return network, torch.optim.AdamW(network.parameters())


WAYS = {"ours": ours, "torchft": torchft, "torchrun": torchrun}

if __name__ == "__main__":
    main(*sys.argv[1:])
