"""One rank of the Lightning tests: runs the cases whose names begin so.

Started by test_lightning as ``python -m tests.frameworks.lightning_cases PACKAGE NAMES``, where the
package is ``lightning.pytorch`` or ``pytorch_lightning``.
"""

import os
import sys
import time
import warnings
from importlib import import_module
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

PACKAGE, NAMES = sys.argv[1:]
pl = import_module(PACKAGE)
FABRIC = "lightning.fabric" if PACKAGE == "lightning.pytorch" else "lightning_fabric"

import worker_client  # noqa: E402
from reducer.errors import RankLostError, ReductionError  # noqa: E402
from tests.frameworks.lightning_trainer import make_trainer  # noqa: E402
from tests.frameworks.small import data, digest, loss_of, network  # noqa: E402
from tests.integration.cases import of_all, run_cases  # noqa: E402
from tests.ranks import refusal  # noqa: E402
from worker_client import lightning as ours  # noqa: E402
from worker_client.client.bootstrap import connect  # noqa: E402

warnings.filterwarnings("ignore")
EMBEDDED = "REDUCTION_SERVERS" not in os.environ
MIB = 1 << 20


class Net(pl.LightningModule):
    """A small smooth network; `unused` has a layer that takes no part."""

    def __init__(self, unused=False, dies_at=-1):
        super().__init__()
        self.layers = network(64, 64)  # large enough for 8 bits
        self.spare = torch.nn.Linear(8, 8) if unused else None
        self.dies_at = dies_at
        self.wrapped = None

    def on_train_start(self):
        model = self.trainer.strategy.model
        self.wrapped = (model.bucket_bytes_cap, model.find_unused_parameters)

    def training_step(self, batch):
        if self.global_step == self.dies_at and self.global_rank == 1:
            raise ValueError("this rank gives up")
        return self.validation_step(batch)

    def validation_step(self, batch):
        x, y = batch
        return loss_of(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def trainer_of(strategy, epochs=2, **options):
    return make_trainer(pl, strategy, max_epochs=epochs, **options)


def fit(strategy, **options):
    """Return what a training comes to: weights, how DDP was made, and the client."""
    torch.manual_seed(0)
    model = Net(unused=options.pop("unused", False))
    trainer = trainer_of(strategy, **options)
    trainer.fit(model, data(shuffle=True))
    return digest(model), model.wrapped, getattr(trainer.strategy, "client", None)


def case_fits_have_the_bits_of_gloo():
    """A sum of two does not depend on their order; what is asked for reaches DDP."""
    unused = "ddp_find_unused_parameters_true"
    sent = []
    for mine, theirs, options, wrapped in (
        ("reduction", "ddp", {}, (64 * MIB, False)),
        ("reduction", "ddp", {"accumulate_grad_batches": 2}, (64 * MIB, False)),
        ("reduction", "ddp", {"precision": "bf16-mixed"}, (64 * MIB, False)),
        (ours.NAME_UNUSED, unused, {"unused": True}, (64 * MIB, True)),
        (ours.ReductionStrategy(bucket_cap_mb=1), "ddp", {}, (MIB, False)),
    ):
        weights, made, client = fit(mine, **options)
        assert (weights, None) == fit(theirs, **options)[::2]
        assert made == wrapped
        assert client.bytes_reduced > 0
        assert not client.usable
        sent.append(client.bytes_reduced)
    wrapper = ours.ReductionStrategy(ddp_comm_wrapper=default_hooks.fp16_compress_wrapper)
    weights, _, client = fit(wrapper)
    assert of_all(weights) == [weights] * 2
    assert sent[1] == client.bytes_reduced == sent[0] / 2


def case_a_checkpoint_has_the_residuals_of_8_bits():
    with connect(job="8 bits", wire_dtype="int8") as client, TemporaryDirectory() as folder:

        def fitted(epochs, saved=None):
            torch.manual_seed(0)
            model = Net()
            options = {"enable_checkpointing": True, "default_root_dir": folder}
            trainer = trainer_of(ours.ReductionStrategy(client=client), epochs, **options)
            trainer.fit(model, data(shuffle=True), ckpt_path=saved)
            return digest(model), trainer.checkpoint_callback.best_model_path

        whole, _ = fitted(2)
        _, saved = fitted(1)
        assert fitted(2, saved)[0] == whole
        dist.barrier()


def case_a_fit_by_either_name():
    weights, _, client = fit("reduction")
    assert of_all(weights) == [weights] * 2
    assert client.bytes_reduced > 0
    assert ours.ReductionStrategy.__mro__[1].__module__.startswith(f"{PACKAGE}.")


def case_the_environment_is_the_launchers():
    rank = int(os.environ["RANK"])
    assert told(ours.ReductionEnvironment())[:4] == [rank, 2, 0, rank]
    assert ours.ReductionEnvironment().detect()
    several = {**TWO_BY_TWO, "MASTER_ADDR": "first", "MASTER_PORT": "29500"}
    named, counted = launched(**several, GROUP_RANK="5"), launched(**several)
    named.set_global_rank(7)
    named.set_world_size(8)
    counted.validate_settings(2, 2)
    assert told(named) == [3, 4, 1, 5, "first", 29500]
    assert told(counted) == [3, 4, 1, 1, "first", 29500]


def told(environment):
    """What a process is told about itself."""
    return [
        environment.global_rank(),
        environment.world_size(),
        environment.local_rank(),
        environment.node_rank(),
        environment.main_address,
        environment.main_port,
    ]


TWO_BY_TWO = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def launched(**variables):
    """Return the environment of a process that was started with these, or without empty ones."""
    with patch.dict(os.environ, {name: value for name, value in variables.items() if value}):
        for name in [name for name, value in variables.items() if not value]:
            os.environ.pop(name, None)
        return ours.ReductionEnvironment()


def case_the_fix_is_named_by_refusals():
    hook = default_hooks.allreduce_hook
    for fix, call in (
        (
            "Lightning's DDPStrategy without reducers",
            lambda: ours.ReductionStrategy(ddp_comm_hook=hook),
        ),
        ("give all three, or none", lambda: ours.ReductionStrategy(model_averaging_period=2)),
        ("devices=1 and num_nodes=2", lambda: ours.ReductionEnvironment().validate_settings(4, 1)),
        ("devices=2 and num_nodes=2", lambda: launched(**TWO_BY_TWO).validate_settings(1, 4)),
        (
            "did not set RANK and MASTER_PORT: start the script with torchrun",
            lambda: launched(RANK="", MASTER_PORT=""),
        ),
    ):
        assert fix in refusal(call)


def case_fabric_trains_as_it_does_over_gloo():
    lightning_fabric = import_module(FABRIC)
    weights = set()
    for strategy in ("reduction", "ddp"):
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
        for at, (x, y) in enumerate(fabric.setup_dataloaders(data(shuffle=True))):
            with fabric.no_backward_sync(model, enabled=at % 2 == 0):
                fabric.backward(loss_of(model(x), y))
            if at % 2:
                optimizer.step()
                optimizer.zero_grad()
        fabric.barrier()
        client = getattr(fabric.strategy, "client", None)
        assert (client is None) == (strategy == "ddp")
        assert client is None or client.bytes_reduced > 0
        weights.add(digest(net))
    assert len(weights) == 1


def twice(strategy):
    """Return the weights after two fits of one Trainer, with validations, and their clients."""
    torch.manual_seed(0)
    model = Net()
    trainer = trainer_of(strategy)
    clients = []
    for epochs in (2, 4):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, data(shuffle=True))
        clients.append(getattr(trainer.strategy, "client", None))
        trainer.validate(model, data(shuffle=True), verbose=False)
    return digest(model), clients


