"""Which tensors travel together, and the memory that they travel in."""

from reducer.wire.constants import DType, ReduceOp
from worker_client.fusion.fusion import fusion_buffers
from worker_client.fusion.negotiation import Tensor, group


def tensors(*sizes, dtype=DType.FLOAT32, op=ReduceOp.SUM):
    return [Tensor(f"{dtype.name}{op.name}{at}", dtype, op, size) for at, size in enumerate(sizes)]


def exact(_):
    return False


def test_buffers_are_filled_up_to_the_threshold():
    a, b, c, d, e = tensors(40, 60, 1, 99, 100)
    assert group([a, b, c, d, e], 101, exact) == [[a, b, c], [d], [e]]
    assert group([a, b, c, d, e], 100, exact) == [[a, b], [e], [c, d]]


def test_what_is_larger_travels_alone():
    a, b, c = tensors(40, 1000, 40)
    assert group([a, b, c], 100, exact) == [[b], [a, c]]


def test_nothing_is_packed_without_a_threshold():
    several = tensors(1, 2, 3, 0)
    assert group(several, 0, exact) == [[tensor] for tensor in several]


def test_types_and_reductions_are_apart():
    sums, halves = tensors(8, 8), tensors(8, 8, dtype=DType.FLOAT16)
    means = tensors(8, 8, op=ReduceOp.MEAN)
    mixed = [sums[0], halves[0], means[0], sums[1], halves[1], means[1]]
    assert group(mixed, 100, exact) == [sums, halves, means]


def test_what_travels_in_16_bits_is_apart():
    a, b, c, d = tensors(10, 40, 11, 50)
    assert group([a, b, c, d], 100, lambda tensor: tensor.nbytes >= 40) == [[a, c], [b, d]]


def test_what_travels_in_blocks_is_alone():
    a, b, c, d = tensors(10, 40, 11, 50)
    groups = group([a, b, c, d], 100, lambda tensor: tensor.nbytes >= 40, apart=True)
    assert groups == [[b], [d], [a, c]]


def test_memory_is_used_again_but_not_twice():
    buffers = fusion_buffers()
    one, other = buffers.take(100_000), buffers.take(100_000)
    assert one.size >= 100_000
    assert one is not other
    buffers.give_back(one)
    assert buffers.take(one.size + 1) is not one
    assert buffers.take(50_000) is one
    assert buffers.take(50_000) is not one


def test_little_memory_is_kept():
    buffers = fusion_buffers()
    taken = [buffers.take(1) for _ in range(10)]
    for memory in taken:
        buffers.give_back(memory)
    again = [buffers.take(1) for _ in range(10)]
    assert len({id(memory) for memory in (*taken, *again)}) == 10 + 10 - 4
