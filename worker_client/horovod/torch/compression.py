"""How tensors travel: `Compression`, which calls and optimizers take as ``compression=``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Compressor(Protocol):
    """What `compression=` takes: a class or an object with these two functions."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return what is to be reduced, and what `decompress` needs to know."""

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return the reduced tensor as it was before `compress`."""


class NoneCompressor:
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:  # noqa: ARG004
        return tensor


class FP16Compressor:
    """Floating types travel as float16, and are summed in float32."""

    wire: Any = torch.float16
    _cast: ClassVar[Callable[[Any, Any], Any]] = torch.Tensor.to
    _is_floating = "is_floating_point"  # of a dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        narrow = getattr(tensor.dtype, cls._is_floating)
        return cls._cast(tensor, cls.wire) if narrow else tensor, tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        return tensor if ctx is None else cls._cast(tensor, ctx)


class BF16Compressor(FP16Compressor):
    """Floating types travel as bfloat16, which has float32's range, and are summed in float32."""

    wire = torch.bfloat16


class Compression:
    """The compressors by their names."""

    none, fp16, bf16 = NoneCompressor, FP16Compressor, BF16Compressor


def compressed(
    compression: Compressor, tensors: Sequence[Any], call: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Return what a call makes of tensors, which travel compressed."""
    narrow = [compression.compress(tensor) for tensor in tensors]
    results = call([tensor for tensor, _ in narrow])
    return [compression.decompress(one, ctx) for one, (_, ctx) in zip(results, narrow, strict=True)]
