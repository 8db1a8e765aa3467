"""Many arrays or tensors as few buffers, in which each travels as it would alone.

A framework without communication hooks gives all gradients of a step at once. Packed, they make one
all-reduce for each element type, which costs one copy and saves a round trip for each array. The
order of arrays is the caller's and the same at every rank, so that of the buffers is, too.
"""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

import worker_client
from reducer.errors import ConfigError
from worker_client.collectives import broadcast_bytes
from worker_client.staging.arguments import parse_op
from worker_client.staging.host_buffer import find_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from reducer.wire.constants import DType
    from worker_client.client.client import Client

    Arrays = Sequence[NDArray[Any]]


class Pack:
    """Arrays or tensors of one dtype, copied one after another into a flat buffer.

    Args:
        members: what is packed.
        align: elements, of which each tensor begins at a multiple; zeros fill what is between.
    """

    def __init__(self, members: Sequence[Any], align: int = 1) -> None:
        flat = [member.reshape(-1) for member in members]
        cat: Any = np.concatenate if isinstance(flat[0], np.ndarray) else sys.modules["torch"].cat
        pieces = flat
        if align > 1:
            zeros = flat[0].new_zeros(align - 1)
            pieces = [piece for one in flat for piece in (one, zeros[: -len(one) % align])]
        self.buffer = cat(pieces)
        begins = accumulate((len(one) + -len(one) % align for one in flat), initial=0)
        self.parts = [  # views of the buffer, in the shapes of what was packed
            self.buffer[begin : begin + len(one)].reshape(member.shape)
            for member, one, begin in zip(members, flat, begins, strict=False)
        ]
        self._members = members

    def unpack(self) -> None:
        """Copy the elements back into tensors."""
        for member, part in zip(self._members, self.parts, strict=True):
            member.copy_(part)


def kinds(arrays: Sequence[Any]) -> list[tuple[DType, int]]:
    """Return dtype and bytes of arrays or tensors, as `Client.packs` takes them."""
    names = [getattr(one.dtype, "name", str(one.dtype).removeprefix("torch.")) for one in arrays]
    return [(find_dtype(name), one.nbytes) for name, one in zip(names, arrays, strict=True)]


def all_reduce_arrays(client: Client, arrays: Arrays, op: str = "mean") -> list[NDArray[Any]]:
    """Return the reductions of `arrays` over all ranks; the arrays themselves stay as they are.

    Args:
        client: the job's.
        arrays: of any shapes, and of dtypes that `Client.all_reduce` takes; the same number, shapes
            and dtypes in the same order at every rank.
        op: as of `Client.all_reduce`.

    Returns:
        Arrays of the same shapes and dtypes, in the same order.

    Raises:
        ConfigError: a dtype cannot be reduced, or not by `op`.
        ReductionError: as `Work.wait`.
    """
    places = client.packs(kinds(arrays), parse_op(op))
    packs = [Pack([arrays[at] for at in group]) for group in places]
    for work in [client.all_reduce(pack.buffer, op) for pack in packs]:
        work.wait()
    results = list(arrays)
    for pack, group in zip(packs, places, strict=True):
        for at, part in zip(group, pack.parts, strict=True):
            results[at] = part
    return results


def broadcast_arrays(client: Client, arrays: Arrays, root: int = 0) -> list[NDArray[Any]]:
    """Return what `arrays` are at rank `root`, bit for bit; the arrays themselves stay as they are.

    Args:
        client: the job's.
        arrays: of any shapes and of any dtypes whose elements have a fixed size; the same number,
            shapes and dtypes in the same order at every rank.
        root: the rank whose arrays they are to be.

    Returns:
        Arrays of the same shapes and dtypes, in the same order.

    Raises:
        ConfigError: there is no such rank, or elements of an array are Python objects.
        MismatchError: ranks disagree on the root, or on the arrays' dtypes or shapes.
        RankLostError: the job goes on without that rank.
        ReductionError: as `Client.all_reduce`.
    """
    for array in arrays:
        if array.dtype.hasobject:
            raise ConfigError(
                "an array of strings or other Python objects cannot be broadcast: leave it out"
            )
    packed = np.frombuffer(b"".join(array.tobytes() for array in arrays), np.uint8)
    what = ", ".join(f"{array.dtype} {array.shape}" for array in arrays)
    packed = broadcast_bytes(client, packed, root, what)
    ends = np.cumsum([array.nbytes for array in arrays])
    return [
        np.frombuffer(packed[end - array.nbytes : end].tobytes(), array.dtype).reshape(array.shape)
        for array, end in zip(arrays, ends, strict=True)
    ]


def on_host(
    call: Callable[[Client, Arrays], list[NDArray[Any]]], client: Client | None
) -> Callable[..., list[NDArray[Any]]]:
    """Return `call` as a function of the arrays alone, for a framework to call from its graphs.

    A graph keeps it, perhaps for longer than a client lasts: so without `client` it finds
    `worker_client.init()`'s whenever it runs, and once here, which shows early what is missing.

    Args:
        call: is given a client and a list of arrays.
        client: the one to use, or None.

    Raises:
        ConfigError: as `worker_client.init`.
    """

    def used() -> Client:
        return worker_client.init() if client is None else client

    used()
    return lambda *arrays: call(used(), [np.asarray(array) for array in arrays])
