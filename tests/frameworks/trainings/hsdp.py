"""HSDP, two replicas of two shards: over the backend, and by `fsdp.attach`."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.frameworks.resumption import main
from tests.frameworks.trainings.sharded import blocks, shard, start, train
from worker_client import fsdp

NAMES = ("replicate", "shard")


def train_hsdp(part):
    start(part)
    model = blocks()
    shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES))
    return train(part, model, dist.get_rank())


def train_hsdp_attached(part):
    """The shards' groups are Gloo's, and reducers average over the replicas."""
    start(part)
    gloo = dict.fromkeys(NAMES, "gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES, backend_override=gloo)
    model = blocks()
    shard(model, mesh if part.stock else mesh["shard"])
    client = None if part.stock else fsdp.attach(model, mesh["replicate"])
    return train(part, model, dist.get_rank(), lambda: client.bytes_reduced if client else 0)


if __name__ == "__main__":
    main(globals())
