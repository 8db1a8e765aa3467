"""All-reduces of jobs that have several ranks on each node: less on the network.

The ranks of a node share one network card. Were each to send its whole buffer to the reducers, the
card would carry the buffer as often as there are ranks. Instead, of each buffer

1. every rank gets its part from all ranks of its node, and folds them in local-rank order;
2. the ranks with the same local rank, one of each node, all-reduce that part through the reducers,
   in a job of their own, which folds in node order;
3. every rank gives its part of the result, divided for the mean and rounded once, to its node.

So a node sends and receives each buffer once. 16-bit types travel as fp32 in step 2, to be rounded
only once. The bits are the same at every rank, and from run to run where ranks lie on nodes alike;
they may differ in the last place from those of an all-reduce without hierarchy, whose fold has no
parentheses.

Two threads do this, so that the network is busy with one buffer while a node passes on another:
one does step 1 and starts step 2, the other waits for its end and does step 3.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from reducer.errors import (
    LocalProtocolError,
    MismatchError,
    RankLostError,
    ReductionError,
    renumbered,
)
from reducer.wire.constants import DType, ReduceOp
from reducer.wire.header import fingerprint
from worker_client.communicators.communicator import Communicator, Traffic
from worker_client.communicators.node_fold import finish, fold, folded_as
from worker_client.communicators.node_sockets import decode, encode
from worker_client.protocol.operation import Operation, reason, refused
from worker_client.runtime.service_thread import ServiceThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from reducer.wire.messages import Straggler
    from worker_client.communicators.node_fold import Array
    from worker_client.communicators.node_sockets import NodeSockets
    from worker_client.communicators.placement import NodePlace
    from worker_client.protocol import _flight

    Step: TypeAlias = Callable[[], None]

# Of a buffer, at a time: while one piece is on the network, the node works on the next one.
PIECE_BYTES = 16 << 20
MOST_PIECES = 12  # of one all-reduce, each of which may travel as several; then larger ones
PIECE_ALIGNMENT = 64  # bytes; a multiple of every element's size
GRACE_S = 10.0  # for a rank of the node to say that the deadline has passed between its nodes
LINGER_S = 2.5  # longer than reducers take to see that a rank is lost
_TICK_S = 0.1  # between two looks whether a rank has given up
_SHORTEST_S = 0.001
_NAME_SHOWN = 200
_REFUSAL_SHOWN = 500
_IN, _OUT = 0, 1  # the streams of steps 1 and 3


class HierarchicalCommunicator(Communicator):
    """The ranks of a node, around a communicator between the nodes.

    `between` is of the ranks with this local rank, one of each node. An all-reduce that fails
    between nodes fails at all ranks of a node, and the next one may work. What fails within a node
    ends this communicator, at all ranks of the job: a rank that has ended, one that comes too late,
    ranks that disagree.
    """

    def __init__(self, between: Communicator, place: NodePlace, node: NodeSockets) -> None:
        self.place = place
        self.inner = between
        self._node = node
        # Each gets what it is to do: an all-reduce to fold, or a step; None has it look around.
        self._first = ServiceThread[Operation | None]("hierarchy", self._fold_all)
        self._second: ServiceThread[Step | None] = ServiceThread("hierarchy", self._hand_out_all)
        self._open: dict[Operation, None] = {}
        self._broken: ReductionError | None = None
        self._leave_at = 0.0
        self._latest: Operation | None = None  # the first thread has taken
        self._guard = threading.Lock()  # of `_broken`, between the two threads
        self._failed: object = None  # the latest call that ranks of this node disagreed on,
        self._failure: ReductionError | None = None  # and how
        self._first.start()
        self._second.start()

    # -- the communicator -------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.place.peers[self.place.local_rank]

    @property
    def world_size(self) -> int:
        return len(self.place.nodes) * len(self.place.peers)

    @property
    def present(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    @property
    def straggler(self) -> Straggler | None:
        found = self.inner.straggler  # a node, as the ranks of this local rank see it
        return None if found is None else replace(found, rank=self.place.across[found.rank])

    @property
    def traffic(self) -> Traffic:
        return self.inner.traffic.renumbered(self.place.across)

    @property
    def closing(self) -> bool:
        return self._broken is not None or self.inner.closing

    @property
    def busy(self) -> bool:
        return bool(self._open)

    @property
    def piecewise(self) -> bool:
        return False  # it has pieces of its own

    @property
    def in_callback(self) -> bool:
        return self._is_this_thread or self.inner.in_callback

    @property
    def _is_this_thread(self) -> bool:
        return self._first.is_current or self._second.is_current

    def check(self) -> None:
        """See whether all-reduces may be submitted; if not, the error is what ended this one."""
        if self._broken is not None:
            raise copy.copy(self._broken)
        self.inner.check()

    def submit(self, operation: Operation) -> None:
        if self._broken is not None:
            raise copy.copy(self._broken)
        operation.deadline = time.monotonic() + operation.timeout_s
        try:
            self._open[operation] = None
            self._first.queue.put(operation)
        except BaseException:  # an interrupt: nobody waits for it
            self._open.pop(operation, None)
            raise
        # Where it has ended meanwhile, the second thread may have overlooked this.
        if self._broken is not None and self._open.pop(operation, operation) is None:
            raise copy.copy(self._broken)

    def wait(self, done: Callable[[], bool], until: float) -> None:
        """Return at once: two threads of this object do everything."""
        del done, until
        if self._is_this_thread:
            raise LocalProtocolError("waiting in a callback of an all-reduce would last for ever")

    def stop(self) -> None:
        """Leave the job; the ranks of this node that are in an all-reduce get an error.

        After the loss of a rank it takes some seconds: the other nodes shall hear from their own
        reducers who is lost, and not that this rank left.
        """
        # Takes no lock: a signal handler may have interrupted the thread that holds it.
        self._broken = self._broken or LocalProtocolError("this client was shut down")
        self._node.stop()
        self._first.queue.put(None)
        self._second.queue.put(None)
        self._first.wait_for_end()
        self._second.wait_for_end()
        self._node.close()
        time.sleep(max(0.0, self._leave_at - time.monotonic()))
        self.inner.stop()

    # -- the first thread: within the node, and on to the reducers ------------------------------

    def _fold_all(self) -> None:
        while (asked := self._first.queue.get()) is not None:
            if self._broken is None:
                self._try(partial(self._fold, asked))
            self._second.queue.put(None)  # the other thread may have to end all-reduces

    def _fold(self, asked: Operation) -> None:
        latest = self._latest
        call = asked.call or asked
        again = latest is not None and asked.call is latest.call and not latest.more
        if again and asked.refusal is not None:
            self._conclude(asked, None)  # all of that call was on its way when it was refused
            return
        self._latest = asked
        if call is not self._failed:
            self._failure = self._disagreement(asked)
            self._failed = None if self._failure is None else call
            if self._failure is not None:
                self._refuse(call, asked, self._failure)
        if call is self._failed:  # at all ranks of this node
            self._second.queue.put(partial(self._conclude, asked, self._failure))
            return
        ranks, here = len(self.place.peers), self.place.local_rank
        op, between_op, within, _ = self._steps(asked)
        pieces = _cut(asked, ranks)
        for number, places in enumerate(pieces, 1):
            parts = [asked.view[place] for place in places]
            own = parts[here]
            rows = [
                own if at == here else np.empty(own.nbytes, np.uint8).data for at in range(ranks)
            ]
            self._node.exchange(_IN, parts, rows, asked.deadline)
            folded = fold(rows, asked.dtype, op)
            if within != 1:
                finish(folded, asked.dtype, within, folded.data)
            between = Operation(
                folded.data,
                folded_as(asked.dtype),
                between_op,
                asked.name,
                max(asked.deadline - time.monotonic(), _SHORTEST_S),
                call=call,
                more=asked.more or number < len(pieces),
                rounded=asked.rounded,
                residual=None if asked.residual is None else asked.residual[places[here]],
            )
            self.inner.submit(between)
            last = number == len(pieces)
            self._second.queue.put(partial(self._hand_out, asked, parts, folded, between, last))

    def _steps(self, asked: Operation) -> tuple[ReduceOp, ReduceOp, int, int]:
        """Return what is done within a node and between nodes, and what is divided by after each.

        What is rounded to travel is a mean: the sum of all ranks may be too large for fp16.
        """
        if asked.op is not ReduceOp.MEAN:
            return asked.op, asked.op, 1, 1
        if asked.rounded:
            return ReduceOp.SUM, ReduceOp.MEAN, len(self.place.peers), 1
        return ReduceOp.SUM, ReduceOp.SUM, 1, self.world_size

    def _refuse(self, call: _flight.Call | None, asked: Operation, why: ReductionError) -> None:
        """Let what the other nodes have of a call end as it does here."""
        nothing = memoryview(b"")
        with suppress(ReductionError):  # it was stopped: the others hear that
            self.inner.submit(
                Operation(
                    nothing,
                    DType.UINT8,
                    ReduceOp.SUM,
                    None,
                    asked.timeout_s,
                    call=call,
                    refusal=refused(self.inner.rank, f"{type(why).__name__}: {why}"),
                )
            )

    def _disagreement(self, asked: Operation) -> ReductionError | None:
        """See whether all ranks of this node ask for the same, and none has refused it."""
        fields = ("total_bytes", "dtype", "op", "name", "name", "exact")
        name = asked.name or ""
        mine = [
            asked.view.nbytes,
            asked.dtype.name,
            asked.op.name,
            name[:_NAME_SHOWN] or "no name",
            fingerprint(name),  # of what is not shown, too
            not asked.rounded,
            reason(asked.refusal)[:_REFUSAL_SHOWN],
        ]
        answers = self._node.agree(_IN, json.dumps(mine).encode(), asked.deadline)
        said = [json.loads(answer) for answer in answers]
        first = self.place.peers[0]
        for rank, (*_, refusal) in zip(self.place.peers, said, strict=True):
            if refusal:
                return asked.refusal or refused(rank, refusal)
        for rank, other in zip(self.place.peers, said, strict=True):
            for field, expected, got in zip(fields, said[0], other, strict=False):
                if expected != got:
                    return MismatchError.between(
                        "all-reduce within a node", field, (first, expected), (rank, got)
                    )
        return None

    # -- the second thread: the results, to the node --------------------------------------------

    def _hand_out_all(self) -> None:
        while (step := self._second.queue.get()) is not None or not self._node.stopped:
            if step is not None and self._broken is None:
                self._try(step)
            if self._broken is not None:
                self._end_all()
        self._end_all()

    def _hand_out(
        self,
        asked: Operation,
        parts: list[memoryview],
        folded: Array,
        between: Operation,
        last: bool,
    ) -> None:
        """Give this rank's part of a piece to its node, and get the others' parts.

        It is `folded`, and on its way `between` the nodes; `last` if no piece follows.
        """
        own = parts[self.place.local_rank]
        error = self._wait_for(between, asked)
        if isinstance(error, RankLostError):
            raise error  # without it there are no more all-reduces
        asked.sequence = between.sequence
        if error is None:
            finish(folded, asked.dtype, self._steps(asked)[3], own)
        asked.error = asked.error or error
        until = asked.deadline + GRACE_S
        self._node.exchange(_OUT, [own] * len(parts), parts, until)
        if last:
            mine = encode(asked.error) if isinstance(asked.error, ReductionError) else b""
            said = self._node.agree(_OUT, mine, until)
            first = next((one for one in said if one), b"")
            self._conclude(asked, asked.error if first == mine else decode(first))

    def _wait_for(self, between: Operation, asked: Operation) -> ReductionError | None:
        """Wait for the end between the nodes and return the error, in this job's ranks."""
        across = self.place.across
        while not between.ends_within(_TICK_S):
            self._node.check(everybody=True)  # none of them can have this one's end
            asked.missing = tuple(across[node] for node in between.missing)
        try:
            between.wait()
        except ReductionError as error:
            return renumbered(error, across, "between nodes")
        return None

    # -- ends -----------------------------------------------------------------------------------

    def _try(self, step: Step) -> None:
        try:
            step()
        except ReductionError as error:
            self._break(error)
        except Exception as error:  # noqa: BLE001 (its waiter gets it)
            self._break(ReductionError(repr(error)))

    def _break(self, error: ReductionError) -> None:
        """Take part no longer; the second thread ends what is open, as it writes to buffers."""
        with self._guard:
            if self._broken is not None:
                return
            self._broken = error
        if self._node.stopped:
            return
        self._node.give_up(error)
        if isinstance(error, RankLostError):
            self._leave_at = time.monotonic() + LINGER_S
        else:
            self.inner.stop()  # the other nodes shall not wait for this rank

    def _end_all(self) -> None:
        while self._open:
            asked, _ = self._open.popitem()
            asked.end(self._broken)

    def _conclude(self, asked: Operation, error: Exception | None) -> None:
        self._open.pop(asked, None)
        asked.end(error)


def _cut(asked: Operation, ranks: int) -> list[list[slice]]:
    """Return the pieces of a buffer, each cut into parts for the ranks of a node."""
    size, nbytes = asked.dtype.itemsize, asked.view.nbytes
    step = max(PIECE_BYTES, -(-nbytes // (MOST_PIECES * PIECE_ALIGNMENT)) * PIECE_ALIGNMENT)
    pieces = []
    for start in range(0, max(nbytes, 1), step):
        count = (min(start + step, nbytes) - start) // size
        ends = [start + count * at // ranks * size for at in range(ranks + 1)]
        pieces.append([slice(low, high) for low, high in pairwise(ends)])
    return pieces
