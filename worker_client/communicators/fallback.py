"""All-reduces through the process group, while no reducer is left.

First the calls that some rank may not have finished: what any rank has of their results, the others
get from it; the rest is all-reduced. All ranks so have the same bits; where the process group
summed, these may differ from a reducer's in the last place, as it adds in an order of its own.

With every call through it the ranks tell each other what they ask for, and so also, at no further
cost, whether they could go back to the reducers (`worker_client.communicators.returning`).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reducer.errors import LocalProtocolError, MismatchError, ReducerLostError, ReductionError
from reducer.wire.constants import PLACES, DType, ReduceOp
from worker_client.communicators.returning import Offer
from worker_client.protocol.calls import FIRST_PLACE
from worker_client.protocol.handover import Held, gaps, held, merge
from worker_client.protocol.names import own, refused
from worker_client.runtime.service_thread import STOP_S, ServiceThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker_client.communicators.returning import Returning
    from worker_client.protocol.operation import Operation, Unfinished

_TYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT64: torch.float64,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
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
KEPT_S = 0.1  # the same, once the client was shut down
_REFUSAL_SHOWN = 500

log = logging.getLogger(__name__)


class Stay:
    """What one session hands over, whose reducers are lost.

    Args:
        fallback: whose thread brings it to its end.
        ended: called with each call that has ended, and its error or None.
        back: the way back to the reducers, if there is one.

    Attributes:
        begun: calls were handed over.
        first, shares: as of `merge`, once the ranks have met.
        failure: why no call succeeds any more.
        over: the ranks have gone back; what is handed over is passed on there.
    """

    def __init__(
        self,
        fallback: Fallback,
        ended: Callable[[Operation, ReductionError | None], None],
        back: Returning | None,
    ) -> None:
        self.ended = ended
        self.back = back
        self.begun = False
        self.first = 0
        self.shares: dict[int, list[Held]] | None = None
        self.failure: ReductionError | None = None
        self.over = False
        self._fallback = fallback

    def take(self, calls: list[Unfinished]) -> None:
        """Bring calls to their end, one after another.

        Args:
            calls: with numbers that go on from those of the time before; none is fine.
        """
        self._fallback.take(self, calls)


class Fallback:
    """A thread that all-reduces through a process group, from the first call that it is given.

    Args:
        group: of all ranks, used for nothing else; its timeout bounds every call.
        announced: whether another one says, at the same loss, what becomes of all-reduces.

    Attributes:
        announced: as given.
        count: all-reduces that ended well here.
    """

    def __init__(self, group: dist.ProcessGroup, *, announced: bool = False) -> None:
        self.count = 0
        self.announced = announced
        self._group = group
        self._rank = group.rank()
        self._ranks = group.size()
        self._waiting: deque[tuple[Stay, Unfinished]] = deque()
        self._thread: ServiceThread[list[tuple[Stay, Unfinished]]]
        self._thread = ServiceThread("fallback", self._run)
        self._buffers = threading.Lock()  # taken while one is written to
        self._idle = threading.Event()  # set once it has stopped, but for what Gloo still does
        self._stopped = False

    def stay(
        self,
        ended: Callable[[Operation, ReductionError | None], None],
        back: Returning | None,
    ) -> Stay:
        """Return what takes the calls of one session; see `Stay`."""
        return Stay(self, ended, back)

    def take(self, stay: Stay, calls: list[Unfinished]) -> None:
        """Bring calls to their end, one after another; see `Stay.take`."""
        if self._stopped:
            return
        if calls and not stay.begun:
            stay.begun = True
            level = logging.DEBUG if self.announced else logging.WARNING
            log.log(level, "no reducer is left: all-reduces go through the process group now")
        self._thread.start()
        if calls:
            self._thread.queue.put([(stay, call) for call in calls])

    def stop(self) -> None:
        """Write to no buffer and end no call from now on."""
        with self._buffers:
            self._stopped = True
        self._thread.queue.put([])
        if self._thread.ident is not None and not self._thread.is_current:
            self._idle.wait(STOP_S)

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is in a callback of a call that has ended here."""
        return self._thread.is_current

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            stay, call = taken
            try:
                if stay.shares is None:
                    others = [one for its, one in self._waiting if its is stay]
                    stay.first, stay.shares = self._meet([call, *others])
                if stay.failure is None and not stay.over and call.number >= stay.first:
                    error = self._reduce(stay, call, stay.shares.pop(call.number, None))
                    if not stay.over:
                        self._end(stay, call, error)
            except Exception as error:  # noqa: BLE001 (whoever waits gets it)
                if not self._stopped:
                    log.warning("the process group's all-reduce failed: %s", error)
                why = f"no reducer is left, and the process group failed as well: {error}"
                stay.failure = ReducerLostError(why, reducer="")
                stay.shares = {}
            if stay.over and stay.back is not None and not self._stopped:
                stay.back.forward(_asked_for(call))
            elif stay.failure is not None:
                self._end(stay, call, stay.failure)
        self._idle.set()

    def _next(self) -> tuple[Stay, Unfinished] | None:
        """Wait for the next call; None when there will be none."""
        while not (self._waiting or self._stopped):
            self._waiting.extend(self._thread.queue.get())
        return None if self._stopped else self._waiting.popleft()

    def _end(self, stay: Stay, call: Unfinished, error: ReductionError | None) -> None:
        if call.operation is None or self._stopped:
            return
        self.count += error is None
        stay.ended(call.operation, error and own(error, call.operation))

    def _meet(self, mine: list[Unfinished]) -> tuple[int, dict[int, list[Held]]]:
        """Find out what ranks have of the calls that any of them has begun.

        Returns:
            The first call that some rank may not have finished, and what each rank has of it and of
            those after it.
        """
        everywhere = self._exchange([held(call) for call in mine])
        return merge([[Held(*one) for one in theirs] for theirs in everywhere])

    def _reduce(
        self, stay: Stay, call: Unfinished, shares: list[Held] | None
    ) -> ReductionError | None:
        """Do what this rank must for a call, whether it needs the result or not.

        If the ranks go back with it, the stay is over, and the call is as it was.

        Args:
            stay: which the call is of.
            call: what was asked for here.
            shares: what each rank has of it; None for a call that none had begun.

        Returns:
            Why it failed, the same at all ranks, or None.
        """
        shares = shares or [Held(call.number)] * self._ranks
        if any(share.failed for share in shares):
            rank = [share.failed for share in shares].index(True)
            why = f"no reducer is left, and the call had failed at rank {rank}"
            return ReducerLostError(why, reducer="")
        complete = any(share.done for share in shares)
        if not complete:
            error = self._disagreement(stay, call, shares)
            if error is not None or stay.over:
                return error
        known: dict[int, int] = {}  # where chunks begin, and end
        for rank, share in enumerate(shares):
            news = [chunk for chunk in share.chunks if chunk[0] not in known]
            known.update((low, high) for low, high in news)
            self._share(call, rank, news)
        if not complete:
            operation = _asked_for(call)
            self._add(operation, gaps(known, operation.view.nbytes))
        return None

    def _disagreement(
        self, stay: Stay, call: Unfinished, shares: list[Held]
    ) -> ReductionError | None:
        """Find out whether all ranks ask for the same, and none has refused it.

        Unless they can all go back to the reducers with this call, which then find that out.
        """
        operation = _asked_for(call)
        refusal = "" if operation.refusal is None else str(operation.refusal)
        asked = {
            "refusal": refusal[:_REFUSAL_SHOWN],
            "total_bytes": operation.view.nbytes,
            "dtype": operation.dtype.name,
            "op": operation.op.name,
            "name": operation.name or "",
        }
        while True:
            offer = None if stay.back is None else stay.back.offer()
            said = self._exchange([call.number, asked, offer])
            numbers, everywhere, offers = zip(*said, strict=True)
            if call.number > min(numbers):
                continue  # some ranks have asked for more in a call before, which fails there
            if call.number < max(numbers):
                other = numbers.index(max(numbers))
                return _mismatch("call", (self._rank, call.number), (other, max(numbers)))
            begun = any(share.chunks for share in shares)
            if stay.back is not None and not begun and self._may_leave(stay, call.number):
                stay.over = stay.back.settle([Offer(*one) for one in offers])
                if stay.over:
                    stay.back.go()
                    return None
            for field in asked:
                for rank, theirs in enumerate(everywhere):
                    if field == "refusal" and theirs[field]:
                        return operation.refusal or refused(rank, theirs[field])
                    if theirs[field] != everywhere[0][field]:
                        return _mismatch(field, (0, everywhere[0][field]), (rank, theirs[field]))
            return None

    def _may_leave(self, stay: Stay, number: int) -> bool:
        """Whether it begins a call, and no rank had begun a later one; all ranks agree."""
        assert stay.shares is not None, "the ranks have met"
        return number % PLACES == FIRST_PLACE and max(stay.shares, default=-1) < number

    def _share(self, call: Unfinished, rank: int, chunks: Sequence[Sequence[int]]) -> None:
        """Give all ranks the results that one of them has."""
        nbytes = sum(high - low for low, high in chunks)
        if nbytes == 0:
            return
        if rank == self._rank:
            data = bytearray().join(call.results[low] for low, _ in chunks)
            pieces = torch.frombuffer(data, dtype=torch.uint8)
        else:
            pieces = torch.empty(nbytes, dtype=torch.uint8)
        self._finish(self._group.broadcast(pieces, rank))
        if call.operation is not None:
            self._write(call.operation, chunks, pieces)

    def _add(self, operation: Operation, ranges: Sequence[Sequence[int]]) -> None:
        """All-reduce these parts of a buffer, 16-bit types in fp32 and rounded once."""
        if not ranges:
            return
        whole = torch.frombuffer(operation.view, dtype=torch.uint8)
        pieces = torch.cat([whole[low:high] for low, high in ranges])
        narrow = pieces.view(_TYPES[operation.dtype])
        wide = narrow.float() if narrow.dtype.is_floating_point and narrow.itemsize == 2 else narrow
        lost = torch.isnan(wide).to(torch.uint8)
        self._finish(self._group.allreduce([wide], _OPS[operation.op]))
        if operation.op in {ReduceOp.MIN, ReduceOp.MAX} and wide.is_floating_point():
            # Gloo's own may drop a NaN, where reducers pass it on.
            self._finish(self._group.allreduce([lost], dist.ReduceOp.MAX))
            wide[lost.bool()] = torch.nan
        if operation.op is ReduceOp.MEAN:
            wide /= self._ranks
        self._write(operation, ranges, wide.to(narrow.dtype).view(torch.uint8))

    def _write(
        self, operation: Operation, ranges: Sequence[Sequence[int]], pieces: torch.Tensor
    ) -> None:
        """Put results where they belong, unless the caller has its buffer back."""
        with self._buffers:
            if self._stopped:
                return
            whole = torch.frombuffer(operation.view, dtype=torch.uint8)
            for low, high in ranges:
                whole[low:high] = pieces[: high - low]
                pieces = pieces[high - low :]

    def _finish(self, work: dist.Work) -> None:
        """Wait for the end of something, or of the client.

        Not in a call of Gloo's: one that returns while the interpreter ends takes the process down.
        So does whoever drops the last reference to a work in a thread of Gloo's then, as its
        tensors need the interpreter's lock. So this thread keeps it until Gloo has ended it.
        """
        pause_s = SHORTEST_PAUSE_S
        while not work.is_completed():
            if self._stopped:
                self._idle.set()
                pause_s = KEPT_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if self._idle.is_set():
            time.sleep(KEPT_S)  # Gloo's thread has yet to drop its own reference
            raise LocalProtocolError("this client was shut down")
        work.wait()  # raises what went wrong

    def _exchange(self, message: Any) -> list[Any]:
        """Return what all ranks say, in rank order; tuples come as lists."""
        data = torch.frombuffer(bytearray(json.dumps(message), "utf-8"), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._ranks)]
        size = torch.tensor([len(data)])
        self._finish(self._group.allgather([sizes], [size]))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(data)] = data
        said = [torch.empty_like(padded) for _ in range(self._ranks)]
        self._finish(self._group.allgather([said], [padded]))
        return [
            json.loads(bytes(one[:size].tolist()))
            for one, size in zip(said, map(int, sizes), strict=True)
        ]


def _mismatch(field: str, one: tuple[int, object], other: tuple[int, object]) -> MismatchError:
    return MismatchError.between("call through the process group", field, one, other)


def _asked_for(call: Unfinished) -> Operation:
    if call.operation is None:
        raise RuntimeError(f"call {call.number} is over here, but no rank has its result")
    return call.operation
