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
from datetime import timedelta
from functools import partial
from hashlib import sha256

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import write_result
from worker_client.torch_backend import bytes_reduced  # registers it, with torch before 2.14

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]
OPS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"]
SHAPES = {
    "empty": lambda whole: whole.flatten()[:0],
    "transposed": lambda whole: whole.t(),
    "every other column": lambda whole: whole[:, ::2],
    "one column": lambda whole: whole[:, 1],
    "from the middle": lambda whole: whole.flatten()[3:9],
    "channels last": lambda whole: whole.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "expanded": lambda whole: whole[:, :1].expand(-1, 3),
    "that needs a gradient": lambda whole: whole.requires_grad_(),
    "large": lambda whole: whole.repeat(10_000, 1),
    "sparse": lambda whole: (whole - 1).to_sparse(),
    "compressed": lambda whole: (whole - 1).to_sparse_csr(),
}


def size():
    return dist.get_world_size()


def world():
    return dist.group.WORLD


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


def parts(*shape, dtype=torch.float32):
    """Return room for what each rank sends."""
    return [torch.zeros(shape, dtype=dtype) for _ in range(size())]


def with_op(name):
    return getattr(dist.ReduceOp, name)


def after(call, output, *arguments, **options):
    """Return what a collective leaves in its first argument."""
    call(output, *arguments, **options)
    return output


def at_rank(rank, given):
    """Return what is given at one rank, and nothing at the others."""
    return given if dist.get_rank() == rank else None


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
            for name, check in BY_DTYPE_AND_OP.items():
                yield f"{name}, {name_of(dtype)}, {op}", partial(check, dtype, with_op(op))
    yield from REDUCTIONS.items()


def all_reduced(dtype, op):
    return after(dist.all_reduce, values(3, 5, dtype=dtype), with_op(op))


def all_reduced_shape(shape):
    tensor = after(dist.all_reduce, SHAPES[shape](values(4, 6)))
    return [tensor.to_dense(), list(tensor.stride()) if tensor.layout is torch.strided else None]


def all_reduced_noise(dtype):
    return after(dist.all_reduce, noise(301, dtype=dtype))


def reduced_to(dtype, op):
    last = size() - 1
    return at_rank(last, after(dist.reduce, values(6, dtype=dtype), last, op))


def scattered(dtype, op):
    given, output = list(values(size(), 4, dtype=dtype)), torch.zeros(4, dtype=dtype)
    return [after(dist.reduce_scatter, output, given, op), given]


def scattered_tensor(dtype, op):
    given, output = values(size() * 4, dtype=dtype), torch.zeros(4, dtype=dtype)
    return [after(dist.reduce_scatter_tensor, output, given, op), given]


def coalesced(dtype, op):
    return after(dist.all_reduce_coalesced, [values(3, dtype=dtype), values(2, 2, dtype=dtype)], op)


BY_DTYPE_AND_OP = {
    "reduce": reduced_to,
    "reduce_scatter": scattered,
    "reduce_scatter_tensor": scattered_tensor,
    "all_reduce_coalesced": coalesced,
}


def all_reduced_many():
    tensors = [values(at + 1) for at in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return tensors


REDUCTIONS = {
    "reduce_scatter, uneven": lambda: after(
        dist.reduce_scatter,
        torch.zeros(dist.get_rank() + 2),
        [values(rank + 2) for rank in range(size())],
    ),
    "reduce_scatter_tensor, with two dimensions": lambda: after(
        dist.reduce_scatter_tensor, torch.zeros(2, 3), values(2 * size(), 3)
    ),
    "reduce_scatter_tensor, transposed": lambda: after(
        dist.reduce_scatter_tensor, torch.zeros(2, 3), values(3, 2 * size()).t()
    ),
    "all_reduce_coalesced, of several types": lambda: after(
        dist.all_reduce_coalesced, [values(3), values(3, dtype=torch.int64), values(3)]
    ),
    "all_reduce, of nothing that is a number": lambda: [
        after(dist.all_reduce, torch.tensor([1.0, float("nan"), 2.0]), with_op(op))
        for op in ("SUM", "MIN", "MAX")
    ],
    "all_reduce, many in a row": all_reduced_many,
}


def others():
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
        for name, check in BY_DTYPE.items():
            yield f"{name}, {name_of(dtype)}", partial(check, dtype)
    yield from OTHERS.items()


BY_DTYPE = {
    "broadcast": lambda dtype: after(dist.broadcast, values(5, dtype=dtype), 1),
    "all_gather": lambda dtype: after(
        dist.all_gather, parts(5, dtype=dtype), values(5, dtype=dtype)
    ),
    "all_to_all_single": lambda dtype: after(
        dist.all_to_all_single,
        torch.zeros(size() * 2, dtype=dtype),
        values(size() * 2, dtype=dtype),
    ),
}


def gathered():
    room = at_rank(1, parts(3))
    dist.gather(values(3), room, dst=1)
    return room


def exchanged_unevenly():
    takes, gives = [dist.get_rank() + 1] * size(), [other + 1 for other in range(size())]
    output, given = torch.zeros(sum(takes)), values(sum(gives))
    return after(dist.all_to_all_single, output, given, takes, gives)


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
    rank, got = dist.get_rank(), torch.zeros(3)
    ring = [
        dist.P2POp(dist.isend, values(3), (rank + 1) % size()),
        dist.P2POp(dist.irecv, got, (rank - 1) % size()),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    return got


def barriers():
    work = dist.barrier(async_op=True)
    return [work.wait(), work.is_completed(), dist.barrier()]


def tensor_of_shards():
    """Torch asks for a device that the group serves, and there may be no other than the CPU."""
    spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(size())])
    whole = at_rank(0, torch.empty(2 * size(), 2))
    sharded_tensor.ones(spec, 2 * size(), 2).gather(out=whole)
    return whole


