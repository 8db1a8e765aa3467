"""Objects of plain types as bytes and back, and their broadcast and all-gather.

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
import math
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch

from reducer.errors import ConfigError
from worker_client.horovod.broadcasting import as_bytes, start_broadcast
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet, group_of
from worker_client.horovod.ops import torch_dtype
from worker_client.horovod.reduction import dense_copy

_LENGTH = struct.Struct("<Q")  # of the JSON
_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_DICTS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_BYTES = {kind.__name__: kind for kind in (bytes, bytearray)}
_REFUSED, _ENCODED = b"E", b"O"


def encode(value: Any) -> bytes:
    """Return an object as bytes.

    Raises:
        ConfigError: it is, or contains, an object of a type that is not supported; or lists and
            dictionaries are nested too deep, or in a circle.
    """
    blobs: list[bytes] = []
    try:
        described = json.dumps(_describe(value, blobs)).encode()
    except RecursionError:
        raise ConfigError("the object contains itself, or is nested too deep") from None
    return b"".join([_LENGTH.pack(len(described)), described, *blobs])


def decode(data: bytes) -> Any:
    """Return the object of which `encode` made these bytes.

    Raises:
        ConfigError: no object was encoded like this.
    """
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
    if name in _SEQUENCES:
        values = []
        for one in rest[0]:
            value, at = _restore(one, data, at)
            values.append(value)
        return _SEQUENCES[name](values), at
    if name in _DICTS:
        pairs = []
        for key, one in rest[0]:
            restored, at = _restore(key, data, at)
            value, at = _restore(one, data, at)
            pairs.append((restored, value))
        return _DICTS[name](dict(pairs)), at
    blob = data[at : at + rest[-1]]
    at += rest[-1]
    if len(blob) != rest[-1] or rest[-1] < 0:
        raise ValueError("bytes are missing")
    if name in _BYTES:
        return _BYTES[name](blob), at
    dtype, shape = rest[0], tuple(rest[1])
    if name == "tensor":
        return _tensor(dtype, shape, blob), at
    array = np.frombuffer(blob, np.dtype(dtype)).reshape(shape).copy()
    return (array[()] if name == "scalar" else array), at


def _tensor(name: str, shape: tuple[int, ...], blob: bytes) -> torch.Tensor:
    dtype = torch_dtype(name)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(blob), dtype=dtype).reshape(shape)


# -- between ranks ------------------------------------------------------------------------------


def _pack(value: Any) -> bytes:
    # A refusal travels like an object, so that every rank raises it and none waits.
    try:
        return _ENCODED + encode(value)
    except ConfigError as error:
        return _REFUSED + str(error).encode()


def _unpack(rank: int, payload: bytes) -> Any:
    if payload[:1] == _REFUSED:
        raise ConfigError(f"rank {rank}: {payload[1:].decode()}")
    return decode(payload[1:])


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> Any:
    """Return the object of rank `root_rank`; what others pass is ignored.

    Args:
        obj: None, numbers, strings, bytes, tensors, NumPy arrays, and lists, tuples, sets and
            dictionaries of such.
        root_rank: whose object it is, as ``hvd.rank()`` numbers it.
        name: the same at every rank; by default numbered.
        process_set: the ranks that take part.

    Raises:
        ConfigError: it is of another type, at every rank alike.
        ReductionError: as `Client.all_reduce`.
    """
    group = group_of(process_set)
    client = group.client
    with group.call("broadcast_object", name) as wire:
        root = group.number(root_rank)
        is_root = root == client.rank
        payload = _pack(obj) if is_root else b""
    size = torch.tensor([len(payload)])
    start_broadcast(client, size, root, wire).wait()
    data = torch.zeros(int(size), dtype=torch.uint8)
    if is_root:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    start_broadcast(client, data, root, f"{wire}.data").wait()
    received = _unpack(root_rank, data.numpy().tobytes())
    return obj if is_root else received


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = ALL_RANKS
) -> list[Any]:
    """Return every rank's object, in rank order; arguments and errors as `broadcast_object`."""
    group = group_of(process_set)
    with group.call("allgather_object", name) as wire:
        payload = _pack(obj)
    payloads = group.gather(payload, wire).wait()
    return [_unpack(rank, one) for rank, one in enumerate(payloads)]
