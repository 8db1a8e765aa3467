"""Calls of Horovod's interfaces and what comes of them: one table for all frameworks and ways.

Each function yields a name, a call, and the result or results of it at this rank, as NumPy and
Python find them. Its arguments are an interface, or a way of it; what makes a tensor of nested
lists and a type's name; the ranks that make the calls; and this rank.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

FLOATS = ("float32", "float64", "float16", "bfloat16")
DTYPES = (*FLOATS, "int8", "int32", "int64", "uint8")
FOLDS = {
    "Sum": lambda given: given.sum(0),
    "Min": lambda given: given.min(0),
    "Max": lambda given: given.max(0),
    "Product": lambda given: given.prod(0),
    "Average": lambda given: given.sum(0) / len(given),
}
FINE = [1.0 + 2.0**-9, 1.0 + 2.0**-12, 1e5, -3.0]
ROUNDED = {"fp16": [1.0 + 2.0**-9, 1.0, np.inf, -3.0], "bf16": [1.0, 1.0, 99840.0, -3.0]}


class Result(NamedTuple):
    """A tensor: its elements as nested lists, and the name of their type."""

    elements: Any
    dtype: str = "float32"


def check(calls, result_of):
    """Make calls, and compare what comes of each; a function makes results of tensors."""
    for name, call, expected in calls:
        found = call()
        one = isinstance(expected, Result)
        results = [result_of(each) for each in ([found] if one else found)]
        assert results == ([expected] if one else expected), name


def reductions(hvd, tensor, ranks, me):
    """All operations of all types: short ones wrap around, averages of integers are cut."""
    size, at = len(ranks), ranks.index(me)
    given = np.array([[[3, 6], [9, 0]]] * size) + 3 * (np.arange(size) % 2)[:, None, None]
    total, mine = given.sum(0), partial(tensor, given[at].tolist())
    for dtype in DTYPES:
        for op, fold in FOLDS.items():
            name, named = f"{op} of {dtype}", {"op": getattr(hvd, op)}
            folded = fold(given) if dtype in FLOATS else fold(given).astype(dtype)
            call = partial(hvd.allreduce, mine(dtype), name=name, **named)
            yield name, call, Result(folded.tolist(), dtype)
    for expected, named in (
        (2 * total, {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 4.0}),
        (total, {"average": False}),
        (total / size, {"average": True}),
        (total / size, {}),
    ):
        yield f"{named}", partial(hvd.allreduce, mine(), **named), Result(expected.tolist())
    dtypes = ("float32", "int64", "float64")
    group = partial(hvd.grouped_allreduce, [mine(dtype) for dtype in dtypes], op=hvd.Sum)
    yield "several types", group, [Result(total.tolist(), dtype) for dtype in dtypes]


def compressions(hvd, tensor):
    """What travels in 16 bits is rounded to them; integers are not."""
    for name, rounded in {**ROUNDED, "none": np.float32(FINE).tolist()}.items():
        for given, expected in ((FINE, Result(rounded)), ([1 << 20], Result([1 << 20], "int64"))):
            compressor = getattr(hvd.Compression, name)
            mine = tensor(given, expected.dtype)
            yield f"{name}, {given}", partial(hvd.allreduce, mine, compression=compressor), expected


def exchanges(hvd, tensor, ranks, me):
    """What is gathered, exchanged, scattered and broadcast; of some the first rank has no rows."""
    size, at, root = len(ranks), ranks.index(me), ranks[-1]
    rows = [[[10.0 * rank + row, rank] for row in range(rank)] for rank in range(size)]
    all_rows = Result([row for of_rank in rows for row in of_rank])
    mine, place = tensor([*rows[at], [0.0, 0.0]])[:at], tensor([at], "int64")
    places = Result(list(range(size)), "int64")
    yield "rows of all", partial(hvd.allgather, mine, name="rows"), all_rows
    flags = Result([rank == 1 for rank in range(size)], "bool")
    yield "flags of all", partial(hvd.allgather, tensor([at == 1], "bool")), flags
    yield "rows of nobody", partial(hvd.allgather, tensor([[0.0] * 4])[:0]), Result([])
    yield "two tensors", partial(hvd.grouped_allgather, [mine, place]), [all_rows, places]

    each = tensor([[10.0 * at + to, to] for to in range(size)])
    expected = Result([[10.0 * sender + at, at] for sender in range(size)])
    yield "a row for each", partial(hvd.alltoall, each, name="each"), expected
    # Rank r sends r + t rows to rank t, and keeps one for itself besides.
    sent = [10 * at + to for to in range(size) for _ in range(at + to)]
    got = [10 * sender + at for sender in range(size) for _ in range(sender + at)]
    splits = tensor([at + to for to in range(size)], "int32")
    counts = Result([sender + at for sender in range(size)], "int32")
    exchange = partial(hvd.alltoall, tensor([*sent, 99], "int64"), splits)
    yield "rows by numbers", exchange, [Result(got, "int64"), counts]

    whole = np.arange(2.0 * size + 2).reshape(-1, 2)  # the first has one row more than others
    share = whole[:2] if at == 0 else whole[at + 1 : at + 2]
    own = tensor(whole.tolist())
    for op, factor in (("Sum", 2 * size), ("Average", 2)):
        call = partial(hvd.reducescatter, own, op=getattr(hvd, op), prescale_factor=2.0)
        yield f"{op} of own rows", call, Result((factor * share).tolist())
    short = tensor([row + at for row in range(size)], "int64")
    total = Result([size * at + size * (size - 1) // 2], "int64")
    call = partial(hvd.grouped_reducescatter, [own, short], op=hvd.Sum)
    yield "own rows of two", call, [Result((size * share).tolist()), total]

    for dtype in (*DTYPES, "bool", "int16", "uint16", "complex64"):
        given = tensor([[int(me == root), 1], [1, 0]], dtype)
        expected = Result([[1, 1], [1, 0]], dtype)
        yield f"{dtype} of the root", partial(hvd.broadcast, given, root, name=dtype), expected


def gradients(hvd, tensor, ranks, me):
    """Return names, calls, their arguments, factors of the results, and gradients."""
    size, at, root = len(ranks), ranks.index(me), ranks[-1]
    mean = (size + 1) / 2  # of one more than each rank's place

    def factors(rows, place=at):
        return [[row + place + 1.0] * 2 for row in range(rows)]

    def gradient(rows, times=1.0):
        return [[times * (row + mean)] * 2 for row in range(rows)]

    two, every = [[1.0, 1.0]] * 2, size * (size + 1) // 2
    before = at * (at + 1) // 2  # rows of the ranks before, of which each has one more
    own, more = two[:1] * (at + 1), two[:1] * (size + 1)
    of_root = gradient(2) if me == root else [[0.0, 0.0]] * 2
    shares = [2] + [1] * (size - 1)
    mine = factors(shares[at])
    of_mean = [row for place, rows in enumerate(shares) for row in factors(rows, place)]
    of_sum = (np.array(of_mean) * size).tolist()
    counts = tensor([at + to for to in range(size)], "int32")
    got = [[at + 1.0] * 2] * sum(sender + at for sender in range(size))
    sent = [[to + 1.0] * 2 for to in range(size) for _ in range(at + to)] + [[0.0] * 2]
    total, twice = {"op": hvd.Sum}, {"postscale_factor": 2.0}
    return [
        ("mean", hvd.allreduce, two, factors(2), gradient(2)),
        ("sum", lambda x: hvd.allreduce(x, **total), two, factors(2), gradient(2, size)),
        ("twice", lambda x: hvd.allreduce(x, **twice), two, factors(2), gradient(2, 2)),
        ("group", lambda x: hvd.grouped_allreduce([x, x + 1])[1], two, factors(2), gradient(2)),
        ("rows", hvd.allgather, own, factors(every), gradient(every)[before : before + at + 1]),
        ("root's", lambda x: hvd.broadcast(x, root), two, factors(2), of_root),
        ("share of a mean", hvd.reducescatter, more, mine, of_mean),
        ("share of a sum", lambda x: hvd.reducescatter(x, **total), more, mine, of_sum),
        (
            "share in a group",
            lambda x: hvd.grouped_reducescatter([x + 1, x], **total)[1],
            more,
            mine,
            of_sum,
        ),
        ("exchange", lambda x: hvd.alltoall(x, counts)[0], sent, got, sent),
    ]
