"""How tensors travel: `Compression`, which calls and optimizers take as ``compression=``."""

from __future__ import annotations

from typing import Protocol

import torch


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
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:  # noqa: ARG004
        """Return the tensor itself."""
        return tensor


class FP16Compressor:
    """Floating types travel as float16, and are summed in float32."""

    wire = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return the tensor in 16 bits, and the dtype it had."""
        narrow = tensor.to(cls.wire) if tensor.dtype.is_floating_point else tensor
        return narrow, tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return the tensor in the dtype it had."""
        return tensor if ctx is None else tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Floating types travel as bfloat16, which has float32's range, and are summed in float32."""

    wire = torch.bfloat16


class Compression:
    """The compressors by their names."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
