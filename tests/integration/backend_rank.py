"""One rank of test_torch_backend: every case over the backend, against Gloo in the same processes.

Started as ``python -m tests.integration.backend_rank BACKEND`` with the launcher's usual
environment; a second argument names a file that appears when no reducer is left, and there is one
case then.
Contributions are small whole numbers, so that results are the same in any order.
"""

import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import worker_client.torch_backend
from reducer.errors import (
    ConfigError,
    LocalProtocolError,
    MismatchError,
    ReductionTimeout,
)
from tests.ranks import case_names, write_result
from tests.waits import eventually

WORLD_SIZE = 3
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int32, torch.int64, torch.uint8]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]


def contribution(rank, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def reduced():
    return dist.group.WORLD.client.bytes_reduced


def network():
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.GELU(), torch.nn.Linear(16, 3)
    ).double()


def case_all_reduce(rank, gloo):
    for dtype in TYPES + INTEGERS:
        for op in OPS:
            ours, theirs = (contribution(rank, 5, 7, dtype=dtype) for _ in range(2))
            before = reduced()
            dist.all_reduce(ours, op)
            assert reduced() - before == ours.nbytes
            dist.all_reduce(theirs, op, group=gloo)
            assert torch.equal(ours, theirs), (dtype, op)
    for dtype in TYPES:
        ours, total = contribution(rank, 9, dtype=dtype), contribution(rank, 9).double()
        dist.all_reduce(ours, dist.ReduceOp.AVG)
        dist.all_reduce(total, group=gloo)
        assert torch.equal(ours, (total / WORLD_SIZE).to(dtype))


def case_shapes(rank, gloo):
    for make in (
        lambda: contribution(rank, 4, 6).t(),
        lambda: contribution(rank, 4, 6)[:, ::2],
        lambda: contribution(rank, 1).squeeze(),
        lambda: contribution(rank, 300_000),
        lambda: contribution(rank, 0),
        lambda: contribution(rank, 3, dtype=torch.complex64) * (1 + 2j),
    ):
        ours, theirs = make(), make().contiguous()
        dist.all_reduce(ours)
        dist.all_reduce(theirs, group=gloo)
        assert torch.equal(ours, theirs)


def case_what_reducers_do_not_do(rank, gloo):
    for make, op in (
        (lambda: contribution(rank, 5, dtype=torch.int32), dist.ReduceOp.BAND),
        (lambda: contribution(rank, 5, dtype=torch.int64), dist.ReduceOp.BXOR),
        (lambda: contribution(rank, 5) > 1, dist.ReduceOp.MAX),
        (lambda: contribution(rank, 4, 4).to_sparse(), dist.ReduceOp.SUM),
    ):
        ours, theirs = make(), make()
        before = reduced()
        dist.all_reduce(ours, op)
        assert reduced() == before
        dist.all_reduce(theirs, op, group=gloo)
        assert torch.equal(ours.to_dense(), theirs.to_dense())


def case_coalesced(rank, gloo):
    def make():
        kinds = [torch.float32, torch.int64, torch.float32, torch.bfloat16]
        return [contribution(rank, 2, n + 1, dtype=kind).t() for n, kind in enumerate(kinds)]

    ours, theirs = make(), make()
    before = dist.group.WORLD.client.bytes_reduced
    dist.group.WORLD.allreduce_coalesced(ours).wait()
    assert reduced() - before == sum(tensor.nbytes for tensor in ours)
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_reduce(ours[0])
        dist.all_reduce(ours[2])
    works.wait()
    for one in (*theirs, theirs[0], theirs[2]):
        dense = one.contiguous()
        dist.all_reduce(dense, group=gloo)
        one.copy_(dense)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def case_reduce_scatter(rank, gloo):
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        whole = contribution(rank, 2 * WORLD_SIZE, 5, dtype=dtype)
        total = whole.clone()
        dist.all_reduce(total, group=gloo)
        expected = total.chunk(WORLD_SIZE)[rank]
        before, untouched = reduced(), whole.clone()
        outputs = [torch.empty(2, 5, dtype=dtype) for _ in range(4)]
        dist.reduce_scatter(outputs[0], list(whole.chunk(WORLD_SIZE)))
        dist.reduce_scatter_tensor(outputs[1], whole)
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(outputs[2], whole)
            dist.reduce_scatter_tensor(outputs[3], whole)
        assert all(torch.equal(output, expected) for output in outputs)
        assert torch.equal(whole, untouched)
        assert reduced() - before == 4 * whole.nbytes
        with pytest.raises(RuntimeError, match="must be world size"):  # in Gloo's words
            dist.reduce_scatter(outputs[0], list(whole.chunk(WORLD_SIZE))[1:])


