"""Every variant sums subtrees of leaves to the bits that the tree over all leaves has."""

import numpy as np
import pytest

from reducer import kernels
from reducer.errors import ConfigError, LocalProtocolError
from reducer.wire.constants import DType, ReduceOp
from reducer.wire.leaves import dealt, parts
from tests.kernels import golden

TYPES = {
    DType.FLOAT32: np.float32,
    DType.FLOAT64: np.float64,
    DType.FLOAT16: np.float16,
    DType.INT32: np.int32,
    DType.UINT8: np.uint8,
}
STEPS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: lambda left, right: np.where((right < left) | np.isnan(right), right, left),
    ReduceOp.MAX: lambda left, right: np.where((right > left) | np.isnan(right), right, left),
}


def node(leaves, step, first, size):
    """The definition: the node over `size` leaves, of which those beyond the last are missing."""
    if size == 1:
        return leaves[first]
    half = size // 2
    left = node(leaves, step, first, half)
    if first + half >= len(leaves):
        return left
    right = node(leaves, step, first + half, half)
    wide = np.float32 if left.dtype == np.float16 else left.dtype
    with np.errstate(all="ignore"):
        return step(left.astype(wide), right.astype(wide)).astype(left.dtype)


def root(leaves, op):
    size = 1 << (len(leaves) - 1).bit_length()
    step = STEPS[ReduceOp.SUM if op is ReduceOp.MEAN else op]
    total = node(leaves, step, 0, size)
    if op is ReduceOp.MEAN:
        wide = np.float64 if total.dtype == np.float64 else np.float32
        total = (total.astype(wide) / wide(len(leaves))).astype(total.dtype)
    return total


def subtrees(leaves, op, ranks):
    """What ranks contribute: for each subtree of theirs what is below it, and where it ends."""
    step = STEPS[ReduceOp.SUM if op is ReduceOp.MEAN else op]
    found, ends = [], []
    for rank in range(ranks):
        for part in parts(len(leaves), ranks, rank):
            own = leaves[part.start : part.stop]
            found.append(node(own, step, 0, 1 << (len(own) - 1).bit_length()))
            ends.append(part.stop)
    return found, ends


@pytest.mark.parametrize("variant", kernels.variants())
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
def test_any_number_of_ranks_has_the_bits_of_the_tree(variant, dtype):
    select, element = kernels.select(variant), TYPES[dtype]
    for count, length in ((1, 3), (2, 517), (5, 64), (8, 1030), (24, 517), (33, 9)):
        leaves = [
            np.frombuffer(golden.contribution(dtype.name, length, leaf), element)
            for leaf in range(count)
        ]
        for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.MEAN):
            if not dtype.defines(op):
                continue
            total = root(leaves, op)
            quiet = np.array(np.nan, element) if dtype.is_floating else 0
            total = np.where(np.isnan(total), quiet, total).astype(element)
            for ranks in {1, 2, 3, 5, 7, 8, count}:
                if ranks > count:
                    continue
                inputs, ends = subtrees(leaves, op, ranks)
                out = bytearray(total.nbytes)
                select.reduce_leaves([bytes(one) for one in inputs], ends, out, dtype, op)
                assert bytes(out) == total.tobytes(), f"{count=} {length=} {op=} {ranks=}"


@pytest.mark.parametrize("variant", kernels.variants())
def test_16_bit_nodes_are_rounded_each(variant):
    """So that a rank that has several leaves sends what several ranks would have made of them."""
    leaves = [golden.contribution("BFLOAT16", 4099, leaf) for leaf in range(7)]
    select, seen = kernels.select(variant), set()
    for ranks in range(1, 8):
        inputs, ends = [], []
        for rank in range(ranks):
            for part in parts(7, ranks, rank):
                own, below = [leaves[leaf] for leaf in part], bytearray(len(leaves[0]))
                inner = [leaf - part.start + 1 for leaf in part]
                select.reduce_leaves(own, inner, below, DType.BFLOAT16, ReduceOp.SUM)
                inputs.append(bytes(below))
                ends.append(part.stop)
        out = bytearray(len(leaves[0]))
        select.reduce_leaves(inputs, ends, out, DType.BFLOAT16, ReduceOp.MEAN)
        seen.add(bytes(out))
    assert len(seen) == 1
    chain = bytearray(len(leaves[0]))
    select.reduce(leaves, chain, DType.BFLOAT16, ReduceOp.MEAN)
    assert bytes(chain) not in seen, "a chain rounds once: the data do not tell them apart"


@pytest.mark.parametrize("variant", kernels.variants())
def test_it_refuses_what_is_no_tree(variant):
    select, out = kernels.select(variant), bytearray(8)
    for ends in ([], [1], [1, 3, 2], [1, 3, 4], [2, 3, 5], [0, 1, 2]):
        with pytest.raises(LocalProtocolError):
            select.reduce_leaves([bytes(8)] * 3, ends, out, DType.FLOAT32, ReduceOp.SUM)
    with pytest.raises(ConfigError):
        select.reduce_leaves([bytes(256)], [1], bytearray(256), DType.BLOCK8, ReduceOp.SUM)


def test_leaves_are_dealt_evenly_and_parts_cover_them():
    for count in (1, 2, 7, 8, 24, 100, 1 << 16):
        for ranks in {1, min(3, count), min(8, count), min(13, count)}:
            shares = [dealt(count, ranks, rank) for rank in range(ranks)]
            assert [leaf for share in shares for leaf in share] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            for rank, share in enumerate(shares):
                cut = parts(count, ranks, rank)
                assert [leaf for part in cut for leaf in part] == list(share)
                if count & (count - 1) == 0 and ranks & (ranks - 1) == 0:
                    assert len(cut) == 1
