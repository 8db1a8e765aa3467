"""One rank of test_torch_backend: what of the backend is its own, and Gloo cannot be asked for.

Started as ``python -m tests.integration.backend_rank BACKEND`` with the launcher's usual
environment; a second argument names a file that appears when no reducer is left, and there is one
case then.
"""

import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import worker_client.torch_backend
from reducer.errors import ConfigError, LocalProtocolError, MismatchError, ReductionTimeout
from tests.integration.cases import run_cases
from tests.ranks import write_result
from tests.waits import eventually

WORLD_SIZE = 3


def case_coalesced(rank, gloo):
    """Of several types, which Gloo refuses, and of tensors with gaps."""
    kinds = (torch.float32, torch.int64, torch.float32, torch.bfloat16)
    tensors = [torch.full((2, at + 1), rank + at, dtype=kind).t() for at, kind in enumerate(kinds)]
    before = dist.group.WORLD.client.bytes_reduced
    work = dist.group.WORLD.allreduce_coalesced(tensors)
    sums = work.get_future().then(lambda done: [int(one.sum()) for one in done.value()])
    expected = [3 + 3 * at for at in range(4)]  # the sum of the ranks, and three times `at`
    assert sums.wait() == [2 * (at + 1) * one for at, one in enumerate(expected)]
    for tensor, one in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, torch.full_like(tensor, one))
    sent = dist.group.WORLD.client.bytes_reduced - before
    assert sent == sum(tensor.nbytes for tensor in tensors)


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


def case_waits_in_callbacks(rank, gloo):
    """A reduction waits for its callbacks, and one of these may wait for the reduction."""

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
    """Each has a client and a job of its own, once it needs them."""
    job = dist.group.WORLD.client.spec.job
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [2, 0])]
    mine = [pair for pair in pairs if pair != dist.GroupMember.NON_GROUP_MEMBER]
    assert all(pair.client is None for pair in mine)
    tensor, tensors = torch.ones(1), [torch.full((1,), 2.0**rank) for _ in mine]
    works = [
        dist.all_reduce(one, group=pair, async_op=True)
        for one, pair in zip(tensors, mine, strict=True)
    ]
    for work, pair, one in zip(works, mine, tensors, strict=True):
        work.wait()
        assert one == sum(2.0**member for member in dist.get_process_group_ranks(pair))
        assert pair.client.spec.job == f"{job}.{pair.group_name}"
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(tensor, group=alone)
    assert alone.client is None
    dist.destroy_process_group(mine[0])
    with pytest.raises(LocalProtocolError, match="destroyed"):
        mine[0].allreduce([tensor])


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
        warnings.simplefilter("ignore")  # torch's, of what it will call otherwise one day
        run_cases(globals(), dist.get_rank(), dist.new_group(backend="gloo"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