def tensors_that_gloo_frees():
    """Leave the last reference to a tensor to a thread of Gloo's, which then needs the GIL."""
    for _ in range(300):
        dist.broadcast(torch.ones(10), 0, async_op=True)
        dist.all_gather(parts(10), torch.ones(10), async_op=True)
        dist.all_to_all_single(torch.ones(size()), torch.ones(size()), async_op=True)
        dist.barrier()


OTHERS = {
    "gathered into tensor": lambda: after(
        dist.all_gather_into_tensor, torch.zeros(3 * size()), values(3)
    ),
    "gathered unevenly": lambda: after(
        dist.all_gather,
        [torch.zeros(rank + 1) for rank in range(size())],
        values(dist.get_rank() + 1),
    ),
    "gathered coalesced": lambda: after(
        dist.all_gather_coalesced,
        [[torch.zeros(2), torch.zeros(3)] for _ in range(size())],
        [values(2), values(3)],
    ),
    "gathered": gathered,
    "scatter": lambda: after(
        dist.scatter, torch.zeros(3), at_rank(1, list(values(size(), 3))), src=1
    ),
    "exchanged unevenly": exchanged_unevenly,
    "exchanged lists": lambda: after(dist.all_to_all, parts(3), list(values(size(), 3))),
    "objects": objects,
    "received from any": received_from_any,
    "sent in batch": sent_in_batch,
    "barriers": barriers,
    "monitored": lambda: dist.monitored_barrier(timeout=timedelta(seconds=20)),
    "monitored all": lambda: dist.monitored_barrier(world(), wait_all_ranks=True),
    "monitored seconds": lambda: dist.monitored_barrier(timeout=20.0),
    "tensor of shards": tensor_of_shards,
    "tensors that gloo frees": tensors_that_gloo_frees,
}