def case_others(rank, gloo):
    n = WORLD_SIZE
    before = reduced()
    tensor = torch.full((2,), float(rank))
    dist.broadcast(tensor, 1)
    assert tensor.tolist() == [1.0, 1.0]
    whole = torch.empty(n)
    dist.all_gather_into_tensor(whole, torch.tensor([float(rank)]))
    assert whole.tolist() == [0.0, 1.0, 2.0]
    gathered = [torch.empty(1) for _ in range(n)] if rank == 2 else None
    dist.gather(torch.tensor([float(rank)]), gathered, dst=2)
    assert gathered is None or torch.cat(gathered).tolist() == [0.0, 1.0, 2.0]
    dist.scatter(whole[:1], list(torch.arange(3.0).split(1)) if rank == 0 else None, src=0)
    assert whole[0] == rank
    dist.reduce(tensor, 0)
    assert rank != 0 or tensor.tolist() == [3.0, 3.0]
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(n)]
    got = torch.empty(1)
    ring = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % n),
        dist.P2POp(dist.irecv, got, (rank - 1) % n),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert got == (rank - 1) % n
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    assert reduced() == before


def case_all_to_all(rank, gloo):
    """Of lists of tensors, which an older torch's Gloo does not have: then the backend says so."""
    n = WORLD_SIZE
    ends = []
    for group in (gloo, dist.group.WORLD):
        parts = [torch.empty(1) for _ in range(n)]
        try:
            dist.all_to_all(parts, [torch.tensor([10.0 * rank + to]) for to in range(n)], group)
            ends.append(torch.cat(parts).tolist())
        except RuntimeError as error:
            ends.append(str(error).partition("\n")[0])
    refusal = "Backend gloo does not support alltoall"
    assert ends in ([[10.0 * of + rank for of in range(n)]] * 2, [refusal] * 2), ends


def case_tensors_that_gloo_frees(rank, gloo):
    """Leave the last reference to a tensor to a thread of Gloo's, which then needs the GIL."""
    del rank, gloo
    for _ in range(300):
        dist.broadcast(torch.ones(10), 0, async_op=True)
        dist.all_gather([torch.ones(10) for _ in range(WORLD_SIZE)], torch.ones(10), async_op=True)
        dist.all_to_all_single(torch.ones(WORLD_SIZE), torch.ones(WORLD_SIZE), async_op=True)
        dist.barrier()


def case_work_object(rank, gloo):
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.get_future().wait()[0] is tensor
    assert work.wait(timedelta(seconds=9))
    assert work.is_completed()
    assert work.result()[0] is tensor
    assert tensor.tolist() == [WORLD_SIZE] * 3
    tensors = [torch.ones(2), torch.ones(2, dtype=torch.int64)]
    both = dist.group.WORLD.allreduce_coalesced(tensors)
    then = both.get_future().then(lambda done: sum(int(one.sum()) for one in done.value()))
    assert then.wait() == 2 * 2 * WORLD_SIZE
    # C++ keeps the handle, when nothing here does.
    torch._C._distributed_c10d._register_work(tensor, dist.all_reduce(tensor, async_op=True))
    torch.ops._c10d_functional.wait_tensor(tensor)
    assert tensor.tolist() == [WORLD_SIZE**2] * 3


