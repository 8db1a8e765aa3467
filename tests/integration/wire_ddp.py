"""One rank of test_wire_ddp: DDP trainings with any wire dtype and device.

Started as `python -m tests.integration.wire_ddp NAMES host|slow|cuda` with torchrun's environment,
it runs the cases whose names begin so. Tensors are in host memory, on the tests' own device, which
is that as well, or on a GPU.
"""

import io
import sys
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import worker_client
from harness import block8_oracle
from reducer.errors import MismatchError
from tests.integration.cases import of_all, run_cases
from tests.integration.ddp_cases import digest
from tests.ranks import refusal
from tests.worker_client.slow_device import stage_all, staging_threads
from worker_client.ddp import ReductionState, reduction_hook, state_of

STEPS = 40
BATCHES = (5, 24, 11)  # samples of each rank in a step
NAMES, KIND = sys.argv[1:]
ON = "cuda:0" if KIND == "cuda" else "cpu"


class Spectral(torch.nn.Module):
    """Large complex and real parameters, and small ones in the same buckets."""

    def __init__(self):
        super().__init__()
        self.lift = torch.nn.Linear(20, 300)
        self.modes = torch.nn.Parameter(torch.randn(300, 20, dtype=torch.complex64))
        self.phase = torch.nn.Parameter(torch.randn(20, dtype=torch.complex64))
        self.wide = torch.nn.Linear(20, 300)

    def forward(self, x):
        spectrum = ((self.lift(x) + 0j) @ self.modes * self.phase).abs()
        return self.wide(spectrum).mean(1, keepdim=True)


class Rearranged(torch.nn.Module):
    """Layers that are used in another order than they are made in, so DDP rearranges buckets."""

    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(150, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(150, 150) for _ in range(6))
        self.norm = torch.nn.LayerNorm(150)

    def forward(self, x):
        for at in (3, 0, 5, 1, 4, 2):
            x = torch.tanh(self.layers[at](x))
        return self.last(self.norm(x))


def make(network=None):
    """Two buckets and more, smooth layers."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 200)]
    layers += [torch.nn.Tanh(), torch.nn.Linear(200, 1)]
    network = network() if network else torch.nn.Sequential(*layers)
    return DistributedDataParallel(network.to(ON), bucket_cap_mb=0.1)


def samples(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCHES[rank], 20, generator=generator)


def loss_of(model, x):
    return (model(x) - x[:, :3].sum(1, keepdim=True)).square().mean()


class Trained(NamedTuple):
    """What a training comes to, at this rank; of a parameter's residuals the largest."""

    loss: float
    digest: str
    residuals: list[float]
    checkpoint: str


def train(hook=None, *, feedback=False, weighted=False, early=0):
    """Train over Gloo, or through a hook; rank 0 leaves out `early` steps, others go on."""
    ddp, rank = make(), dist.get_rank()
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
    kept = [one.abs().max().item() for one in state._residuals.values()] if state else []
    return Trained(total_loss(ddp), same, kept, checkpoint)


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


def case_a_gradient_travels_as_it_would_alone_and_a_complex_one_as_its_real_numbers():
    """All of a first step, in which a layer is excluded, are one or the other bit for bit."""
    ddp, own = make(Spectral), make(Spectral).module
    rank = dist.get_rank()
    loss_of(own, samples(0, rank).to(ON)).backward()
    mine = [real(parameter.grad.cpu()) for parameter in own.parameters()]
    both = [[torch.empty_like(gradient) for _ in range(2)] for gradient in mine]
    for gathered, gradient in zip(both, mine, strict=True):
        dist.all_gather(gathered, gradient)
    worker_client.attach(ddp, exclude=lambda name, _: name == "wide.weight")
    loss_of(ddp, samples(0, rank).to(ON)).backward()
    for (name, parameter), given in zip(ddp.module.named_parameters(), both, strict=True):
        got = real(parameter.grad.cpu()).numpy().tobytes()
        if name in {"modes", "lift.weight"}:
            expected = rounded_mean([gradient.numpy().reshape(-1) for gradient in given])
        else:
            expected = ((given[0] + given[1]) / 2).numpy()
        assert got == expected.tobytes(), name


def weighted_ranks_agree_to_the_bit():
    train(reduction_hook, weighted=True)


def unequal_batches_train_like_one_process_with_all_samples():
    for early in (0, 8):
        together = train(reduction_hook, weighted=True, early=early)
        assert together.loss == pytest.approx(alone(early), rel=1e-5)


def unequal_error_feedback_needs_a_cast():
    assert worker_client.init().wire_dtype == "none"
    assert "set REDUCTION_WIRE_DTYPE=bf16" in refusal(ReductionState, error_feedback=True)


def backward(ddp, x):
    (ddp(x) - x[:, :8] * x[:, 8:16]).square().mean().backward()


def fail(ddp, x):
    """Make a backward pass to whose last buckets one rank gives a weight."""
    state, layer = state_of(ddp), ddp.module.layers[0]
    weight = 1.0 if dist.get_rank() == 1 else None
    hook = layer.register_full_backward_hook(lambda *_: setattr(state, "weight", weight))
    with pytest.raises(MismatchError, match="disagree on"):
        backward(ddp, x)
    hook.remove()
    state.weight = None


def train_in_parts(checkpoint=None, end=10, failing=-1):
    """Train from the start or from a checkpoint to another one; make the step `failing` again.

    Returns:
        The checkpoint; a digest of the weights, and the bits of this rank's residuals.
    """
    ddp = make(Rearranged)
    worker_client.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    parts = ddp.module, optimizer, state_of(ddp)
    first, *saved = torch.load(checkpoint) if checkpoint else (0,)
    for part, its in zip(parts, saved, strict=False):
        part.load_state_dict(its)
    for step in range(first, end):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(16, 150, generator=generator)
        if step == failing:
            fail(ddp, x)
        optimizer.zero_grad()
        backward(ddp, x)
        optimizer.step()
    assert ddp._get_ddp_logging_data()["has_rebuilt_buckets"]
    saved = [end, *(part.state_dict() for part in parts)]
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    kept = {name: one.numpy().tobytes() for name, one in saved[-1]["residuals"].items()}
    return file, (digest(ddp), kept)


def undisturbed():
    _, bits = train_in_parts()
    (weights, first), (same, second) = of_all(bits)
    assert weights == same
    assert sorted(first) == [f"layers.{at}.weight" for at in range(6)]
    assert all(first[name] != second[name] for name in first)
    return bits


def residuals_outlive_the_model_in_a_checkpoint():
    checkpoint, _ = train_in_parts(end=5)
    assert train_in_parts(checkpoint)[1] == undisturbed()


def residuals_stay_as_they_were_when_a_step_fails():
    assert train_in_parts(failing=5)[1] == undisturbed()


def reducer_is_lost_and_no_bit_differs():
    _, bits = train_in_parts()
    assert worker_client.init().losses == 1
    assert bits == undisturbed()


def real(gradient):
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def rounded_mean(given):
    """The mean of what travels, rounded once more, of a gradient that travels alone."""
    wire = worker_client.init().wire_dtype
    if wire in block8_oracle.Q:
        return block8_oracle.reduced(given, wire, mean=True)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[wire]
    total = sum(torch.from_numpy(gradient).to(narrow).float() for gradient in given)
    return (total / 2).to(narrow).float().numpy()


def alone(early):
    """One process with everybody's samples: what a weighted mean has to come to."""
    model = make().module.cpu()
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
        stage_all()
    run_cases(globals(), names=NAMES, stop=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
