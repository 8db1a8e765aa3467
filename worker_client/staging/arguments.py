"""What callers may pass to an all-reduce, beside the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reducer.errors import ConfigError
from reducer.wire.constants import DType, ReduceOp
from worker_client import config

if TYPE_CHECKING:
    from collections.abc import Mapping

_REDUCTIONS = {op.name.lower(): op for op in ReduceOp}
DEFINED: Mapping[tuple[DType, object], ReduceOp] = {
    (dtype, name): op for dtype in DType for name, op in _REDUCTIONS.items() if dtype.defines(op)
}


def parse(
    dtype: DType,
    op: str | ReduceOp,
    name: str | None,
    timeout: float | str | None,
    default_s: float,
) -> tuple[ReduceOp, float]:
    """Check the arguments of a call, and return what is to be done and for how many seconds.

    Raises:
        ConfigError: one of them is not supported, or does not go with the data.
    """
    reduction = DEFINED.get((dtype, op)) if isinstance(op, str) else None
    if reduction is None:  # seldom
        reduction = parse_op(op)
        if not dtype.defines(reduction):
            raise ConfigError(
                f"the mean of {dtype.name.lower()} is not defined: "
                "use op='sum' and divide, or a floating type"
            )
    if name is not None:
        _check_name(name)
    return reduction, default_s if timeout is None else config.seconds("timeout", timeout)


def refuse_weight(weight: float | None, because: str) -> None:
    """Refuse a weight where there can be none, and say why, and what to do."""
    if weight is not None:
        raise ConfigError(f"weight= goes with data in host memory, without a name: {because}")


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"name must be a string, got {name!r}")
    try:
        name.encode()  # as the ranks tell it to each other
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"name must be text that UTF-8 can express, got {name!r}: {error.reason}"
        ) from None


def parse_op(op: str | ReduceOp) -> ReduceOp:
    """Return the reduction that a caller names."""
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, str) and op in _REDUCTIONS:
        return _REDUCTIONS[op]
    name = getattr(op, "name", op)  # torch.distributed.ReduceOp.SUM has one
    try:
        return ReduceOp["MEAN" if name == "AVG" else name.upper()]
    except (KeyError, AttributeError):
        known = ", ".join(repr(known.name.lower()) for known in ReduceOp)
        raise ConfigError(f"unknown op {op!r}: use one of {known}") from None
