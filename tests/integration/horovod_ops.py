"""Calls of the Horovod interface, as one of three ranks; `horovod_rank` runs each function."""

import json
from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

import worker_client.horovod as hvd
import worker_client.horovod.torch as horovods
from reducer.errors import ConfigError, MismatchError
from tests.integration import horovod_calls
from tests.waits import eventually

SIZE = 3
DTYPES = [getattr(torch, name) for name in horovod_calls.DTYPES]


def tensor_of(elements, dtype="float32", device="cpu"):
    return torch.tensor(elements, dtype=getattr(torch, dtype), device=device)


def result_of(tensor):
    return horovod_calls.Result(tensor.tolist(), str(tensor.dtype).removeprefix("torch."))


class Way:
    """The interface, each of whose calls is made in another way, if there is such a way.

    Args:
        ending: of the names of calls: ``_async``, ``_`` for those in place, or both.
        given: arguments of all calls.
    """

    def __init__(self, ending="", **given):
        self._ending = ending
        self._given = given

    def __getattr__(self, name):
        call = getattr(hvd, name + self._ending, getattr(hvd, name))

        def made(*arguments, **named):
            found = call(*arguments, **named, **self._given)
            return hvd.synchronize(found) if "_async" in call.__name__ else found

        return made if callable(call) else call


def gradient_of(call, given, factors):
    x = torch.tensor(given, requires_grad=True)
    (call(x) * torch.tensor(factors)).sum().backward()
    return x.grad.tolist()


def check_all(way, ranks=range(SIZE)):
    """Make the calls of the table in a way."""
    calls = (way, tensor_of, list(ranks), hvd.rank())
    horovod_calls.check(horovod_calls.reductions(*calls), result_of)
    horovod_calls.check(horovod_calls.exchanges(*calls), result_of)


def check_gradients(way, ranks=range(SIZE)):
    calls = horovod_calls.gradients(way, tensor_of, list(ranks), hvd.rank())
    for name, call, given, factors, expected in calls:
        assert gradient_of(call, given, factors) == expected, name


def mine():
    """Small whole numbers, others at every rank."""
    return torch.tensor([[3.0, 6.0], [9.0, 0.0]]) + 3 * (hvd.rank() % 2)


TOTAL = torch.tensor([[12.0, 21.0], [30.0, 3.0]])


def case_places():
    assert hvd.is_initialized()
    assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (SIZE, SIZE, 1)
    assert (hvd.local_rank(), hvd.cross_rank(), hvd.is_homogeneous()) == (hvd.rank(), 0, True)
    hvd.init()  # a second time changes nothing


def case_calls():
    check_all(hvd)
    horovod_calls.check(horovod_calls.compressions(hvd, tensor_of), result_of)


def case_calls_that_do_not_wait():
    check_all(Way("_async"))


def case_calls_in_place():
    check_all(Way("_"))
    check_all(Way("_async_"))


def case_gradients_pass_through():
    check_gradients(hvd)


def case_averages_of_negative_integers_are_cut():
    assert hvd.allreduce(torch.tensor([-hvd.rank() - (hvd.rank() > 0)])).tolist() == [-1]
    assert hvd.allreduce(torch.tensor([-hvd.rank()]), postscale_factor=0.75).tolist() == [0]


def case_what_is_in_place_and_what_is_not():
    given = mine()
    hvd.allreduce(given)
    hvd.broadcast(given, 1)
    assert torch.equal(given, mine())
    tensor = mine().t()  # not contiguous
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert torch.equal(tensor, TOTAL.t())
    weight = torch.nn.Parameter(mine())
    assert hvd.synchronize(hvd.allreduce_async_(weight, op=hvd.Sum)) is weight
    assert torch.equal(weight.detach(), TOTAL)
    tensors = [mine(), mine().t() + 1]
    reduced = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    for one, other, expected in zip(tensors, reduced, (TOTAL, TOTAL.t() + 3), strict=True):
        assert torch.equal(one, expected)
        assert torch.equal(other, expected)


