"""Torch tensors as bytes, and as host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from reducer.errors import ConfigError
from worker_client.staging.host_buffer import HostBuffer, find_dtype

if TYPE_CHECKING:
    from reducer.wire.constants import DType

DEVICES = ("cpu", "cuda")  # by torch's names of their types


class Flat(NamedTuple):
    """A tensor as contiguous bytes, on its own device.

    Attributes:
        data: one dimension of uint8; the tensor's own memory unless that is not contiguous.
        dtype: element type of the tensor.
        target: the tensor, apart from autograd.
        copy: what `data` are the bytes of, in the tensor's shape, if it is a copy.
    """

    data: torch.Tensor
    dtype: DType
    target: torch.Tensor
    copy: torch.Tensor | None

    def write_back(self) -> None:
        """Put a copy's elements where the caller expects them."""
        if self.copy is not None:
            self.target.copy_(self.copy)


def flatten(tensor: torch.Tensor) -> Flat:
    """Give access to the bytes of a dense tensor, in place if it is contiguous.

    Raises:
        ConfigError: the tensor is sparse, on a device that is not served, of a dtype that cannot be
            reduced, or of a class that has no memory of its own.
    """
    if tensor.layout is not torch.strided:
        raise ConfigError(
            "a sparse tensor cannot be reduced: use tensor.to_dense(), or sparse=False in the "
            "embedding"
        )
    if tensor.device.type not in DEVICES:
        raise ConfigError(
            f"the tensor is on {tensor.device}, this version reduces tensors on the CPU and on "
            "CUDA devices: use tensor.cpu() and copy the result back"
        )
    dtype = find_dtype(str(tensor.dtype).removeprefix("torch."))
    target = tensor.detach()
    if target.is_contiguous() and not target.is_neg():
        return Flat(_bytes(target), dtype, target, None)
    if any(
        stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)
    ):
        raise ConfigError(
            "elements of the tensor share memory (it was expanded), and the result would overwrite "
            "them all: use tensor.clone()"
        )
    copy = target.resolve_neg().contiguous()
    return Flat(_bytes(copy), dtype, target, copy)


def of_tensor(tensor: torch.Tensor) -> HostBuffer:
    """Give access to a tensor's bytes in host memory, in place if it is contiguous there.

    Of a tensor on a device it is a copy, for which this waits, as writing it back does.

    Raises:
        ConfigError: as `flatten`.
    """
    flat = flatten(tensor)
    if flat.data.device.type == "cpu":
        view = flat.data.numpy().data
        return HostBuffer(view, flat.dtype, None if flat.copy is None else flat.write_back)
    host = flat.data.cpu()

    def write_back() -> None:
        flat.data.copy_(host)
        flat.write_back()

    return HostBuffer(host.numpy().data, flat.dtype, write_back)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Through uint8, which every dtype can be viewed as and NumPy knows, unlike bfloat16.
    # as_strided, because a tensor of one element is contiguous whatever its stride says.
    try:
        data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        data.data_ptr()  # which a tensor that only wraps others has not
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"a {type(tensor).__name__} gives no access to its elements: reduce the plain, dense "
            "tensors that it is made of"
        ) from None
    return data
