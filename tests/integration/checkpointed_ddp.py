"""One rank of test_wire_checkpoint: DDP with 8 bits on the wire, from a checkpoint to another one.

Started as `python -m tests.integration.checkpointed_ddp FOLDER FIRST END [FAILING]` with torchrun's
environment. It makes the steps from FIRST on to END: from the start, or from the checkpoint that
was written at FIRST; then it writes one. The step FAILING fails, after buckets that are well, and
is made again.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import worker_client
from reducer.errors import ReductionError
from tests.integration.ddp_cases import digest
from tests.ranks import write_result
from worker_client.ddp import state_of

WIDTH = 150


class Net(torch.nn.Module):
    """Layers that are used in another order than they are made in, so DDP rearranges buckets."""

    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(WIDTH, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x):
        for at in (3, 0, 5, 1, 4, 2):
            x = torch.tanh(self.layers[at](x))
        return self.last(self.norm(x))


def backward(ddp, x):
    (ddp(x) - x[:, :8] * x[:, 8:16]).square().mean().backward()


def fail(ddp, x):
    """Make a backward pass whose last buckets one rank gives a weight, and return the error."""
    state = state_of(ddp)
    layer = ddp.module.layers[0]
    weight = 1.0 if dist.get_rank() == 1 else None
    hook = layer.register_full_backward_hook(lambda *_: setattr(state, "weight", weight))
    try:
        backward(ddp, x)
        said = ""
    except ReductionError as error:
        said = str(error)
    hook.remove()
    state.weight = None
    return said


def main(folder, first, end, failing=-1):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    # Less than two of the layers.
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.15, gradient_as_bucket_view=True)
    client = worker_client.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    if first:
        saved = torch.load(folder / f"{rank}-{first}.pt")
        ddp.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state_of(ddp).load_state_dict(saved["reduction"])
    failure = ""
    for step in range(first, end):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        if step == failing:
            failure = fail(ddp, x)
        optimizer.zero_grad()
        backward(ddp, x)
        optimizer.step()
    saved = {
        "model": ddp.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "reduction": state_of(ddp).state_dict(),
    }
    torch.save(saved, folder / f"{rank}-{end}.pt")
    residuals = saved["reduction"]["residuals"]
    facts = {
        "digest": digest(ddp),
        "residuals": {name: kept.numpy().tobytes().hex() for name, kept in residuals.items()},
        "losses": client.losses,
        "failure": failure,
        "rearranged": ddp._get_ddp_logging_data()["has_rebuilt_buckets"],
    }
    write_result(facts)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