def case_alone(rank, gloo):
    """Every collective of a group of one has a handle with a future."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    sent = torch.arange(2.0)
    outputs = [torch.empty(2) for _ in range(11)]
    works = [
        dist.all_reduce(outputs[0].copy_(sent), group=alone, async_op=True),
        dist.reduce(outputs[1].copy_(sent), rank, group=alone, async_op=True),
        dist.broadcast(outputs[2].copy_(sent), rank, group=alone, async_op=True),
        dist.reduce_scatter(outputs[3], [sent], group=alone, async_op=True),
        dist.reduce_scatter_tensor(outputs[4], sent, group=alone, async_op=True),
        dist.all_gather([outputs[5]], sent, group=alone, async_op=True),
        dist.all_gather_into_tensor(outputs[6], sent, group=alone, async_op=True),
        dist.gather(sent, [outputs[7]], rank, group=alone, async_op=True),
        dist.scatter(outputs[8], [sent], rank, group=alone, async_op=True),
        dist.all_to_all([outputs[9]], [sent], group=alone, async_op=True),
        dist.barrier(group=alone, async_op=True),
        alone.allreduce_coalesced([outputs[10].copy_(sent)]),
    ]
    with dist._coalescing_manager(group=alone, async_ops=True) as coalesced:
        dist.reduce_scatter_tensor(outputs[3], sent, group=alone)
        dist.reduce_scatter_tensor(outputs[4], sent, group=alone)
    for work in [*works, *coalesced.works]:
        work.get_future().wait()
        assert work.wait()
    assert all(torch.equal(output, sent) for output in outputs)


def case_a_tensor_of_shards(rank, gloo):
    """Torch asks for a device that the group serves, and there may be no other than the CPU."""
    spec = ChunkShardingSpec(0, [f"rank:{at}/cpu" for at in range(WORLD_SIZE)])
    whole = torch.empty(2 * WORLD_SIZE, 2) if rank == 0 else None
    sharded_tensor.ones(spec, 2 * WORLD_SIZE, 2).gather(out=whole)
    assert rank > 0 or torch.equal(whole, torch.ones(2 * WORLD_SIZE, 2))


def case_received_from_any_rank(rank, gloo):
    tensor = torch.full((3,), float(rank))
    if rank == 1:
        dist.send(tensor, 0)
    elif rank == 0:
        assert dist.recv(tensor) == 1
        assert tensor.tolist() == [1.0] * 3


def case_callbacks_come_before_the_end(rank, gloo):
    """As with Gloo, `wait()` returns after the callbacks of the collective's future."""
    done = []
    for at in range(20):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        then = work.get_future().then(lambda _, at=at: (time.sleep(0.01), done.append(at)))
        assert not work.is_completed() or at in done
        work.wait()
        assert work.is_completed()
        assert done == list(range(at + 1))
        then.wait()

    def ask(_):
        work.wait()  # it has ended, but for this callback
        return work.is_completed()

    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work.get_future().then(ask).wait()
    if rank == 0:  # with the others it does not end before it has a callback
        gate = threading.Event()
        work = dist.all_reduce(torch.ones(3), async_op=True)
        held = work.get_future().then(lambda _: gate.wait(30))
    dist.barrier(gloo)
    if rank == 0:
        with pytest.raises(ReductionTimeout):
            work.wait(timedelta(seconds=0.5))
        gate.set()
        assert held.wait()
        assert work.wait()
    else:
        dist.all_reduce(torch.ones(3))


def case_reductions_in_callbacks(rank, gloo):
    """Rank 0's callback is in time, and that of rank 1 is not; then calls match again."""
    if rank == 1:
        first = dist.all_reduce(torch.ones(3), async_op=True)
        late = first.get_future().then(lambda _: dist.all_reduce(torch.ones(5)))
        second = dist.all_reduce(torch.ones(3), async_op=True)
    dist.barrier(gloo)
    if rank == 0:
        first = dist.all_reduce(torch.ones(3), async_op=True)
        early = first.get_future().then(lambda _: dist.all_reduce(torch.ones(5)))
    dist.barrier(gloo)
    if rank == 0:
        with pytest.raises(RuntimeError, match="disagree on total_bytes"):
            early.wait()
        second = dist.all_reduce(torch.ones(3), async_op=True)
    elif rank == 1:
        with pytest.raises(RuntimeError, match=r"LocalProtocolError.*bucket_cap_mb"):
            late.wait()
    else:
        first = dist.all_reduce(torch.ones(3), async_op=True)
        second = dist.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(MismatchError, match="rank 1 takes no part"):
            dist.all_reduce(torch.ones(3))
    with pytest.raises(
        MismatchError, match="takes no part" if rank == 0 else "disagree on total_bytes"
    ):
        second.wait()
    assert first.wait()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [WORLD_SIZE] * 3


