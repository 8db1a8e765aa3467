"""The kernels in NumPy: the oracle of the compiled ones, with which the reference reducer sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from reducer.kernels import block8, refusals
from reducer.wire.constants import DType, ReduceOp
from reducer.wire.leaves import depths_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
BytesLike: TypeAlias = "Buffer | Array"  # to a type checker, an array is a Buffer from Python 3.12

_STEP = 1 << 16  # bytes of each input at a time: they and the accumulator stay in the L2 cache

_MEMORY_TYPES: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype("<f4"),
    DType.FLOAT64: np.dtype("<f8"),
    DType.FLOAT16: np.dtype("<f2"),
    DType.BFLOAT16: np.dtype("<u2"),  # NumPy has no such type: its bits
    DType.INT8: np.dtype("i1"),
    DType.INT32: np.dtype("<i4"),
    DType.INT64: np.dtype("<i8"),
    DType.UINT8: np.dtype("u1"),
    DType.BLOCK8: block8.ELEMENT,
    DType.BLOCK8_E4M3: block8.ELEMENT,
}


class PlainKernels:
    """The variant ``numpy``; see `reducer.kernels.Kernels`."""

    name = "numpy"

    def reduce(
        self, inputs: Sequence[BytesLike], out: BytesLike, dtype: DType, op: ReduceOp
    ) -> None:
        self._run(inputs, out, dtype, op, None)

    def reduce_leaves(
        self,
        inputs: Sequence[BytesLike],
        ends: Sequence[int],
        out: BytesLike,
        dtype: DType,
        op: ReduceOp,
    ) -> None:
        self._run(inputs, out, dtype, op, ends)

    def _run(
        self,
        inputs: Sequence[BytesLike],
        out: BytesLike,
        dtype: DType,
        op: ReduceOp,
        ends: Sequence[int] | None,
    ) -> None:
        try:
            dtype, op = DType(dtype), ReduceOp(op)
        except ValueError:
            raise refusals.unknown_code(dtype, op) from None
        if not dtype.defines(op) or (ends is not None and dtype.is_block):
            raise refusals.undefined(dtype, op)
        if not inputs:
            raise refusals.no_inputs()
        target = _bytes_of("the output", out)
        if not target.flags.writeable:
            raise refusals.not_a_buffer("the output", BufferError("it is read-only"))
        sources = [_bytes_of(f"input {rank}", source) for rank, source in enumerate(inputs)]
        for rank, source in enumerate(sources):
            if source.nbytes != target.nbytes:
                raise refusals.wrong_length(rank, source.nbytes, target.nbytes)
            if np.may_share_memory(source, target) and _address(source) != _address(target):
                raise refusals.overlap(rank)
        if target.nbytes % dtype.itemsize:
            raise refusals.partial_element(target.nbytes, dtype)
        depths = b"" if ends is None else depths_of(tuple(ends), len(sources))
        with np.errstate(all="ignore"):
            for start in range(0, target.nbytes, _STEP):
                part = slice(start, start + _STEP)
                cut = [source[part] for source in sources]
                if ends is None:
                    target[part] = _fold(cut, dtype, op)
                else:
                    target[part] = _fold_leaves(cut, depths, ends[-1], dtype, op)


def _bytes_of(which: str, buffer: BytesLike) -> Array:
    memory: Any = buffer  # NumPy's stubs name only some of the buffers that it takes
    try:
        return np.frombuffer(memory, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise refusals.not_a_buffer(which, error) from error


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _fold(sources: list[Array], dtype: DType, op: ReduceOp) -> Array:
    """Fold parts of the inputs; returns the result's bytes."""
    memory_type = _MEMORY_TYPES[dtype]
    acc = _widen(sources[0].view(memory_type), dtype)
    for source in sources[1:]:
        _step(acc, _widen(source.view(memory_type), dtype), op)
    return _final(acc, len(sources), dtype, op).view(np.uint8)


def _fold_leaves(
    sources: list[Array], depths: Sequence[int], leaves: int, dtype: DType, op: ReduceOp
) -> Array:
    """Combine subtrees as the tree of leaves does; every node is a value of the element's type."""
    memory_type, nodes = _MEMORY_TYPES[dtype], list[Array]()
    for source, depth in zip(sources, depths, strict=True):
        node = source.view(memory_type)
        while len(nodes) >= depth:
            acc = _widen(nodes.pop(), dtype)
            _step(acc, _widen(node, dtype), op)
            node = _final(acc, 1, dtype, ReduceOp.SUM)
        nodes.append(node)
    return _final(_widen(nodes[0], dtype), leaves, dtype, op).view(np.uint8)


def _final(acc: Array, n: int, dtype: DType, op: ReduceOp) -> Array:
    """Divide a mean's sum by `n`, and round to elements."""
    if op is ReduceOp.MEAN:
        acc /= acc.dtype.type(n)
    if dtype.is_floating:
        # The positive quiet NaN without payload, whatever NaN the CPU made of the inputs.
        acc[np.isnan(acc)] = np.nan
    return _narrow(acc, dtype)


def _widen(elements: Array, dtype: DType) -> Array:
    """Aligned elements of the accumulator's type, in memory of their own."""
    if dtype.is_block:
        return block8.values_of(elements, dtype)
    if dtype is DType.BFLOAT16:
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return elements.astype(np.float32 if dtype is DType.FLOAT16 else elements.dtype)


def _step(acc: Array, x: Array, op: ReduceOp) -> None:
    """Combine `x` into `acc` in place. Integers wrap, as NumPy's arrays do."""
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        np.add(acc, x, out=acc)
    elif op is ReduceOp.PRODUCT:
        np.multiply(acc, x, out=acc)
    else:
        # Not np.minimum, which leaves open which of -0 and +0 it returns.
        better = x < acc if op is ReduceOp.MIN else x > acc
        np.copyto(acc, x, where=better | (x != x))  # noqa: PLR0124


def _narrow(acc: Array, dtype: DType) -> Array:
    """Round to the element's type: to nearest, ties to even; blocks with a dither."""
    if dtype.is_block:
        return block8.rounded(acc, dtype, dithered=True)
    if dtype is DType.FLOAT16:
        return acc.astype(np.float16)
    if dtype is DType.BFLOAT16:
        bits = acc.view(np.uint32)  # a NaN is 0x7fc00000 here, which stays one below
        last = (bits >> np.uint32(16)) & np.uint32(1)
        return ((bits + (np.uint32(0x7FFF) + last)) >> np.uint32(16)).astype(np.uint16)
    return acc
