"""One rank of test_wire_ddp: DDP trainings with 16 or 8 bits on the wire, and unequal batches.

Started as `python -m tests.integration.wire_ddp CASES host|slow|cuda` with torchrun's environment:
tensors are in host memory, on the tests' own device, which is that as well, or on a GPU.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import worker_client
from harness import block8_oracle
from tests.integration.ddp_cases import digest
from tests.ranks import refusal, write_result
from tests.worker_client.slow_device import SlowDevice, stage_all, staging_threads
from worker_client.ddp import ReductionState, reduction_hook

STEPS = 40
BATCHES = (5, 24, 11)  # samples of each rank in a step
FEEDBACK = {"feedback": True, "default": None}
EARLY = 8  # steps that rank 0 leaves out in the case "join"


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


def train(case, on):
    ddp = make(on)
    state = None
    if case != "stock":
        state = ReductionState(error_feedback=FEEDBACK.get(case, False))
        hook = reduction_hook
        if case == "wrapper":
            hook = default_hooks.fp16_compress_wrapper(reduction_hook)
        ddp.register_comm_hook(state, hook)
    rank = dist.get_rank()
    weighted = case in {"weighted", "join"}
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    steps = STEPS - EARLY if case == "join" and rank == 0 else STEPS
    with Join([ddp], enable=case == "join"):
        for step in range(steps):
            if weighted:
                state.weight = BATCHES[rank]
            loss = loss_of(ddp, samples(step, rank).to(on))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    ddp.cpu()
    return {
        "loss": total_loss(ddp),
        "digest": digest(ddp),
        "residuals": residuals(state),
        "checkpoint": refusal(state.state_dict) if state else "",
    }


def residuals(state):
    """Largest residual of each parameter that has one."""
    return [kept.abs().max().item() for kept in state._residuals.values()] if state else []


def make_complex(on="cpu"):
    torch.manual_seed(0)
    return DistributedDataParallel(Spectral().to(on))


def real(gradient):
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def one_step(wire, on, make=make):
    """Gradients of a first step, in which a layer is excluded, by what each is bit for bit."""
    ddp = make(on)
    rank = dist.get_rank()
    own = make(on).module
    loss_of(own, samples(0, rank).to(on)).backward()
    mine = [real(parameter.grad.cpu()) for parameter in own.parameters()]
    both = [[torch.empty_like(gradient) for _ in range(2)] for gradient in mine]
    for gathered, gradient in zip(both, mine, strict=True):
        dist.all_gather(gathered, gradient)
    worker_client.attach(ddp, exclude=lambda name, _: name == "2.weight")
    loss_of(ddp, samples(0, rank).to(on)).backward()
    found = {"exact": [], "rounded": [], "neither": []}
    for (name, parameter), given in zip(ddp.module.named_parameters(), both, strict=True):
        exact = (given[0] + given[1]) / 2
        as_rounded = rounded_mean(wire, [gradient.numpy().reshape(-1) for gradient in given])
        of = {"exact": exact.numpy().tobytes(), "rounded": as_rounded.tobytes()}
        got = real(parameter.grad.cpu()).numpy().tobytes()
        found[next((kind for kind, bits in of.items() if bits == got), "neither")].append(name)
    return found


def rounded_mean(wire, given):
    """The mean of what travels, rounded once more, of a gradient that travels alone."""
    if wire in block8_oracle.Q:
        return block8_oracle.reduced(given, wire, mean=True)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[wire]
    total = sum(torch.from_numpy(gradient).to(narrow).float() for gradient in given)
    return (total / 2).to(narrow).float().numpy()


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
    return {"loss": total_loss(model)}


def total_loss(model):
    with torch.no_grad():
        x = torch.cat([samples(step, rank) for step in range(20) for rank in range(3)])
        return loss_of(getattr(model, "module", model), x).item()


def main(cases, kind="host"):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if kind == "slow":
        stage_all(lambda _: SlowDevice())
    on = "cuda:0" if kind == "cuda" else "cpu"
    results = {}
    for case in cases.split(","):
        if case.startswith("alone"):
            results[case] = alone(EARLY if case == "alone-join" else 0)
        elif case == "refused":
            results[case] = refusal(ReductionState, error_feedback=True)
        elif case == "one_step":
            results[case] = one_step(worker_client.init().wire_dtype, on)
        elif case == "one_complex_step":
            results[case] = one_step(worker_client.init().wire_dtype, on, make_complex)
        else:
            results[case] = train(case, on)
    client = worker_client.init()
    results["bytes_reduced"], results["wire_dtype"] = client.bytes_reduced, client.wire_dtype
    results["staged"] = bool(staging_threads())
    write_result(results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