def case_groups(rank, gloo):
    job = dist.group.WORLD.client.spec.job
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [2, 0])]
    mine = [
        (at, pair) for at, pair in enumerate(pairs) if pair != dist.GroupMember.NON_GROUP_MEMBER
    ]
    assert all(pair.client is None for _, pair in mine)
    tensors = [torch.tensor([float(rank)]) for _ in mine]
    # A rank meets its two groups in another order than the next one does.
    works = [
        dist.all_reduce(tensor, group=pair, async_op=True)
        for tensor, (_, pair) in zip(tensors, mine, strict=True)
    ]
    for work, tensor, (at, pair) in zip(works, tensors, mine, strict=True):
        work.wait()
        assert tensor == [1, 3, 2][at]
        assert pair.client.spec.job == f"{job}.{pair.group_name}"
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(tensors[0], group=alone)
    assert alone.client is None
    mesh = init_device_mesh("cpu", (1, WORLD_SIZE), mesh_dim_names=("replicate", "shard"))
    whole = torch.tensor([float(rank)])
    dist.all_reduce(whole, group=mesh.get_group("shard"))
    assert whole == 3
    dist.destroy_process_group(mine[0][1])
    with pytest.raises(LocalProtocolError, match="destroyed"):
        mine[0][1].allreduce([whole])


def case_the_same_ranks_split_twice(rank, gloo):
    world = dist.group.WORLD
    for ranks in ([], [0, 0], [0, WORLD_SIZE]):
        with pytest.raises(ConfigError, match="split_group takes different ranks"):
            world.split_group(ranks)
    halves = [world.split_group([0, 2]) for _ in range(2)]
    if rank == 1:
        assert halves == [None, None]
        return
    tensors = [torch.tensor([float(rank + at)]) for at in range(2)]
    # Each meets its members by itself, whatever the other one has left in the store.
    for half, tensor in zip(halves, tensors, strict=True):
        half.allreduce([tensor]).wait()
    assert tensors == [2, 4]
    jobs = {half.client.spec.job for half in halves}
    assert len(jobs) == 2


def case_ddp(rank, gloo):
    weights = []
    for group in (None, gloo):
        model = DistributedDataParallel(network(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = reduced()
        torch.manual_seed(rank)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(6, 8, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        assert (reduced() > before) == (group is None)
        for initial in (True, False):
            with model.join(divide_by_initial_world_size=initial):
                for _ in range(rank + 1):
                    optimizer.zero_grad()
                    model(torch.randn(6, 8, dtype=torch.float64)).square().mean().backward()
                    optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.state_dict().values()]))
        everywhere = [torch.empty_like(weights[-1]) for _ in range(WORLD_SIZE)]
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
        everywhere = [torch.empty_like(parameters) for _ in range(WORLD_SIZE)]
        dist.all_gather(everywhere, parameters)
        assert all(torch.equal(parameters, other) for other in everywhere)
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-12)


def losses(model, forward):
    """Train for some steps; return the mean of the losses over all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    found = []
    for _ in range(4):
        inputs = torch.randn(6, 8, dtype=torch.float64)
        loss = (forward(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def case_compiled(rank, gloo):
    """The forward pass broadcasts the batch norm's buffers, which dynamo must not trace."""
    del rank
    found = []
    for group in (None, gloo):
        model = DistributedDataParallel(network(), process_group=group)
        before = reduced()
        found.append(losses(model, torch.compile(model, backend="aot_eager")))
        assert (reduced() > before) == (group is None)
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def case_fp16_compress(rank, gloo):
    del rank
    found = []
    for group in (None, gloo):
        model = DistributedDataParallel(network(), process_group=group)
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        before = reduced()
        found.append(losses(model, model))
        halves = 4 * sum(2 * parameter.numel() for parameter in model.parameters())
        assert reduced() - before == (halves if group is None else 0)
    assert found[0] == pytest.approx(found[1], rel=1e-2)  # Gloo adds up in 16 bits


