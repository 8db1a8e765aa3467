"""Calls that several all-reduces make up, one after another."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING

from reducer.errors import ReductionError
from reducer.wire.constants import BLOCK_VALUES, PLACES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker_client.protocol.operation import Operation

PIECE_BYTES = 4 << 20  # long on a link beside what an all-reduce costs, short beside a bucket
_MOST = PLACES - 2  # pieces of one call: those of a large tensor are larger
_ALIGNMENT = 64  # of pieces, in bytes: a multiple of every element's size
_BLOCKS = math.lcm(_ALIGNMENT, 4 * BLOCK_VALUES)  # the same, of float32 in blocks of the wire


def cut(nbytes: int, *, rounded: bool) -> list[tuple[int, int]]:
    """Return first and last byte (exclusive) of each piece: equal ones, mostly of `PIECE_BYTES`.

    Ranks must cut alike, so nothing may count but the size, and whether the call is rounded.
    """
    alignment = _BLOCKS if rounded else _ALIGNMENT
    count = min(_MOST, max(1, -(-nbytes // PIECE_BYTES)))
    step = max(1, -(-nbytes // (count * alignment))) * alignment
    return [(at, min(at + step, nbytes)) for at in range(0, max(1, nbytes), step)]


def part_bytes(nbytes: int, ranks: int, *, rounded: bool) -> int:
    """Return the size of the equal parts that ranks of a node have of a buffer, in bytes.

    All parts together may be larger than the buffer: the last ones are smaller, or empty. What is
    rounded in blocks has the same ones, however it is cut.
    """
    alignment = _BLOCKS if rounded else _ALIGNMENT
    return -(-nbytes // (ranks * alignment)) * alignment


def submit_pieces(
    whole: Operation,
    pieces: Sequence[Operation],
    submit: Callable[[Operation], object],
    release: Callable[[Exception | None], object] | None = None,
    *,
    filled: int | None = None,
) -> None:
    """Submit the pieces of a call, in the order that is the same at all ranks, each when filled.

    Args:
        whole: what they make up; it ends with the last of them.
        pieces: at least one.
        submit: submits one of them.
        release: as of `Operation.split`.
        filled: number of pieces that this thread fills; the driver fills the others when it begins
            them. None: this thread fills all.

    Raises:
        ReductionError: the first could not be submitted. After that one, the call ends with it.
    """
    whole.split(pieces, release)
    stopped: ReductionError | None = None
    for number, piece in enumerate(pieces, 1):
        piece.more = piece.more or number < len(pieces)
        piece.ended = partial(whole.piece_ended, piece)
        if filled is not None and number > filled:
            piece.begun = time.monotonic()  # from now on its deadline counts
        elif piece.fill is not None:
            piece.fill()
            piece.fill = None  # once, whatever else it waits for
        if stopped is None:
            try:
                submit(piece)
            except ReductionError as error:
                if number == 1:
                    raise
                stopped = error
        if stopped is not None:  # pieces before it are on their way
            piece.end(stopped)
