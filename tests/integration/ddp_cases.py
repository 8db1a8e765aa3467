"""One rank of the DDP tests: runs every case through Gloo and through the reducers.

Started by test_ddp as `python -m tests.integration.ddp_cases GROUP` with torchrun's environment.
"""

import copy
import hashlib
import io
import sys
import time
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import worker_client
from reducer.errors import ReductionError
from tests.ranks import refusal, write_result
from worker_client.ddp import DEFAULT_BUCKET_CAP_MB, ReductionState, reduction_hook, state_of

STEPS = 50


class Net(torch.nn.Module):
    """BatchNorm, fp32 and bf16 parameters, and a layer that is never used."""

    def __init__(self, mixed=True):
        super().__init__()
        self.first = torch.nn.Linear(20, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.middle = torch.nn.Linear(64, 32, dtype=torch.bfloat16 if mixed else torch.float32)
        self.unused = torch.nn.Linear(64, 64)
        self.last = torch.nn.Linear(32, 1)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.middle(x.to(self.middle.weight.dtype))).float()
        return self.last(x)


# DDP arguments of each option; unused parameters need one of the first two.
UNUSED = {"find_unused_parameters": True}
OPTIONS = {
    "find_unused_parameters": UNUSED,
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {**UNUSED, "gradient_as_bucket_view": True},
    "many_buckets": {**UNUSED, "bucket_cap_mb": 0.004},
    "no_sync": UNUSED,
    "fp16_compress_wrapper": UNUSED,
    "bf16_compress_wrapper": UNUSED,
    "join": UNUSED,
    "compile": UNUSED,
}


def _register(ddp, case, reduction):
    wrapper = getattr(default_hooks, case, None)
    if wrapper is not None:
        hook = wrapper(reduction_hook if reduction else default_hooks.allreduce_hook)
        hook.__name__ = case  # torch wants NCCL for a hook of bf16's own name; a CPU can do it too
        ddp.register_comm_hook(ReductionState() if reduction else None, hook)
    elif reduction:
        worker_client.attach(ddp)


def train(case, reduction, mixed=True):
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        Net(mixed), **{"bucket_cap_mb": DEFAULT_BUCKET_CAP_MB, **OPTIONS.get(case, UNUSED)}
    )
    _register(ddp, case, reduction)
    forward = torch.compile(ddp, backend="aot_eager") if case == "compile" else ddp
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    torch.manual_seed(100 + rank)
    joins = "join" in case
    steps = STEPS - 10 * rank if joins else STEPS
    losses = []
    if reduction and case == "join_of_who_is_left":
        state_of(ddp).weight = 1.0  # what torch's option does without a hook
    initial = reduction or case == "join"
    with ddp.join(divide_by_initial_world_size=initial) if joins else nullcontext():
        for step in range(steps):
            x = torch.randn(16, 20)
            hold = case == "no_sync" and step % 2 == 0
            with ddp.no_sync() if hold else nullcontext():
                loss = (forward(x) - x[:, :3].sum(1, keepdim=True)).square().mean()
                loss.backward()
            if not hold:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "digest": digest(ddp), "hooks": reduction}


def digest(model, *, gradients=False):
    total = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        tensor = parameter.grad if gradients else parameter.detach()
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def errors():
    """A slow rank makes backward() raise a typed error at every rank; the next step works."""
    client = worker_client.init()
    client.timeout_s = 2.0
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net(mixed=False), find_unused_parameters=True)
    worker_client.attach(ddp)
    seen = []
    raised_after = []
    for step in range(5):
        x = torch.randn(8, 20)
        loss = ddp(x).square().mean()
        if step == 2 and dist.get_rank() == 1:
            time.sleep(3.0)
        start = time.monotonic()
        try:
            loss.backward()
            seen.append("ok")
        except ReductionError as error:
            seen.append(f"{type(error).__name__} {getattr(error, 'missing', None)}")
            raised_after.append(time.monotonic() - start)
        ddp.zero_grad()
    client.timeout_s = 300.0
    return {"seen": seen, "raised_after": raised_after}


def buffers():
    """Rank 1 is late before each forward pass; then the ranks' buffers before and after one."""
    client, rank = worker_client.init(), dist.get_rank()
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    layers.register_buffer("transposed", torch.arange(12.0).reshape(3, 4).t())
    ddp = DistributedDataParallel(layers)
    worker_client.attach(ddp)
    waited_s = client.waited_s
    for _ in range(10):
        if rank == 1:
            time.sleep(0.2)
        ddp(torch.randn(8, 4)).sum().backward()
    waited_s = client.waited_s - waited_s
    layers.transposed.add_(-float(rank))
    mine = {name: buffer.tolist() for name, buffer in layers.named_buffers()}
    ddp.eval()
    ddp(torch.ones(1, 4))
    theirs = {name: buffer.tolist() for name, buffer in layers.named_buffers()}
    hooked = []
    ddp._register_buffer_comm_hook(None, lambda _, named: hooked.extend(named))
    ddp(torch.ones(1, 4))
    return {"waited_s": waited_s, "mine": mine, "theirs": theirs, "hooked": hooked}


class Segment(torch.autograd.Function):
    """A module whose backward pass begins another one: reentrant checkpointing, by hand."""

    @staticmethod
    def forward(context, x, module):
        context.module = module
        context.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(context, gradient):
        x = context.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            context.module(x).backward(gradient)
        return x.grad, None