HANDLE = {
    "wait": lambda work: work.wait(),
    "wait with a timeout": lambda work: work.wait(timedelta(seconds=20)),
    "second wait": lambda work: [work.wait(), work.wait()],
    **{
        name: lambda work, name=name: [work.wait(), getattr(work, name)()]
        for name in ("is_completed", "is_success", "exception", "result", "synchronize")
    },
    "source_rank": lambda work: [work.wait(), work._source_rank()],
    "future's done": lambda work: [work.get_future().wait(), work.get_future().done()],
    "own tensor": lambda work: [work.wait(), work.get_future().wait()[0] is work.result()[0]],
    "future's value": lambda work: [work.get_future().wait(), work.get_future().value()],
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


def future_of(tensor):
    return dist.all_reduce(tensor, async_op=True).get_future()


def futures_that_wait():
    first, second, third = values(3), values(4), values(5)

    def go_on(done):
        found = done.value()[0].clone()
        more = future_of(second).wait()[0]
        dist.all_reduce(third)
        return [found, more, third]

    return future_of(first).then(go_on).wait()


def future_that_fails():
    def fail(_):
        raise ValueError("by a callback")

    return future_of(values(3)).then(fail).wait()


HANDLES = {
    **{f"a handle's {name}": partial(asked_of_handle, ask) for name, ask in HANDLE.items()},
    "a handle of several tensors": handle_of_several,
    "a handle that C++ keeps": handle_kept,
    "callbacks come before the end": callbacks_before_the_end,
    "futures that wait for one another": futures_that_wait,
    "a future whose callback fails": future_that_fails,
}


def group_that_was_destroyed():
    group = dist.new_group()
    dist.destroy_process_group(group)
    return after(dist.all_reduce, values(3), group=group)


def together(call, *pairs):
    """Make calls as one; return what they leave in the first argument of each."""
    with dist._coalescing_manager():
        for arguments in pairs:
            call(*arguments)
    return [output for output, *_ in pairs]


def together_async():
    tensors = [values(3), values(4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [manager.wait(), tensors]


GROUPS = {
    "group of one": lambda: [
        None if rank != dist.get_rank() else after(dist.all_reduce, values(3), group=group)
        for rank in range(size())
        for group in [dist.new_group([rank])]
    ],
    "group that was destroyed": group_that_was_destroyed,
    "together all reduce": lambda: together(dist.all_reduce, [values(3)], [values(4)]),
    "together reduce scatter": lambda: together(
        dist.reduce_scatter_tensor, *[(torch.zeros(at), values(at * size())) for at in (2, 3)]
    ),
    "together all gather": lambda: together(
        dist.all_gather_into_tensor, *[(torch.zeros(at * size()), values(at)) for at in (2, 3)]
    ),
    "together async": together_async,
    "together of nothing": lambda: [together(dist.all_reduce), after(dist.all_reduce, values(3))],
}


def gradients():
    for name, hook in HOOKS.items():
        rounded = "rounded to 16 bits" if "16" in name else "rounded"
        yield f"DDP, {name}, {rounded}", partial(trained, hook)
    for check in (compiled, joined_unevenly, with_zero, sharded):
        yield f"{check.__name__.replace('_', ' ')}, rounded", check


def network(norm=torch.nn.LayerNorm):
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 33), norm(33), torch.nn.GELU(), torch.nn.Linear(33, 3)
    )


def steps(model, count=4, sgd=torch.optim.SGD):
    """Train a model; return its weights."""
    optimizer = sgd(model.parameters(), lr=0.05)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def power(model):
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def hooked(hook):
    return lambda model: model.register_comm_hook(None, hook)


def built_in(kind):
    return lambda model: model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))


HOOKS = {
    "by default": lambda _: None,
    "bf16_compress_hook": hooked(default_hooks.bf16_compress_hook),
    "ALLREDUCE": built_in("ALLREDUCE"),
    "FP16_COMPRESS": built_in("FP16_COMPRESS"),
    "PowerSGD": power,
}


def trained(register):
    model = DistributedDataParallel(network())
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


def with_zero():
    sgd = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)
    return steps(DistributedDataParallel(network()), 3, sgd)


def sharded():
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 (seconds, for this check alone)

    model = network()
    fully_shard(model)
    return [weight.to_local() for weight in steps(model)]


def errors():
    for name, call in ERRORS.items():
        yield f"error: {name}", call
    yield "a call after all these errors", lambda: after(dist.all_reduce, values(3))


def ones(count=3, **options):
    return torch.ones(count, **options)


def two_kinds():
    with dist._coalescing_manager():
        dist.all_reduce(ones())
        dist.all_gather_into_tensor(ones(size()), ones(1))


ERRORS = {
    "all_reduce by PREMUL_SUM": lambda: dist.all_reduce(ones(), dist._make_nccl_premul_sum(2.0)),
    "all_reduce of float8": lambda: dist.all_reduce(ones().to(torch.float8_e4m3fn)),
    "all_reduce of meta": lambda: dist.all_reduce(ones(device="meta")),
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
    "all_gather of too few": lambda: dist.all_gather([ones()] * (size() - 1), ones()),
    "all_gather of other types": lambda: dist.all_gather(
        [ones(dtype=torch.int64) for _ in range(size())], ones()
    ),
    "all_gather_into_tensor of other sizes": lambda: dist.all_gather_into_tensor(ones(2), ones()),
    "all_to_all_single with other splits": lambda: dist.all_to_all_single(
        ones(), ones(), [1] * (size() + 5), [1] * (size() + 5)
    ),
    "reduce to no rank": lambda: dist.reduce(ones(), -2),
    "monitored_barrier for words": lambda: dist.monitored_barrier(timeout="20s"),
    "monitored_barrier without time": lambda: dist.monitored_barrier(timeout=timedelta(-1)),
    "two kinds together": two_kinds,
}


def all_checks():
    """Return the checks by their names, in the order in which they run."""
    handles, groups = HANDLES.items(), GROUPS.items()
    return dict([*reductions(), *others(), *handles, *groups, *gradients(), *errors()])


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