def case_more_fits_and_a_client_of_ones_own():
    """A second fit joins anew; a client that the user made is used and left running."""
    weights, _, client = fit("reduction")
    assert bool(client.spec.hosts) == EMBEDDED
    assert weights == fit("ddp")[0]
    trained, (first, second) = twice("reduction")
    assert trained == twice("ddp")[0]
    assert first is not second
    assert (first.usable, second.usable) == (False, False)
    mine = worker_client.init()
    for strategy in (ours.ReductionStrategy(), ours.ReductionStrategy(client=mine)):
        assert fit(strategy)[::2] == (weights, mine)
        assert mine.usable
    assert mine.bytes_reduced == 2 * client.bytes_reduced
    dist.barrier()
    mine.shutdown()


class Late(Net):
    """Its rank 1 comes late to the end of a fit."""

    def on_train_end(self):
        if self.global_rank == 1:
            time.sleep(4.0)
        self.woke = time.monotonic()


def case_other_ranks_of_an_embedded_job_are_waited_for():
    model = Late()
    trainer_of("reduction").fit(model, data(shuffle=True))
    (_, returned), (woke, _) = of_all((model.woke, time.monotonic()))
    assert woke < returned


def case_who_raises_keeps_nobody_waiting():
    trainer = trainer_of("reduction")
    began = time.monotonic()
    error = ReductionError if EMBEDDED else RankLostError
    with pytest.raises(ValueError if os.environ["RANK"] == "1" else error) as raised:
        trainer.fit(Net(dies_at=2), data(shuffle=True))
    assert os.environ["RANK"] == "0" or str(raised.value) == "this rank gives up"
    assert not trainer.strategy.client.usable
    assert time.monotonic() - began < 60


if __name__ == "__main__":
    run_cases(globals(), names=NAMES, stop=True)
