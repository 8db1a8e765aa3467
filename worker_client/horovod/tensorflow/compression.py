"""How tensors travel: `Compression`, which calls, tapes and optimizers take as ``compression=``."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf


class Compressor(Protocol):
    """What `compression=` takes: a class or an object with these two functions."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return what is to be reduced, and what `decompress` needs to know."""

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the reduced tensor as it was before `compress`."""


class NoneCompressor:
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:  # noqa: ARG004
        """Return the tensor itself."""
        return tensor


class FP16Compressor:
    """Floating types travel as float16, and are summed in float32."""

    wire = tf.float16

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor in 16 bits, and the dtype it had."""
        narrow = tf.cast(tensor, cls.wire) if tensor.dtype.is_floating else tensor
        return narrow, tensor.dtype

    @classmethod
    def decompress(cls, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the tensor in the dtype it had."""
        return tf.cast(tensor, ctx)


class BF16Compressor(FP16Compressor):
    """Floating types travel as bfloat16, which has float32's range, and are summed in float32."""

    wire = tf.bfloat16


class Compression:
    """The compressors by their names."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
