"""What ranks bring to the calls of `torture.guarantee`, and what must come of it, in NumPy alone.

Nothing here is the product's: its specification was read, and its code was not. Everything follows
from a seed and a call's key, so that each rank knows what every other one brings.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from harness.oracle import half, through, widen
from torture.guarantee_plan import Call

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Fold: TypeAlias = "Callable[[Array, Array], Array]"

PERIOD = 65_521  # elements, a prime number: no chunk, shard or segment is like another one
_ROUNDED_BYTES = 16 << 10  # float32 tensors of so many are rounded to travel, if any are
# NumPy has no bfloat16: these are its bits.
TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int8": np.dtype("i1"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint8": np.dtype("u1"),
}
FLOATS = ("float32", "float64", "float16", "bfloat16")
_ROUNDED_OPS = {
    "": set(),
    "bf16": {"sum", "mean", "min", "max"},
    "fp16": {"sum", "mean", "min", "max"},
    "int8": {"sum", "mean"},
    "fp8_e4m3": {"sum", "mean"},
}
_ODD = (np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38, 6e4, 1e-40, -1e-40, 6e-8)


class Shape(NamedTuple):
    """How contributions are folded.

    Attributes:
        groups: ranks whose contributions are folded first, in the order of the groups; one group
            of all of them but with a hierarchy.
        wire_dtype: what float32 travels as, ``bf16``, ``fp16``, ``int8`` or ``fp8_e4m3``; "" for
            itself.
    """

    groups: tuple[tuple[int, ...], ...]
    wire_dtype: str = ""

    @property
    def ranks(self) -> int:
        """How many contributions there are."""
        return sum(map(len, self.groups))


class Oracle:
    """Contributions and results; if `exact`, of small whole numbers, in any order the same."""

    def __init__(self, seed: str, *, exact: bool) -> None:
        self._seed = seed
        rng = np.random.default_rng(list(seed.encode()))
        make = _whole if exact else _wild
        self._tables = {dtype: make(rng, dtype) for dtype in TYPES}

    def contribution(self, call: Call, rank: int) -> Array:
        """Return a new array with what a rank brings to a call; of bfloat16, its bits."""
        said = f"{self._seed} {call.key} {rank}".encode()
        at = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little") % PERIOD
        table = self._tables[call.dtype]
        if call.elements <= PERIOD:
            return table[at : at + call.elements].copy()
        return np.resize(table[at : at + PERIOD], call.elements)

    def result(self, call: Call, shape: Shape) -> Array:
        """Return what every rank of `shape` must end with; of bfloat16, its bits."""
        with np.errstate(all="ignore"):
            rounded = is_rounded(call, shape.wire_dtype)
            whole = len(shape.groups) == 1
            fold, parts = _FOLDS[call.op], []
            of_means = not whole and call.op == "mean"  # of each node, and then of these
            for group in shape.groups:
                # What travels: of a flat job each contribution, of a node the fold of its ranks.
                values = [self._brought(call, rank) for rank in group]
                if rounded and whole:
                    if call.residual:  # that of every rank is 0, which makes 0 of -0
                        values = [one + np.float32(0) for one in values]
                    values = [through(one, shape.wire_dtype) for one in values]
                folded = _folded(values, fold)
                if of_means:
                    folded = folded / folded.dtype.type(len(group))
                parts.append(through(folded, shape.wire_dtype) if rounded and not whole else folded)
            total = _folded(parts, fold)
            if of_means:
                total = total / total.dtype.type(len(parts))
            if not whole and rounded:
                total = through(total, shape.wire_dtype, dithered=True)
            if call.op == "mean" and not of_means:
                total = total / total.dtype.type(shape.ranks)
            if whole and rounded:
                total = through(total, shape.wire_dtype, dithered=True)
            if call.weights is not None:
                total = total / total.dtype.type(_mean_weight(call.weights, shape.groups))
            return narrow(total, call.dtype)

    def _brought(self, call: Call, rank: int) -> Array:
        values: Array = widen(self.contribution(call, rank), call.dtype)
        if call.weights is None or call.weights[rank] == 1.0:
            return values
        if call.weights[rank] == 0.0:
            return np.zeros_like(values)
        values *= values.dtype.type(call.weights[rank])
        return values


def same(one: Array, other: Array, dtype: str, *, any_nan: bool = False) -> bool:
    """Whether two results have the same bits; with `any_nan`, any NaN is like any other."""
    if one.tobytes() == other.tobytes():
        return True
    if not any_nan or dtype not in FLOATS:
        return False
    first, second = widen(one, dtype), widen(other, dtype)
    return bool(np.array_equal(first, second, equal_nan=True))


def narrow(values: Array, dtype: str) -> Array:
    """Round folded values to their type, to nearest and ties to even, with one NaN alone."""
    if dtype in {"float16", "bfloat16"}:
        halves: Array = half(values, dtype)
        return halves
    found = values.astype(TYPES[dtype])
    if found.dtype.kind == "f":
        found[np.isnan(found)] = np.nan
    return found


def kept(call: Call, values: Array, wire_dtype: str) -> Array:
    """Return what the cast to the wire's type takes away from a contribution, where finite."""
    if not is_rounded(call, wire_dtype):
        return np.zeros_like(values)
    with np.errstate(all="ignore"):
        lost: Array = values - through(values, wire_dtype)
    lost[~np.isfinite(lost)] = 0
    return lost