# How the segments of a model make their backward passes.
SEGMENTS = {
    "plain": lambda module, x: module(x),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "static graph": partial(checkpoint, use_reentrant=True),
    "function": lambda module, x: Segment.apply(x, module),
}


class Segments(torch.nn.Module):
    """Two of them; `between` is called when the backward pass is done with the last."""

    def __init__(self, kind, between):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.run = SEGMENTS[kind]
        self.between = between

    def forward(self, x):
        hidden = self.run(self.first, x)
        hidden.register_hook(lambda _: self.between())
        return self.run(self.last, hidden)


def nested_errors(kind):
    """The first bucket's all-reduce fails in a nested backward pass, the last one's is well."""

    def between():
        state.weight = None

    torch.manual_seed(0)
    # A bucket for each segment.
    ddp = DistributedDataParallel(
        Segments(kind, between), bucket_cap_mb=0.01, static_graph=kind == "static graph"
    )
    worker_client.attach(ddp)
    state = state_of(ddp)
    seen, digests = [], []
    for step in range(4):
        ddp.zero_grad()
        x = torch.full((2, 64), 1.0 + step + dist.get_rank(), requires_grad=True)
        loss = ddp(x).square().mean()
        state.weight = 1.0 if step == 2 and dist.get_rank() == 1 else None  # others give none
        try:
            loss.backward()
            seen.append("")
        except ReductionError as error:
            seen.append(type(error).__name__)
        digests.append(digest(ddp, gradients=True))
    return {"seen": seen, "digests": digests}


def sparse_in_hook():
    ddp = DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True))
    ddp.register_comm_hook(ReductionState(), reduction_hook)
    return refusal(ddp(torch.tensor([1, 2])).sum().backward)


def copies():
    """An attached model is copied, averaged, written to a file and read again."""
    net = torch.nn.Linear(4, 4)
    ddp = DistributedDataParallel(net)
    client = worker_client.attach(ddp)
    averaged = AveragedModel(ddp)
    copied = copy.deepcopy(ddp)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    before = client.bytes_reduced
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
        optimizer.step()
        averaged.update_parameters(ddp)
    states = [model._comm_hooks[0][1] for model in (copied, loaded)]
    return {
        "the model still trains through reducers": client.bytes_reduced - before >= 3 * 80,
        "copies are independent": not torch.equal(copied.module.weight, net.weight),
        "copies are as the model was": torch.equal(copied.module.weight, loaded.module.weight),
        "averages are of the model": not torch.equal(averaged.module.module.weight, net.weight),
        "their hooks' states have the client": all(state.client is client for state in states),
    }


def profiled():
    """A step under torch's profiler, whose last rank comes late: what ranges lasted, ms."""
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    worker_client.attach(ddp)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss = ddp(torch.ones(1, 4)).sum()
        time.sleep(0.05 * dist.get_rank())
        loss.backward()
    events = [event for event in profile.events() if event.name.startswith("reduction: ")]
    return {event.name: event.cpu_time_total / 1000 for event in events}


def refusals():
    """What attach() says to models that a hook cannot serve."""
    from torch.distributed.fsdp import MixedPrecision  # noqa: PLC0415

    refused = partial(refusal, worker_client.attach)
    said = {"bare": refused(Net()), "sparse": ""}
    sparse = DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True))
    said["sparse"] = refused(sparse)
    twice = DistributedDataParallel(Net(mixed=False))
    worker_client.attach(twice)
    said["second"] = refused(twice)
    builtin = DistributedDataParallel(Net(mixed=False))
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    said["builtin"] = refused(builtin)
    low = torch.bfloat16
    precision = MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low)
    with patch("torch.Stream"):  # DDP makes one here, which needs a driver where torch has CUDA
        mixed = DistributedDataParallel(Net(mixed=False), mixed_precision=precision)
    said["mixed_precision"] = refused(mixed)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        said["python_reducer"] = refused(DistributedDataParallel(Net(mixed=False)))
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first = next(layer.named_parameters())
    delayed = DistributedDataParallel(
        layer, delay_all_reduce_named_params=[first], param_to_hook_all_reduce=first[1]
    )
    said["delay_all_reduce"] = refused(delayed)
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    del pair
    said["sub_group"] = refused(DistributedDataParallel(Net(mixed=False), process_group=alone))
    return said


def main(group):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    if group == "options":
        for case in OPTIONS:
            results[case] = {"gloo": train(case, False), "reduction": train(case, True)}
        results["repeat"] = {"reduction": train("many_buckets", True)}
    elif group == "fp32":
        for case in ("find_unused_parameters", "join_of_who_is_left"):
            results[case] = {
                "gloo": train(case, False, mixed=False),
                "reduction": train(case, True, mixed=False),
            }
    else:
        results["errors"] = errors()
        results["nested_errors"] = {kind: nested_errors(kind) for kind in SEGMENTS}
        results["sparse_in_hook"] = sparse_in_hook()
        results["buffers"] = buffers()
        results["copies"] = copies()
        results["profiled"] = profiled()
        results["refusals"] = refusals()
    results["bytes_reduced"] = worker_client.init().bytes_reduced
    write_result(results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
