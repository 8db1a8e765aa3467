"""What eight bits on the wire do to a training whose gradients differ much within a block.

    torchrun --nproc-per-node 4 -m bench.feedback

A linear regression, whose features have scales from 1 to 0.001 side by side. Each has a step of its
own, in proportion to what its scale needs, as adaptive optimizers make them. It is trained in
fp32, and with int8 or fp8_e4m3 on the wire, without and with what casts take away added to the next
step.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from worker_client.client.bootstrap import connect
from worker_client.ddp import ReductionState, reduction_hook

FEATURES, BATCH, STEPS, SEEDS = 5040, 64, 1000, 3
MODES = {
    "fp32": ("none", False),
    "int8": ("int8", False),
    "int8, feedback": ("int8", True),
    "fp8_e4m3": ("fp8_e4m3", False),
    "fp8_e4m3, feedback": ("fp8_e4m3", True),
}


def train(seed: int, wire_dtype: str, *, feedback: bool) -> float:
    """Return the error after all steps, as a share of the first one."""
    rank = dist.get_rank()
    shared = torch.Generator().manual_seed(seed)
    scales = 10 ** (-3 * torch.rand(FEATURES, generator=shared))
    target = torch.randn(FEATURES, generator=shared) / scales / FEATURES**0.5
    model = DistributedDataParallel(nn.Linear(FEATURES, 1, bias=False))
    weight = model.module.weight
    nn.init.zeros_(weight)
    own = torch.Generator().manual_seed(100 * seed + rank + 1)
    with connect(wire_dtype=wire_dtype) as client:
        state = ReductionState(client, error_feedback=feedback)
        model.register_comm_hook(state, reduction_hook)
        for _ in range(STEPS):
            features = torch.randn(BATCH, FEATURES, generator=own) * scales
            loss = (model(features)[:, 0] - features @ target).square().mean() / 2
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                weight -= BATCH / 4 / FEATURES / scales**2 * weight.grad
        dist.barrier()  # a rank that hosts a reducer leaves when all have their last result
    with torch.no_grad():
        error: float = ((weight[0] - target) * scales).square().sum().item()
    return error


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, (wire_dtype, feedback) in MODES.items():
        errors = [train(seed, wire_dtype, feedback=feedback) for seed in range(SEEDS)]
        if dist.get_rank() == 0:
            said = ", ".join(f"{error:.2e}" for error in errors)
            print(f"{dist.get_world_size()} ranks, {name}: {said}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
