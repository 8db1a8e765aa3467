"""Train on handwritten digits with Ray Train; reducers average the gradients.

Run it with ``REDUCTION_SERVERS=HOST:PORT,HOST:PORT python examples/ray_digits.py``; ``--backend``
changes the process group's backend instead of the model, with ``--stock`` Gloo averages. A worker
that dies is no end: Ray starts all of them again, from the latest checkpoint.
"""

import argparse
import hashlib
import os
import signal
import tempfile
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import nn

import worker_client
from worker_client import torch_backend

EPOCHS, BATCH = 3, 64


def train(options: dict) -> list[str]:
    """Train as one rank, in a process of Ray's; return what all ranks say at the end."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data, target = load_digits(return_X_y=True)
    images, labels = torch.tensor(data / 16, dtype=torch.float32), torch.tensor(target)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    begin = load(ray.train.get_checkpoint(), network, optimizer)
    model = prepare_model(network, parallel_strategy_kwargs={"bucket_cap_mb": 64})
    if options["attach"]:
        client = worker_client.attach(model)  # the one line
    for epoch in range(begin, EPOCHS):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
            mine = batch[rank::world_size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
            if epoch == 1 and rank == 1:
                die(options["dies"])
        save(epoch, network, optimizer)

    with torch.no_grad():
        loss = nn.functional.cross_entropy(network(images), labels)
    weights = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    reduced = client.bytes_reduced if options["attach"] else torch_backend.bytes_reduced()
    said = [""] * world_size
    # A rank that hosts a reducer leaves when all have their last result.
    dist.all_gather_object(
        said, f"rank {rank}: loss {loss:.9g}, weights {digest}, {reduced} bytes reduced"
    )
    if options["attach"]:
        client.shutdown()  # Ray kills its workers: say goodbye before
    return said


def load(checkpoint: Checkpoint | None, network: nn.Module, optimizer: torch.optim.SGD) -> int:
    """Take the weights of a checkpoint, if there is one; return the epoch to begin with."""
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, "state.pt"))
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def save(epoch: int, network: nn.Module, optimizer: torch.optim.SGD) -> None:
    """Write a checkpoint at rank 0."""
    state = {"epoch": epoch, "network": network.state_dict(), "optimizer": optimizer.state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder, "state.pt"))
        mine = Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None
        ray.train.report({"epoch": epoch}, checkpoint=mine)


def die(file: str | None) -> None:
    """Kill this process, if there is a file that says so, which goes first."""
    if file is not None and Path(file).exists():
        Path(file).unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Start the workers, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--backend", action="store_true", help="by the backend's name")
    parser.add_argument("--stock", action="store_true", help="train over Gloo")
    parser.add_argument("--dies", metavar="FILE", help="rank 1 dies if it is there, and removes it")
    options = parser.parse_args()
    # The hook is for torch before 2.14, which does not find the backend by its name.
    hook = {"worker_process_setup_hook": "worker_client.torch_backend.register"}
    ray.init(runtime_env=hook if options.backend else {}, include_dashboard=False)
    settings = {name: text for name, text in os.environ.items() if name.startswith("REDUCTION_")}
    with tempfile.TemporaryDirectory() as folder:  # with several nodes one that they all see
        trainer = TorchTrainer(
            train,
            train_loop_config={
                "attach": not (options.backend or options.stock),
                "dies": options.dies,
            },
            torch_config=TorchConfig(backend="reduction" if options.backend else "gloo"),
            scaling_config=ScalingConfig(num_workers=options.workers),
            run_config=RunConfig(
                storage_path=folder,
                failure_config=FailureConfig(max_failures=1),
                worker_runtime_env={"env_vars": settings},  # which other nodes have not
            ),
        )
        print(*trainer.fit().return_value, sep="\n")  # rank 0's
    ray.shutdown()


if __name__ == "__main__":
    main()