def case_dtensor(rank, gloo):
    whole = contribution(0, 2 * WORLD_SIZE, 5)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    sharded = distribute_tensor(whole if rank == 0 else torch.zeros_like(whole), mesh, [Shard(0)])
    assert torch.equal(sharded.to_local(), whole.chunk(WORLD_SIZE)[rank])
    assert torch.equal(sharded.full_tensor(), whole)
    mine = contribution(rank, 2 * WORLD_SIZE, 5)
    total = mine.clone()
    dist.all_reduce(total, group=gloo)
    parts = DTensor.from_local(mine, mesh, [Partial()])
    assert torch.equal(parts.redistribute(mesh, [Replicate()]).to_local(), total)
    assert torch.equal(
        parts.redistribute(mesh, [Shard(0)]).to_local(), total.chunk(WORLD_SIZE)[rank]
    )


def case_fsdp(rank, gloo):
    whole, sharded = network(), network()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    fully_shard(sharded, mesh=mesh)
    client = mesh.get_group().join()
    before = client.bytes_reduced
    inputs = contribution(0, 6, 8, dtype=torch.float64)
    for model in (whole, sharded):
        model(inputs).square().mean().backward()
    assert client.bytes_reduced > before
    for mine, parameter in zip(whole.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, parameter.grad.full_tensor())
    found = []
    for over in (mesh, DeviceMesh.from_group(gloo, "cpu")):
        model = network()
        fully_shard(model, mesh=over)
        found.append(losses(model, model))
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def case_failures(rank, gloo):
    hasty = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(torch.ones(1), group=hasty)
    assert hasty.client.timeout_s == 1
    begun = time.monotonic()
    if rank != 2:
        expect(ReductionTimeout, dist.all_reduce(torch.ones(3), group=hasty, async_op=True))
        assert time.monotonic() - begun < 10
    time.sleep(1.5 - min(1.5, time.monotonic() - begun))
    error = expect(MismatchError, dist.all_reduce(torch.ones(3 + rank), async_op=True))
    assert error.field == "total_bytes"
    for size in (5, 6):  # and then it works again
        tensor = torch.ones(size)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * size


def expect(kind, work):
    with pytest.raises(kind) as found:
        work.wait()
    assert work.is_completed()
    assert work.exception() is found.value
    assert not work.is_success()
    with pytest.raises(RuntimeError, match=kind.__name__):
        work.get_future().wait()
    return found.value


def without_reducers(ended):
    pair = dist.new_group([0, 1])
    groups = [dist.group.WORLD] if dist.get_rank() == 2 else [dist.group.WORLD, pair]

    def reduce_in_all():
        totals = []
        for group in groups:
            tensor = torch.full((3,), dist.get_rank() + 1.0)
            dist.all_reduce(tensor, group=group)
            totals.append(float(tensor[0]))
        return totals

    ends = [reduce_in_all()]
    print("reduced", flush=True)  # noqa: T201 (the test waits for it)
    eventually(ended.exists, 200.0)
    ends += [reduce_in_all() for _ in range(3)]
    used = [group.client.counters.fallbacks > 0 for group in groups]
    write_result({"totals": ends, "used": used})


def main():
    dist.init_process_group(sys.argv[1], timeout=timedelta(seconds=40))
    assert isinstance(dist.group.WORLD, worker_client.torch_backend.ReductionGroup)
    if len(sys.argv) > 2:
        without_reducers(Path(sys.argv[2]))
    else:
        all_cases()
    dist.barrier()
    dist.destroy_process_group()


def all_cases():
    warnings.simplefilter("ignore")  # torch's, of what it will call otherwise one day
    gloo = dist.new_group(backend="gloo")
    rank = dist.get_rank()
    ends = {}
    for name in case_names("tests.integration.backend_rank"):
        try:
            globals()[name](rank, gloo)
            ends[name] = ""
        except Exception:  # noqa: BLE001 (the test shows it)
            ends[name] = traceback.format_exc()
        write_result(ends)


if __name__ == "__main__":
    main()