def tells(call: Call) -> bool:
    wide = call.dtype in {"float32", "float64", "int32", "int64"}
    return wide and call.op in {"sum", "mean"} and call.elements > 8


def is_rounded(call: Call, wire_dtype: str) -> bool:
    return (
        call.dtype == "float32"
        and call.op in _ROUNDED_OPS[wire_dtype]
        and call.elements * 4 >= _ROUNDED_BYTES
    )


def _mean_weight(weights: Sequence[float], groups: Sequence[Sequence[int]]) -> float:
    means = []
    for ranks in groups:
        total = np.float64(weights[ranks[0]])
        for rank in ranks[1:]:
            total = total + np.float64(weights[rank])
        means.append(float(total / np.float64(len(ranks))))
    return means[0] if len(groups) == 1 else _mean_weight(means, [range(len(groups))])


def _folded(values: Sequence[Array], fold: Fold) -> Array:
    total = values[0]
    for one in values[1:]:
        total = fold(total, one)
    return total


def _is_nan(values: Array) -> Array:
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)


def _smaller(total: Array, one: Array) -> Array:
    return np.where((one < total) | _is_nan(one), one, total)


def _larger(total: Array, one: Array) -> Array:
    return np.where((one > total) | _is_nan(one), one, total)


_FOLDS: dict[str, Fold] = {
    "sum": np.add,
    "mean": np.add,
    "product": np.multiply,
    "min": _smaller,
    "max": _larger,
}


def _wild(rng: np.random.Generator, dtype: str) -> Array:
    """Return values of all sizes, with those in between on which arithmetic often differs."""
    if dtype not in FLOATS:
        numbers = np.frombuffer(rng.bytes(PERIOD * TYPES[dtype].itemsize), TYPES[dtype])
        return np.concatenate([numbers, numbers])
    with np.errstate(all="ignore"):
        numbers = rng.standard_normal(PERIOD) * 10.0 ** rng.integers(-3, 3, PERIOD)
        at = rng.integers(0, PERIOD, PERIOD // 400)
        numbers[at] = rng.choice(_ODD, at.size)
        at = rng.integers(0, PERIOD, PERIOD // 50)
        numbers[at] = rng.choice([0.0, -0.0], at.size)
        values = numbers if dtype == "float64" else numbers.astype(np.float32)
        values = values if dtype in {"float32", "float64"} else narrow(values, dtype)
    return np.concatenate([values, values])


def _whole(rng: np.random.Generator, dtype: str) -> Array:
    """Return small whole numbers, without zeros of either sign."""
    numbers = rng.integers(1, 5, PERIOD)
    if dtype != "uint8":
        numbers = numbers * rng.choice([-1, 1], PERIOD)
    values = narrow(numbers.astype(np.float32 if dtype == "bfloat16" else np.float64), dtype)
    return np.concatenate([values, values])
