"""Arrays as the bytes that travel: dtype, contiguity, writability."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reducer.errors import ConfigError
from reducer.wire.constants import DType

if TYPE_CHECKING:
    from collections.abc import Callable

# By name, so that ml_dtypes' bfloat16 and torch's dtypes need no import here.
DTYPES = {dtype.name.lower(): dtype for dtype in DType}
_NATIVE = {np.dtype(name): dtype for name, dtype in DTYPES.items() if name != "bfloat16"}


class HostBuffer(NamedTuple):
    """A buffer in host memory, ready to be sent and overwritten.

    Attributes:
        view: its bytes; keeps the owner of the memory alive.
        dtype: element type.
        write_back: copies the result to where the caller expects it, if `view` is a copy.
    """

    view: memoryview
    dtype: DType
    write_back: Callable[[], object] | None


def host_buffer(data: Any) -> HostBuffer:
    """Give access to the bytes of a NumPy array or a torch tensor.

    A contiguous one is used in place. Of one that is not, a copy is reduced and written back.

    Raises:
        ConfigError: the type, dtype or device is not supported, or the array is read-only.
    """
    if isinstance(data, np.ndarray):
        return _of_array(data)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        staged: HostBuffer = import_module("worker_client.staging.staging").of_tensor(data)
        return staged
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


def _of_array(array: np.ndarray[Any, Any]) -> HostBuffer:
    if type(array) is not np.ndarray:
        if isinstance(array, np.ma.MaskedArray):
            raise ConfigError("a masked array cannot be reduced: use array.filled(0)")
        array = np.asarray(array)  # a matrix, for one, would stay two-dimensional
    dtype = _NATIVE.get(array.dtype)
    if dtype is None:  # a type that NumPy has learnt from another package, or an error
        dtype = find_dtype(array.dtype.name)
        if not array.dtype.isnative:
            raise ConfigError("the array's byte order is not this machine's: use array.astype(...)")
    flags = array.flags
    if not flags.writeable:
        raise ConfigError("the array is read-only, and the result replaces its contents: copy it")
    if flags.c_contiguous:
        flat = array if array.ndim == 1 else array.reshape(-1)  # a call less for the most frequent
        return HostBuffer(flat.view(np.uint8).data, dtype, None)
    copy = np.ascontiguousarray(array)
    return HostBuffer(copy.reshape(-1).view(np.uint8).data, dtype, lambda: np.copyto(array, copy))
