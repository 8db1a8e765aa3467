"""One rank of test_wire_ddp and test_staged_ddp: DDP trainings with any wire dtype and device.

Started as `python -m tests.integration.wire_ddp NAMES host|slow|halting|cuda` with torchrun's
environment, it runs the cases whose names begin so. Tensors are in host memory, on the tests' own
device, which is that as well, on one whose copies take any time, or on a GPU.
"""

import random
import sys
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import worker_client
from harness import block8_oracle
from reducer.errors import DeviceError
from tests.integration.cases import of_all, run_cases
from tests.integration.ddp_cases import digest, late
from tests.ranks import refusal
from tests.worker_client.slow_device import SlowDevice, stage_all, staging_threads
from worker_client.ddp import ReductionState, reduction_hook
from worker_client.staging import split_call

STEPS = 40
BATCHES = (5, 24, 11)  # samples of each rank in a step
NAMES, KIND = sys.argv[1:]
ON = "cuda:0" if KIND == "cuda" else "cpu"
BROKEN = range(0)  # numbers of copies that a halting device fails at


class Spectral(torch.nn.Module):
    """A large complex parameter, a small one, and real ones in the same bucket."""

    def __init__(self):
        super().__init__()
        self.lift = torch.nn.Linear(20, 300)
        self.modes = torch.nn.Parameter(torch.randn(300, 20, dtype=torch.complex64))
        self.phase = torch.nn.Parameter(torch.randn(20, dtype=torch.complex64))

    def forward(self, x):
        return ((self.lift(x) + 0j) @ self.modes * self.phase).abs().mean(1, keepdim=True)


