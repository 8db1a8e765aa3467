"""What goes wrong at one rank of the Horovod interface, and whether all go on afterwards.

`horovod_rank` runs each function at two ranks, and at three. An error must come soon at all ranks,
and the next 20 calls must be right.
"""

import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch

import worker_client.horovod as hvd
from reducer.errors import ConfigError, MismatchError

SOON_S = 10.0  # a timeout comes after 60 s


def ones():
    return torch.ones(5)


@contextmanager
def soon(message, kind=MismatchError):
    begun = time.monotonic()
    with pytest.raises(kind, match=message) as caught:
        yield
    assert isinstance(caught.value, hvd.HorovodInternalError)
    assert time.monotonic() - begun < SOON_S


def twenty_calls_are_right():
    """What `horovod_rank` calls after each case, too."""
    rank, size = hvd.rank(), hvd.size()
    for at in range(5):
        total = hvd.allreduce(torch.full((3,), float(rank + at)), op=hvd.Sum)
        assert total.tolist() == [sum(range(size)) + size * at] * 3
        name = f"gradient {at % 2}"
        assert hvd.allreduce(torch.tensor([rank + at]), op=hvd.Max, name=name) == size - 1 + at
        assert hvd.broadcast(torch.tensor(rank + at), at % size) == at % size + at
        assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))


def case_a_name_twice_at_one_rank_and_pending_while_others_call_barrier():
    mine = torch.full((4,), float(hvd.rank()))
    expected = [float(sum(range(hvd.size())))] * 4
    if hvd.rank() == 0:
        first = hvd.allreduce_async(mine, op=hvd.Sum, name="twice")
        with pytest.raises(ConfigError, match=r"'allreduce\.twice' is in progress"):
            hvd.allreduce_async(mine, op=hvd.Sum, name="twice")
        hvd.barrier()
        assert hvd.synchronize(first).tolist() == expected
    else:
        hvd.barrier()
        assert hvd.allreduce(mine, op=hvd.Sum, name="twice").tolist() == expected
        with soon("rank 0 takes no part in this call: .*in progress"):
            hvd.allreduce(mine, op=hvd.Sum, name="twice")
    assert hvd.allreduce(mine, op=hvd.Sum, name="twice").tolist() == expected


def case_another_order_of_calls_without_a_name():
    mine = torch.tensor([hvd.rank()])
    total = sum(range(hvd.size()))
    if hvd.rank() == 0:
        pending = hvd.allreduce_async(mine, op=hvd.Sum)
        hvd.barrier()
        assert hvd.synchronize(pending) == total
    else:
        hvd.barrier()
        assert hvd.allreduce(mine, op=hvd.Sum) == total


def case_what_one_rank_is_refused():
    sparse = ones().to_sparse()
    refused = [
        ("unknown op", lambda: hvd.allreduce(ones()), lambda: hvd.allreduce(ones(), op=17)),
        ("Adasum", lambda: hvd.allreduce(ones(), name="n"),
         lambda: hvd.allreduce(ones(), name="n", op=hvd.Adasum)),
        ("sparse", lambda: hvd.allreduce(ones()), lambda: hvd.allreduce(sparse)),
        ("complex", lambda: hvd.allreduce_(ones()), lambda: hvd.allreduce_(ones() * 1j)),
        ("no tensors", lambda: hvd.grouped_allreduce([ones()]), lambda: hvd.grouped_allreduce([])),
        ("sparse", lambda: hvd.grouped_allreduce([ones(), ones().int()]),
         lambda: hvd.grouped_allreduce([sparse, ones().int()])),
        ("not a rank", lambda: hvd.broadcast(ones(), 0), lambda: hvd.broadcast(ones(), 9)),
        ("not a rank", lambda: hvd.broadcast_object(1, 0), lambda: hvd.broadcast_object(1, -1)),
        ("not a tensor", lambda: hvd.broadcast_parameters({"a": ones(), "b": ones()}, 0),
         lambda: hvd.broadcast_parameters({"a": ones(), "b": 1}, 0)),
        ("sparse", lambda: hvd.allgather(ones()), lambda: hvd.allgather(sparse)),
        ("equally", lambda: hvd.alltoall(torch.ones(hvd.size()), name="n"),
         lambda: hvd.alltoall(torch.ones(1), name="n")),
        ("hvd.Sum", lambda: hvd.reducescatter(ones()),
         lambda: hvd.reducescatter(ones(), op=hvd.Max)),
    ]  # fmt: skip
    for message, right, wrong in refused:
        if hvd.rank() == 1:
            with soon(message, ConfigError):
                wrong()
        else:
            with soon(f"rank 1 takes no part in this call: ConfigError: .*{message}"):
                right()
        twenty_calls_are_right()


