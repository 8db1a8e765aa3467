"""Calls of the Horovod interface, as one of three ranks; `horovod_rank` runs each function."""

import json
import time
from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

import worker_client.horovod as hvd
import worker_client.horovod.torch as horovods
from reducer.errors import ConfigError, MismatchError

SIZE = 3
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int32, torch.int64, torch.uint8),
)
FOLDS = {
    hvd.Sum: lambda values: values.sum(0),
    hvd.Min: lambda values: values.amin(0),
    hvd.Max: lambda values: values.amax(0),
    hvd.Product: lambda values: values.prod(0),
    hvd.Average: lambda values: values.sum(0) / SIZE,
}


def mine(dtype=torch.float32, rank=None):
    """Small whole numbers, others at every rank; no result overflows or is rounded."""
    at = hvd.rank() if rank is None else rank
    return torch.tensor([[3, 6], [9, 0]], dtype=dtype) + 3 * (at % 2)


def everybodys(dtype):
    return torch.stack([mine(dtype, rank) for rank in range(SIZE)]).double()


def case_places():
    assert hvd.is_initialized()
    assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (SIZE, SIZE, 1)
    assert (hvd.local_rank(), hvd.cross_rank(), hvd.is_homogeneous()) == (hvd.rank(), 0, True)
    hvd.init()  # a second time changes nothing
    with pytest.raises(ConfigError, match="without comm="):
        hvd.init(comm=[0, 1])


def case_every_op_of_every_dtype():
    for dtype in DTYPES:
        for op, fold in FOLDS.items():
            given = mine(dtype)
            reduced = hvd.allreduce(given, op=op, name=f"{op.name}.{dtype}")
            assert torch.equal(given, mine(dtype))
            assert reduced.dtype == dtype
            expected = fold(everybodys(dtype))
            # A short type wraps around, as it does where Horovod adds.
            expected = expected.long().to(dtype) if op is not hvd.Average else expected.to(dtype)
            assert torch.equal(reduced, expected), (op, dtype, reduced, expected)


def case_averages_of_integers_are_cut():
    assert hvd.allreduce(torch.tensor([hvd.rank(), -hvd.rank() - 1])).tolist() == [1, -2]
    assert hvd.allreduce(torch.tensor([hvd.rank() * 2, -2])).tolist() == [2, -2]
    assert hvd.allreduce(torch.tensor([-hvd.rank() * 2 + 1])).tolist() == [-1]
    assert hvd.allreduce(torch.tensor([-hvd.rank()]), postscale_factor=0.75).tolist() == [0]


def case_in_place():
    tensor = mine().t()  # not contiguous
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert torch.equal(tensor, everybodys(torch.float32).sum(0).float().t())
    weight = torch.nn.Parameter(mine())
    assert hvd.synchronize(hvd.allreduce_async_(weight, op=hvd.Max)) is weight
    assert torch.equal(weight.detach(), everybodys(torch.float32).amax(0).float())


def case_many_at_once():
    handles = [
        hvd.allreduce_async(torch.full((at + 1,), float(hvd.rank())), op=hvd.Sum)
        for at in range(30)
    ]
    results = [hvd.synchronize(handle) for handle in handles]
    assert all(hvd.poll(handle) for handle in handles)
    assert [result.tolist() for result in results] == [[3.0] * (at + 1) for at in range(30)]
    assert hvd.synchronize(handles[0]) is results[0]
    polled = hvd.allreduce_async(mine(), name="polled")
    until = time.monotonic() + 10
    while not hvd.poll(polled) and time.monotonic() < until:
        time.sleep(0.01)
    assert hvd.poll(polled)  # though nobody waited
    with pytest.raises(ConfigError, match="handle"):
        hvd.synchronize(7)