def make(on="cpu"):
    """Two buckets and more, smooth layers."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 200)]
    layers += [torch.nn.Tanh(), torch.nn.Linear(200, 1)]
    return DistributedDataParallel(torch.nn.Sequential(*layers).to(on), bucket_cap_mb=0.1)


def samples(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCHES[rank], 20, generator=generator)


def loss_of(model, x):
    return (model(x) - x[:, :3].sum(1, keepdim=True)).square().mean()


class Trained(NamedTuple):
    """What a training comes to, at this rank.

    Attributes:
        loss: of all ranks' samples.
        digest: of the weights, which are the same everywhere.
        residuals: the largest of each parameter that has one.
        checkpoint: what is said where the hook's state is saved.
    """

    loss: float
    digest: str
    residuals: list[float]
    checkpoint: str


def train(hook=None, *, feedback=False, weighted=False, early=0):
    """Train over Gloo or through a hook.

    Args:
        hook: None for Gloo.
        feedback: whether errors of rounding are kept.
        weighted: whether ranks say how large their batches are.
        early: steps that rank 0 leaves out, while others go on.
    """
    ddp, rank = make(ON), dist.get_rank()
    state = None
    if hook:
        state = ReductionState(error_feedback=feedback)
        ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with Join([ddp], enable=bool(early)):
        for step in range(STEPS if rank else STEPS - early):
            if weighted:
                state.weight = BATCHES[rank]
            loss = loss_of(ddp, samples(step, rank).to(ON))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    ddp.cpu()
    same = digest(ddp)
    assert len(set(of_all(same))) == 1
    checkpoint = refusal(state.state_dict) if state else ""
    return Trained(total_loss(ddp), same, residuals(state), checkpoint)


def case_rounded_trainings():
    """They are nearly those of Gloo in float32; feedback is the default in 8 bits alone."""
    stock = train()
    plain, kept = train(reduction_hook), train(reduction_hook, feedback=True)
    wrapped = train(default_hooks.fp16_compress_wrapper(reduction_hook))
    for trained in (plain, kept, wrapped):
        assert trained.loss == pytest.approx(stock.loss, rel=2e-3)
        assert trained.loss != stock.loss  # it was rounded indeed
    blocks = worker_client.init().wire_dtype in block8_oracle.Q
    assert train(reduction_hook, feedback=None) == (kept if blocks else plain)
    assert plain.residuals == []
    assert len(kept.residuals) == 2
    assert min(kept.residuals) > 0
    assert "2 parameters with residuals have no name" in kept.checkpoint
    assert kept.digest != plain.digest
    assert bool(staging_threads()) == (KIND != "host")


def case_a_gradient_travels_as_it_would_alone():
    assert one_step(make) == {
        "exact": ["0.bias", "2.weight", "2.bias", "4.weight", "4.bias"],
        "rounded": ["0.weight"],
        "neither": [],
    }


def case_a_complex_gradient_travels_as_its_real_numbers():
    assert one_step(make_complex) == {
        "exact": ["phase", "lift.bias"],
        "rounded": ["modes", "lift.weight"],
        "neither": [],
    }


def weighted_ranks_agree_to_the_bit():
    train(reduction_hook, weighted=True)


def unequal_batches_train_like_one_process_with_all_samples():
    for early in (0, 8):
        together = train(reduction_hook, weighted=True, early=early)
        assert together.loss == pytest.approx(alone(early), rel=1e-5)


def unequal_error_feedback_needs_a_cast():
    assert worker_client.init().wire_dtype == "none"
    assert "set REDUCTION_WIRE_DTYPE=bf16" in refusal(ReductionState, error_feedback=True)


def staged_gradients_train_as_over_gloo():
    stock, ours = train(), train(reduction_hook)
    assert ours.loss == pytest.approx(stock.loss, rel=1e-4, abs=1e-6)
    assert KIND == "cuda" or ours.digest == stock.digest  # a sum of two has no order


def staged_errors_come_in_time():
    late(make(ON))


def staged_errors_of_a_device_end_the_backward_pass():
    """Whatever DDP makes of the error, which loses its type."""
    global BROKEN  # noqa: PLW0603 (the client has opened its device)
    assert staging_threads() == {"to-device", "to-host"}
    if KIND == "halting":
        BROKEN = range(1 << 40)
        ddp = make()
        worker_client.attach(ddp)
        with pytest.raises(Exception, match="an illegal memory access"):
            ddp(torch.ones(2, 20)).sum().backward()


def residuals(state):
    """Largest residual of each parameter that has one."""
    return [kept.abs().max().item() for kept in state._residuals.values()] if state else []


def make_complex(on="cpu"):
    torch.manual_seed(0)
    return DistributedDataParallel(Spectral().to(on))


def real(gradient):
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def one_step(make):
    """Gradients of a first step, in which a layer is excluded, by what each is bit for bit."""
    ddp = make(ON)
    rank = dist.get_rank()
    own = make(ON).module
    loss_of(own, samples(0, rank).to(ON)).backward()
    mine = [real(parameter.grad.cpu()) for parameter in own.parameters()]
    both = [[torch.empty_like(gradient) for _ in range(2)] for gradient in mine]
    for gathered, gradient in zip(both, mine, strict=True):
        dist.all_gather(gathered, gradient)
    worker_client.attach(ddp, exclude=lambda name, _: name == "2.weight")
    loss_of(ddp, samples(0, rank).to(ON)).backward()
    found = {"exact": [], "rounded": [], "neither": []}
    for (name, parameter), given in zip(ddp.module.named_parameters(), both, strict=True):
        exact = (given[0] + given[1]) / 2
        as_rounded = rounded_mean([gradient.numpy().reshape(-1) for gradient in given])
        of = {"exact": exact.numpy().tobytes(), "rounded": as_rounded.tobytes()}
        got = real(parameter.grad.cpu()).numpy().tobytes()
        found[next((kind for kind, bits in of.items() if bits == got), "neither")].append(name)
    return found


def rounded_mean(given):
    """The mean of what travels, rounded once more, of a gradient that travels alone."""
    wire = worker_client.init().wire_dtype
    if wire in block8_oracle.Q:
        return block8_oracle.reduced(given, wire, mean=True)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[wire]
    total = sum(torch.from_numpy(gradient).to(narrow).float() for gradient in given)
    return (total / 2).to(narrow).float().numpy()


def halting(of):
    """A device each of whose copies takes its time, and which is broken one day."""
    assert of.type == "cpu"
    dice = random.Random(dist.get_rank())

    def before(_way, number):
        time.sleep(dice.choice([0, 0, 0.002]))
        if number in BROKEN:
            raise DeviceError("an illegal memory access", device="slow:0")

    return SlowDevice(before)


def alone(early):
    """One process with everybody's samples: what a weighted mean has to come to."""
    model = make().module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        ranks = range(dist.get_world_size())
        there = [rank for rank in ranks if rank or step < STEPS - early]
        loss = loss_of(model, torch.cat([samples(step, rank) for rank in there]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return total_loss(model)


def total_loss(model):
    with torch.no_grad():
        x = torch.cat([samples(step, rank) for step in range(20) for rank in range(3)])
        return loss_of(getattr(model, "module", model), x).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if KIND == "slow":
        stage_all(lambda _: SlowDevice())
    elif KIND == "halting":
        split_call.PIECE_BYTES = 4096
        stage_all(halting)
    run_cases(globals(), names=NAMES, stop=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
