"""What the kernels refuse, in one wording for the NumPy twin and the compiled ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reducer.errors import ConfigError, LocalProtocolError

if TYPE_CHECKING:
    from reducer.wire.constants import DType, ReduceOp


def unknown_code(dtype: object, op: object) -> ConfigError:
    """Refuse a `dtype` or `op` that is none of the protocol's codes."""
    return ConfigError(f"dtype {dtype!r} or op {op!r} is unknown; use a DType and a ReduceOp")


def undefined(dtype: DType, op: ReduceOp) -> ConfigError:
    """Refuse an operation that has no meaning for the type."""
    if dtype.is_floating:
        why = "only sums and means of blocks are; convert to another type"
    else:
        why = "an integer mean would have to be rounded; use SUM and divide, or convert to a"
        why += " floating type"
    return ConfigError(f"{op.name} is not defined for {dtype.name}: {why}")


def no_inputs() -> LocalProtocolError:
    """Refuse to fold nothing."""
    return LocalProtocolError("a reduction needs at least one input, and got none")


def not_a_buffer(which: str, reason: Exception) -> LocalProtocolError:
    """Refuse an object without contiguous bytes, or without writable ones where needed."""
    return LocalProtocolError(f"{which} cannot be used as a buffer: {reason}")


def wrong_length(rank: int, got: int, expected: int) -> LocalProtocolError:
    """Refuse an input that is longer or shorter than the output."""
    return LocalProtocolError(f"input {rank} has {got} bytes where the output has {expected}")


def partial_element(nbytes: int, dtype: DType) -> LocalProtocolError:
    """Refuse buffers that end within an element."""
    return LocalProtocolError(
        f"{nbytes} bytes are not a whole number of {dtype.name} elements"
        f" of {dtype.itemsize} bytes each"
    )


def overlap(rank: int) -> LocalProtocolError:
    """Refuse an output over a part of an input, which would be overwritten before it is read."""
    return LocalProtocolError(
        f"the output overlaps a part of input {rank};"
        " give it memory of its own, or exactly that input's"
    )