def case_factors_and_older_arguments():
    scaled = hvd.allreduce(mine(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert torch.equal(scaled, 2 * everybodys(torch.float32).sum(0).float())
    assert torch.equal(hvd.allreduce(mine(), False), everybodys(torch.float32).sum(0).float())
    assert torch.equal(hvd.allreduce(mine(), average=True), hvd.allreduce(mine()))
    for arguments, message in (
        ({"average": True, "op": hvd.Sum}, "leave out average="),
        ({"op": hvd.Adasum}, "Adasum"),
        ({"op": 17}, "unknown op 17"),
    ):
        with pytest.raises(ConfigError, match=message):
            hvd.allreduce(mine(), **arguments)
    with pytest.raises(ConfigError, match="to_dense"):
        hvd.allreduce(mine().to_sparse())


def case_compression():
    fine = torch.tensor([1.0 + 2.0**-9, 1.0 + 2.0**-12, 1e5, -3.0])
    for compressor, wire in (
        (hvd.Compression.fp16, torch.float16),
        (hvd.Compression.bf16, torch.bfloat16),
    ):
        reduced = hvd.allreduce(fine, compression=compressor)
        assert reduced.dtype == torch.float32
        assert torch.equal(reduced, fine.to(wire).float())
        whole = torch.tensor([1 << 20])
        assert torch.equal(hvd.allreduce(whole, compression=compressor), whole)
    assert torch.equal(hvd.allreduce(fine, compression=hvd.Compression.none), fine)


def case_groups():
    def given():
        return [mine(), mine(torch.int32), mine(torch.float32).t() + 1, torch.tensor(1.0)]

    expected = [sum(tensors) for tensors in zip(*[
        [mine(rank=r), mine(torch.int32, r), mine(rank=r).t() + 1, torch.tensor(1.0)]
        for r in range(SIZE)
    ], strict=True)]  # fmt: skip
    tensors = given()
    for reduced in (
        hvd.grouped_allreduce(given(), op=hvd.Sum, name="group"),
        hvd.synchronize(hvd.grouped_allreduce_async(given(), op=hvd.Sum)),
        hvd.grouped_allreduce_(tensors, op=hvd.Sum),
    ):
        assert [one.dtype for one in reduced] == [one.dtype for one in given()]
        assert all(torch.equal(one, other) for one, other in zip(reduced, expected, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))
    with pytest.raises(ConfigError, match="no tensors"):
        hvd.grouped_allreduce([])


def case_gradients_pass_through():
    rank = hvd.rank()

    def gradient(call, rows=2):
        x = torch.ones(rows, requires_grad=True)
        result = call(x)
        (result * (torch.arange(float(len(result))) + 1 + rank)).sum().backward()
        return x.grad.tolist()

    assert gradient(hvd.allreduce) == [2.0, 3.0]
    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)) == [6.0, 9.0]
    assert gradient(lambda x: hvd.allreduce(x, postscale_factor=2.0)) == [4.0, 6.0]
    assert gradient(lambda x: hvd.grouped_allreduce([x, x + 1])[1]) == [2.0, 3.0]
    # All-gather: this rank's rows of the average of all ranks' gradients.
    start = rank * (rank + 1) / 2  # rows of the ranks before
    assert gradient(hvd.allgather, rank + 1) == [2.0 + start + at for at in range(rank + 1)]
    expected = [2.0, 3.0] if rank == 1 else [0.0, 0.0]
    assert gradient(lambda x: hvd.broadcast(x, 1)) == expected
    assert gradient(hvd.reducescatter, 4) == [1.0, 2.0, 2.0, 3.0]
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ConfigError, match="gradient of Max is not defined"):
        hvd.allreduce(x, op=hvd.Max).sum().backward()


