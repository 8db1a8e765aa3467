"""Train the small GPT of `gpt_text.py` to the same weights, however many ranks there are.

    export REDUCTION_JOB=gpt REDUCTION_SERVERS=HOST:PORT REDUCTION_ON_RANK_LOST=continue
    RANK=0 WORLD_SIZE=3 python examples/leaves_gpt.py     (and RANK=1, RANK=2)
    python examples/leaves_gpt.py --join                  (another one, at any time)

A step's batch is cut into leaves, which are dealt among the ranks that there are. Kill some, and
let others join: the fingerprint at the end is that of one rank alone.
"""

import argparse
import os

import torch

import worker_client
from gpt_text import GPT, Text, digest, learning_rate, reported
from worker_client import elastic
from worker_client.leaves import Leaves


def main() -> None:
    """Train, and say what has come of it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--leaves", type=int, default=8, help="of a step, 8 pieces of text each")
    arguments.add_argument("--report", type=int, default=0, help="steps; 0: only in the end")
    arguments.add_argument("--join", action="store_true", help="a job that trains already")
    options = arguments.parse_args()

    if "REDUCTION_SERVERS" not in os.environ:  # without a pool ranks host reducers, under torchrun
        torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)  # gradients depend on how many there are
    client = worker_client.init(join=options.join)
    text = Text()
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    leaves = Leaves(model, options.leaves, client=client)
    number = 0
    while number < options.steps:
        if client.admits:  # ranks that join get the state here
            state = elastic.sync(model, optimizer, client=client, number=number)
            number = number if state is None else state["number"]
        for step in leaves.attempts(number):
            for _ in step:
                text.loss(model).backward()
        optimizer.param_groups[0]["lr"] = learning_rate(number, options.steps)
        optimizer.step()
        if client.rank == client.present[0] and reported(number, options.report):
            print(f"step {number + 1}: loss {text.held_back_loss(model):.5f}", flush=True)
        number += 1
    loss = text.held_back_loss(model)
    print(f"rank {client.rank}: loss {loss:.8g}, weights {digest(model)}", flush=True)
    client.shutdown()


if __name__ == "__main__":
    main()
