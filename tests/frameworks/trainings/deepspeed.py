"""DeepSpeed's ZeRO stages over the backend; its own on CPUs is Gloo, without Intel's oneCCL."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["LOCAL_RANK"] = os.environ["RANK"]

import deepspeed
import torch
import torch.distributed as dist

from tests.frameworks import small
from tests.frameworks.resumption import Trained, main
from worker_client.torch_backend import bytes_reduced


def train(part, stage):
    if not dist.is_initialized():
        deepspeed.init_distributed("gloo" if part.stock else "reduction")
    before = bytes_reduced()
    torch.manual_seed(0)
    network = small.network(16)
    zero = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # or parameters as small are not sharded
    engine, _, _, _ = deepspeed.initialize(
        model=network,
        model_parameters=network.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 6},
            },
            "zero_optimization": zero,
        },
    )
    if part.resumes:
        path, _ = engine.load_checkpoint(str(part.folder))
        assert path is not None
    losses = []
    for step in part.steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(8, 8, generator=generator)
        loss = (engine(x) - x.sum(dim=1, keepdim=True)).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    if part.begins:
        engine.save_checkpoint(str(part.folder))
    dist.barrier()
    return Trained(losses, bytes_reduced() - before)


def train_zero_1(part):
    return train(part, 1)


def train_zero_2(part):
    return train(part, 2)


def train_zero_3(part):
    return train(part, 3)


if __name__ == "__main__":
    main(globals())