def case_allgather():
    rank = hvd.rank()
    rows = torch.arange(rank * 2.0).reshape(rank, 2) + 10 * rank  # none of rank 0
    expected = torch.tensor([[10.0, 11.0], [20.0, 21.0], [22.0, 23.0]])
    assert torch.equal(hvd.allgather(rows), expected)
    assert torch.equal(hvd.synchronize(hvd.allgather_async(rows, name="rows")), expected)
    assert hvd.allgather(torch.tensor(rank)).tolist() == [0, 1, 2]
    assert hvd.allgather(torch.tensor([rank == 1])).tolist() == [False, True, False]
    assert hvd.allgather(torch.zeros(0, 4)).shape == (0, 4)
    both = hvd.grouped_allgather([rows, torch.tensor([rank])], name="both")
    assert torch.equal(both[0], expected)
    assert both[1].tolist() == [0, 1, 2]
    for odd in (torch.zeros(2, 2 + rank // 2), torch.zeros(2, dtype=DTYPES[rank // 2])):
        with pytest.raises(MismatchError, match="only the first dimension may differ"):
            hvd.allgather(odd)


def case_a_gather_does_not_wait():
    rank = hvd.rank()
    if rank == 0:
        early = hvd.allgather_async(torch.tensor([[rank]]), name="early")
        assert not hvd.poll(early)
        with pytest.raises(ConfigError, match="in progress"):
            hvd.allgather_async(torch.tensor([[rank]]), name="early")
        assert hvd.allgather(torch.tensor([rank]), name="late").tolist() == [0, 1, 2]
        assert hvd.synchronize(early).tolist() == [[0], [1], [2]]
    else:
        assert hvd.allgather(torch.tensor([rank]), name="late").tolist() == [0, 1, 2]
        assert hvd.allgather(torch.tensor([[rank]]), name="early").tolist() == [[0], [1], [2]]
        with pytest.raises(MismatchError, match="rank 0 takes no part in this call"):
            hvd.allgather(torch.tensor([[rank]]), name="early")
    assert hvd.allgather(torch.tensor([rank]), name="early").tolist() == [0, 1, 2]
    both = hvd.grouped_allgather_async([torch.tensor([rank]), torch.ones(rank, 2)])
    until = time.monotonic() + 10
    while not hvd.poll(both) and time.monotonic() < until:
        time.sleep(0.01)
    assert hvd.poll(both)  # though nobody waited
    assert [one.tolist() for one in hvd.synchronize(both)] == [[0, 1, 2], [[1.0, 1.0]] * 3]


def case_alltoall():
    rank = hvd.rank()
    mine = torch.tensor([[10.0 * rank + to, to] for to in range(SIZE)])
    expected = [[10.0 * sender + rank, rank] for sender in range(SIZE)]
    assert hvd.alltoall(mine).tolist() == expected
    assert hvd.synchronize(hvd.alltoall_async(mine, name="rows")).tolist() == expected
    # Rank r sends t + r rows to rank t, and keeps one for itself besides.
    splits = torch.tensor([to + rank for to in range(SIZE)])
    rows = torch.cat([torch.full((to + rank,), 10 * rank + to) for to in range(SIZE)])
    rows = torch.cat([rows, torch.tensor([99])])
    received, counts = hvd.alltoall(rows, splits)
    assert counts.tolist() == [sender + rank for sender in range(SIZE)]
    assert counts.dtype == splits.dtype
    assert received.tolist() == [
        10 * sender + rank for sender in range(SIZE) for _ in range(sender + rank)
    ]
    received, counts = hvd.synchronize(hvd.alltoall_async(rows, splits.tolist()))
    assert (counts.dtype, counts.sum()) == (torch.int32, len(received))
    x = rows.float().requires_grad_()
    received, _ = hvd.alltoall(x, splits)
    (received * (rank + 1)).sum().backward()
    sent = [to + 1.0 for to in range(SIZE) for _ in range(to + rank)]
    assert x.grad.tolist() == [*sent, 0.0]
    for wrong, message in (
        ((torch.ones(4), None), "cannot be divided"),
        ((torch.ones(4), [1, 2]), "3 numbers of rows"),
        ((torch.ones(4), [1, 2, 2]), "of 4 in all at most"),
        ((torch.ones(4), [2, 3, -1]), "3 numbers of rows"),
        ((torch.ones(4), torch.ones(3)), "of integers"),
        ((torch.tensor(1.0), None), "one dimension or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            hvd.alltoall(*wrong)
    with pytest.raises(MismatchError, match="only the first dimension may differ"):
        hvd.alltoall(torch.ones(3, 2 + rank))


def case_reducescatter():
    rank = hvd.rank()
    rows = torch.arange(8.0).reshape(4, 2)
    shares = [rows[:2], rows[2:3], rows[3:]]
    assert torch.equal(hvd.reducescatter(rows, op=hvd.Sum), 3 * shares[rank])
    assert torch.equal(hvd.reducescatter(rows, compression=hvd.Compression.fp16), shares[rank])
    handle = hvd.reducescatter_async(rows, op=hvd.Sum, prescale_factor=2.0)
    assert torch.equal(hvd.synchronize(handle), 6 * shares[rank])
    short = torch.arange(3) + rank
    for both in (
        hvd.grouped_reducescatter([rows, short], op=hvd.Sum),
        hvd.synchronize(hvd.grouped_reducescatter_async([rows, short], op=hvd.Sum)),
    ):
        assert torch.equal(both[0], 3 * shares[rank])
        assert both[1].tolist() == [3 * rank + 3]
    x = torch.ones(3, requires_grad=True)
    y = torch.ones(3, 2, requires_grad=True)
    first, second = hvd.grouped_reducescatter([x, y], op=hvd.Sum)
    (first.sum() * (rank + 1) + second.sum()).backward()
    assert x.grad.tolist() == [3.0, 6.0, 9.0]
    assert y.grad.tolist() == [[3.0, 3.0]] * 3
    with pytest.raises(ConfigError, match=r"hvd\.Sum"):
        hvd.reducescatter(rows, op=hvd.Max)
    with pytest.raises(ConfigError, match="not scalars"):
        hvd.grouped_reducescatter([rows, torch.tensor(1.0)])


def case_sparse_allreduce():
    rank = hvd.rank()
    dense = torch.zeros(5, 2)
    dense[rank] = 6.0
    dense[4] = rank
    total = torch.tensor([[6.0, 6.0], [6.0, 6.0], [6.0, 6.0], [0.0, 0.0], [3.0, 3.0]])
    for op, expected in ((hvd.Sum, total), (hvd.Average, total / 3)):
        handles = [hvd.sparse_allreduce_async(dense.to_sparse(1), name, op) for name in ("a", None)]
        for handle in handles:
            assert torch.equal(handle().to_dense(), expected)
    for refused, op, message in (
        (dense, hvd.Sum, "takes a sparse tensor"),
        (dense.to_sparse(1), hvd.Max, r"op=hvd\.Average or op=hvd\.Sum"),
    ):
        with pytest.raises(ConfigError, match=message):
            hvd.sparse_allreduce_async(refused, "n", op)


def case_process_sets():
    rank = hvd.rank()
    outer = hvd.add_process_set([2, 0])
    inner = hvd.add_process_set(hvd.ProcessSet([1]))
    assert (outer.ranks, outer.size(), outer.included()) == ([0, 2], 2, rank != 1)
    assert {outer.process_set_id, inner.process_set_id, 0} == {0, 1, 2}
    everybody = hvd.global_process_set
    assert (everybody.ranks, everybody.size(), everybody.rank()) == ([0, 1, 2], SIZE, rank)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=everybody) == 3
    if rank == 1:
        one = {"process_set": inner}
        assert (inner.rank(), hvd.allreduce(torch.tensor(7), **one)) == (0, 7)
        assert hvd.allgather(torch.tensor([7]), **one).tolist() == [7]
        assert hvd.broadcast(torch.tensor(7), 1, **one) == 7
        for call in (outer.rank, lambda: hvd.barrier(outer)):
            with pytest.raises(ConfigError, match="rank 1 is not in ProcessSet"):
                call()
    else:
        two = {"process_set": outer}
        assert outer.rank() == rank // 2
        mine = torch.tensor([rank, 1])
        handle = hvd.allreduce_async(mine, op=hvd.Sum, name="n", **two)
        assert hvd.synchronize(handle).tolist() == [2, 2]
        assert hvd.allreduce(mine, op=hvd.Average, **two).tolist() == [1, 1]
        assert [t.tolist() for t in hvd.grouped_allreduce([mine, mine], **two)] == [[1, 1]] * 2
        assert hvd.allgather(mine, **two).tolist() == [0, 1, 2, 1]
        assert hvd.broadcast(mine, 2, **two).tolist() == [2, 1]  # as hvd.rank() numbers it
        assert hvd.broadcast_object(rank, 2, **two) == 2
        assert hvd.allgather_object(rank, **two) == [0, 2]
        assert hvd.alltoall(mine, **two).tolist() == [[0, 2], [1, 1]][rank // 2]
        assert hvd.reducescatter(mine, op=hvd.Sum, **two).tolist() == [2]
        sparse = hvd.sparse_allreduce_async(mine.to_sparse(), None, hvd.Sum, **two)
        assert sparse().to_dense().tolist() == [2, 2]
        with pytest.raises(ConfigError, match="root 1 is not in the process set"):
            hvd.broadcast(mine, 1, **two)
        x = torch.ones(2, requires_grad=True)
        (hvd.broadcast(x, 2, **two) * (rank + 1)).sum().backward()
        assert x.grad.tolist() == [[0.0, 0.0], [2.0, 2.0]][rank // 2]
        hvd.barrier(outer)
    assert hvd.remove_process_set(inner) is True
    assert hvd.remove_process_set(outer) is True


def case_process_sets_come_and_go():
    rank = hvd.rank()
    outer, inner = hvd.add_process_set([0, 2]), hvd.add_process_set([1])
    assert hvd.remove_process_set(inner) is True
    assert hvd.remove_process_set(inner) is False
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert (inner.process_set_id, inner.size(), inner.included()) == (None, None, None)
    with pytest.raises(ConfigError, match="not in use"):
        hvd.allreduce(torch.ones(1), process_set=inner)
    assert hvd.remove_process_set(outer) is True
    again = hvd.add_process_set(outer)  # under another name among the reducers
    if again.included():
        assert hvd.allgather(torch.tensor([rank]), process_set=again).tolist() == [0, 2]
    hvd.shutdown()
    assert again.process_set_id is None
    hvd.init(process_sets=[inner, hvd.ProcessSet([0, 1])])
    if rank == 1:
        assert hvd.allreduce(torch.tensor(7), process_set=inner) == 7
    hvd.shutdown()
    hvd.init(process_sets="dynamic")


def case_process_sets_that_cannot_be():
    kept = hvd.add_process_set([0, 1])
    for wrong, message in (
        ([0, 3], r"ranks \[3\] are not in a world of size 3"),
        ([1, 0], "already: use that"),
        ([0, 1, 2], "already: use that"),
        (kept, "is in use already"),
        ([0, 1 + (hvd.rank() == 2)], r"already|rank \d takes no part"),
        ([hvd.rank()], "different process sets"),
        ([], "list of ranks"),
        ([0, "1"], "list of ranks"),
        (7, "list of ranks"),
        ([1, 1], "once"),
    ):
        with pytest.raises((ConfigError, MismatchError), match=message):
            hvd.add_process_set(wrong)
    other = hvd.add_process_set([2])
    with pytest.raises(ConfigError, match="have removed different process sets"):
        hvd.remove_process_set(kept if hvd.rank() else other)
    with pytest.raises(ConfigError, match=r"what hvd\.add_process_set\(\) returns, got \[0, 1\]"):
        hvd.allreduce(torch.ones(1), process_set=[0, 1])
    for one in (kept, other):
        assert hvd.remove_process_set(one) is True


def case_broadcast():
    rank = hvd.rank()
    for dtype in (*DTYPES, torch.bool, torch.complex64, torch.int16):
        given = torch.tensor([[rank, 1], [0, 7]]).to(dtype)
        received = hvd.broadcast(given.t(), 2, name=f"{dtype}")
        assert torch.equal(received, torch.tensor([[2, 0], [1, 7]]).to(dtype))
        assert torch.equal(given, torch.tensor([[rank, 1], [0, 7]]).to(dtype))
    odd = torch.tensor([float("nan"), -0.0, float("inf")]) if rank == 1 else torch.ones(3)
    assert hvd.broadcast_(odd, 1) is odd
    assert odd.view(torch.int32).tolist() == [0x7FC00000, -(1 << 31), 0x7F800000]
    turned = torch.full((2, 3), float(rank)).t()
    assert hvd.synchronize(hvd.broadcast_async_(turned, 1)) is turned
    assert turned.tolist() == [[1.0, 1.0]] * 3
    assert hvd.broadcast(torch.tensor(rank), 1).item() == 1
    strange = [torch.arange(2.0)[::2][:1], torch.zeros(0, 5).t(), torch.tensor(3.0).expand(1)]
    for at, given in enumerate(strange):  # contiguous to torch, whatever the last stride is
        mine = given if rank == 2 else torch.ones(given.shape)
        assert torch.equal(hvd.broadcast_(mine, 0, f"strange {at}"), torch.ones(given.shape))
    with pytest.raises(ConfigError, match="root 3 is not a rank"):
        hvd.broadcast(odd, 3)


def case_parameters():
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model(torch.randn(5, 3))
    torch.manual_seed(1)
    root = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    root(torch.randn(5, 3))
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, root.state_dict()[name]), name
    for listed in (list(model.parameters()), model.named_parameters()):
        with torch.no_grad():
            model[0].weight.fill_(hvd.rank())
        hvd.broadcast_parameters(listed, root_rank=2)
        assert (model[0].weight == 2).all()
    with pytest.raises(ConfigError, match="'epoch' is a int"):
        hvd.broadcast_parameters({"epoch": 3}, 0)


def case_objects():
    rank = hvd.rank()
    thing = {
        "epoch": 3,
        7: (1, 2.5, None, True),
        "list": [b"\0\xff", bytearray(b"x"), {"a"}, frozenset({1})],
        "deep": OrderedDict([("z", [[[]]]), ("a", 1 << 70)]),
        "size": torch.Size([2]),
    }
    received = hvd.broadcast_object(thing if rank == 1 else None, root_rank=1)
    assert received == thing
    assert [type(one) for one in received["list"]] == [bytes, bytearray, set, frozenset]
    assert list(received["deep"]) == ["z", "a"]
    assert isinstance(received["deep"], OrderedDict)
    arrays = hvd.broadcast_object(
        [torch.tensor([[1.5]], dtype=torch.bfloat16), torch.tensor(True), torch.zeros(0, 3),
         np.arange(4).reshape(2, 2), np.float32(0.1), float("nan")], 0, name="arrays"
    )  # fmt: skip
    assert arrays[0].dtype == torch.bfloat16
    assert arrays[0].tolist() == [[1.5]]
    assert arrays[1].item() is True
    assert arrays[2].shape == (0, 3)
    assert arrays[3].tolist() == [[0, 1], [2, 3]]
    assert arrays[4] == np.float32(0.1)
    assert type(arrays[4]) is np.float32
    assert arrays[5] != arrays[5]
    assert hvd.allgather_object({"rank": rank}) == [{"rank": at} for at in range(SIZE)]
    assert hvd.allgather_object(["x"] * rank, name="x") == [[], ["x"], ["x", "x"]]
    circle = []
    circle.append(circle)
    for refused, message in ((print, "builtin_function_or_method"), (circle, "contains itself")):
        with pytest.raises(ConfigError, match=f"rank 1: .*{message}"):
            hvd.broadcast_object(refused if rank == 1 else 0, root_rank=1)
    with pytest.raises(ConfigError, match="rank 2: an object of type Generator"):
        hvd.allgather_object(torch.Generator() if rank == 2 else 0)


def case_barrier_and_long_names():
    hvd.barrier()
    names = ["é" * 200 + str(at) for at in range(2)]
    handles = [hvd.allreduce_async(torch.tensor([at]), name=names[at], op=hvd.Sum) for at in (0, 1)]
    assert [hvd.synchronize(handle).item() for handle in handles] == [0, 3]


def case_what_is_missing_says_so():
    for module in (hvd, horovods):
        assert module.nccl_built() is False
    assert horovods.allreduce is hvd.allreduce
    assert issubclass(ConfigError, hvd.HorovodInternalError)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    for name, hint in (("run", "torchrun"),):
        with pytest.raises(AttributeError, match=f"hvd.{name} is not available: .*{hint}"):
            getattr(hvd, name)
    with pytest.raises(AttributeError, match="no attribute 'allreduce_sync'"):
        _ = hvd.allreduce_sync


def case_a_timeline():
    with TemporaryDirectory() as folder:
        hvd.start_timeline(f"{folder}/timeline.json", mark_cycles=True)
        hvd.allreduce(torch.ones(5), name="shown")
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(5), name="not shown")
        (path,) = Path(folder).iterdir()
        assert path.name == (
            "timeline.json" if hvd.rank() == 0 else f"timeline.rank{hvd.rank()}.json"
        )
        shown = [
            event["args"]["tensors"]
            for event in json.loads(path.read_bytes())
            if "tensors" in event.get("args", {})
        ]
        assert [any("shown" in name for name in names) for names in shown] == [True]


def case_leaving_and_coming_back():
    for _ in range(2):
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [3.0, 3.0]
