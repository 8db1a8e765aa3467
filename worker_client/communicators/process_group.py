"""What a torch process group does with host memory: all-reduce, broadcast, exchange of words."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from reducer.errors import LocalProtocolError
from reducer.wire.constants import DType, ReduceOp
from worker_client.runtime.service_thread import STOP_S
from worker_client.staging import casts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker_client.protocol.operation import Operation

_TYPES = {  # those that Gloo adds up as they are
    DType.FLOAT32: torch.float32,
    DType.FLOAT64: torch.float64,
    DType.INT8: torch.int8,
    DType.INT32: torch.int32,
    DType.INT64: torch.int64,
    DType.UINT8: torch.uint8,
}
_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MEAN: dist.ReduceOp.SUM,  # and then divided
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 1e-3  # between two looks whether Gloo is done
KEPT_S = 0.1  # the same, once it was stopped


class ProcessGroup:
    """A process group of all ranks that one thread uses, for nothing else.

    Its timeout bounds everything here. Once it has `stopped`, nothing is written to any buffer.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.stopped = False
        self._group = group
        self._casts = casts.select()
        self._writing = threading.Lock()
        self._idle = threading.Event()  # set once it has stopped, but for what Gloo still does

    def stop(self) -> None:
        """Write to no buffer from now on."""
        with self._writing:
            self.stopped = True

    def rest(self) -> None:
        """Say that nothing more will be done here: for the thread that uses it."""
        self._idle.set()

    def await_rest(self) -> None:
        """Wait until that thread says so, or has nothing to do but wait for Gloo."""
        self._idle.wait(STOP_S)

    def exchange(self, message: Any) -> list[Any]:
        """Return what all ranks say, in rank order; tuples come as lists."""
        data = torch.frombuffer(bytearray(json.dumps(message), "utf-8"), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        size = torch.tensor([len(data)])
        self._finish(self._group.allgather([sizes], [size]))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(data)] = data
        said = [torch.empty_like(padded) for _ in range(self.size)]
        self._finish(self._group.allgather([said], [padded]))
        return [
            json.loads(bytes(one[:size].tolist()))
            for one, size in zip(said, map(int, sizes), strict=True)
        ]

    def share(
        self,
        operation: Operation | None,
        rank: int,
        chunks: Sequence[Sequence[int]],
        results: dict[int, bytes],
    ) -> None:
        """Give all ranks the results that one of them has.

        Args:
            operation: where they belong; None if nobody here needs them.
            rank: who has them.
            chunks: first and last byte (exclusive) of each.
            results: at that rank, by offset.
        """
        nbytes = sum(high - low for low, high in chunks)
        if nbytes == 0:
            return
        if rank == self.rank:
            data = bytearray().join(results[low] for low, _ in chunks)
            pieces = torch.frombuffer(data, dtype=torch.uint8)
        else:
            pieces = torch.empty(nbytes, dtype=torch.uint8)
        self._finish(self._group.broadcast(pieces, rank))
        if operation is not None:
            self._write(operation, chunks, pieces)

    def reduce(self, operation: Operation, ranges: Sequence[Sequence[int]]) -> None:
        """All-reduce these parts of a buffer; narrow types as fp32, to be rounded once."""
        if not ranges:
            return
        dtype = operation.dtype
        is_narrow = dtype not in _TYPES
        whole = torch.frombuffer(operation.view, dtype=torch.uint8)
        pieces = torch.cat([whole[low:high] for low, high in ranges])
        if is_narrow:
            wide = torch.empty(len(pieces) // dtype.itemsize * dtype.values)
            self._casts.widen(pieces.numpy().data, _bytes_of(wide), dtype)
        else:
            wide = pieces.view(_TYPES[dtype])
        lost = torch.isnan(wide).to(torch.uint8)
        self._finish(self._group.allreduce([wide], _OPS[operation.op]))
        if operation.op in {ReduceOp.MIN, ReduceOp.MAX} and wide.is_floating_point():
            # Gloo's own may drop a NaN, where reducers pass it on.
            self._finish(self._group.allreduce([lost], dist.ReduceOp.MAX))
            wide[lost.bool()] = torch.nan
        if operation.op is ReduceOp.MEAN:
            wide /= self.size
        if dtype.is_block:
            casts.dither(_bytes_of(wide), pieces.numpy().data, dtype)
        elif is_narrow:
            self._casts.narrow(_bytes_of(wide), pieces.numpy().data, dtype)
        self._write(operation, ranges, pieces)

    def _write(
        self, operation: Operation, ranges: Sequence[Sequence[int]], pieces: torch.Tensor
    ) -> None:
        """Put results where they belong, unless the caller has its buffer back."""
        with self._writing:
            if self.stopped:
                return
            whole = torch.frombuffer(operation.view, dtype=torch.uint8)
            for low, high in ranges:
                whole[low:high] = pieces[: high - low]
                pieces = pieces[high - low :]

    def _finish(self, work: dist.Work) -> None:
        """Wait for the end of something, or of the client.

        Not in a call of Gloo's: one that returns while the interpreter ends takes the process down.
        So does a thread of Gloo's that drops the last reference to a work then, as its tensors need
        the interpreter's lock. So this thread keeps it until Gloo has ended it.
        """
        pause_s = SHORTEST_PAUSE_S
        while not work.is_completed():
            if self.stopped:
                self._idle.set()
                pause_s = KEPT_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if self._idle.is_set():
            time.sleep(KEPT_S)  # Gloo's thread has yet to drop its own reference
            raise LocalProtocolError("this client was shut down")
        work.wait()  # raises what went wrong


def _bytes_of(floats: torch.Tensor) -> memoryview:
    return floats.numpy().view(np.uint8).data
