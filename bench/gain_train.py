"""A training that never ends: `worker-client doctor --gain -- -m bench.gain_train MODEL SECONDS`.

`bench.ddp_models` says what it trains.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench import ddp_models


def main(model: str, compute_s: float) -> None:
    torch.set_num_threads(1)  # several ranks share the machine
    dist.init_process_group("gloo")
    work = ddp_models.workload(model, compute_s)
    wrapped = DistributedDataParallel(work.build(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.02)
    step = 0
    while True:
        torch.autograd.backward(work.loss(wrapped, dist.get_rank(), step))
        optimizer.step()
        optimizer.zero_grad()
        step += 1


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
