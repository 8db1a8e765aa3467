"""Arrays and tensors as the bytes that travel: dtype, contiguity, writability."""

from __future__ import annotations

import ctypes
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reducer.errors import ConfigError
from reducer.wire.constants import DType

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

STAGED = ("cuda",)  # torch's types of devices whose tensors are copied to host memory first
DEVICES = ("cpu", *STAGED)
# By name, so that ml_dtypes' bfloat16 and torch's dtypes need no import here. No array has blocks.
DTYPES: dict[str, DType] = {dtype.name.lower(): dtype for dtype in DType if not dtype.is_block}
_NATIVE = {np.dtype(name): dtype for name, dtype in DTYPES.items() if name != "bfloat16"}

# Of any length: a type for each would be made again and again.
_MEMORY = ctypes.c_char * sys.maxsize


class HostBuffer(NamedTuple):
    """A buffer in host memory, ready to be sent and overwritten."""

    view: memoryview  # keeps the owner of the memory alive
    dtype: DType
    write_back: Callable[[], object] | None  # if `view` is a copy: to where its caller looks


# As `HostBuffer(...)`, which would be a call more in every all-reduce.
_host_buffer: Callable[[tuple[Any, ...]], HostBuffer] = partial(tuple.__new__, HostBuffer)


def is_on_device(data: Any) -> bool:
    """Whether `data` is a torch tensor in the memory of a device, and has to be staged."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.Tensor) and data.device.type in STAGED


def host_buffer(data: Any) -> HostBuffer:
    """Give access to the bytes of a NumPy array or a torch tensor.

    A contiguous one is used in place. Of one that is not, a copy is reduced and written back.

    Raises:
        ConfigError: the type, dtype or device is not supported, or the array is read-only.
    """
    if isinstance(data, np.ndarray):
        array = data if type(data) is np.ndarray else _plain(data)
        dtype = _NATIVE.get(array.dtype)
        if dtype is None:
            dtype = _dtype_of(array)
            array = array.view(f"u{array.itemsize}")  # the buffer protocol has no name for its own
        view = array.data  # its attributes cost less than the array's, in every all-reduce
        if view.readonly:
            raise ConfigError(
                "the array is read-only, and the result replaces its contents: copy it"
            )
        if not view.nbytes:
            view = array.reshape(-1).data  # none with rows of nothing can be cast
        if view.c_contiguous:
            return _host_buffer((view.cast("B"), dtype, None))
        copy = np.ascontiguousarray(array)
        write_back = partial(np.copyto, array, copy)
        return HostBuffer(copy.data.cast("B"), dtype, write_back)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return _of_tensor(data)
    raise ConfigError(
        f"all_reduce takes a NumPy array or a torch tensor, got {type(data).__name__}: "
        "convert it first, for instance with numpy.asarray"
    )


def find_dtype(name: str) -> DType:
    """Return the element type called `name`, such as ``"float32"``.

    Raises:
        ConfigError: it cannot be reduced; the message lists those that can.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise ConfigError(
            f"dtype {name} cannot be reduced: convert to one of {', '.join(DTYPES)}"
        ) from None


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array of a subclass, such as a matrix, which would stay two-dimensional."""
    if isinstance(array, np.ma.MaskedArray):
        raise ConfigError("a masked array cannot be reduced: use array.filled(0)")
    return np.asarray(array)


def _dtype_of(array: np.ndarray[Any, Any]) -> DType:
    """Return a type that NumPy has learnt from another package, or say what is wrong with it."""
    dtype = find_dtype(array.dtype.name)
    if not array.dtype.isnative:
        native = array.dtype.newbyteorder("=").name
        raise ConfigError(
            f"the array's byte order is not this machine's: use array.astype({native!r})"
        )
    return dtype


class Flat(NamedTuple):
    """A tensor as contiguous bytes, on its own device."""

    data: torch.Tensor  # uint8, one dimension; the tensor's own memory if that is contiguous
    dtype: DType  # of the tensor
    target: torch.Tensor  # apart from autograd
    copy: torch.Tensor | None  # what `data` are the bytes of, in its shape, if it is a copy

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
    import torch  # noqa: PLC0415 (a caller with a tensor has loaded it)

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


def _shared(data: torch.Tensor) -> memoryview:
    """Return the memory of bytes in a tensor.

    After `torch.Tensor.numpy` torch refuses to resize the tensor, as PowerSGD's hooks and FSDP do.
    """
    memory: Any = _MEMORY.from_address(data.data_ptr())
    memory.owner = data  # keeps it alive
    return memoryview(memory).cast("B")[: data.numel()]


def _of_tensor(tensor: torch.Tensor) -> HostBuffer:
    """Give access to a tensor's bytes in host memory, in place if it is contiguous there.

    Of a tensor on a device it is a copy, for which this waits, as writing it back does.

    Raises:
        ConfigError: as `flatten`.
    """
    flat = flatten(tensor)
    if flat.data.device.type == "cpu":
        view = _shared(flat.data)
        return HostBuffer(view, flat.dtype, None if flat.copy is None else flat.write_back)
    host = flat.data.cpu()

    def write_back() -> None:
        flat.data.copy_(host)
        flat.write_back()

    return HostBuffer(host.numpy().data, flat.dtype, write_back)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch  # noqa: PLC0415

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
