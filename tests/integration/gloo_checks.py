"""One rank of test_gloo_checks.py: what a script sees of torch.distributed over a backend.

Started as ``python -m tests.integration.gloo_checks BACKEND``, in a launcher's usual environment,
and perhaps with how the names of some checks begin, as ``NAME;NAME``. Each check returns what a
script would get: tensors, numbers, the type of an error. Nothing here knows what is right: Gloo
says so. Beside it stands how many bytes reducers have reduced.

Contributions are small whole numbers, so that their reductions are the same in any order, or any
numbers where the check's name says that they are rounded.
"""

import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import write_result
from worker_client.torch_backend import bytes_reduced  # registers it, with torch before 2.14

Check = Callable[[], Any]

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]
OPS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"]
SHAPES = {
    "empty": lambda whole: whole.flatten()[:0],
    "of no dimension": lambda whole: whole.flatten()[0],
    "of one element": lambda whole: whole.flatten()[:1],
    "odd": lambda whole: whole.flatten()[:7],
    "transposed": lambda whole: whole.t(),
    "every other column": lambda whole: whole[:, ::2],
    "one column": lambda whole: whole[:, 1],
    "from the middle": lambda whole: whole.flatten()[3:9],
    "from an odd offset": lambda whole: whole.flatten()[1:],
    "channels last": lambda whole: whole.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "of five dimensions": lambda whole: whole.reshape(1, 2, 3, 2, 2),
    "expanded": lambda whole: whole[:, :1].expand(-1, 3),
    "that needs a gradient": lambda whole: whole.requires_grad_(),
    "of a graph": lambda whole: whole.requires_grad_() * 2,
    "large": lambda whole: whole.repeat(10_000, 1),
    "sparse": lambda whole: (whole - 1).to_sparse(),
    "compressed": lambda whole: (whole - 1).to_sparse_csr(),
}


def values(*shape, dtype=torch.float32):
    """Return this rank's contribution, of small whole numbers."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    whole = torch.randint(1, 4, shape, generator=generator)
    if dtype is torch.bool:
        return whole > 1
    return whole.to(dtype) * (1 + 2j) if dtype.is_complex else whole.to(dtype)


def noise(*shape, dtype=torch.float32):
    """Return this rank's contribution, of any numbers."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return torch.randn(shape, generator=generator).to(dtype)


def with_op(name):
    return getattr(dist.ReduceOp, name)


# -- reductions