def case_what_is_refused():
    rows, x = torch.ones(4, 2), torch.ones(2, requires_grad=True)
    for message, call in (
        ("without comm=", lambda: hvd.init(comm=[0, 1])),
        ("handle", lambda: hvd.synchronize(7)),
        ("leave out average=", lambda: hvd.allreduce(rows, average=True, op=hvd.Sum)),
        ("gradient of Max is not", lambda: hvd.allreduce(x, op=hvd.Max).sum().backward()),
        ("3 numbers of rows", lambda: hvd.alltoall(rows, [1, 2])),
        ("of 4 in all at most", lambda: hvd.alltoall(rows, [1, 2, 2])),
        ("3 numbers of rows", lambda: hvd.alltoall(rows, [2, 3, -1])),
        ("of integers", lambda: hvd.alltoall(rows, torch.ones(3))),
        ("one dimension or more", lambda: hvd.alltoall(torch.tensor(1.0))),
        ("not scalars", lambda: hvd.grouped_reducescatter([rows, torch.tensor(1.0)])),
        ("takes a sparse tensor", lambda: hvd.sparse_allreduce_async(rows, "n", hvd.Sum)),
        (
            r"op=hvd\.Average or op=hvd\.Sum",
            lambda: hvd.sparse_allreduce_async(rows.to_sparse(1), "n", hvd.Max),
        ),
        ("'epoch' is a int", lambda: hvd.broadcast_parameters({"epoch": 3}, 0)),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    part = hvd.rank() // 2
    for call, odd in (
        (hvd.allgather, torch.zeros(2, 2 + part)),
        (hvd.allgather, torch.zeros(2, dtype=DTYPES[part])),
        (hvd.alltoall, torch.ones(3, 2 + hvd.rank())),
    ):
        with pytest.raises(MismatchError, match="only the first dimension may differ"):
            call(odd)


def case_scalars_and_lists():
    rank = hvd.rank()
    assert hvd.allgather(torch.tensor(rank)).tolist() == [0, 1, 2]
    assert hvd.broadcast(torch.tensor(rank), 1).item() == 1
    for splits, dtype in ((torch.ones(3, dtype=torch.int64), torch.int64), ([1] * 3, torch.int32)):
        _, counts = hvd.alltoall(torch.ones(3), splits)
        assert (counts.dtype, counts.tolist()) == (dtype, [1] * 3)
    rows = torch.arange(8.0).reshape(4, 2)
    share = [rows[:2], rows[2:3], rows[3:]][rank]
    assert torch.equal(hvd.reducescatter(rows, compression=hvd.Compression.fp16), share)


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
    reduced = hvd.allreduce_async(mine(), op=hvd.Sum, name="polled")
    for handle in (both, reduced):
        eventually(lambda handle=handle: hvd.poll(handle))  # though nobody waits
    assert torch.equal(hvd.synchronize(reduced), TOTAL)
    assert hvd.synchronize(reduced) is hvd.synchronize(reduced)
    assert [one.tolist() for one in hvd.synchronize(both)] == [[0, 1, 2], [[1.0, 1.0]] * 3]


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
        assert inner.rank() == 0
        check_all(Way(process_set=inner), [1])
        for call in (outer.rank, lambda: hvd.barrier(outer)):
            with pytest.raises(ConfigError, match="rank 1 is not in ProcessSet"):
                call()
    else:
        two = {"process_set": outer}
        assert outer.rank() == rank // 2
        for ending in ("", "_async"):
            check_all(Way(ending, **two), [0, 2])
        check_gradients(Way(**two), [0, 2])
        assert hvd.broadcast_object(rank, 2, **two) == 2
        assert hvd.allgather_object(rank, **two) == [0, 2]
        own = torch.tensor([rank, 1]).to_sparse()
        sparse = hvd.sparse_allreduce_async(own, None, hvd.Sum, **two)
        assert sparse().to_dense().tolist() == [2, 2]
        with pytest.raises(ConfigError, match="root 1 is not in the process set"):
            hvd.broadcast(mine(), 1, **two)
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


def case_bits_and_strides_of_a_broadcast():
    rank = hvd.rank()
    odd = torch.tensor([float("nan"), -0.0, float("inf")]) if rank == 1 else torch.ones(3)
    assert hvd.broadcast_(odd, 1) is odd
    assert odd.view(torch.int32).tolist() == [0x7FC00000, -(1 << 31), 0x7F800000]
    turned = torch.full((2, 3), float(rank)).t()
    assert hvd.broadcast(turned, 2).tolist() == [[2.0, 2.0]] * 3
    assert hvd.synchronize(hvd.broadcast_async_(turned, 1)) is turned
    assert turned.tolist() == [[1.0, 1.0]] * 3
    strange = [torch.arange(2.0)[::2][:1], torch.zeros(0, 5).t(), torch.tensor(3.0).expand(1)]
    for at, given in enumerate(strange):  # contiguous to torch, whatever the last stride is
        own = given if rank == 2 else torch.ones(given.shape)
        assert torch.equal(hvd.broadcast_(own, 0, f"strange {at}"), torch.ones(given.shape))


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
    arrays = [torch.tensor([[1.5]], dtype=torch.bfloat16), torch.tensor(True), torch.zeros(0, 3)]
    arrays += [np.arange(4).reshape(2, 2), np.float32(0.1), float("nan")]
    assert repr(hvd.broadcast_object(arrays, 0, name="arrays")) == repr(arrays)
    assert hvd.allgather_object({"rank": rank}) == [{"rank": at} for at in range(SIZE)]
    assert hvd.allgather_object(["x"] * rank, name="x") == [[], ["x"], ["x", "x"]]
    circle = []
    circle.append(circle)
    for refused, message in ((print, "builtin_function_or_method"), (circle, "contains itself")):
        with pytest.raises(ConfigError, match=f"rank 1: .*{message}"):
            hvd.broadcast_object(refused if rank == 1 else 0, root_rank=1)
    with pytest.raises(ConfigError, match="rank 2: an object of type Generator"):
        hvd.allgather_object(torch.Generator() if rank == 2 else 0)


def case_what_is_missing_says_so():
    for module in (hvd, horovods):
        assert module.nccl_built() is False
    assert horovods.allreduce is hvd.allreduce
    assert issubclass(ConfigError, hvd.HorovodInternalError)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    with pytest.raises(AttributeError, match=r"hvd\.run is not available: .*torchrun"):
        _ = hvd.run
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
