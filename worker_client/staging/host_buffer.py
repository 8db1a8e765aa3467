"""Arrays and tensors as the bytes that travel: dtype, contiguity, writability."""

from __future__ import annotations

import ctypes
import logging
import sys
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reducer.errors import ConfigError, DeviceError
from reducer.wire.constants import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

STAGED = ("cuda",)  # torch's types of devices whose tensors are copied while nobody waits
_FLAT = ("cpu", *STAGED)  # those whose memory is bytes, one after another
# By name, so that ml_dtypes' bfloat16 and torch's dtypes need no import here. No array has blocks.
DTYPES: dict[str, DType] = {dtype.name.lower(): dtype for dtype in DType if not dtype.is_block}
_NATIVE = {np.dtype(name): dtype for name, dtype in DTYPES.items() if name != "bfloat16"}

# Of any length: a type for each would be made again and again.
_MEMORY = ctypes.c_char * sys.maxsize

log = logging.getLogger(__name__)


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

    A contiguous one in host memory is used in place. Of any other, a copy is reduced and written
    back.

    Raises:
        ConfigError: the type, dtype or device is not supported, or the array is read-only.
        DeviceError: the tensor's device failed.
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

    Args:
        tensor: on the CPU, or on a device of `STAGED`.

    Raises:
        ConfigError: the tensor is sparse, of a dtype that cannot be reduced, or of a class that has
            no memory of its own.
    """
    target, dtype = _dense(tensor)
    if target.is_contiguous() and not target.is_neg():
        return Flat(_bytes(target), dtype, target, None)
    _check_apart(target)
    copy = target.resolve_neg().contiguous()
    return Flat(_bytes(copy), dtype, target, copy)


def _dense(tensor: torch.Tensor) -> tuple[torch.Tensor, DType]:
    """Return a tensor apart from autograd, and its element type, if it can be reduced."""
    import torch  # noqa: PLC0415 (a caller with a tensor has loaded it)

    if tensor.layout is not torch.strided:
        raise ConfigError(
            "a sparse tensor cannot be reduced: use tensor.to_dense(), or sparse=False in the "
            "embedding"
        )
    return tensor.detach(), find_dtype(str(tensor.dtype).removeprefix("torch."))


def _check_apart(target: torch.Tensor) -> None:
    if any(
        stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)
    ):
        raise ConfigError(
            "elements of the tensor share memory (it was expanded), and the result would overwrite "
            "them all: use tensor.clone()"
        )


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
        ConfigError: as `flatten`; or the device has no memory.
        DeviceError: the device failed.
    """
    if tensor.device.type not in _FLAT:
        return _through_host(tensor)
    flat = flatten(tensor)
    if flat.data.device.type == "cpu":
        view = _shared(flat.data)
        return HostBuffer(view, flat.dtype, None if flat.copy is None else flat.write_back)
    host = flat.data.cpu()

    def write_back() -> None:
        flat.data.copy_(host)
        flat.write_back()

    return HostBuffer(host.numpy().data, flat.dtype, write_back)


def _through_host(tensor: torch.Tensor) -> HostBuffer:
    """Copy a tensor of a device that nothing is known of, by what torch has for every device.

    These copies follow what the calling thread's stream has to do, and are there when they return.
    Whatever the tensor's memory is to the device, nothing but them reads or writes it.
    """
    if tensor.is_meta:
        raise ConfigError("the tensor is on meta, where tensors have no elements: use to_empty()")
    target, dtype = _dense(tensor)
    _check_apart(target)
    if target.is_neg():  # which copies of a package's devices may not ask
        raise ConfigError(
            f"a negative view of a tensor on {tensor.device} cannot be reduced: use "
            "tensor.resolve_neg()"
        )
    _say_what_copies_cost(tensor.device.type)
    with _errors(tensor.device):
        host = target.cpu().contiguous()

    def write_back() -> None:
        with _errors(target.device):
            target.copy_(host)

    return HostBuffer(_shared(_bytes(host)), dtype, write_back)


@cache  # once in a process, whatever clients it has
def _say_what_copies_cost(kind: str) -> None:
    log.warning(
        "tensors on %s are copied to the host before their all-reduce begins, and back when it has "
        "ended: unlike those of %s, these copies overlap neither each other nor the backward pass",
        kind,
        " and ".join(STAGED),
    )


@contextmanager
def _errors(device: torch.device) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what torch makes of every error of a device
        raise DeviceError(f"{device} failed: {error}", device=str(device)) from error


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
