"""One rank of the Lightning tests: runs the cases of a group.

Started by test_lightning as ``python -m tests.frameworks.lightning_cases GROUP PACKAGE FOLDER``;
the package is ``lightning.pytorch`` or ``pytorch_lightning``.
"""

import hashlib
import logging
import os
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset

GROUP, PACKAGE, FOLDER = sys.argv[1:]
pl = import_module(PACKAGE)
FABRIC = "lightning.fabric" if PACKAGE == "lightning.pytorch" else "lightning_fabric"

import worker_client  # noqa: E402
from reducer.errors import ReductionError  # noqa: E402
from tests.ranks import refusal, write_result  # noqa: E402
from worker_client import lightning as ours  # noqa: E402

warnings.filterwarnings("ignore")
for name in (PACKAGE, FABRIC):
    logging.getLogger(name).setLevel(logging.ERROR)


class Net(pl.LightningModule):
    """A small smooth network; `unused` has a layer that takes no part."""

    def __init__(self, unused=False, dies_at=-1):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )
        self.spare = torch.nn.Linear(8, 8) if unused else None
        self.dies_at = dies_at
        self.seen = {}

    def on_train_start(self):
        wrapped = self.trainer.strategy.model
        self.seen["bucket_cap"] = wrapped.bucket_bytes_cap
        self.seen["find_unused"] = wrapped.find_unused_parameters

    def training_step(self, batch):
        if self.global_step == self.dies_at and self.global_rank == 1:
            raise ValueError("this rank gives up")
        return self.validation_step(batch)

    def validation_step(self, batch):
        x, y = batch
        return (self.layers(x).float() - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(160, 8, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)


def digest(model):
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def make_trainer(strategy, epochs=2, **options):
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        plugins=[ours.ReductionEnvironment()],
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )


def fit(strategy, *, resume=None, **options):
    torch.manual_seed(0)
    model = Net(unused=options.pop("unused", False))
    trainer = make_trainer(strategy, **options)
    trainer.fit(model, data(), ckpt_path=resume)
    client = getattr(trainer.strategy, "client", None)
    return {
        **model.seen,
        "digest": digest(model),
        "bytes": 0 if client is None else client.bytes_reduced,
        "left": client is None or not client.usable,
        "hosts": client is not None and bool(client.spec.hosts),
    }


def options():
    """Return each option's outcome through reducers and over Gloo."""
    wrapper = default_hooks.fp16_compress_wrapper
    cases = {
        "default": ("reduction", "ddp", {}),
        "unused": (ours.NAME_UNUSED, "ddp_find_unused_parameters_true", {"unused": True}),
        "accumulate": ("reduction", "ddp", {"accumulate_grad_batches": 2}),
        "bf16": ("reduction", "ddp", {"precision": "bf16-mixed"}),
        "small_buckets": (ours.ReductionStrategy(bucket_cap_mb=1), "ddp", {}),
    }
    seen = {
        case: {"ours": fit(mine, **kwargs), "stock": fit(theirs, **kwargs)}
        for case, (mine, theirs, kwargs) in cases.items()
    }
    seen["wrapper"] = fit(ours.ReductionStrategy(ddp_comm_wrapper=wrapper))
    return seen


def twice(strategy):
    """Return what two fits of one Trainer come to, with a validation between them."""
    torch.manual_seed(0)
    model = Net()
    trainer = make_trainer(strategy)
    clients = []
    for epochs in (2, 4):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, data())
        clients.append(getattr(trainer.strategy, "client", None))
        trainer.validate(model, data(), verbose=False)
    return {
        "digest": digest(model),
        "left": [client is not None and not client.usable for client in clients],
        "two_clients": clients[0] is not clients[1],
    }


def again():
    """Return what comes of checkpoints, further fits, and a client of the user's."""
    straight = fit("reduction", epochs=4)
    half = fit("reduction", enable_checkpointing=True, default_root_dir=FOLDER)
    torch.distributed.barrier()  # rank 0 has removed the checkpoint before the last by then
    saved = str(next(Path(FOLDER).rglob("*.ckpt")))
    resumed = fit("reduction", epochs=4, resume=saved)

    mine = worker_client.init()
    kept = fit(ours.ReductionStrategy())
    passed = fit(ours.ReductionStrategy(client=mine))
    usable, reduced = mine.usable, mine.bytes_reduced
    torch.distributed.barrier()
    mine.shutdown()
    return {
        "straight": straight,
        "half": half,
        "resumed": resumed,
        "twice": {"ours": twice("reduction"), "stock": twice("ddp")},
        "kept": kept,
        "passed": passed,
        "still_usable": usable,
        "bytes_of_mine": reduced,
    }


