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
import queue
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import DeviceError, LocalProtocolError, ReductionError
from worker_client.runtime.driver import STOP_S
from worker_client.staging import device
from worker_client.staging.buffer_pool import BufferPool
from worker_client.staging.staged_call import StagedCall

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from reducer.wire.constants import ReduceOp
    from worker_client.protocol.operation import Operation
    from worker_client.staging.device import Copy, Device
    from worker_client.staging.staging import Flat
    from worker_client.work import Work

    Ended = Callable[[Exception | None], None]
    Submit = Callable[[Operation, Ended], None]

# DDP's buckets come back every step, but those of the first step never do.
BLOCK_TURNS = 1024

log = logging.getLogger(__name__)


class _Turn(NamedTuple):
    """What is to be submitted.

    Attributes:
        operation: an all-reduce of host memory.
        copied: when its contribution is there; None if it was already.
        ended: whom to tell of its end.
    """

    operation: Operation
    copied: Copy | None
    ended: Ended


class DeviceStaging:
    """What a client does with tensors on devices. It has no threads until there is one.

    Args:
        submit: starts an all-reduce of host memory, in the order of calls, and has it ended.
    """

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._devices: dict[torch.device, tuple[Device, BufferPool[torch.Tensor]]] = {}
        self._failure: Exception | None = None  # a piece was not contributed: the order is lost
        # Calls as they were made, each with its pieces; the first stays until it was submitted.
        self._line: deque[tuple[StagedCall | None, list[_Turn]]] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # look at the line, or leave
        # Pieces that have ended, and how; None: no more will be submitted.
        self._ended: queue.SimpleQueue[tuple[StagedCall, int, Exception | None] | None]
        self._ended = queue.SimpleQueue()
        self._calls: set[StagedCall] = set()  # being submitted, or submitted and not ended
        self._closing = False
        # Guards `_closing`, `_devices` and `_threads`. A signal handler may take it again.
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []

    @property
    def in_order(self) -> bool:
        """Whether all calls so far were submitted, so that the next one need not wait here."""
        return not self._line and self._failure is None

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is in a callback of a call that has ended here."""
        return threading.current_thread() in self._threads

    def all_reduce(
        self,
        call: object,
        work: Work,
        tensor: torch.Tensor,
        flat: Flat,
        *,
        op: ReduceOp,
        name: str | None,
        timeout_s: float,
    ) -> None:
        """Start an all-reduce of a tensor on a device, which ends `work`.

        Args:
            call: what its operations have in common.
            work: the caller's handle.
            tensor: the caller's, of which `flat` are the bytes.
            flat: what is to be reduced.
            op: reduction.
            name: the caller's name for it, compared between ranks; None for none.
            timeout_s: seconds for each piece, from when it is in host memory.

        Raises:
            ConfigError: the current stream is being captured.
            DeviceError: the device failed.
            LocalProtocolError: the client was shut down.
        """
        self._check()
        opened, blocks = self._open(flat.data.device)
        try:
            staged = StagedCall(work, tensor, flat, opened, blocks)
            staged.ask(call, op, name, timeout_s)
        except DeviceError as error:
            self._failure = error
            raise
        turns = [
            _Turn(piece.operation, piece.copied, partial(self._piece_ended, staged, at))
            for at, piece in enumerate(staged.pieces)
        ]
        self._stand_in_line(staged, turns)

    def follow(self, operation: Operation, ended: Ended) -> None:
        """Submit an all-reduce of host memory when all calls before it were.

        Raises:
            LocalProtocolError: the client was shut down.
            DeviceError: a call before it could not be made.
        """
        self._stand_in_line(None, [_Turn(operation, None, ended)])

    def stop(self, wait: bool) -> None:
        """Submit nothing any more, and end what has not; the client submits nothing, either.

        Args:
            wait: for that to be done, and for copies on their way.
        """
        with self._lock:
            self._closing = True
            threads = list(self._threads)
        self._wake.put(None)
        for thread in threads:
            if wait and thread.is_alive() and thread is not threading.current_thread():
                thread.join(STOP_S)
                if thread.is_alive():
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
            if not self._threads:
                self._threads = [
                    threading.Thread(target=target, name=name, daemon=True)
                    for target, name in ((self._send, "to-host"), (self._return, "to-device"))
                ]
            for thread in self._threads:
                if thread.ident is None:  # Ctrl-C may have come before it was started
                    thread.start()
            return self._devices[of]

    def _stand_in_line(self, call: StagedCall | None, turns: list[_Turn]) -> None:
        with self._lock:
            self._check()
            self._line.append((call, turns))
        self._wake.put(None)

    def _piece_ended(self, call: StagedCall, at: int, error: Exception | None) -> None:
        self._ended.put((call, at, error))

    # -- the sending thread -------------------------------------------------------------------

    def _send(self) -> None:
        failure: Exception | None = None
        while self._line or not self._closing:
            self._wake.get()
            while self._line:
                failure = self._submit_first(failure)
        self._ended.put(None)

    def _submit_first(self, failure: Exception | None) -> Exception | None:
        """Submit the pieces of the call that is first in the line, or end them.

        Returns:
            Why nothing is to be submitted after it: `failure` if there is one, or its own.
        """
        call, turns = self._line[0]
        if call is not None:
            self._calls.add(call)
        for turn in turns:
            try:
                if turn.copied is not None:
                    turn.copied.wait()
            except Exception as error:  # noqa: BLE001 (whoever waits gets it)
                self._failure = failure = failure or error
            refusal = failure
            if refusal is None:
                try:
                    self._submit(turn.operation, turn.ended)
                except ReductionError as error:
                    refusal = error
            if refusal is not None:
                turn.ended(refusal)
        self._line.popleft()
        return failure

    # -- the returning thread -----------------------------------------------------------------

    def _return(self) -> None:
        sending = True
        while sending or self._calls:
            sending = self._bring_back(self._ended.get()) and sending

    def _bring_back(self, end: tuple[StagedCall, int, Exception | None] | None) -> bool:
        """Take note of the end of a piece; return whether more may be submitted."""
        if end is None:
            return False
        call, at, error = end
        if call.piece_ended(at, error):
            call.finish()
            self._calls.discard(call)
        return True
