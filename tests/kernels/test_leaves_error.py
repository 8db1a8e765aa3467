"""How far sums are from exact ones: by the tree of leaves, and by the chain of ranks."""

import math

import ml_dtypes
import numpy as np
import pytest

from reducer import kernels
from reducer.wire.constants import DType, ReduceOp

LENGTH = 1 << 14
COUNTS = (2, 3, 4, 5, 6, 7, 8, 11, 16, 24, 31, 32, 33, 48, 64)
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {np.dtype(np.float32): DType.FLOAT32, BF16: DType.BFLOAT16}


def drawn(count, signed):
    """Values of similar size, of both signs or of one."""
    rng = np.random.default_rng([count, signed])
    values = rng.standard_normal((count, LENGTH)) if signed else rng.random((count, LENGTH))
    return values.astype(np.float32)


def off(result, leaves):
    """The root mean square of a result's errors, by NumPy's float64."""
    exact = leaves.astype(np.float64).sum(axis=0)
    return math.sqrt(np.square(result.astype(np.float64) - exact).mean())


def tree(leaves):
    out, inputs = bytearray(leaves[0].nbytes), [leaf.tobytes() for leaf in leaves]
    ends, dtype = list(range(1, len(leaves) + 1)), DTYPES[leaves.dtype]
    kernels.select().reduce_leaves(inputs, ends, out, dtype, ReduceOp.SUM)
    return np.frombuffer(out, leaves.dtype)


def chain(contributions):
    out, inputs = bytearray(contributions[0].nbytes), [one.tobytes() for one in contributions]
    kernels.select().reduce(inputs, out, DTYPES[contributions.dtype], ReduceOp.SUM)
    return np.frombuffer(out, contributions.dtype)


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "positive"])
def test_a_tree_of_float32_is_not_further_from_the_exact_sum_than_a_chain(signed):
    for count in COUNTS:
        leaves = drawn(count, signed)
        ratio = off(tree(leaves), leaves) / off(chain(leaves), leaves)
        assert ratio <= 1, count
        assert count < 24 or ratio < 0.7, count


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "positive"])
def test_a_tree_of_bfloat16_rounds_each_level_and_a_chain_once(signed):
    for count in COUNTS:
        leaves = drawn(count, signed).astype(BF16)
        ratio = off(tree(leaves), leaves) / off(chain(leaves), leaves)
        assert (ratio == 1) if count == 2 else (ratio > 1.2), count
        assert ratio < 1.2 * math.sqrt(math.log2(count)), count


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "positive"])
def test_leaves_that_travel_as_bfloat16_beside_what_ranks_send_without(signed):
    for count in (8, 16, 24, 48, 64):
        leaves = drawn(count, signed)
        ranks = leaves.reshape(8, count // 8, LENGTH).sum(axis=1)  # each adds up its own first
        ratio = off(tree(leaves.astype(BF16)), leaves) / off(chain(ranks.astype(BF16)), leaves)
        assert 1.3 < ratio < 2.1, count
