"""The numbers of the system: one pass over n buffers that leaves their reduction.

``kernels.select()`` gives the fastest variant that this CPU can run; every variant gives the same
bits. Their semantics are written down in `fold.h`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from reducer.errors import ConfigError
from reducer.kernels.plain import PlainKernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reducer.kernels.plain import BytesLike
    from reducer.wire.constants import DType, ReduceOp

__all__ = ["Kernels", "select", "variants"]


class Kernels(Protocol):
    """One variant of the kernels. It has no state; threads may share it."""

    @property
    def name(self) -> str:
        """One of ``avx512``, ``avx2``, ``neon``, ``generic`` and ``numpy``."""

    def reduce(
        self, inputs: Sequence[BytesLike], out: BytesLike, dtype: DType, op: ReduceOp
    ) -> None:
        """Write the left fold of `inputs`, in their order, to `out`.

        The inputs are bytes-like objects of one length, read-only ones too, at any alignment. `out`
        is writable, has the same length, and has memory of its own or exactly that of one input.
        The compiled variants hold no GIL while they fold.

        Raises:
            ConfigError: the operation is not defined for the type (an integer MEAN).
            LocalProtocolError: the buffers do not fit together; the message says which and why.
        """

    def reduce_leaves(
        self,
        inputs: Sequence[BytesLike],
        ends: Sequence[int],
        out: BytesLike,
        dtype: DType,
        op: ReduceOp,
    ) -> None:
        """Write the tree over leaves to `out`, of which each input is a subtree.

        Args:
            inputs: all of them, in the order of their leaves; as in `reduce`.
            ends: of each, the number after that of its last leaf (`reducer.wire.leaves.parts`).
            out: as in `reduce`.
            dtype: no blocks.
            op: reduction.

        Raises:
            ConfigError, LocalProtocolError: as `reduce`.
        """


def _usable() -> dict[str, Kernels]:
    """Return the variants of this machine by name, best first."""
    usable: list[Kernels] = []
    try:
        from reducer.kernels import _kernels  # noqa: PLC0415
    except ImportError:  # built without a C compiler
        pass
    else:
        usable += _kernels.usable()
    usable.append(PlainKernels())
    return {kernels.name: kernels for kernels in usable}


def variants() -> tuple[str, ...]:
    """Names of the variants that this CPU can run, best first."""
    return tuple(_usable())


def select(name: str | None = None) -> Kernels:
    """Return the variant called `name`, or the best one.

    Raises:
        ConfigError: this machine has no such variant; the message lists those that it has.
    """
    usable = _usable()
    if name is None:
        return next(iter(usable.values()))
    if name not in usable:
        raise ConfigError(
            f"kernel variant {name!r} is not available here; use one of {', '.join(usable)}"
        )
    return usable[name]
