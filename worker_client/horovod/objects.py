"""Objects of plain types, and tensors, as bytes and back.

What other ranks send is data and never code: an object is JSON, which names a type for each value,
and the bytes of what is large. Types that are not named here are refused.

| encoding | is |
|---|---|
| null, true, 1, 1.5, "a" | None, bool, int, float, str |
| ["list", [...]], also tuple, set, frozenset | each value encoded |
| ["dict", [[key, value], ...]], also OrderedDict | keys and values encoded |
| ["bytes", n], also bytearray | the next n bytes after the JSON |
| ["tensor", dtype, shape, n] | a tensor's memory, the next n bytes |
| ["array", dtype, shape, n], also scalar | a NumPy array's or scalar's, the next n bytes |
"""

from __future__ import annotations

import json
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch

from reducer.errors import ConfigError

_LENGTH = struct.Struct("<Q")  # of the JSON
_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_DICTS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_BYTES = {kind.__name__: kind for kind in (bytes, bytearray)}


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that has no history, of a tensor that is not sparse."""
    if tensor.layout is not torch.strided:
        raise ConfigError("a sparse tensor cannot be reduced: use tensor.to_dense()")
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor of any dtype, sharing its memory."""
    # A dimension of one element, or of none, may have any stride, and is contiguous all the same.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name}")
    return dtype


def encode(value: Any) -> bytes:
    """Return an object as bytes; other types than above, and circles, are refused."""
    blobs: list[bytes] = []
    try:
        described = json.dumps(_describe(value, blobs)).encode()
    except RecursionError:
        raise ConfigError("the object contains itself, or is nested too deep") from None
    return b"".join([_LENGTH.pack(len(described)), described, *blobs])


def decode(data: bytes) -> Any:
    """Return the object of which `encode` made these bytes; others are refused."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        described = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        value, at = _restore(described, data, _LENGTH.size + length)
    except (ValueError, TypeError, LookupError, RuntimeError, struct.error) as error:
        raise ConfigError(f"these bytes are no encoded object: {error}") from error
    if at != len(data):
        raise ConfigError(f"these bytes are no encoded object: {len(data) - at} bytes are left")
    return value


def _describe(value: Any, blobs: list[bytes]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _SEQUENCES.values() or kind is torch.Size:
        name = "tuple" if kind is torch.Size else kind.__name__
        return [name, [_describe(one, blobs) for one in value]]
    if kind in _DICTS.values():
        pairs = [[_describe(k, blobs), _describe(v, blobs)] for k, v in value.items()]
        return [kind.__name__, pairs]
    if kind in _BYTES.values():
        blobs.append(bytes(value))
        return [kind.__name__, len(value)]
    if isinstance(value, torch.Tensor):
        blobs.append(as_bytes(dense_copy(value).cpu()).numpy().tobytes())
        dtype = str(value.dtype).removeprefix("torch.")
        return ["tensor", dtype, list(value.shape), len(blobs[-1])]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcSU":
        blobs.append(value.tobytes())
        name = "array" if isinstance(value, np.ndarray) else "scalar"
        return [name, value.dtype.str, list(value.shape), len(blobs[-1])]
    raise ConfigError(
        f"an object of type {kind.__name__} cannot be sent to other ranks, whose code must not "
        "depend on it: send numbers, strings, bytes, lists, tuples, sets, dictionaries, tensors "
        "and NumPy arrays"
    )


def _restore(described: Any, data: bytes, at: int) -> tuple[Any, int]:
    """Return a value, and where the next one's bytes begin."""
    if isinstance(described, _PLAIN):
        return described, at
    name, *rest = described
    if name in _SEQUENCES or name in _DICTS:
        values = []
        for one in rest[0]:
            value, at = _restore(["tuple", one] if name in _DICTS else one, data, at)
            values.append(value)
        return _SEQUENCES[name](values) if name in _SEQUENCES else _DICTS[name](dict(values)), at
    blob = data[at : at + rest[-1]]
    at += rest[-1]
    if len(blob) != rest[-1] or rest[-1] < 0:
        raise ValueError("bytes are missing")
    if name in _BYTES:
        return _BYTES[name](blob), at
    dtype, shape = rest[0], tuple(rest[1])
    if name == "tensor":
        # A buffer of no bytes is refused, though a tensor may have none.
        flat = torch.frombuffer(bytearray(blob or b"\0"), dtype=torch.uint8)[: len(blob)]
        return flat.view(torch_dtype(dtype)).reshape(shape), at
    array = np.frombuffer(blob, np.dtype(dtype)).reshape(shape).copy()
    return (array[()] if name == "scalar" else array), at
