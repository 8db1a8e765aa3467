"""A weighted mean: that of the weighted data, divided by that of the weights."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from reducer.errors import ConfigError
from reducer.wire.constants import DType, ReduceOp
from worker_client.protocol.operation import Operation
from worker_client.staging import casts

_CASTS = casts.select()


def weigh(operation: Operation, weight: float) -> list[Operation]:
    """Return the pieces of a weighted mean, which is made of their results at its end.

    Raises:
        ConfigError: the weight does not go with that.
    """
    check_weight(weight)
    if operation.op is not ReduceOp.MEAN:
        raise ConfigError("weight= makes a weighted mean: use op='mean'")
    view, dtype, write_back = operation.view, operation.dtype, operation.write_back
    if dtype not in casts.FLOATS:
        raise ConfigError(
            f"weight= goes with float32 and float64, got {dtype.name.lower()}: convert the data to "
            "float32 (and set REDUCTION_WIRE_DTYPE to send fewer bits)"
        )
    name = operation.name or "a weighted mean"
    total = np.array([weight], np.float64)
    weights = Operation(
        total.view(np.uint8).data,
        DType.FLOAT64,
        ReduceOp.MEAN,
        f"{name}: weight",
        operation.timeout_s,
        call=operation.call,
    )
    weighted = Operation(
        view,
        dtype,
        ReduceOp.MEAN,
        f"{name}: weighted",
        operation.timeout_s,
        call=operation.call,
        rounded=operation.rounded,
        residual=operation.residual,
    )

    def divide() -> None:
        mean = float(total[0])
        if mean == 0.0:
            raise ConfigError("all ranks' weights are 0: give at least one above 0")
        _CASTS.divide(view, mean, dtype)
        if write_back is not None:
            write_back()

    operation.write_back = divide
    if weight != 1.0:
        weighted.fill = partial(_scale, view, dtype, weight)
    return [weights, weighted]


def check_weight(weight: object) -> None:
    """Refuse what is no weight.

    Raises:
        ConfigError: it is not a finite number of at least 0.
    """
    number = isinstance(weight, (int, float, np.integer, np.floating))
    if not number or isinstance(weight, bool) or not 0 <= float(weight) < math.inf:  # type: ignore[arg-type]
        raise ConfigError(f"weight= takes a finite number of at least 0, got {weight!r}")


def _scale(values: memoryview, dtype: DType, weight: float) -> None:
    """Multiply by a weight in place; a rank with weight 0 has nothing to say, not even a NaN."""
    numbers = np.frombuffer(values, casts.FLOATS[dtype])
    if weight == 0.0:
        numbers.fill(0)
        return
    with np.errstate(all="ignore"):
        np.multiply(numbers, numbers.dtype.type(weight), out=numbers)
