"""Train the small GPT of `gpt_text.py` at sites that are far from each other.

    export REDUCTION_JOB=sites REDUCTION_SERVERS=HOST:PORT REDUCTION_WIRE_DTYPE=int8
    RANK=0 WORLD_SIZE=3 python examples/diloco_gpt.py     (and RANK=1, RANK=2)

Each site makes its own steps. After `--every` of them reducers average what the sites have learned:
half of the model at a time, and while they train on. The loss is that of text that none of them has
seen, in nats a letter; rank 0 says its own after every `--report` steps, too. All end with the same
weights. With `REDUCTION_ON_RANK_LOST=continue` the others go on when a site is lost.
"""

import argparse
import time

import torch

import worker_client
from gpt_text import GPT, Text, digest, learning_rate, reported
from worker_client.outer import OuterOptimizer


def main() -> None:
    """Train, and say what has come of it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--every", type=int, default=50, help="own steps between outer ones")
    arguments.add_argument("--fragments", type=int, default=2, help="parts averaged in turn")
    arguments.add_argument("--delay", type=int, default=20, help="steps that an averaging may take")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--report", type=int, default=0, help="steps; 0: only in the end")
    arguments.add_argument("--alone", action="store_true", help="no averaging before the end")
    options = arguments.parse_args()

    torch.set_num_threads(1)
    client = worker_client.init()
    text = Text(seed=1000 * options.seed + client.rank)
    torch.manual_seed(options.seed)
    model = GPT()
    outer = OuterOptimizer(
        model,
        client,
        every=options.every,
        fragments=options.fragments,
        delay=options.delay,
        lr=0.8,
        momentum=0.6,  # a training of few outer steps gains little from those long ago
    )
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    outer_s = 0.0  # in which the network, or an outer step, kept this site from training
    begun = time.perf_counter()
    for step in range(options.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, options.steps)
        optimizer.zero_grad()
        text.loss(model).backward()
        optimizer.step()
        if not options.alone:
            before = time.perf_counter()
            outer.step()
            outer_s += time.perf_counter() - before
        if client.rank == 0 and reported(step, options.report):
            print(f"step {step + 1}: loss {text.held_back_loss(model):.5f}", flush=True)
    seconds = time.perf_counter() - begun
    outer.finish()
    print(
        f"rank {client.rank}: loss {text.held_back_loss(model):.8g}, weights {digest(model)}, "
        f"{client.bytes_reduced} bytes reduced, {seconds:.1f} s, {outer_s:.2f} s in outer steps",
        flush=True,
    )
    client.shutdown()


if __name__ == "__main__":
    main()