def reductions():
    for dtype in DTYPES:
        for op in OPS:
            yield f"all_reduce, {name_of(dtype)}, {op}", partial(all_reduced, dtype, op)
    for shape in SHAPES:
        yield f"all_reduce, {shape}", partial(all_reduced_shape, shape)
    for dtype in FLOATS:
        yield f"all_reduce, {name_of(dtype)}, SUM, rounded", partial(all_reduced_noise, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for op in ("SUM", "AVG", "MAX", "BXOR"):
            what = f"{name_of(dtype)}, {op}"
            yield f"reduce, {what}", partial(reduced_to, dtype, op)
            yield f"reduce_scatter, {what}", partial(scattered, dtype, op)
            yield f"reduce_scatter_tensor, {what}", partial(scattered_tensor, dtype, op)
            yield f"all_reduce_coalesced, {what}", partial(coalesced, dtype, op)
    yield "reduce_scatter, uneven", scattered_unevenly
    yield "reduce_scatter_tensor, with two dimensions", scattered_matrix
    yield "reduce_scatter_tensor, transposed", scattered_transposed
    yield "all_reduce_coalesced, of several types", coalesced_of_several_types
    yield "all_reduce, of nothing that is a number", all_reduced_nan
    yield "all_reduce, of infinities", all_reduced_infinities
    yield "all_reduce, integers that overflow", all_reduced_overflow
    yield "all_reduce, the same tensor three times", all_reduced_thrice
    yield "all_reduce, many in a row", all_reduced_many


def all_reduced(dtype, op):
    tensor = values(3, 5, dtype=dtype)
    dist.all_reduce(tensor, with_op(op))
    return tensor


def all_reduced_shape(shape):
    tensor = SHAPES[shape](values(4, 6))
    dist.all_reduce(tensor)
    return [tensor.to_dense(), list(tensor.stride()) if tensor.layout is torch.strided else None]


def all_reduced_noise(dtype):
    tensor = noise(301, dtype=dtype)
    dist.all_reduce(tensor)
    return tensor


def reduced_to(dtype, op):
    tensor, last = values(6, dtype=dtype), dist.get_world_size() - 1
    dist.reduce(tensor, last, with_op(op))
    return tensor if dist.get_rank() == last else None  # elsewhere it is undefined


def scattered(dtype, op):
    parts = list(values(dist.get_world_size(), 4, dtype=dtype))
    output = torch.zeros(4, dtype=dtype)
    dist.reduce_scatter(output, parts, with_op(op))
    return [output, parts]


def scattered_tensor(dtype, op):
    whole = values(dist.get_world_size() * 4, dtype=dtype)
    output = torch.zeros(4, dtype=dtype)
    dist.reduce_scatter_tensor(output, whole, with_op(op))
    return [output, whole]


def scattered_matrix():
    whole, output = values(2 * dist.get_world_size(), 3), torch.zeros(2, 3)
    dist.reduce_scatter_tensor(output, whole)
    return output


def scattered_transposed():
    whole, output = values(3, 2 * dist.get_world_size()).t(), torch.zeros(2, 3)
    dist.reduce_scatter_tensor(output, whole)
    return output


def scattered_unevenly():
    parts = [values(rank + 2) for rank in range(dist.get_world_size())]
    output = torch.zeros(dist.get_rank() + 2)
    dist.reduce_scatter(output, parts)
    return output


def coalesced(dtype, op):
    tensors = [values(3, dtype=dtype), values(2, 2, dtype=dtype)]
    dist.all_reduce_coalesced(tensors, with_op(op))
    return tensors


def coalesced_of_several_types():
    tensors = [values(3, dtype=dtype) for dtype in (torch.float32, torch.int64, torch.float32)]
    dist.all_reduce_coalesced(tensors)
    return tensors


def all_reduced_nan():
    found = []
    for op in ("SUM", "MIN", "MAX"):
        tensor = torch.tensor([1.0, float("nan"), 2.0])
        dist.all_reduce(tensor, with_op(op))
        found.append(tensor)
    return found


def all_reduced_infinities():
    tensor = torch.tensor([float("inf"), -float("inf"), 65504.0]).half()
    dist.all_reduce(tensor)
    return tensor


def all_reduced_overflow():
    tensors = [torch.tensor([100], dtype=torch.int8), torch.tensor([200], dtype=torch.uint8)]
    tensors += [torch.tensor([2**62 + 5])]
    for tensor in tensors:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    return tensors


def all_reduced_thrice():
    tensor = values(5)
    for _ in range(3):
        dist.all_reduce(tensor)
    return tensor


def all_reduced_many():
    tensors = [values(at + 1) for at in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return tensors


# -- what is no reduction


def others():
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
        what = name_of(dtype)
        yield f"broadcast, {what}", partial(broadcast, dtype)
        yield f"all_gather, {what}", partial(gathered_by_all, dtype)
        yield f"all_to_all_single, {what}", partial(exchanged, dtype)
    for check in (
        *(gathered_into_tensor, gathered_unevenly, gathered_coalesced, gathered, scatter),
        *(exchanged_unevenly, exchanged_lists, objects, received_from_any, sent_in_batch),
        *(barriers, monitored, monitored_all, monitored_seconds, tensor_of_shards),
        tensors_that_gloo_frees,
    ):
        yield check.__name__.replace("_", " "), check


def broadcast(dtype):
    tensor = values(5, dtype=dtype)
    dist.broadcast(tensor, 1)
    return tensor


def gathered_by_all(dtype):
    parts = [torch.zeros(5, dtype=dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values(5, dtype=dtype))
    return parts


def exchanged(dtype):
    whole = values(dist.get_world_size() * 2, dtype=dtype)
    output = torch.zeros_like(whole)
    dist.all_to_all_single(output, whole)
    return output


def gathered_into_tensor():
    output = torch.zeros(3 * dist.get_world_size())
    dist.all_gather_into_tensor(output, values(3))
    return output


def gathered_unevenly():
    parts = [torch.zeros(rank + 1) for rank in range(dist.get_world_size())]
    dist.all_gather(parts, values(dist.get_rank() + 1))
    return parts


def gathered_coalesced():
    parts = [[torch.zeros(2), torch.zeros(3)] for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(parts, [values(2), values(3)])
    return parts


def gathered():
    parts = None
    if dist.get_rank() == 1:
        parts = [torch.zeros(3) for _ in range(dist.get_world_size())]
    dist.gather(values(3), parts, dst=1)
    return parts


def scatter():
    tensor = torch.zeros(3)
    parts = list(values(dist.get_world_size(), 3)) if dist.get_rank() == 1 else None
    dist.scatter(tensor, parts, src=1)
    return tensor


def exchanged_unevenly():
    rank, size = dist.get_rank(), dist.get_world_size()
    takes, gives = [rank + 1] * size, [other + 1 for other in range(size)]
    output = torch.zeros(sum(takes))
    dist.all_to_all_single(output, values(sum(gives)), takes, gives)
    return output


def exchanged_lists():
    size = dist.get_world_size()
    outputs = [torch.zeros(3) for _ in range(size)]
    dist.all_to_all(outputs, list(values(size, 3)))
    return outputs


def objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    everywhere, at_one, mine = [None] * size, [None] * size, [None]
    dist.all_gather_object(everywhere, {"rank": rank})
    dist.gather_object(("from", rank), at_one if rank == 1 else None, dst=1)
    dist.scatter_object_list(mine, list(range(size)) if rank == 0 else [None] * size)
    sent_to_all = ["a", {"b": 1}] if rank == 0 else [None, None]
    dist.broadcast_object_list(sent_to_all)
    return [everywhere, at_one, mine, sent_to_all]


def received_from_any():
    tensor = values(3)
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    elif dist.get_rank() == 1:
        work = dist.irecv(tensor)
        work.wait()
        return [tensor, work._source_rank()]
    return None


def sent_in_batch():
    rank, size, got = dist.get_rank(), dist.get_world_size(), torch.zeros(3)
    ring = [
        dist.P2POp(dist.isend, values(3), (rank + 1) % size),
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    return got


def barriers():
    work = dist.barrier(async_op=True)
    return [work.wait(), work.is_completed(), dist.barrier()]


def monitored():
    return dist.monitored_barrier(timeout=timedelta(seconds=20))


def monitored_all():
    return dist.monitored_barrier(dist.group.WORLD, wait_all_ranks=True)


def monitored_seconds():
    return dist.monitored_barrier(timeout=20.0)


def tensor_of_shards():
    """Torch asks for a device that the group serves, and there may be no other than the CPU."""
    size = dist.get_world_size()
    spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(size)])
    whole = torch.empty(2 * size, 2) if dist.get_rank() == 0 else None
    sharded_tensor.ones(spec, 2 * size, 2).gather(out=whole)
    return whole


def tensors_that_gloo_frees():
    """Leave the last reference to a tensor to a thread of Gloo's, which then needs the GIL."""
    size = dist.get_world_size()
    for _ in range(300):
        dist.broadcast(torch.ones(10), 0, async_op=True)
        dist.all_gather([torch.ones(10) for _ in range(size)], torch.ones(10), async_op=True)
        dist.all_to_all_single(torch.ones(size), torch.ones(size), async_op=True)
        dist.barrier()


# -- handles


def handles():
    for name, ask in HANDLE.items():
        yield f"a handle's {name}", partial(asked_of_handle, ask)
    yield "a handle of several tensors", handle_of_several
    yield "a handle that C++ keeps", handle_kept
    yield "callbacks come before the end", callbacks_before_the_end
    yield "futures that wait for one another", futures_that_wait
    yield "a future whose callback fails", future_that_fails
    yield "a future's done callback", future_done
    yield "torch.futures.collect_all", futures_together


HANDLE = {
    "wait": lambda work: work.wait(),
    "wait with a timeout": lambda work: work.wait(timedelta(seconds=20)),
    "second wait": lambda work: [work.wait(), work.wait()],
    "is_completed": lambda work: [work.wait(), work.is_completed()],
    "is_success": lambda work: [work.wait(), work.is_success()],
    "exception": lambda work: [work.wait(), work.exception()],
    "result": lambda work: [work.wait(), work.result()],
    "synchronize": lambda work: [work.wait(), work.synchronize()],
    "source_rank": lambda work: [work.wait(), work._source_rank()],
    "future": lambda work: work.get_future().wait(),
    "future's done": lambda work: [work.get_future().wait(), work.get_future().done()],
    "own tensor": lambda work: [work.wait(), work.get_future().wait()[0] is work.result()[0]],
    "future's value": lambda work: [
        work.wait(),
        work.get_future().wait(),
        work.get_future().value(),
    ],
    "future's then": lambda work: work.get_future().then(lambda done: done.value()[0] * 2).wait(),
    "future's chain": lambda work: (
        work.get_future()
        .then(lambda done: done.value()[0] * 2)
        .then(lambda done: done.value() + 1)
        .wait()
    ),
}


def asked_of_handle(ask):
    tensor = values(3)
    work = dist.all_reduce(tensor, async_op=True)
    try:
        return [ask(work), tensor]
    finally:
        work.wait()


def handle_of_several():
    tensors = [values(3), values(4)]
    work = dist.all_reduce_coalesced(tensors, async_op=True)
    return [work.wait(), tensors, work.get_future().then(lambda done: done.value()).wait()]


def handle_kept():
    tensor = values(3)
    torch._C._distributed_c10d._register_work(tensor, dist.all_reduce(tensor, async_op=True))
    torch.ops._c10d_functional.wait_tensor(tensor)
    return tensor


def callbacks_before_the_end():
    """`wait()` returns after the callbacks of the collective's future."""
    done, ends = [], []
    for at in range(20):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.get_future().then(lambda _, at=at: (time.sleep(0.01), done.append(at)))
        ends.append(not work.is_completed() or at in done)
        work.wait()
        ends += [work.is_completed(), list(done)]
    return ends


def futures_that_wait():
    first, second, third = values(3), values(4), values(5)

    def go_on(done):
        found = done.value()[0].clone()
        more = dist.all_reduce(second, async_op=True).get_future().wait()[0]
        dist.all_reduce(third)
        return [found, more, third]

    return dist.all_reduce(first, async_op=True).get_future().then(go_on).wait()


def future_that_fails():
    def fail(_):
        raise ValueError("by a callback")

    return dist.all_reduce(values(3), async_op=True).get_future().then(fail).wait()


def future_done():
    found = torch.futures.Future()
    future = dist.all_reduce(values(3), async_op=True).get_future()
    future.add_done_callback(lambda done: found.set_result(done.value()[0] + 1))
    return found.wait()


def futures_together():
    futures = [dist.all_reduce(values(at), async_op=True).get_future() for at in (1, 2, 3)]
    return [one.value() for one in torch.futures.collect_all(futures).wait()]


# -- groups, and calls that are one


def groups():
    for check in (
        *(group_of_some, groups_in_another_order, group_of_all, group_of_one, group_by_itself),
        *(group_with_a_timeout, group_with_a_description, groups_by_size, groups_by_list),
        *(what_is_known_of_a_group, group_that_was_destroyed, group_is_split),
        *(group_is_split_by_its_method, reduced_in_a_group, sorted_group, group_of_gloo),
        *(together_all_reduce, together_reduce_scatter, together_all_gather, together_async),
        *(together_of_nothing, meshes, mesh_is_flat),
    ):
        yield check.__name__.replace("_", " "), check


def total(group, shape=3):
    """Return an all-reduce in a group, None where this rank is none of its members."""
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    tensor = values(shape)
    dist.all_reduce(tensor, group=group)
    return tensor


def group_of_some():
    return total(dist.new_group([0, 1]))


def groups_in_another_order():
    size = dist.get_world_size()
    pairs = [dist.new_group(sorted({at, (at + 1) % size})) for at in range(size)]
    mine = [pair for pair in pairs if pair != dist.GroupMember.NON_GROUP_MEMBER]
    tensors = [values(2) for _ in mine]
    works = [
        dist.all_reduce(tensor, group=pair, async_op=True)
        for tensor, pair in zip(tensors, mine, strict=True)
    ]
    for work in works:
        work.wait()
    return tensors


def group_of_all():
    return total(dist.new_group())


def group_of_one():
    return [total(dist.new_group([rank])) for rank in range(dist.get_world_size())]


def group_by_itself():
    if dist.get_rank() > 1:
        return None
    return total(dist.new_group([0, 1], use_local_synchronization=True))


def group_with_a_timeout():
    return total(dist.new_group(timeout=timedelta(seconds=15)))


def group_with_a_description():
    group = dist.new_group(group_desc="words")
    return [group.group_desc, total(group)]


def groups_by_size():
    mine, every = dist.new_subgroups(dist.get_world_size() // 2)
    return [len(every), total(mine)]


def groups_by_list():
    size = dist.get_world_size()
    mine, every = dist.new_subgroups_by_enumeration([[0], list(range(1, size))])
    return [len(every), total(mine)]


def what_is_known_of_a_group():
    group = dist.new_group()
    return [
        dist.get_world_size(group),
        dist.get_rank(group),
        group.rank(),
        group.size(),
        dist.get_process_group_ranks(group),
        str(group.group_name).isdigit(),
        dist.get_pg_count() > 0,
    ]


def group_that_was_destroyed():
    group = dist.new_group()
    dist.destroy_process_group(group)
    return total(group)


def group_is_split():
    halves = [[0], list(range(1, dist.get_world_size()))]
    return total(dist.split_group(split_ranks=halves))


def group_is_split_by_its_method():
    return total(dist.group.WORLD.split_group([0, 1]))


def reduced_in_a_group():
    group = dist.new_group()
    outputs, tensor = torch.zeros(2), values(2 * dist.get_world_size())
    dist.reduce_scatter_tensor(outputs, tensor, group=group)
    parts = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, outputs, group=group)
    return parts


def sorted_group():
    return total(dist.new_group(list(reversed(range(dist.get_world_size())))))


def group_of_gloo():
    return total(dist.new_group(backend="gloo"))


def together_all_reduce():
    tensors = [values(3), values(4)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


def together_reduce_scatter():
    outputs = [torch.zeros(2), torch.zeros(3)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.reduce_scatter_tensor(output, values(len(output) * dist.get_world_size()))
    return outputs


def together_all_gather():
    outputs = [torch.zeros(size * dist.get_world_size()) for size in (2, 3)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.all_gather_into_tensor(output, values(len(output) // dist.get_world_size()))
    return outputs


def together_async():
    tensors = [values(3), values(4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [manager.wait(), tensors]


def together_of_nothing():
    with dist._coalescing_manager():
        pass
    return total(dist.group.WORLD)


def meshes():
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    return [mesh.get_coordinate(), *(total(mesh.get_group(at)) for at in (0, 1))]


def mesh_is_flat():
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("a", "b"))
    return total(mesh["a", "b"]._flatten().get_group())


# -- gradients


def gradients():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
            yield f"gradients, {name_of(dtype)}, {op}, rounded", partial(gradients_by, dtype, op)
    for name, options in DDP.items():
        yield f"DDP, {name}, rounded", partial(trained, dict(options))
    for name, hook in HOOKS.items():
        rounded = "rounded to 16 bits" if "16" in name else "rounded"
        yield f"DDP, {name}, {rounded}", partial(trained, {}, hook)
    for check in (
        *(compiled, joined_unevenly, with_unused_parameters, sparse_gradients, with_zero),
        *(sharded, tensors_are_distributed, tensors_are_partial, ddp_says, differentiated),
    ):
        yield f"{check.__name__.replace('_', ' ')}, rounded", check
    for name, call in FUNCTIONAL.items():
        yield f"functional, {name}", call


def network(norm=torch.nn.LayerNorm):
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 33), norm(33), torch.nn.GELU(), torch.nn.Linear(33, 3)
    )


def steps(model, count=4):
    """Train a model; return its weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(100 + dist.get_rank())
    dtype = next(model.parameters()).dtype
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(6, 8, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def gradients_by(dtype, op):
    model = DistributedDataParallel(network().to(dtype))
    model.register_comm_hook(
        dist.group.WORLD,
        lambda group, bucket: (
            dist.all_reduce(bucket.buffer(), with_op(op), group=group, async_op=True)
            .get_future()
            .then(lambda done: done.value()[0])
        ),
    )
    torch.manual_seed(100 + dist.get_rank())
    model(torch.randn(6, 8, dtype=dtype)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


DDP = {
    "by default": {},
    "with views": {"gradient_as_bucket_view": True},
    "with small buckets": {"bucket_cap_mb": 0.0005},
    "with a static graph": {"static_graph": True},
    "that looks for unused parameters": {"find_unused_parameters": True},
    "without buffers": {"broadcast_buffers": False},
    "without a first broadcast": {"init_sync": False},
}


def power(hook, **options):
    def register(model):
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2, **options
        )
        model.register_comm_hook(state, hook)

    return register


def hooked(hook):
    return lambda model: model.register_comm_hook(None, hook)


HOOKS = {
    "allreduce_hook": hooked(default_hooks.allreduce_hook),
    "fp16_compress_hook": hooked(default_hooks.fp16_compress_hook),
    "bf16_compress_hook": hooked(default_hooks.bf16_compress_hook),
    "fp16_compress_wrapper": hooked(
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "ALLREDUCE": lambda model: model._register_builtin_comm_hook(
        dist.BuiltinCommHookType.ALLREDUCE
    ),
    "FP16_COMPRESS": lambda model: model._register_builtin_comm_hook(
        dist.BuiltinCommHookType.FP16_COMPRESS
    ),
    "PowerSGD": power(powerSGD_hook.powerSGD_hook, min_compression_rate=0.1),
    "PowerSGD without error feedback": power(
        powerSGD_hook.powerSGD_hook, min_compression_rate=0.1, use_error_feedback=False
    ),
    "PowerSGD that starts warm": power(
        powerSGD_hook.powerSGD_hook, min_compression_rate=0.1, warm_start=False
    ),
    "PowerSGD of the batched matrices": power(
        powerSGD_hook.powerSGD_hook, min_compression_rate=0.1, batch_tensors_with_same_shape=True
    ),
    "batched PowerSGD": power(powerSGD_hook.batched_powerSGD_hook),
}


def trained(options, register=None):
    model = DistributedDataParallel(network(), **options)
    if register is not None:
        register(model)
    return steps(model)


def compiled():
    """The forward pass broadcasts the batch norm's buffers, which dynamo must not trace."""
    model = DistributedDataParallel(network(torch.nn.BatchNorm1d))
    weights = steps(torch.compile(model, backend="aot_eager"))
    return [*weights, *(one for one in model.buffers() if one.is_floating_point())]


def joined_unevenly():
    weights = []
    for initial in (True, False):
        model = DistributedDataParallel(network(torch.nn.BatchNorm1d))
        with Join([model], divide_by_initial_world_size=initial):
            steps(model, 1 + dist.get_rank())
        weights += [parameter.detach() for parameter in model.parameters()]
    return weights


def with_unused_parameters():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.both = torch.nn.ModuleList([torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)])

        def forward(self, given):
            return self.both[dist.get_rank() % 2](given)

    model = DistributedDataParallel(Two(), find_unused_parameters=True)
    model(values(3, 4)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def sparse_gradients():
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.EmbeddingBag(10, 3, sparse=True))
    rank = dist.get_rank()
    model(torch.tensor([[rank, rank + 1]])).sum().backward()
    (parameter,) = model.parameters()
    return parameter.grad.to_dense()


def with_zero():
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def sharded():
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 (seconds, for this check alone)

    model = network()
    fully_shard(model)
    return [weight.to_local() for weight in steps(model)]


def tensors_are_distributed():
    from torch.distributed.tensor import Shard, distribute_tensor  # noqa: PLC0415 (as above)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = distribute_tensor(values(8, 3), mesh, [Shard(0)])
    return [whole.to_local(), whole.full_tensor(), whole.sum().full_tensor()]


def tensors_are_partial():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = DTensor.from_local(values(8, 3), mesh, [Partial()])
    found = [parts.redistribute(mesh, [to]).to_local() for to in (Replicate(), Shard(0))]
    by_mean = DTensor.from_local(values(8, 3), mesh, [Partial("avg")])
    return [*found, by_mean.full_tensor()]


def ddp_says():
    model = DistributedDataParallel(network())
    steps(model)
    said = model._get_ddp_logging_data()
    names = ("world_size", "rank", "module_name", "bucket_sizes", "iteration", "has_error")
    return [said.get(name) for name in names]


def differentiated():
    found = []
    for call in (
        differentiable.all_reduce,
        partial(differentiable.broadcast, src=0),
        lambda given: torch.stack(differentiable.all_gather(given)),
    ):
        given = values(4).requires_grad_()
        (call(given) * (dist.get_rank() + 1)).sum().backward()
        found.append(given.grad)
    return found


def whole():
    return values(4 * dist.get_world_size())


def world():
    return dist.group.WORLD


FUNCTIONAL = {
    "all_reduce": lambda: functional.all_reduce(whole(), "sum", world()) + 0,
    "all_reduce, avg": lambda: functional.all_reduce(whole(), "avg", world()) + 0,
    "all_reduce, max": lambda: functional.all_reduce(whole(), "max", world()) + 0,
    "all_reduce_coalesced": lambda: [
        one + 0 for one in functional.all_reduce_coalesced([whole(), whole()], "sum", world())
    ],
    "all_gather_tensor": lambda: functional.all_gather_tensor(whole(), 0, world()) + 0,
    "reduce_scatter_tensor": (
        lambda: functional.reduce_scatter_tensor(whole(), "sum", 0, world()) + 0
    ),
    "reduce_scatter_tensor_coalesced": lambda: [
        one + 0
        for one in functional.reduce_scatter_tensor_coalesced(
            [whole(), whole()], "sum", [0, 0], world()
        )
    ],
    "all_to_all_single": lambda: functional.all_to_all_single(whole(), None, None, world()) + 0,
    "broadcast": lambda: functional.broadcast(whole(), 1, world()) + 0,
}


# -- errors


def errors():
    for name, call in ERRORS.items():
        yield f"error: {name}", call
    yield "error: a mesh of too many ranks", lambda: init_device_mesh("cpu", (99,))
    yield "a call after all these errors", lambda: total(dist.group.WORLD)


def ones(count=3, **options):
    return torch.ones(count, **options)


def size():
    return dist.get_world_size()


def two_kinds():
    with dist._coalescing_manager():
        dist.all_reduce(ones())
        dist.all_gather_into_tensor(ones(size()), ones(1))


ERRORS = {
    "all_reduce of a list": lambda: dist.all_reduce([1.0, 2.0]),
    "all_reduce of a number": lambda: dist.all_reduce(3.0),
    "all_reduce by no operation": lambda: dist.all_reduce(ones(), "sum"),
    "all_reduce by PREMUL_SUM": lambda: dist.all_reduce(ones(), dist._make_nccl_premul_sum(2.0)),
    "all_reduce of float8": lambda: dist.all_reduce(ones().to(torch.float8_e4m3fn)),
    "all_reduce of uint16": lambda: dist.all_reduce(ones().to(torch.uint16)),
    "all_reduce of meta": lambda: dist.all_reduce(ones(device="meta")),
    "all_reduce in no group": lambda: dist.all_reduce(ones(), group="reduction"),
    "all_reduce_coalesced of nothing": lambda: dist.all_reduce_coalesced([]),
    "all_reduce_coalesced of sparse": lambda: dist.all_reduce_coalesced([ones().to_sparse()]),
    "the group's allreduce of two tensors": lambda: world().allreduce([ones(), ones()]).wait(),
    "the group's allreduce of nothing": lambda: world().allreduce([]).wait(),
    "reduce_scatter of too few": lambda: dist.reduce_scatter(ones(), [ones()] * (size() - 1)),
    "reduce_scatter of other sizes": lambda: dist.reduce_scatter(ones(2), [ones(3)] * size()),
    "reduce_scatter of other types": lambda: dist.reduce_scatter(
        ones(dtype=torch.int64), [ones()] * size()
    ),
    "reduce_scatter_tensor of other sizes": lambda: dist.reduce_scatter_tensor(
        ones(2), ones(2 * size() + 1)
    ),
    "reduce_scatter_tensor of other types": lambda: dist.reduce_scatter_tensor(
        ones(2, dtype=torch.int64), ones(2 * size())
    ),
    "reduce_scatter_tensor of a list": lambda: dist.reduce_scatter_tensor([ones()], ones()),
    "all_gather of too few": lambda: dist.all_gather([ones()] * (size() - 1), ones()),
    "all_gather of other types": lambda: dist.all_gather(
        [ones(dtype=torch.int64) for _ in range(size())], ones()
    ),
    "all_gather_into_tensor of other sizes": lambda: dist.all_gather_into_tensor(ones(2), ones()),
    "broadcast from no rank": lambda: dist.broadcast(ones(), 99),
    "reduce to no rank": lambda: dist.reduce(ones(), -2),
    "gather without a list": lambda: dist.gather(ones(), None, dst=dist.get_rank()),
    "scatter without a list": lambda: dist.scatter(ones(), None, src=dist.get_rank()),
    "all_to_all_single with other splits": lambda: dist.all_to_all_single(
        ones(), ones(), [1] * (size() + 5), [1] * (size() + 5)
    ),
    "send to itself": lambda: dist.send(ones(), dist.get_rank()),
    "monitored_barrier without time": lambda: dist.monitored_barrier(timeout=timedelta(-1)),
    "monitored_barrier for words": lambda: dist.monitored_barrier(timeout="20s"),
    "barrier on a device": lambda: dist.barrier(device_ids="0"),
    "a group of no ranks": lambda: dist.new_group([99]),
    "a group of too many ranks": lambda: dist.new_group(list(range(99))),
    "a group with the same rank twice": lambda: dist.new_group([0, 0]),
    "a group without a timeout": lambda: dist.new_group(timeout="20s"),
    "a second default group": lambda: dist.init_process_group(sys.argv[1]),
    "a split of nothing": lambda: dist.split_group(split_ranks=[]),
    "P2POp of no call": lambda: dist.P2POp(dist.all_reduce, ones(), 0),
    "batch_isend_irecv of nothing": lambda: dist.batch_isend_irecv([]),
    "two kinds together": two_kinds,
    "a hook that is none": lambda: DistributedDataParallel(network()).register_comm_hook(None, 3),
    "a model without gradients": lambda: DistributedDataParallel(
        torch.nn.Linear(2, 2).requires_grad_(False)
    ),
}


# -- all of them


def all_checks():
    """Return the checks by their names, in the order in which they run."""
    kinds = (reductions(), others(), handles(), groups(), gradients(), errors())
    return {name: check for kind in kinds for name, check in kind}


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def shown(found):
    """Return what a check found as JSON has it; of a tensor type, shape and exact elements.

    Of a large one the first elements, and a digest of all.
    """
    if hasattr(found, "to_local"):  # a DTensor
        found = found.to_local()
    if isinstance(found, torch.Tensor):
        plain = found.detach().cpu()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        told = {"dtype": name_of(found.dtype), "shape": list(found.shape)}
        if plain.numel() > 10_000:
            told["digest"] = sha256(plain.contiguous().view(torch.uint8).numpy()).hexdigest()
            plain = plain[:10]
        return told | {"elements": [repr(one) for one in plain.flatten().tolist()]}
    if isinstance(found, list | tuple):
        return [shown(one) for one in found]
    return found if isinstance(found, int | float | bool | str | None) else repr(found)


def seen(check):
    """Return what a script sees of a check."""
    try:
        return shown(check())
    except Exception as error:  # noqa: BLE001 (what it is shall be compared)
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"raised": kinds[: kinds.index("Exception") + 1], "text": str(error)[:500]}


def main():
    warnings.simplefilter("ignore")
    checks = all_checks()
    names = tuple(sys.argv[2].split(";")) if len(sys.argv) > 2 else ("",)
    dist.init_process_group(sys.argv[1], timeout=timedelta(seconds=30))
    between = dist.new_group(backend="gloo")
    found = {}
    for name, check in checks.items():
        if name.startswith(names):
            before = bytes_reduced()
            found[name] = [seen(check), bytes_reduced() - before]
            write_result(found)
            dist.barrier(between)  # an error at one rank may be nothing at another
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
