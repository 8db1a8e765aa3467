"""Torch tensors as host memory."""

from __future__ import annotations

import torch

from reducer.errors import ConfigError
from worker_client.host_buffer import HostBuffer, find_dtype


def of_tensor(tensor: torch.Tensor) -> HostBuffer:
    """Give access to the bytes of a dense CPU tensor, in place if it is contiguous.

    Raises:
        ConfigError: the tensor is sparse, on another device, of a dtype that cannot be reduced, or
            of a class that has no memory of its own.
    """
    if tensor.layout is not torch.strided:
        raise ConfigError(
            "a sparse tensor cannot be reduced: use tensor.to_dense(), or sparse=False in the "
            "embedding"
        )
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"the tensor is on {tensor.device}, this version reduces CPU tensors: "
            "use tensor.cpu() and copy the result back"
        )
    dtype = find_dtype(str(tensor.dtype).removeprefix("torch."))
    target = tensor.detach()
    if target.is_contiguous() and not target.is_neg():
        return HostBuffer(_bytes(target), dtype, None)
    if any(
        stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)
    ):
        raise ConfigError(
            "elements of the tensor share memory (it was expanded), and the result would overwrite "
            "them all: use tensor.clone()"
        )
    copy = target.resolve_neg().contiguous()
    return HostBuffer(_bytes(copy), dtype, lambda: target.copy_(copy))


def _bytes(tensor: torch.Tensor) -> memoryview:
    # Through uint8, which every dtype can be viewed as and NumPy knows, unlike bfloat16.
    # as_strided, because a tensor of one element is contiguous whatever its stride says.
    try:
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"a {type(tensor).__name__} gives no access to its elements: reduce the plain, dense "
            "tensors that it is made of"
        ) from None
