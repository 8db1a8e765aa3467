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
from worker_client.runtime.trace import Copies
from worker_client.staging import device
from worker_client.staging.buffer_pool import BufferPool
from worker_client.staging.split_call import Piece, SplitCall, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from reducer.wire.constants import ReduceOp
    from worker_client.runtime.trace import Trace
    from worker_client.staging.device import Copy, Device
    from worker_client.staging.host_buffer import Flat

    End = tuple[SplitCall, Device, Operation, Exception | None]  # of a piece

# DDP's buckets come back every step, but those of the first step never do.
BLOCK_TURNS = 1024

log = logging.getLogger(__name__)


class DeviceCopies:
    """The copies of one call, to page-locked memory and back. Calls refer to it, not it to them.

    The caller's thread calls `ask`; everything after that is for the returning thread.

    Args:
        flat: the tensor's bytes, on the device.
        device: where the tensor is.
        blocks: page-locked memory of that device.
    """

    def __init__(self, flat: Flat, device: Device, blocks: BufferPool[torch.Tensor]) -> None:
        self._flat = flat
        self._device = device
        self._blocks = blocks
        self._block: torch.Tensor
        self._back: Copy | None = None  # the last copy to the device

    def ask(self, call: object, op: ReduceOp, timeout_s: float) -> list[Piece]:
        """Ask for the copies to the host, behind what the caller's stream has to do.

        Raises:
            ConfigError: the caller's stream is being captured.
            DeviceError: the device failed.
        """
        data, dtype = self._flat.data, self._flat.dtype
        ends = cut(data.nbytes)
        self._device.follow(data, self._flat.target)
        self._block = self._blocks.take(data.nbytes)
        pieces = []
        try:
            for number, (start, end) in enumerate(ends, 1):
                part = self._block[start:end]
                copied = self._device.to_host(part, data[start:end])
                what = None
                if len(ends) > 1:  # from which ranks see that the whole differs in size
                    what = f"piece {number} of {len(ends)}, of {data.nbytes} bytes in all"
                more = number < len(ends)
                operation = Operation(
                    part.numpy().data, dtype, op, what, timeout_s, call=call, more=more
                )
                copy_back = partial(self._copy_back, data[start:end], part)
                pieces.append(Piece(operation, copied.wait, copy_back))
        except BaseException:
            self._blocks.forget(self._block)
            raise
        return pieces

    def settle(self, error: Exception | None) -> None:
        """Wait for the copies to the device, and give the memory back unless the device failed.

        Args:
            error: of the call.

        Raises:
            DeviceError: the device failed.
        """
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
        self._back = self._device.to_device(target, source)


class DeviceStaging:
    """What a client does with tensors on devices. It has no threads until there is one.

    Args:
        submit: starts an all-reduce of host memory, in the order of calls.
        trace: shows what becomes of calls, while there is a timeline.

    Attributes:
        bytes_reduced: of all pieces so far.
    """

    def __init__(self, submit: Callable[[Operation], object], trace: Trace) -> None:
        self.bytes_reduced = 0
        self._trace = trace
        self._submit = submit
        self._devices: dict[torch.device, tuple[Device, BufferPool[torch.Tensor]]] = {}
        self._failure: Exception | None = None  # a piece was not contributed: the order is lost
        # Calls as they were made, each with its pieces; the first stays until it was submitted.
        self._line: deque[tuple[SplitCall | None, Sequence[Piece]]] = deque()
        # The first one is woken to look at the line, or to leave; the other one gets pieces that
        # have ended, and None: no more will be submitted.
        self._sending = ServiceThread[None]("to-host", self._send)
        self._returning: ServiceThread[End | None] = ServiceThread("to-device", self._return)
        self._threads = (self._sending, self._returning)
        self._calls: set[SplitCall] = set()  # being submitted, or submitted and not ended
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

    def all_reduce(
        self,
        call: object,
        end: Callable[[Exception | None], object],
        flat: Flat,
        *,
        op: ReduceOp,
        timeout_s: float,
    ) -> None:
        """Start an all-reduce of a tensor on a device.

        Args:
            call: what its operations have in common.
            end: called with its error or None when the result is on the device, once or more often.
            flat: the tensor's bytes.
            op: reduction.
            timeout_s: seconds for each piece, from when it is in host memory.

        Raises:
            ConfigError: the current stream is being captured.
            DeviceError: the device failed.
            LocalProtocolError: the client was shut down.
        """
        self._check()
        opened, blocks = self._open(flat.data.device)
        copies = DeviceCopies(flat, opened, blocks)
        try:
            pieces = copies.ask(call, op, timeout_s)
        except DeviceError as error:
            self._failure = error
            raise
        steps = None
        if self._trace.timeline is not None:
            steps = Copies(self._trace, flat.data.nbytes)
            pieces = [piece._replace(prepare=steps.copied(piece.prepare)) for piece in pieces]
            end = steps.finished(end)
        made = SplitCall(pieces, end, name=None, release=copies.settle)
        for piece in pieces:
            ended = partial(self._piece_ended, made, opened, piece.operation)
            piece.operation.ended = ended if steps is None else steps.reduced(ended)
        self._stand_in_line(made, pieces)

    def follow(self, operation: Operation) -> None:
        """Submit an all-reduce of host memory when all calls before it were.

        Raises:
            LocalProtocolError: the client was shut down.
            DeviceError: a call before it could not be made.
        """
        self._stand_in_line(None, [Piece(operation)])

    def stop(self, wait: bool) -> None:
        """Submit nothing any more, and end what has not; the client submits nothing, either.

        Args:
            wait: for that to be done, and for copies on their way.
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

    def _stand_in_line(self, call: SplitCall | None, pieces: Sequence[Piece]) -> None:
        with self._lock:
            self._check()
            self._line.append((call, pieces))
        self._sending.queue.put(None)

    def _piece_ended(
        self, call: SplitCall, opened: Device, operation: Operation, error: Exception | None
    ) -> None:
        if error is None:
            self.bytes_reduced += operation.view.nbytes
        self._returning.queue.put((call, opened, operation, error))

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

        Returns:
            Why nothing is to be submitted after it: `failure` if there is one, or its own.
        """
        call, pieces = self._line[0]
        if call is not None:
            self._calls.add(call)
        for piece in pieces:
            try:
                if piece.prepare is not None:
                    piece.prepare()
            except Exception as error:  # noqa: BLE001 (whoever waits gets it)
                self._failure = failure = failure or error
            refusal = failure
            if refusal is None:
                try:
                    self._submit(piece.operation)
                except ReductionError as error:
                    refusal = error
            if refusal is not None:
                piece.operation.end(refusal)
        self._line.popleft()
        return failure

    # -- the returning thread -----------------------------------------------------------------

    def _return(self) -> None:
        sending = True
        while sending or self._calls:
            sending = self._bring_back(self._returning.queue.get()) and sending

    def _bring_back(self, end: End | None) -> bool:
        """Take note of the end of a piece; return whether more may be submitted."""
        if end is None:
            return False
        call, opened, operation, error = end
        if call.all_ended(operation, error):
            with ExitStack() as stack:
                call.attempt(lambda: stack.enter_context(opened.returning()))
                call.finish()
            self._calls.discard(call)
        return True
