"""All-reduces of tensors on devices: through page-locked host memory, piece by piece.

The caller's thread asks for all copies to the host, which a stream of the device makes one after
another. The sending thread waits for each, and hands that piece to the reducers while the next
ones are still on their way. The returning thread asks for the copy back of each piece that has its
result, and ends the all-reduce after the last. So the network, both directions of the bus and the
caller's own work overlap, and neither the caller nor the client's driver waits for a device.

Ranks must make the same calls in the same order. So what is called while pieces wait for their
copies waits behind them, all-reduces of host memory as well.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from reducer.errors import DeviceError, LocalProtocolError, ReductionError
from worker_client.protocol.operation import Operation
from worker_client.runtime.service_thread import STOP_S, ServiceThread
from worker_client.runtime.trace import CopyTimings
from worker_client.staging import device
from worker_client.staging.buffer_pool import BufferPool
from worker_client.staging.split_call import cut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from worker_client.runtime.trace import Trace
    from worker_client.staging.device import Copy, Device
    from worker_client.staging.host_buffer import Flat

    End = tuple[Operation, "DeviceCopies", Operation, Exception | None]  # of a call's piece

# DDP's buckets come back every step, but those of the first step never do. What is rounded has a
# block for each gradient, of which a model may have thousands.
BLOCK_TURNS = 4096

log = logging.getLogger(__name__)


class DeviceCopies:
    """The copies of one call, to page-locked memory and back. Calls refer to it, not it to them.

    The caller's thread calls `ask`; everything after that is for the returning thread.
    """

    def __init__(self, flat: Flat, device: Device, blocks: BufferPool[torch.Tensor]) -> None:
        self.device = device
        self._flat = flat
        self._blocks = blocks
        self._block: torch.Tensor
        self._ways: dict[Operation, tuple[torch.Tensor, torch.Tensor]] = {}  # back, of each piece
        self._back: Copy | None = None  # the last copy to the device

    def ask(self, whole: Operation) -> list[Operation]:
        """Ask for the copies to the host, behind what the caller's stream has to do.

        The call's `view` becomes where they are. Returns its pieces, which are rounded if it is.

        Raises:
            ConfigError: the caller's stream is being captured.
            DeviceError: the device failed.
        """
        data = self._flat.data
        ends = cut(data.nbytes, rounded=whole.rounded)
        self.device.follow(data, self._flat.target)
        self._block = self._blocks.take(data.nbytes)
        whole.view = self._block.numpy().data
        try:
            for number, (start, end) in enumerate(ends, 1):
                part = self._block[start:end]
                copied = self.device.to_host(part, data[start:end])
                what = None
                if len(ends) > 1:  # from which ranks see that the whole differs in size
                    what = f"piece {number} of {len(ends)}, of {data.nbytes} bytes in all"
                piece = Operation(
                    part.numpy().data,
                    whole.dtype,
                    whole.op,
                    what,
                    whole.timeout_s,
                    call=whole.call,
                    more=number < len(ends),
                    rounded=whole.rounded,
                    residual=None if whole.residual is None else whole.residual[start:end],
                )
                piece.cut = True
                piece.fill = copied.wait
                self._ways[piece] = data[start:end], part
        except BaseException:
            self._blocks.forget(self._block)
            raise
        return list(self._ways)

    def bring_back(self, piece: Operation) -> None:
        """Ask for the copy to the device of a piece that has its result."""
        self._copy_back(*self._ways[piece])

    def settle(self, error: Exception | None) -> None:
        """Wait for the copies to the device, and give the memory back unless the device failed."""
        failed = isinstance(error, DeviceError)
        try:
            try:
                if error is None and self._flat.copy is not None:
                    self._copy_back(self._flat.target, self._flat.copy)
            finally:
                if self._back is not None:
                    self._back.wait()  # and so for all before it, as a stream keeps their order
        except DeviceError:
            failed = True
            raise
        finally:
            if failed:  # the device may still use it
                self._blocks.forget(self._block)
            else:
                self._blocks.give_back(self._block)

    def _copy_back(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._back = self.device.to_device(target, source)


class DeviceStaging:
    """What a client does with tensors on devices. It has no threads until there is one."""

    def __init__(self, submit: Callable[[Operation], object], trace: Trace) -> None:
        self.bytes_reduced = 0
        self._trace = trace
        self._submit = submit
        self._devices: dict[torch.device, tuple[Device, BufferPool[torch.Tensor]]] = {}
        self._failure: Exception | None = None  # a piece was not contributed: the order is lost
        # Calls as they were made, each with its pieces; the first stays until it was submitted.
        self._line: deque[tuple[Operation | None, Sequence[Operation]]] = deque()
        # The first one is woken to look at the line, or to leave; the other one gets pieces that
        # have ended, and None: no more will be submitted.
        self._sending = ServiceThread[None]("to-host", self._send)
        self._returning: ServiceThread[End | None] = ServiceThread("to-device", self._return)
        self._threads = (self._sending, self._returning)
        self._calls: set[Operation] = set()  # being submitted, or submitted and not ended
        self._closing = False
        # Guards `_closing` and `_devices`. A signal handler may take it again.
        self._lock = threading.RLock()

    @property
    def in_order(self) -> bool:
        """Whether all calls so far were submitted, so that the next one need not wait here."""
        return not self._line and self._failure is None

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is in a callback of a call that has ended here."""
        return any(thread.is_current for thread in self._threads)

    def device(self, of: torch.device) -> Device:
        """Return a device that it copies from and to."""
        opened, _ = self._open(of)
        return opened

    def all_reduce(self, whole: Operation, flat: Flat) -> None:
        """Start an all-reduce of a tensor on a device; it ends when the result is there.

        Its timeout is for each piece, from when that is in host memory.

        Raises:
            ConfigError: the current stream is being captured.
            DeviceError: the device failed.
            LocalProtocolError: the client was shut down.
        """
        self._check()
        opened, blocks = self._open(flat.data.device)
        copies = DeviceCopies(flat, opened, blocks)
        try:
            pieces = copies.ask(whole)
        except DeviceError as error:
            self._failure = error
            raise
        steps = None
        if self._trace.timeline is not None:
            steps = CopyTimings(self._trace, flat.data.nbytes)
            whole.ended = steps.finished(whole.ended)
        whole.split(pieces, copies.settle)
        for piece in pieces:
            piece.ended = partial(self._piece_ended, whole, copies, piece)
            if steps is not None:
                piece.fill = steps.copied(piece.fill)
                piece.ended = steps.reduced(piece.ended)
        self._stand_in_line(whole, pieces)

    def follow(self, operation: Operation) -> None:
        """Submit an all-reduce of host memory when all calls before it were.

        Raises:
            LocalProtocolError: the client was shut down.
            DeviceError: a call before it could not be made.
        """
        self._stand_in_line(None, [operation])

    def stop(self, wait: bool) -> None:
        """Submit nothing any more, and end what has not; the client submits nothing, either.

        With `wait`, return when that is done, and copies on their way have been made.
        """
        with self._lock:
            self._closing = True
        self._sending.queue.put(None)
        for thread in self._threads:
            if wait and not thread.wait_for_end():
                log.warning("a device has not made all copies after %g s", STOP_S)

    def _check(self) -> None:
        if self._closing:
            raise LocalProtocolError("this client was shut down")
        if self._failure is not None:
            raise copy.copy(self._failure) from self._failure

    def _open(self, of: torch.device) -> tuple[Device, BufferPool[torch.Tensor]]:
        with self._lock:
            if of not in self._devices:
                opened = device.open_device(of)
                self._devices[of] = opened, BufferPool(opened.pinned, turns=BLOCK_TURNS)
            for thread in self._threads:
                thread.start()
            return self._devices[of]

    def _stand_in_line(self, call: Operation | None, pieces: Sequence[Operation]) -> None:
        with self._lock:
            self._check()
            self._line.append((call, pieces))
        self._sending.queue.put(None)

    def _piece_ended(
        self, call: Operation, copies: DeviceCopies, piece: Operation, error: Exception | None
    ) -> None:
        if error is None:
            self.bytes_reduced += piece.view.nbytes
        self._returning.queue.put((call, copies, piece, error))

    # -- the sending thread -------------------------------------------------------------------

    def _send(self) -> None:
        failure: Exception | None = None
        while self._line or not self._closing:
            self._sending.queue.get()
            while self._line:
                failure = self._submit_first(failure)
        self._returning.queue.put(None)

    def _submit_first(self, failure: Exception | None) -> Exception | None:
        """Submit the pieces of the call that is first in the line, or end them.

        Return why nothing is to be submitted after it: `failure` if there is one, or its own.
        """
        call, pieces = self._line[0]
        if call is not None:
            self._calls.add(call)
        for piece in pieces:
            try:
                if piece.fill is not None:
                    piece.fill()
                    piece.fill = None
            except Exception as error:  # noqa: BLE001 (its waiter gets it)
                self._failure = failure = failure or error
            refusal = failure
            if refusal is None:
                try:
                    self._submit(piece)
                except ReductionError as error:
                    refusal = error
            if refusal is not None:
                piece.end(refusal)
        self._line.popleft()
        return failure

    # -- the returning thread -----------------------------------------------------------------

    def _return(self) -> None:
        sending = True
        while sending or self._calls:
            sending = self._bring_back(self._returning.queue.get()) and sending

    def _bring_back(self, end: End | None) -> bool:
        """Record the end of a piece; return whether more may be submitted."""
        if end is None:
            return False
        call, copies, piece, error = end
        with ExitStack() as stack:
            try:
                stack.enter_context(copies.device.returning())
                if error is None and call.error is None:
                    copies.bring_back(piece)
            except Exception as failure:  # noqa: BLE001 (its waiter gets it)
                error = error or failure
            call.piece_ended(piece, error)
        if call.over:
            call.view = memoryview(b"")  # the memory may be another call's now
            self._calls.discard(call)
        return True
