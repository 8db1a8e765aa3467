"""One rank of the Accelerate tests: runs the cases whose names begin so.

Started by test_accelerate as ``python -m tests.frameworks.accelerate_cases NAMES``.
"""

import os
import sys
import warnings
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.frameworks.small import data, digest, loss_of, network
from tests.integration.cases import of_all, run_cases
from tests.ranks import refusal
from worker_client import accelerate as ours
from worker_client.client.bootstrap import connect
from worker_client.ddp import state_of
from worker_client.torch_backend import bytes_reduced

warnings.filterwarnings("ignore")
MIB = 1 << 20


def make(handler=None, **options):
    AcceleratorState._reset_state()
    handlers = [] if handler is None else [DistributedDataParallelKwargs(**handler)]
    return Accelerator(cpu=True, kwargs_handlers=handlers, **options)


class Training:
    """A small smooth network with its optimizer, prepared by an accelerator."""

    def __init__(self, accelerator, attached, unused=False):
        self.accelerator = accelerator
        own = None if attached is True else attached
        self.client = ours.attach(accelerator, own) if attached else None
        self.before = self.reduced()
        torch.manual_seed(0)
        self.net = network(64, 64)  # large enough for 8 bits
        if unused:
            used = nn.Sequential(*self.net)
            self.net.spare = nn.Linear(8, 8)
            self.net.forward = used.forward
        self.model, self.optimizer, self.loader = accelerator.prepare(
            self.net, torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9), data()
        )

    def reduced(self):
        return 0 if self.client is None else self.client.bytes_reduced

    def backward(self, batch):
        x, y = batch
        self.accelerator.backward(loss_of(self.model(x), y))

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
        """Return the weights, the same everywhere; bytes reduced; and how DDP was made."""
        weights = digest(self.net)
        assert of_all(weights) == [weights] * 2
        made = (self.model.bucket_bytes_cap, self.model.find_unused_parameters)
        return weights, self.reduced() - self.before, made


def trained(attached, handler=None, **options):
    """Return what two epochs come to."""
    training = Training(
        make(handler, **options), attached, unused="bucket_cap_mb" in (handler or {})
    )
    training.epochs()
    return training.end()


def halves(attached):
    """Return what an epoch comes to whose every second step is not synchronized."""
    training = Training(make(), attached)
    for at, batch in enumerate(training.loader):
        if at % 2:
            training.backward(batch)
            training.step()
        else:
            with training.accelerator.no_sync(training.model):
                training.backward(batch)
    return training.end()


def case_options_give_the_bits_of_gloo():
    """A sum of two does not depend on their order; what is asked for reaches DDP."""
    unused = {"find_unused_parameters": True, "bucket_cap_mb": 1}
    weights, plain, made = trained(True)
    assert (weights, 0) == trained(False)[:2]
    assert plain > 0
    assert made == (64 * MIB, False)
    assert trained(True, gradient_accumulation_steps=2)[:2] == (
        trained(False, gradient_accumulation_steps=2)[0],
        plain / 2,
    )
    weights, sent, _ = trained(True, mixed_precision="bf16")
    assert weights == trained(False, mixed_precision="bf16")[0]
    assert sent > 0
    weights, sent, made = trained(True, unused)
    assert weights == trained(False, unused)[0]
    assert sent > 0
    assert made == (MIB, True)
    assert halves(True)[:2] == (halves(False)[0], plain / 4)  # half of one epoch instead of two
    for wrapper in ("fp16", "bf16"):
        assert trained(True, {"comm_wrapper": wrapper})[1] == plain / 2


def case_a_state_has_the_residuals_of_8_bits():
    with connect(job="8 bits", wire_dtype="int8") as client, TemporaryDirectory() as folder:
        whole = Training(make(), client)
        whole.epochs(2)
        saved, _ = of_all(folder)
        begun = Training(make(), client)
        begun.epochs(1)
        begun.accelerator.save_state(saved)
        resumed = Training(make(), client)
        resumed.accelerator.load_state(saved)
        resumed.epochs(1)
        assert resumed.end()[0] == whole.end()[0]


def case_refusals_name_the_fix():
    attached, prepared = make(), make()
    _half_built = DistributedDataParallel.__new__(DistributedDataParallel)  # its device failed, say
    ours.attach(attached)
    wrapped = prepared.prepare(nn.Linear(2, 2))
    for fix, given in (
        ("call it once", attached),
        ("call attach() before prepare()", prepared),
        ("comm_wrapper=FP16", make({"comm_hook": "power_sgd"})),
        ("trainer.accelerator", wrapped),
    ):
        assert fix in refusal(ours.attach, given)
    evaluating = make()
    evaluating.prepare_model(nn.Linear(2, 2), evaluation_mode=True)  # as TRL's trainers do
    ours.attach(evaluating)
    assert state_of(evaluating.prepare(nn.Linear(2, 2))).weight is None


def case_backend():
    """A process group of the backend needs no attach()."""
    weights, _, _ = trained(False)
    dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    dist.init_process_group("reduction")
    assert "leave out attach()" in refusal(ours.attach, make())
    assert trained(False)[0] == weights
    assert bytes_reduced() > 0


def case_who_is_alone_is_told_how_to_start():
    os.environ["WORLD_SIZE"] = "1"  # no launcher has started others
    assert "accelerate launch" in refusal(ours.attach, make())


if __name__ == "__main__":
    run_cases(globals(), names=sys.argv[1], stop=True)
    if dist.is_initialized():
        dist.barrier()
