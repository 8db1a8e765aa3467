"""One rank of the tests of nodes: ``python -m tests.integration.node_rank CASE``.

Started with a launcher's environment, GROUP_RANK included.
"""

import copy
import itertools
import os
import signal
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import worker_client
import worker_client.fsdp
from reducer.errors import ReductionError
from tests.integration.cases import of_all
from tests.integration.ddp_cases import digest
from tests.ranks import write_result
from torture.guarantee_oracle import Oracle, Shape
from torture.guarantee_plan import Call
from worker_client.client.bootstrap import connect
from worker_client.collectives import all_gather_bytes

STEPS = 20
VICTIM = 3
WIRE_DTYPES = ("none", "int8", "bf16", "fp16")
TYPES_TRIED = ("float32", "bfloat16", "float16", "float64")
WEIGHED = ("float32", "float64")
COUNTS = (300_001, 1, 40_000, 7, 65_537, 4096)
OPS = ("sum", "mean", "max", "mean", "min")
COUNTED = 500_001  # no multiple of the ranks of a node


def model_on(client):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    ddp = DistributedDataParallel(layers, bucket_cap_mb=0.002)
    if client is not None:
        worker_client.attach(ddp, client)
    return ddp


def step(ddp, optimizer):
    x = torch.randn(16, 20)
    loss = (ddp(x) - x[:, :3].sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def losses_on(client):
    """Train, with data of this rank's own; without a client DDP does it through Gloo alone."""
    ddp = model_on(client)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    torch.manual_seed(1 + dist.get_rank())
    losses = [step(ddp, optimizer) for _ in range(STEPS)]
    assert len(set(of_all(digest(ddp)))) == 1
    return losses


def train():
    """Train with Gloo, without hierarchy and with it: the same losses, by other ways."""
    everybody, nodes = dist.get_world_size(), len(set(of_all(os.environ["GROUP_RANK"])))
    plain, reduced = losses_on(None), []
    for mode, between in (("off", everybody), ("auto", nodes if nodes > 1 else everybody)):
        client = connect(hierarchy=mode)
        assert client.spec.world_size == between
        losses = losses_on(client)
        assert losses == pytest.approx(plain, rel=1e-5)
        reduced.append((client.bytes_reduced, losses if nodes == 1 else None))
        names = list(all_gather_bytes(client, f"rank {client.rank}".encode()).values())
        assert names == [f"rank {rank}".encode() for rank in range(everybody)]
        assert by_name(client) == [4, 8, 12]
        dist.barrier()
        client.shutdown()
    assert reduced[0] == reduced[1]
    return {"losses": plain}


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
            if not os.fork():  # as a DataLoader's worker, which has copies of all connections
                time.sleep(5)
                os._exit(0)
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


def bits():
    """Make many calls at once, large and small: rails end them in orders of their own."""
    rank, nodes, made = dist.get_rank(), of_all(os.environ["GROUP_RANK"]), 0
    groups = tuple(
        tuple(at for at, node in enumerate(nodes) if node == one) for one in dict.fromkeys(nodes)
    )
    for wire_dtype in WIRE_DTYPES:
        client = worker_client.init(hierarchy="auto", wire_dtype=wire_dtype)
        assert client.spec.world_size == len(groups)
        oracle, calls = Oracle("nodes", exact=False), []
        shape = Shape(groups, wire_dtype.replace("none", ""))
        for number, (dtype, count) in enumerate(itertools.product(TYPES_TRIED, COUNTS)):
            weights = None
            if number % 3 == 2 and dtype in WEIGHED:  # as of batches that are not equally large
                weights = tuple(range(1, 1 + len(nodes)))
            op = OPS[number % len(OPS)] if weights is None else "mean"
            call = Call((0, number, 0), None, dtype, op, count, weights=weights)
            data = torch.from_numpy(oracle.contribution(call, rank))
            data = data.view(torch.bfloat16) if dtype == "bfloat16" else data
            weight = None if weights is None else weights[rank]
            calls.append((call, client.all_reduce(data, op, weight=weight)))
        for call, work in calls:
            got = work.wait(60).view(torch.uint8).numpy()
            assert got.tobytes() == oracle.result(call, shape).tobytes(), (wire_dtype, call)
            made += 1
        dist.barrier()
        client.shutdown()
    return {"calls": made}


def cross():
    """Count what the ranks of a node send to reducers, which have one thread each."""
    client = worker_client.init(hierarchy="auto")
    data = torch.ones(COUNTED)
    client.all_reduce(data, "sum").wait(60)
    dist.barrier()
    client.shutdown()
    return {"nbytes": data.nbytes, "right": bool((data == dist.get_world_size()).all())}


def go_on():
    """Lose a rank, and with it its node; the others go on, with means over their own."""
    os.environ["REDUCTION_ON_RANK_LOST"] = "continue"
    client = worker_client.init(hierarchy="auto")
    everybody, changes, seen = client.present, [], []
    client.on_membership(lambda change: changes.append(list(change.lost)))
    said = ""
    for number in range(40):
        if number == 5 and dist.get_rank() == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        # Large enough for both parts to be lost at different points.
        data = np.full(200_001, 1.0 + client.rank, np.float32)
        try:
            client.all_reduce(data, "mean").wait(60)
        except ReductionError as error:
            said = f"{type(error).__name__} {getattr(error, 'rank', None)}"
            break
        values = sorted(set(data.tolist()))
        assert len(values) == 1, f"a sum of different nodes: {values}"
        seen.append(values[0])
    present = client.present
    client.shutdown()
    return {"said": said, "seen": seen, "present": present, "all": everybody, "lost": changes}


def shard():
    """FSDP's replicas have flat jobs, one for each shard; NO_SHARD goes through nodes."""
    os.environ["REDUCTION_HIERARCHY"] = "auto"
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layers = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    alone = copy.deepcopy(layers)
    fully_shard(layers, mesh=mesh["shard"])
    client = worker_client.fsdp.attach(layers, mesh["replicate"])
    assert (client.world_size, client.spec.world_size) == (2, 2)
    whole = DistributedDataParallel(alone)
    for model in (layers, whole):
        torch.manual_seed(dist.get_rank())
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for mine, theirs in zip(layers.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.detach())
    return {"bytes": client.bytes_reduced}


def main(case):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = (train, lose, fall_back, bits, cross, go_on, shard)
    write_result({one.__name__: one for one in cases}[case]())
    if case not in {"lose", "go_on"}:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