def case_broadcasts_that_differ():
    rank, last = hvd.rank(), hvd.rank() == hvd.size() - 1
    mine = torch.full((2, 3), float(rank))
    others = {"dtype": mine.int(), "shape": mine.reshape(6), "size": mine[:1].clone()}
    for name, other in {"root": mine, **others}.items():
        root = int(name == "root" and last)
        given = other if last else mine
        before = given.clone()
        for call in (
            partial(hvd.broadcast_, given, root, name),
            partial(hvd.broadcast_parameters, {"w": given}, root),
        ):
            with soon("disagree|differ"):
                call()
            assert torch.equal(given, before)
            twenty_calls_are_right()
    with soon("disagree on the root"):
        hvd.broadcast_object({"epoch": 3}, int(last))
    twenty_calls_are_right()
    with soon("disagree"):
        hvd.broadcast_parameters({"w": mine, **({"more": mine} if last else {})}, 0)
    assert torch.equal(mine, torch.full((2, 3), float(rank)))


def case_shapes_that_differ_in_reductions():
    last = hvd.rank() == hvd.size() - 1
    mine = torch.ones((3, 2) if last else (2, 3))
    same = torch.ones(4)
    for name, call in {
        "all": lambda: hvd.allreduce(mine, name="all"),
        "group": lambda: hvd.grouped_allreduce([same, mine], name="group"),
        "rows": lambda: hvd.reducescatter(mine, name="rows"),
        "many": lambda: hvd.grouped_allreduce([same] * 40 + [mine], name="many"),
    }.items():
        with soon(f"allreduce.{name}.* disagree on shape: rank 0 says"):
            call()
        twenty_calls_are_right()


def case_joined_ranks_have_any_shape():
    if hvd.rank() == 0:
        assert hvd.allreduce(torch.ones(2, 3), op=hvd.Sum).tolist() == [[1.0] * 3] * 2
    hvd.join()


def case_who_joined_last_has_the_model():
    """The usual idiom: the others take over the weights of the rank that had most data."""
    for last in (*range(hvd.size()), 0):
        for _ in range(3 if hvd.rank() == last else hvd.rank() % 2):
            hvd.allreduce(torch.ones(2), op=hvd.Sum)
        state = {"w": torch.full((3,), float(hvd.rank())), "b": torch.tensor(hvd.rank())}
        root = hvd.join()
        assert root == last
        hvd.broadcast_parameters(state, root_rank=root)
        assert state["w"].tolist() == [float(last)] * 3
        assert state["b"] == last
        if last % 2:  # and else the next join() is of the next calls
            twenty_calls_are_right()
            hvd.join()
    for _ in range(2):
        assert hvd.join() == hvd.size() - 1, "nobody has called anything"


def case_a_call_in_progress_is_ended_before_all_have_joined():
    if hvd.rank() == 1:
        handles = [hvd.allreduce_async(torch.ones(2), op=op) for op in (hvd.Sum, hvd.Min)]
        assert hvd.join() == 1
        assert [hvd.synchronize(one).tolist() for one in handles] == [[1.0, 1.0]] * 2
    else:
        assert hvd.join() == 1


def case_a_joined_ranks_data_is_not_made_up():
    if hvd.rank() == 0:
        hvd.join()
    else:
        for call in (
            lambda: hvd.broadcast(ones(), 1, name="weights"),
            lambda: hvd.allgather(ones(), name="rows"),
            lambda: hvd.alltoall(torch.ones(hvd.size())),
            lambda: hvd.broadcast_parameters({"w": ones()}, 1),
            lambda: hvd.allgather_object(1),
            hvd.barrier,
        ):
            with soon("rank 0 takes no part in this call: .*needs the data of a rank that has"):
                call()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size() - 1
        hvd.join()
    for _ in range(2):  # both of its all-reduces are counted alike at all ranks
        assert hvd.allgather(torch.tensor([1]), name="rows").tolist() == [1] * hvd.size()


def case_a_name_twice_first_here_then_there():
    """As Horovod's own tests do: how many are refused is a matter of time."""
    for turn in range(2):
        if (hvd.rank() == 0) == (turn == 0):
            handles = [hvd.allreduce_async(ones(), name="duplicate")]
            with pytest.raises(ConfigError, match="in progress"):
                handles.extend(hvd.allreduce_async(ones(), name="duplicate") for _ in range(1000))
        hvd.barrier()
