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

import concurrent.futures
import copy
import json
import threading
import time
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reducer.errors import (
    ConfigError,
    LocalProtocolError,
    MismatchError,
    RankLostError,
    ReductionError,
    renumbered,
)
from reducer.wire.constants import DType, ReduceOp
from reducer.wire.header import fingerprint
from worker_client.client.client import Client
from worker_client.client.node_fold import finish, fold, folded_as
from worker_client.communicators.node_sockets import hear, tell
from worker_client.protocol.names import refused
from worker_client.runtime.service_thread import ServiceThread, forks
from worker_client.staging.host_buffer import HostBuffer
from worker_client.work import PlainWork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from worker_client.client.node_fold import Array
    from worker_client.communicators.node_sockets import NodeSockets
    from worker_client.communicators.placement import Place
    from worker_client.protocol.spec import JobSpec
    from worker_client.staging.arguments import Arguments
    from worker_client.work import Work

# Of a buffer, at a time: while one piece is on the network, the node works on the next one.
PIECE_BYTES = 16 << 20
MOST_PIECES = 15  # of one call, each of which may travel as several all-reduces; then larger ones
PIECE_ALIGNMENT = 64  # bytes; a multiple of every element's size
GRACE_S = 10.0  # for a rank of the node to say that the deadline has passed between its nodes
LINGER_S = 2.5  # longer than reducers take to see that a rank is lost
_TICK_S = 0.1  # between two looks whether a rank has given up
_SHORTEST_S = 0.001
_NAME_SHOWN = 200
_REFUSAL_SHOWN = 500
_IN, _OUT = 0, 1  # the streams of steps 1 and 3