class Late(Net):
    """Its rank 1 comes late to the end of a fit."""

    def on_train_end(self):
        if self.global_rank == 1:
            time.sleep(4.0)
        self.seen["woke"] = time.monotonic()


def goodbye():
    """Return when this rank's last hook ended, and when its fit did."""
    model = Late()
    make_trainer("reduction").fit(model, data())
    return {"woke": model.seen["woke"], "returned": time.monotonic()}


def failure():
    """Return how each rank's fit ends when rank 1 raises in its third step."""
    trainer = make_trainer("reduction")
    began = time.monotonic()
    try:
        trainer.fit(Net(dies_at=2), data())
    except Exception as error:  # noqa: BLE001 (its name is the outcome)
        seen = {
            "error": type(error).__name__,
            "text": str(error),
            "typed": isinstance(error, ReductionError),
        }
    seen["left"] = not trainer.strategy.client.usable
    seen["took_s"] = time.monotonic() - began
    return seen


def refusals():
    """Return what is said where something is refused."""

    hook = default_hooks.allreduce_hook
    return {
        "hook": refusal(lambda: ours.ReductionStrategy(ddp_comm_hook=hook)),
        "averaging": refusal(lambda: ours.ReductionStrategy(model_averaging_period=2)),
        "devices": refusal(lambda: ours.ReductionEnvironment().validate_settings(4, 1)),
        "launcher": refusal(lambda: launched(RANK="", MASTER_PORT="")),
        "machines": refusal(lambda: launched(**TWO_BY_TWO).validate_settings(1, 4)),
    }


TWO_BY_TWO = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def launched(**variables):
    """Return the environment of a process that was started with these, or without empty ones."""
    with patch.dict(os.environ, {name: value for name, value in variables.items() if value}):
        for name in [name for name, value in variables.items() if not value]:
            os.environ.pop(name, None)
        return ours.ReductionEnvironment()


def environments():
    """Return what other launchers' processes are told about themselves."""

    def told(environment):
        return [
            environment.global_rank(),
            environment.world_size(),
            environment.local_rank(),
            environment.node_rank(),
            environment.main_address,
            environment.main_port,
        ]

    named = launched(**TWO_BY_TWO, MASTER_ADDR="first", MASTER_PORT="29500", GROUP_RANK="5")
    counted = launched(**TWO_BY_TWO, MASTER_ADDR="first", MASTER_PORT="29500")
    named.set_global_rank(7)
    named.set_world_size(8)
    counted.validate_settings(2, 2)
    return {"named": told(named), "counted": told(counted)}


def fabric():
    """Return Fabric's outcome through reducers and over Gloo."""
    lightning_fabric = import_module(FABRIC)
    seen = {}
    for case, strategy in (("ours", "reduction"), ("stock", "ddp")):
        fabric = lightning_fabric.Fabric(
            accelerator="cpu",
            devices=1,
            num_nodes=2,
            strategy=strategy,
            plugins=[ours.ReductionEnvironment()],
        )
        fabric.launch()
        torch.manual_seed(0)
        net = Net()
        model, optimizer = fabric.setup(net.layers, torch.optim.SGD(net.layers.parameters(), 0.05))
        for at, (x, y) in enumerate(fabric.setup_dataloaders(data())):
            with fabric.no_backward_sync(model, enabled=at % 2 == 0):
                fabric.backward((model(x) - y).square().mean())
            if at % 2:
                optimizer.step()
                optimizer.zero_grad()
        fabric.barrier()
        client = getattr(fabric.strategy, "client", None)
        seen[case] = {"digest": digest(net), "bytes": client.bytes_reduced if client else 0}
    return seen


GROUPS = {
    "options": lambda: {
        **options(),
        "refusals": refusals(),
        "environments": environments(),
    },
    "again": again,
    "goodbye": goodbye,
    "failure": failure,
    "fabric": fabric,
    "default": lambda: {
        "ours": fit("reduction"),
        "base": ours.ReductionStrategy.__mro__[1].__module__,
    },
}
seen = GROUPS[GROUP]()
environment = ours.ReductionEnvironment()
seen["environment"] = [
    environment.global_rank(),
    environment.world_size(),
    environment.local_rank(),
    environment.node_rank(),
    environment.detect(),
]
write_result(seen)
