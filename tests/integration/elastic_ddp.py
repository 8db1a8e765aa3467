"""One rank of a DDP training that goes on without lost ranks; see test_elastic.

Started as ``python -m tests.integration.elastic_ddp SPEC`` with the launcher's usual environment.
"""

import os
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import worker_client
from harness.reports import digest
from reducer.errors import ReductionError
from tests.integration.elastic_rank import listen, say


def build():
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 512), nn.Linear(512, 1))
    )
    return DistributedDataParallel(layers, bucket_cap_mb=0.5)


def train(stop_at):
    client = worker_client.init(on_rank_lost="continue")
    model = build()
    worker_client.attach(model, client)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = torch.Generator().manual_seed(client.rank)
    number = 0
    while not (stop_at and number >= stop_at[0]):
        optimizer.zero_grad()
        try:
            model(torch.randn(8, 64, generator=data)).square().mean().backward()
        except ReductionError as error:
            say("error", call=number, error=f"{type(error).__name__}: {error}")
            return
        optimizer.step()
        weights = digest(parameter.detach() for parameter in model.parameters())
        say("call", call=number, value=weights, present=client.present)
        number += 1
    say("end", present=client.present)
    client.shutdown()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stop_at = []
    threading.Thread(target=listen, args=(stop_at,), daemon=True).start()
    train(stop_at)
    sys.stdout.flush()
    os._exit(0)  # the process group does not survive the death of a rank, nor its own end then


if __name__ == "__main__":
    main()