class _Call:
    """One all-reduce in progress."""

    def __init__(
        self,
        data: Any,
        buffer: HostBuffer,
        op: ReduceOp,
        name: str | None,
        until: float,
        *,
        rounded: bool,
    ) -> None:
        self.data = data
        self.buffer = buffer
        self.op = op
        self.name = name
        self.until = until
        self.rounded = rounded
        self.work: Work
        self.refusal = ""  # why this rank cannot make it
        self.error: ReductionError | None = None  # of this rank's parts
        self.missing: tuple[int, ...] = ()

    def pieces(self, ranks: int) -> Iterator[list[memoryview]]:
        """Yield each piece of the buffer, cut into parts for the ranks of a node."""
        size = self.buffer.dtype.itemsize
        view = self.buffer.view
        step = max(
            PIECE_BYTES, -(-view.nbytes // (MOST_PIECES * PIECE_ALIGNMENT)) * PIECE_ALIGNMENT
        )
        for start in range(0, max(view.nbytes, 1), step):
            piece = view[start : start + step]
            count = piece.nbytes // size
            ends = [count * at // ranks * size for at in range(ranks + 1)]
            yield [piece[low:high] for low, high in pairwise(ends)]


class _Piece(NamedTuple):
    """A piece that is on its way between the nodes; without parts, the end of a call with none."""

    call: _Call
    parts: list[memoryview]
    folded: Array | None
    between: Work | None
    last: bool


class HierarchicalClient(Client):
    """A client that goes through its node first; `Client` says how it is used.

    An all-reduce that fails between nodes fails at all ranks of a node, and the next one may work.
    What fails within a node ends the client, at all ranks of the job: a rank that has ended, one
    that comes too late, ranks that disagree.

    Args:
        spec: of the job between the nodes, of this local rank.
        place: of this rank.
        introduce: makes the connections to the other ranks of this node.
        arguments: of `Client`.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        place: Place,
        introduce: Callable[[], NodeSockets],
        **arguments: Any,
    ) -> None:
        self.place = place
        self._node = introduce()
        self._first = ServiceThread[_Call | None]("hierarchy", self._fold_all)
        self._second = ServiceThread[_Piece | None]("hierarchy", self._hand_out_all)
        self._open: dict[_Call, None] = {}
        self._broken: ReductionError | None = None
        self._leave_at = 0.0
        self._latest: object = None  # call that was asked for
        self._guard = threading.Lock()  # of the two before
        try:
            super().__init__(spec, **arguments)
        except BaseException:
            self._node.close()
            raise
        self._first.start()
        self._second.start()

    @property
    def rank(self) -> int:
        """Rank of this worker among all."""
        return self.place.peers[self.place.local_rank]

    @property
    def world_size(self) -> int:
        """Number of workers on all nodes."""
        return len(self.place.nodes) * len(self.place.peers)

    def _submit_buffer(self, call: object, asked: Arguments) -> Work:
        """As of `Client`, but that what ended this client is raised by the next call.

        Raises:
            ConfigError: there is a weight or a residual.
        """
        buffer, op, name, timeout_s, data, weight, residual, rounded = asked
        if weight is not None or residual is not None:
            raise ConfigError("weight= and residual= need REDUCTION_HIERARCHY=off")
        if rounded is None:
            rounded = self.rounds(buffer.dtype, op, buffer.view.nbytes)
        until = time.monotonic() + timeout_s
        return self._ask(call, _Call(data, buffer, op, name, until, rounded=rounded))

    def _give_up(self, call: object, why: BaseException) -> None:
        """As of `Client`: the ranks of this node hear it first."""
        if call is self._latest:
            return  # it is on its way, whatever interrupted its caller
        nothing = HostBuffer(memoryview(bytearray()), DType.UINT8, None)
        until = time.monotonic() + self.timeout_s
        asked = _Call(None, nothing, ReduceOp.SUM, None, until, rounded=False)
        asked.refusal = f"{type(why).__name__}: {why}"
        with suppress(ReductionError):
            self._ask(call, asked)

    def _ask(self, call: object, asked: _Call) -> Work:
        what = f"all-reduce{f' {asked.name!r}' if asked.name else ''}"
        what = f"{what} of {asked.buffer.view.nbytes} bytes"
        asked.work = PlainWork(what, self.lead, lambda: asked.missing)
        with self._guard:
            self._check_usable()
            self._open[asked] = None
            self._latest = call
            self._first.queue.put(asked)
        return asked.work

    @property
    def in_callback(self) -> bool:
        """As of `Client`: two threads of this client do everything."""
        return self._is_this_thread or super().in_callback

    @property
    def _is_this_thread(self) -> bool:
        return self._first.is_current or self._second.is_current

    @property
    def usable(self) -> bool:
        """Whether this process may call `all_reduce`: no more when something failed in its node."""
        return self._broken is None and super().usable

    def _is_staged(self, data: Any) -> bool:
        del data
        return False  # the parts of a node are in host memory

    def lead(self, done: Callable[[], bool], until: float) -> None:
        """As `Client.lead`: two threads of this client do everything.

        Raises:
            LocalProtocolError: this is one of them, in a callback of an all-reduce.
        """
        del done, until
        if self._is_this_thread:
            raise LocalProtocolError("waiting in a callback of an all-reduce would last for ever")

    def shutdown(self) -> None:
        """As `Client.shutdown`; the ranks of this node that are in an all-reduce get an error.

        After the loss of a rank it takes some seconds: the other nodes shall hear from their own
        reducers who is lost, and not that this rank left.
        """
        if forks() != self._forks:
            return
        self._node.stop()
        self._first.queue.put(None)
        self._second.queue.put(None)
        self._first.wait_for_end()
        self._second.wait_for_end()
        self._break(LocalProtocolError("this client was shut down"))
        self._end_all()
        self._node.close()
        time.sleep(max(0.0, self._leave_at - time.monotonic()))
        super().shutdown()

    # -- the first thread: within the node, and on to the reducers ------------------------------

    def _fold_all(self) -> None:
        while (call := self._first.queue.get()) is not None:
            if self._broken is None:
                self._try(self._fold, call)
            self._second.queue.put(None)  # the other thread may have to end calls

    def _fold(self, call: _Call) -> None:
        inner = object()
        call.error = self._compare(call)
        if call.error is not None:
            with self._order:
                super()._give_up(inner, call.error)
            self._second.queue.put(_Piece(call, [], None, None, True))
            return
        ranks, here = len(self.place.peers), self.place.local_rank
        op = ReduceOp.SUM if call.op is ReduceOp.MEAN else call.op
        pieces = list(call.pieces(ranks))
        for number, parts in enumerate(pieces):
            own = parts[here]
            rows = [
                own if at == here else np.empty(own.nbytes, np.uint8).data for at in range(ranks)
            ]
            self._node.exchange(_IN, parts, rows, call.until)
            folded = fold(rows, call.buffer.dtype, op)
            left_s = max(call.until - time.monotonic(), _SHORTEST_S)
            sent = HostBuffer(folded.data, folded_as(call.buffer.dtype), None)
            with self._order:
                asked = sent, op, call.name, left_s, None, None, None, call.rounded
                between = super()._submit_buffer(inner, asked)
            self._second.queue.put(_Piece(call, parts, folded, between, number == len(pieces) - 1))

    def _compare(self, call: _Call) -> MismatchError | None:
        """See whether all ranks of this node ask for the same, and none has refused it."""
        fields = ("total_bytes", "dtype", "op", "name", "name")
        name = call.name or ""
        asked = [
            call.buffer.view.nbytes,
            call.buffer.dtype.name,
            call.op.name,
            name[:_NAME_SHOWN] or "no name",
            fingerprint(name),  # of what is not shown, too
            call.refusal[:_REFUSAL_SHOWN],
        ]
        answers = self._node.agree(_IN, json.dumps(asked).encode(), call.until)
        said = [json.loads(answer) for answer in answers]
        first = self.place.peers[0]
        for rank, (*_, refusal) in zip(self.place.peers, said, strict=True):
            if refusal:
                return refused(rank, refusal)
        for rank, other in zip(self.place.peers, said, strict=True):
            for field, expected, got in zip(fields, said[0], other, strict=False):
                if expected != got:
                    return MismatchError.between(
                        "all-reduce within a node", field, (first, expected), (rank, got)
                    )
        return None

    # -- the second thread: the results, to the node --------------------------------------------

    def _hand_out_all(self) -> None:
        while (piece := self._second.queue.get()) is not None or not self._node.stopped:
            if piece is not None and self._broken is None:
                self._try(self._hand_out, piece)
            if self._broken is not None:
                self._end_all()

    def _hand_out(self, piece: _Piece) -> None:
        call = piece.call
        if piece.between is None or piece.folded is None:
            self._conclude(call, call.error)
            return
        own = piece.parts[self.place.local_rank]
        error = self._wait_for(call, piece.between)
        if isinstance(error, RankLostError):
            raise error  # without it there are no more all-reduces
        if error is None:
            divisor = self.world_size if call.op is ReduceOp.MEAN else 1
            finish(piece.folded, call.buffer.dtype, divisor, own)
        call.error = call.error or error
        until = call.until + GRACE_S
        self._node.exchange(_OUT, [own] * len(piece.parts), piece.parts, until)
        if piece.last:
            mine = b"" if call.error is None else tell(call.error)
            said = self._node.agree(_OUT, mine, until)
            first = next((one for one in said if one), b"")
            self._conclude(call, call.error if first == mine else hear(first))

    def _wait_for(self, call: _Call, between: Work) -> ReductionError | None:
        """Wait for the end between the nodes and return the error, in this job's ranks."""
        future, across = between.future(), self.place.across
        while not future.done():
            self._node.check(everybody=True)  # none of them can have this call's end
            call.missing = tuple(across[node] for node in between.missing)
            concurrent.futures.wait([future], _TICK_S)
        error = future.exception()
        if error is None or isinstance(error, ReductionError):
            return None if error is None else renumbered(error, across, "between nodes")
        raise error

    def _check_usable(self) -> None:
        if self._broken is not None and forks() == self._forks:
            raise copy.copy(self._broken)
        super()._check_usable()

    # -- ends -----------------------------------------------------------------------------------

    def _try(self, step: Callable[[Any], None], item: Any) -> None:
        try:
            step(item)
        except ReductionError as error:
            self._break(error)
        except Exception as error:  # noqa: BLE001 (whoever waits gets it)
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
            super().shutdown()  # the other nodes shall not wait for this rank

    def _end_all(self) -> None:
        with self._guard:
            calls, self._open = list(self._open), {}
        for call in calls:
            error = copy.copy(self._broken)
            if error is not None:
                error.name = call.name
            call.work.finish(call.data, error)

    def _conclude(self, call: _Call, error: ReductionError | None) -> None:
        if error is not None:
            error.name = call.name
        call.work.finish(call.data, error, call.buffer.write_back)
        with self._guard:
            self._open.pop(call, None)
