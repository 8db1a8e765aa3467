"""One rank that trains with DDP over Gloo, and then through reducers with its gradients staged.

Started by test_staged_ddp as `python -m tests.integration.staged_ddp cuda|slow` with torchrun's
environment; `slow` is the tests' own device, which needs no GPU.
"""

import random
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import worker_client
from reducer.errors import DeviceError, ReductionError
from tests.ranks import write_result
from tests.worker_client.slow_device import SlowDevice, stage_all, staging_threads
from worker_client.staging import split_call

STEPS = 20
BROKEN = range(0)  # numbers of copies that the device fails at


def slow(of):
    assert of.type == "cpu"
    dice = random.Random(dist.get_rank())

    def before(_way, number):
        time.sleep(dice.choice([0, 0, 0.002]))
        if number in BROKEN:
            raise DeviceError("an illegal memory access", device="slow:0")

    return SlowDevice(before)


def build(on, reduction):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 40), torch.nn.Linear(40, 1)
    )
    ddp = DistributedDataParallel(layers.to(on), bucket_cap_mb=0.02)
    if reduction:
        worker_client.attach(ddp)
    return ddp


def train(on, reduction):
    ddp = build(on, reduction)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(16, 20).to(on)
        loss = (ddp(x) - x[:, :3].sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([one.detach().flatten() for one in ddp.parameters()])
    return [*losses, *weights.tolist()]


def late(on):
    """A slow rank makes backward() raise a typed error at every rank; the next step works."""
    ddp = build(on, reduction=True)
    client = worker_client.init()
    seen = []
    for step in range(4):
        client.timeout_s = 1.0 if step == 2 else 60.0
        loss = ddp(torch.ones(2, 20).to(on)).sum()
        if step == 2 and dist.get_rank() == 1:
            time.sleep(2.5)
        try:
            loss.backward()
            seen.append("ok")
        except ReductionError as error:
            seen.append(type(error).__name__)
        dist.barrier()
    return seen


def broken():
    """A device that fails ends the backward pass, whatever DDP makes of the error."""

    global BROKEN  # noqa: PLW0603 (the client has opened its device)
    BROKEN = range(1 << 40)
    ddp = build("cpu", reduction=True)
    try:
        ddp(torch.ones(2, 20)).sum().backward()
    except Exception as error:  # noqa: BLE001 (any)
        return str(error)
    return "no error"


def main(kind):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stock = train("cuda:0" if kind == "cuda" else "cpu", reduction=False)
    split_call.PIECE_BYTES = 4096
    if kind == "slow":
        stage_all(slow)
    on = "cuda:0" if kind == "cuda" else "cpu"
    results = {"stock": stock, "ours": train(on, reduction=True), "late": late(on)}
    results["threads"] = sorted(staging_threads(), reverse=True)
    if kind == "slow":
        results["broken"] = broken()
    write_result(results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
