"""One rank of the Accelerate and transformers tests: runs the cases of a group.

Started by test_accelerate as ``python -m tests.frameworks.accelerate_cases GROUP FOLDER``.
"""

import hashlib
import sys
import warnings

GROUP, FOLDER = sys.argv[1:]


import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DistributedDataParallelKwargs  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import worker_client  # noqa: E402
from tests.ranks import refusal, write_result  # noqa: E402
from worker_client import accelerate as ours  # noqa: E402
from worker_client.ddp import state_of  # noqa: E402
from worker_client.torch_backend import bytes_reduced  # noqa: E402

warnings.filterwarnings("ignore")


def digest(model):
    weights = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(160, 8, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8)


def make(handler=None, **options):
    AcceleratorState._reset_state()
    handlers = [] if handler is None else [DistributedDataParallelKwargs(**handler)]
    return Accelerator(cpu=True, kwargs_handlers=handlers, **options)


class Training:
    """A small smooth network with its optimizer, prepared by an accelerator."""

    def __init__(self, accelerator, attached, unused=False):
        self.accelerator = accelerator
        self.client = ours.attach(accelerator) if attached else None
        self.before = self.reduced
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        if unused:
            self.net.spare = nn.Linear(8, 8)
            self.net.forward = lambda x: self.net[2](self.net[1](self.net[0](x)))
        self.model, self.optimizer, self.loader = accelerator.prepare(
            self.net, torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9), data()
        )

    @property
    def reduced(self):
        return 0 if self.client is None else self.client.bytes_reduced

    def backward(self, batch):
        x, y = batch
        self.accelerator.backward((self.model(x).float() - y).square().mean())

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epochs(self, count=2):
        for _ in range(count):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.backward(batch)
                    self.step()

    def end(self):
        return {
            "digest": digest(self.net),
            "bytes": self.reduced - self.before,
            "bucket_cap": self.model.bucket_bytes_cap,
            "find_unused": self.model.find_unused_parameters,
        }


def accelerated(attached):
    """Return what every option comes to."""
    seen = {}
    options = {
        "default": (None, {}),
        "accumulate": (None, {"gradient_accumulation_steps": 2}),
        "bf16": (None, {"mixed_precision": "bf16"}),
        "unused": ({"find_unused_parameters": True, "bucket_cap_mb": 1}, {}),
        "fp16_wrapper": ({"comm_wrapper": "fp16"}, {}),
        "bf16_wrapper": ({"comm_wrapper": "bf16"}, {}),
    }
    for case, (handler, arguments) in options.items():
        training = Training(make(handler, **arguments), attached, unused=case == "unused")
        training.epochs()
        seen[case] = training.end()

    training = Training(make(), attached)
    for at, batch in enumerate(training.loader):
        if at % 2:
            training.backward(batch)
            training.step()
        else:
            with training.accelerator.no_sync(training.model):
                training.backward(batch)
    seen["no_sync"] = training.end()
    return seen


def transformed(attached):
    """Return what the Trainer of transformers comes to, straight and resumed."""
    from transformers import (  # noqa: PLC0415
        PrinterCallback,
        Trainer,
        TrainingArguments,
        ViTConfig,
        ViTForImageClassification,
    )

    shape = ViTConfig(
        image_size=4,
        patch_size=2,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 1, 4, 4, generator=generator)
    examples = [{"pixel_values": x, "labels": int(x.sum() > 0)} for x in images]
    base = {
        "use_cpu": True,
        "ddp_backend": "gloo",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    cases = {
        "default": (2, {"save_strategy": "epoch"}, False),
        "resumed": (2, {"save_strategy": "no"}, True),
        "bf16": (2, {"save_strategy": "no", "bf16": True}, False),
        "chosen": (1, {"save_strategy": "no", "ddp_bucket_cap_mb": 8}, False),
    }
    seen = {}
    for case, (epochs, options, resumed) in cases.items():
        folder = f"{FOLDER}/{'ours' if attached else 'stock'}"
        AcceleratorState._reset_state()
        torch.manual_seed(0)
        model = ViTForImageClassification(shape)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder, num_train_epochs=epochs, **{**base, **options}
            ),
            train_dataset=examples,
        )
        trainer.remove_callback(PrinterCallback)
        client = ours.attach(trainer.accelerator) if attached else None
        before = 0 if client is None else client.bytes_reduced
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4" if resumed else None)
        wrapped = trainer.model_wrapped
        seen[case] = {
            "digest": digest(model),
            "bytes": 0 if client is None else client.bytes_reduced - before,
            "steps": trainer.state.global_step,
            "bucket_cap": wrapped.bucket_bytes_cap,
            "find_unused": wrapped.find_unused_parameters,
        }
    return seen


def refusals():
    """Return what is said where something is refused."""

    attached, prepared = make(), make()
    _half_built = DistributedDataParallel.__new__(DistributedDataParallel)  # its device failed, say
    ours.attach(attached)
    wrapped = prepared.prepare(nn.Linear(2, 2))
    evaluating = make()
    evaluating.prepare_model(nn.Linear(2, 2), evaluation_mode=True)  # as TRL's trainers do
    ours.attach(evaluating)
    trained = evaluating.prepare(nn.Linear(2, 2))
    return {
        "after one for evaluation": str(state_of(trained).weight),
        "twice": refusal(ours.attach, attached),
        "late": refusal(ours.attach, prepared),
        "hook": refusal(ours.attach, make({"comm_hook": "power_sgd"})),
        "model": refusal(ours.attach, wrapped),
    }


def backend():
    """Return what a Trainer comes to over the backend, and what is said to who names it there."""
    from transformers import TrainingArguments  # noqa: PLC0415

    try:
        TrainingArguments(FOLDER, use_cpu=True, ddp_backend="reduction")
    except ValueError as error:
        said = str(error)
    torch.distributed.init_process_group("reduction")
    seen = {**transformed(False), "said": said, "reduced": bytes_reduced()}
    torch.distributed.barrier()
    return seen


def alone():
    """Return what is said to a process that no launcher started."""
    return {"alone": refusal(ours.attach, make())}


def both(train):
    seen = {"ours": train(True), "stock": train(False)}
    torch.distributed.barrier()
    worker_client.init().shutdown()
    return seen


GROUPS = {
    "accelerate": lambda: both(accelerated),
    "transformers": lambda: both(transformed),
    "refusals": refusals,
    "backend": backend,
    "alone": alone,
}
seen = GROUPS[GROUP]()
write_result(seen)
