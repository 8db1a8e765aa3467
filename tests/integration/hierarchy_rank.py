"""One rank of the tests of hierarchical DDP: ``python -m tests.integration.hierarchy_rank CASE``.

Started with a launcher's environment, GROUP_RANK included.
"""

import os
import signal
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import worker_client
from reducer.errors import ReductionError
from tests.integration.cases import of_all
from tests.integration.ddp_cases import digest
from tests.ranks import refusal, write_result
from worker_client.client.bootstrap import connect
from worker_client.collectives import all_gather_bytes

STEPS = 20
VICTIM = 3


def model_on(client):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    ddp = DistributedDataParallel(layers, bucket_cap_mb=0.002)
    worker_client.attach(ddp, client)
    return ddp


def step(ddp, optimizer):
    x = torch.randn(16, 20)
    loss = (ddp(x) - x[:, :3].sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train():
    """Train without hierarchy and with it, which changes how many there are between nodes alone."""
    everybody, nodes = dist.get_world_size(), len(set(of_all(os.environ["GROUP_RANK"])))
    trained = []
    for mode, between in (("off", everybody), ("auto", nodes if nodes > 1 else everybody)):
        client = connect(hierarchy=mode)
        assert client.spec.world_size == between
        ddp = model_on(client)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        torch.manual_seed(1 + dist.get_rank())
        losses = [step(ddp, optimizer) for _ in range(STEPS)]
        trained.append((losses, client.bytes_reduced))
        assert len(set(of_all(digest(ddp)))) == 1
        names = list(all_gather_bytes(client, f"rank {client.rank}".encode()).values())
        assert names == [f"rank {rank}".encode() for rank in range(everybody)]
        assert by_name(client) == [4, 8, 12]
        dist.barrier()
        client.shutdown()
    (losses, sent), (others, as_much) = trained
    assert losses == (others if nodes == 1 else pytest.approx(others, rel=1e-5))
    assert sent == as_much


def by_name(client):
    """Sums of tensors that odd ranks submit in another order than even ones."""
    tensors = {name: torch.full((100,), float(len(name))) for name in ("a", "bb", "ccc")}
    order = sorted(tensors, reverse=bool(client.rank % 2))
    for work in [client.all_reduce(tensors[name], "sum", name=name) for name in order]:
        work.wait(60)
    return [tensor[0].item() for tensor in tensors.values()]


def lose():
    client = worker_client.init(hierarchy="auto")
    ddp = model_on(client)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    said = ""
    for number in range(1000):
        if number == 5 and dist.get_rank() == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            step(ddp, optimizer)
        except ReductionError as error:
            said = f"{type(error).__name__} {getattr(error, 'rank', None)}"
            break
    seconds = time.monotonic() - start
    client.shutdown()
    return {"said": said, "seconds": seconds}


def fall_back():
    """Go on until all ranks have had results of the process group: rank 0 ends all reducers."""
    os.environ["REDUCTION_FALLBACK"] = "process-group"
    client = worker_client.init(hierarchy="auto")
    right, number, done = 0, 0, False
    while not done:
        data = np.full(1000, number + client.rank, np.float32)
        data[0] = client.counters.fallbacks >= 3
        client.all_reduce(data, "sum").wait(60)
        done = bool(data[0] == client.world_size)
        right += bool((data[1:] == 4 * number + 6).all())
        number += 1
        if number == 5 and client.rank == 0:
            for victim in os.environ["VICTIMS"].split(","):
                os.kill(int(victim), signal.SIGKILL)
    client.shutdown()
    return {"right": right, "steps": number, "between": client.spec.world_size}


def refuse():
    os.environ["REDUCTION_ON_RANK_LOST"] = "continue"
    return {"said": refusal(worker_client.init, hierarchy="auto")}


def main(case):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"train": train, "lose": lose, "fall_back": fall_back, "refuse": refuse}[case]()
    write_result(found)
    if case != "lose":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
