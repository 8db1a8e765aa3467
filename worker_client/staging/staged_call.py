"""One all-reduce of a tensor on a device: its pieces, their way to the host and back."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import DeviceError, ReductionError
from reducer.wire.constants import PLACES
from worker_client.protocol.operation import Operation

if TYPE_CHECKING:
    import torch

    from reducer.wire.constants import ReduceOp
    from worker_client.staging.buffer_pool import BufferPool
    from worker_client.staging.device import Copy, Device
    from worker_client.staging.staging import Flat
    from worker_client.work import Work

PIECE_BYTES = 4 << 20  # long on a link beside what an all-reduce costs, short beside a bucket
_MOST = PLACES - 2  # pieces of one call: those of a large tensor are larger
_ALIGNMENT = 64  # of pieces, in bytes: a multiple of every element's size


class Piece(NamedTuple):
    """A part of a tensor that is all-reduced by itself.

    Attributes:
        operation: that all-reduce, in host memory.
        copied: the copy to there.
    """

    operation: Operation
    copied: Copy


def cut(nbytes: int) -> list[tuple[int, int]]:
    """Return first and last byte (exclusive) of each piece: equal ones, mostly of `PIECE_BYTES`.

    Ranks must cut alike, so nothing but the size may count.
    """
    count = min(_MOST, max(1, -(-nbytes // PIECE_BYTES)))
    step = max(1, -(-nbytes // (count * _ALIGNMENT))) * _ALIGNMENT
    return [(at, min(at + step, nbytes)) for at in range(0, max(1, nbytes), step)]


class StagedCall:
    """One all-reduce, which has ended when all its pieces have, and all copies.

    The pieces are asked for by the caller's thread; everything after that is for one other thread.

    Args:
        work: the caller's handle.
        tensor: the caller's.
        flat: its bytes, on the device.
        device: where it is.
        blocks: page-locked memory of that device.

    Attributes:
        pieces: in their order.
        error: the first one.
    """

    def __init__(
        self,
        work: Work,
        tensor: torch.Tensor,
        flat: Flat,
        device: Device,
        blocks: BufferPool[torch.Tensor],
    ) -> None:
        self.pieces: list[Piece] = []
        self.error: Exception | None = None
        self._work = work
        self._tensor = tensor
        self._flat = flat
        self._device = device
        self._blocks = blocks
        self._block: torch.Tensor  # of host memory
        self._ends: list[tuple[int, int]] = []
        self._left: set[int] = set()  # pieces that have not ended
        self._back: Copy | None = None  # the last copy to the device
        self._name: str | None = None

    def ask(self, call: object, op: ReduceOp, name: str | None, timeout_s: float) -> None:
        """Ask for the copies to the host, behind what the caller's stream has to do.

        Raises:
            ConfigError: the caller's stream is being captured.
            DeviceError: the device failed.
        """
        data, dtype = self._flat.data, self._flat.dtype
        self._name = name
        self._ends = cut(data.nbytes)
        self._left = set(range(len(self._ends)))
        self._device.follow(data, self._flat.target)
        self._block = self._blocks.take(data.nbytes)
        try:
            for at, (start, end) in enumerate(self._ends):
                part = self._block[start:end]
                copied = self._device.to_host(part, data[start:end])
                called = self._called(at)
                view = part.numpy().data
                operation = Operation(view, dtype, op, called, timeout_s, call=call)
                self.pieces.append(Piece(operation, copied))
        except BaseException:
            self._blocks.forget(self._block)
            raise

    def _called(self, at: int) -> str | None:
        """Return a piece's name, by which ranks see that the whole differs in size."""
        if len(self._ends) == 1:
            return self._name
        of = f"piece {at + 1} of {len(self._ends)}, of {self._flat.data.nbytes} bytes in all"
        return of if self._name is None else f"{self._name} ({of})"

    def piece_ended(self, at: int, error: Exception | None) -> bool:
        """Bring a piece's result back, unless another one has failed; return whether all ended.

        What a piece is said to end with after its end does not count.
        """
        if at not in self._left:
            return False
        self._left.remove(at)
        self._fail(error)
        part = slice(*self._ends[at])
        self._copy_back(self._flat.data[part], self._block[part])
        return not self._left

    def finish(self) -> None:
        """Wait for the copies to the device, and tell the caller."""
        if self._flat.copy is not None:
            self._copy_back(self._flat.target, self._flat.copy)
        try:
            if self._back is not None:
                self._back.wait()  # and so for all before it, as a stream keeps their order
        except Exception as error:  # noqa: BLE001 (whoever waits gets it)
            self._fail(error)
        if isinstance(self.error, DeviceError):  # which may still use it
            self._blocks.forget(self._block)
        else:
            self._blocks.give_back(self._block)
        with ExitStack() as stack:
            try:
                stack.enter_context(self._device.returning())
            except Exception as error:  # noqa: BLE001 (as above)
                self._fail(error)
            self._work.finish(self._tensor, self.error)

    def _copy_back(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.error is not None:
            return
        try:
            self._back = self._device.to_device(target, source)
        except Exception as error:  # noqa: BLE001 (whoever waits gets it)
            self._fail(error)

    def _fail(self, error: Exception | None) -> None:
        if self.error is None and error is not None:
            error = copy.copy(error)
            if isinstance(error, ReductionError):
                error.name = self._name  # the piece's own is in the message
            self.error = error
