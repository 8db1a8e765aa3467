"""One rank of a training on digits that ranks leave and join; see test_join.

Started as ``python -m tests.integration.join_rank SPEC`` with the launcher's usual environment, or
with REDUCTION_JOIN=1. Every step it says which ranks an all-reduce was over, what bits its weights
have and what the loss is.
"""

import json
import os
import sys
import threading
import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import worker_client
from harness.reports import digest
from reducer.errors import RankLostError
from worker_client import elastic
from worker_client.communicators.elastic import ADMISSION, ElasticCommunicator
from worker_client.communicators.reconcile import Reconciliation

PROCESS = int(
    os.environ.get("PROCESS") or os.environ["RANK"]
)  # who joins gets a rank of the job's, perhaps another one
MOST_RANKS = 256
BATCH = 120  # over all ranks


def say(event, **values):
    sys.stdout.write(json.dumps({"event": event, "process": PROCESS, **values}) + "\n")
    sys.stdout.flush()


def listen(stop_at):
    line = sys.stdin.readline()
    if line:
        stop_at.append(int(line))


def contributors(client, name):
    """Which ranks an all-reduce is over: each contributes a one at its own place."""
    ones = np.zeros(MOST_RANKS, np.int64)
    ones[client.rank] = 1
    client.all_reduce(ones, "sum", name=name).wait(60)
    return [int(rank) for rank in np.flatnonzero(ones)] if ones.max() == 1 else [-1]


def train(stop_at):
    client = worker_client.init(on_rank_lost="continue")
    changes = []
    client.on_membership(lambda change: changes.append(tuple(map(list, change))))
    # Process groups cannot grow: each rank has one of its own.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(client.rank)  # who joins gets the weights, so these may differ
    layers = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10))
    if client.rank < 4:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10))
    model = DistributedDataParallel(layers, find_unused_parameters=True)
    worker_client.attach(model, client)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32) / 16
    targets = torch.tensor(labels)
    step = 0
    while not (stop_at and step >= stop_at[0]):
        common = elastic.sync(layers, optimizer, step=step)
        step = step if common is None else common["step"]
        present = client.present
        batch = np.random.default_rng(step).permutation(len(targets))[:BATCH]
        mine = torch.from_numpy(batch[present.index(client.rank) :: len(present)].copy())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            whole = float(nn.functional.cross_entropy(layers(inputs), targets))
        say(
            "step",
            rank=client.rank,
            step=step,
            digest=digest(parameter.detach() for parameter in layers.parameters()),
            loss=whole,
            over=contributors(client, None),
            named=contributors(client, "named"),
            present=client.present,
            changes=changes,
            all_in_use=all(client.in_use),
        )
        step += 1
        time.sleep(0.01)
    say("end", rank=client.rank, present=client.present)
    client.shutdown()


LOST = RankLostError("rank 2 is lost", rank=2)


def miss_the_admission(*processes):
    """Have some ranks not hear that another one joins, until a rank is lost."""
    ended = ElasticCommunicator._attempt_ended

    def end_badly(self, entry, error):
        asked = entry.operation
        if asked.name == ADMISSION and asked.view[0] and error is None and PROCESS in processes:
            say("missed")
            time.sleep(3.0)
            ElasticCommunicator._attempt_ended = ended
            error = LOST
        ended(self, entry, error)

    ElasticCommunicator._attempt_ended = end_badly


def miss_the_meeting():
    """Have rank 1 not hear the last result of the meeting of four, until a rank is lost."""
    run = Reconciliation.run

    def run_and_miss(self, *arguments):
        run(self, *arguments)
        if (self._me, self._ranks) == (1, 4):
            say("missed")
            time.sleep(3.0)
            raise LOST

    Reconciliation.run = run_and_miss


def main():
    if "MISSES" in os.environ:
        missed = os.environ["MISSES"]
        if missed == "meeting":
            miss_the_meeting()
        else:
            miss_the_admission(*([1] if missed == "admission" else [0, 1]))
    torch.set_num_threads(1)
    stop_at = []
    threading.Thread(target=listen, args=(stop_at,), daemon=True).start()
    train(stop_at)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
