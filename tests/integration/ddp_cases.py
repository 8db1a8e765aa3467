"""One rank of the DDP tests: runs the cases whose names begin so.

Started by test_ddp as `python -m tests.integration.ddp_cases NAMES` with torchrun's environment.
"""

import copy
import hashlib
import io
import sys
import time
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import worker_client
from reducer.errors import ReductionError
from tests.integration.cases import of_all, run_cases
from tests.ranks import refusal
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
    return losses, digest(ddp)


def assert_same_training(case, **options):
    """Check that a case trains as over Gloo, and to the same bits everywhere; return these."""
    gloo, _ = train(case, False, **options)
    losses, weights = train(case, True, **options)
    assert len(gloo) >= 40, case
    assert losses == pytest.approx(gloo, rel=1e-5), case
    assert gloo[-1] < gloo[0], case  # it did learn something
    return losses, weights


def case_every_option_trains_like_gloo():
    client = worker_client.init()
    for case in OPTIONS:
        before = client.bytes_reduced
        trained = assert_same_training(case)
        assert len({weights for _, weights in of_all(trained)}) == 1, case
        # All steps but those without synchronization reduce at least the model's 9 KiB, or half.
        assert client.bytes_reduced - before > 20 * 9_000, case
        if case == "many_buckets":
            assert train(case, True) == trained, "a second run has the same bits"


def three_ranks_train_in_fp32():
    _, weights = assert_same_training("find_unused_parameters", mixed=False)
    assert of_all(weights) == [weights] * 3
    (gloo, _), (losses, _) = (train("join_of_who_is_left", on, mixed=False) for on in (False, True))
    assert losses == pytest.approx(gloo, rel=1e-5)


def digest(model, *, gradients=False):
    total = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        tensor = parameter.grad if gradients else parameter.detach()
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def case_errors():
    """A slow rank makes backward() raise a typed error at every rank; the next step works."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net(mixed=False), find_unused_parameters=True)
    client = worker_client.attach(ddp)
    seen = []
    for step in range(5):
        client.timeout_s = 2.0 if step == 2 else 300.0
        loss = ddp(torch.randn(8, 20)).square().mean()
        if step == 2 and dist.get_rank() == 1:
            time.sleep(3.0)
        start = time.monotonic()
        try:
            loss.backward()
            seen.append("ok")
        except ReductionError as error:
            seen.append(f"{type(error).__name__} {getattr(error, 'missing', None)}")
            assert time.monotonic() - start < 30
        ddp.zero_grad()
    assert seen == ["ok", "ok", "ReductionTimeout (1,)", "ok", "ok"]


def case_buffers_are_those_of_the_first_rank_and_reducers_see_who_is_late():
    """Rank 1 is late before each forward pass."""
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
    if rank == 0:
        assert client.waited_s - waited_s > 0.5, "rank 1 was late by 2 s"
    layers.transposed.add_(-float(rank))
    mine = {name: buffer.tolist() for name, buffer in layers.named_buffers()}
    ddp.eval()
    ddp(torch.ones(1, 4))
    theirs = {name: buffer.tolist() for name, buffer in layers.named_buffers()}
    hooked = []
    ddp._register_buffer_comm_hook(None, lambda _, named: hooked.extend(named))
    ddp(torch.ones(1, 4))
    first, second = of_all(mine)
    assert first != second
    assert theirs == first
    assert hooked == (list(mine) if rank == 0 else hooked), "a user's own hook has them instead"


# How the segments of a model make their backward passes.
SEGMENTS = {
    "plain": lambda module, x: module(x),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "static graph": partial(checkpoint, use_reentrant=True),
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


def case_backward_raises_what_failed_in_a_nested_one():
    plain = nested_errors("plain")
    for kind in SEGMENTS:
        digests = nested_errors(kind)
        of_both = of_all(digests)
        for step in (0, 1, 3):
            assert of_both[0][step] == of_both[1][step] == plain[step], kind


def nested_errors(kind):
    """The first bucket's all-reduce fails in a nested backward pass, the last one's is well.

    Returns:
        Digests of the gradients after each step.
    """

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
    assert seen == ["", "", "MismatchError", ""], kind
    return digests


def case_sparse_gradients_end_in_an_error_of_backward():
    ddp = DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True))
    ddp.register_comm_hook(ReductionState(), reduction_hook)
    assert "sparse" in refusal(ddp(torch.tensor([1, 2])).sum().backward)


def case_an_attached_model_can_be_copied_averaged_and_saved():
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
    assert client.bytes_reduced - before >= 3 * 80, "it still trains through reducers"
    assert not torch.equal(copied.module.weight, net.weight)
    assert torch.equal(copied.module.weight, loaded.module.weight)
    assert not torch.equal(averaged.module.module.weight, net.weight)
    for model in (copied, loaded):
        assert model._comm_hooks[0][1].client is client


def case_torchs_profiler_shows_each_bucket_until_its_result_is_there():
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    worker_client.attach(ddp)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss = ddp(torch.ones(1, 4)).sum()
        time.sleep(0.05 * dist.get_rank())
        loss.backward()
    events = [event for event in profile.events() if event.name.startswith("reduction: ")]
    assert [event.name for event in events] == ["reduction: bucket 0"]
    early, late_ms = of_all(events[0].cpu_time_total / 1000)
    assert early > 40 > late_ms


def case_attach_refuses_and_names_the_fix():
    from torch.distributed.fsdp import MixedPrecision  # noqa: PLC0415

    twice, builtin = (DistributedDataParallel(Net(mixed=False)) for _ in range(2))
    worker_client.attach(twice)
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    low = torch.bfloat16
    precision = MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low)
    with patch("torch.Stream"):  # DDP makes one here, which needs a driver where torch has CUDA
        mixed = DistributedDataParallel(Net(mixed=False), mixed_precision=precision)
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first = next(layer.named_parameters())
    delayed = DistributedDataParallel(
        layer, delay_all_reduce_named_params=[first], param_to_hook_all_reduce=first[1]
    )
    dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    models = {
        "attach(DistributedDataParallel(model))": Net(),
        "sparse=False": DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True)),
        "remove the other attach() or register_comm_hook() call": twice,
        "fp16_compress_wrapper(reduction_hook)": builtin,
        "torch.autocast": mixed,
        "wrap the model without it": delayed,
        "rank 0 of 1": DistributedDataParallel(Net(mixed=False), process_group=alone),
    }
    for fix, model in models.items():
        assert fix in refusal(worker_client.attach, model)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        compiled = DistributedDataParallel(Net(mixed=False))
        assert "optimize_ddp at its default" in refusal(worker_client.attach, compiled)


def main(names):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run_cases(globals(), names=names, stop=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
