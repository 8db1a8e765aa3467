"""How tensors travel: `Compression`, which calls, tapes and optimizers take as ``compression=``."""

from __future__ import annotations

import tensorflow as tf

from worker_client.horovod.torch import compression as of_torch
from worker_client.horovod.torch.compression import Compressor  # noqa: F401 (Horovod's name)


class NoneCompressor(of_torch.NoneCompressor):
    """Tensors travel as they are."""


class FP16Compressor(of_torch.FP16Compressor):
    """Floating types travel as float16, and are summed in float32."""

    wire = tf.float16
    _cast = tf.cast
    _is_floating = "is_floating"


class BF16Compressor(FP16Compressor):
    """Floating types travel as bfloat16, which has float32's range, and are summed in float32."""

    wire = tf.bfloat16


class Compression:
    """The compressors by their names."""

    none, fp16, bf16 = NoneCompressor, FP16Compressor, BF16Compressor
