"""A ring all-reduce over ZeroMQ with our kernels: what a ring would be with our means.

The buffer is cut into n segments, a segment into chunks. Every rank receives from the one before it
and sends to the one after it. In n-1 steps of reduce-scatter the partial sum of a segment goes
round and every rank adds its own; in n-1 steps of all-gather the sums go round. No step waits
for the one before as a whole: a chunk goes on as soon as it is there, so that the links are always
busy. The same chunks leave a rank in the order in which they come, and so a chunk needs no header:
the k-th that comes says by its number which it is.

Chunks are sent from the buffer itself, without a copy. That is safe: a chunk of the buffer is only
written when one comes that was made from what was sent, so that what was sent has arrived; except
at the very end, where `all_reduce` waits until the last ones have left.
"""

from collections.abc import Callable, Sequence
from functools import partial

import zmq

from bench.contenders import AllReduce, Place
from harness.oracle import Array
from reducer import kernels
from reducer.wire.constants import DType, ReduceOp

SMALLEST, LARGEST = 64 << 10, 256 << 10  # bytes of a chunk, where the segment allows
PER_SEGMENT = 4  # chunks, so that adding one overlaps with receiving the next
TIMEOUT_MS = 300_000
ITEM = 4


class Ring(AllReduce):
    """One rank of the ring."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._context = zmq.Context()
        self._before = self._socket(zmq.PULL)
        self._after = self._socket(zmq.PUSH)
        self._kernels = kernels.select()

    def offer(self) -> str:
        """Listen for the rank before this one and return the endpoint."""
        self._before.bind(f"tcp://{self._place.address}:0")
        return self._before.getsockopt_string(zmq.LAST_ENDPOINT)

    def join(self, offers: Sequence[str]) -> None:
        """Connect to the rank after this one."""
        self._after.connect(offers[(self._place.rank + 1) % len(offers)])

    def bind(self, *arrays: Array) -> Callable[[], object]:
        """As `AllReduce.bind`."""
        calls = [partial(self.all_reduce, array, self._cut(array)) for array in arrays]
        return lambda: [call() for call in calls]

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=1000)

    def all_reduce(self, array: Array, segments: list[list[slice]]) -> None:
        """Sum `array`, cut into `segments` of equally many chunks, over all ranks."""
        n, rank = len(segments), self._place.rank
        chunks = len(segments[0])
        last_step = 2 * (n - 1) - 1
        for part in segments[rank]:
            self._after.send(array[part].data, copy=False)
        leaving = []
        for step in range(last_step + 1):
            for part in segments[(rank - step - 1) % n]:
                frame = self._before.recv(copy=False)
                own = array[part]
                if step < n - 1:
                    self._kernels.reduce([frame.buffer, own], own, DType.FLOAT32, ReduceOp.SUM)
                else:
                    own.data.cast("B")[:] = frame.buffer
                if step < last_step:
                    leaving.append(self._after.send(own.data, copy=False, track=True))
                    del leaving[:-chunks]
        for tracker in leaving:
            tracker.wait()

    def _cut(self, array: Array) -> list[list[slice]]:
        """Cut the elements into a segment per rank; some chunks are empty if there are few."""
        n = self._place.world_size
        segment = -(-array.size // n)
        chunk_bytes = min(LARGEST, max(SMALLEST, segment * ITEM // PER_SEGMENT))
        chunk = min(segment, chunk_bytes // ITEM)
        starts = range(0, segment, chunk)
        return [
            [
                slice(
                    min(first + start, array.size),
                    min(first + min(start + chunk, segment), array.size),
                )
                for start in starts
            ]
            for first in range(0, n * segment, segment)
        ]

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # what is under way is bounded by the buffer
        socket.rcvtimeo = socket.sndtimeo = TIMEOUT_MS
        return socket
