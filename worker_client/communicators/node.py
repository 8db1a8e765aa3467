"""All-reduces of jobs that have several ranks on each node: less on the network.

The ranks of a node share one network card, which would carry a buffer as often as there are ranks.
Instead it is cut into as many equal parts, and

1. every rank gets its part from all ranks of its node, and folds them in local-rank order;
2. the ranks with the same local rank, one of each node, all-reduce that part through the reducers,
   in a job of their own (a rail), which folds in node order;
3. every rank gives its part of the result, rounded once, to its node.

So a node sends and receives each buffer once. A first thread does step 1 and starts step 2, and a
second one waits for its end and does step 3, both in the order of calls: the network is busy with
one buffer while the node's ranks swap another.

In a job that goes on without lost ranks, a node that loses a rank is lost. Its rails may find that
out in different calls. So a call ends when all rails have a result of the same nodes, those that
have more nodes make it again, and the next call is not sent before that.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from reducer.errors import (
    LocalProtocolError,
    MismatchError,
    RankLostError,
    ReductionError,
    renumbered,
)
from reducer.wire.header import fingerprint
from reducer.wire.messages import decode_error, encode_error
from worker_client.communicators.communicator import Communicator, LinkTraffic
from worker_client.communicators.node_fold import TYPES, fold, folded_as, rounded
from worker_client.communicators.node_group import IN, OUT
from worker_client.protocol.operation import Operation, reason, refused, refusing
from worker_client.runtime.service_thread import ServiceThread
from worker_client.runtime.trace import Trace
from worker_client.staging.device_copies import DeviceStaging
from worker_client.staging.host_buffer import Flat
from worker_client.staging.split_call import part_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from reducer.wire.messages import Straggler
    from worker_client.communicators.node_group import NodeGroup
    from worker_client.communicators.placement import NodePlace
    from worker_client.staging.device import Device

    Step: TypeAlias = Callable[[], "Step | None"]  # of a call; returns the one that follows

GRACE_S = 10.0  # for a rank of the node to say that the deadline has passed between its nodes
LINGER_S = 2.5  # longer than reducers take to see that a rank is lost
_TICK_S = 0.1  # between two looks whether a rank has given up
_SHOWN = 200  # characters of a name, or of a reason
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass
class _NodeCall:
    """An all-reduce on its way.

    Attributes:
        asked: what its caller waits for.
        data: all bytes of the buffer, in host memory or on a device.
        flat, device, mark: of a tensor on a device: how its caller sees it, where it is, and what
            stands for all that it follows there.
        size: of a rank's part, in bytes; the last ranks may have fewer, or none.
        rows: memory for a part of each rank of the node.
        part: this rank's in the type in which it is folded; the result, once `rail` has ended.
        residual: where what rounding takes away from `part` is kept.
        rail: the all-reduce of `part` between the nodes.
        brought: part and residual before that, in a job that goes on without lost ranks.
        again: whether it was made again, without nodes that are lost.
    """

    asked: Operation
    data: torch.Tensor
    flat: Flat | None = None
    device: Device | None = None
    mark: Any = None
    size: int = 0
    rows: torch.Tensor = _NOTHING
    part: torch.Tensor = _NOTHING
    residual: memoryview | None = None
    rail: Operation | None = None
    brought: tuple[torch.Tensor, bytes] = (_NOTHING, b"")
    again: bool = False

    def leaving(self) -> AbstractContextManager[object]:
        """Make the stream of what leaves the device this thread's current one."""
        return nullcontext() if self.device is None else self.device.leaving(self.mark)

    def returning(self) -> AbstractContextManager[object]:
        """Make the stream of what comes back to the device this thread's current one."""
        return nullcontext() if self.device is None else self.device.returning()


class NodeCommunicator(Communicator):
    """The ranks of a node, around a communicator between the nodes.

    `between` is of the ranks with this local rank, one of each node. An all-reduce that fails
    between nodes fails at all ranks of a node, and the next one may work. What fails within a node
    ends this communicator, at all ranks of the node: a rank that has ended, one that comes too
    late. Other nodes go on if the job goes on without lost ranks; else they end likewise.
    """

    takes_devices: bool = False

    def __init__(
        self, between: Communicator, place: NodePlace, node: NodeGroup, *, takes_devices: bool
    ) -> None:
        self.place = place
        self.inner = between
        # A tensor goes to the host in pieces, of which each could be of other nodes.
        self.takes_devices = takes_devices and not between.spec.elastic
        self._node = node
        self._staging = DeviceStaging(between.submit, Trace())
        # Each gets what it is to do, and None to look whether this rank takes part no longer.
        self._first = ServiceThread[_NodeCall | None]("node-in", self._take_all_in)
        self._second: ServiceThread[Step | None] = ServiceThread("node-out", self._hand_all_out)
        self._open: dict[Operation, None] = {}
        self._latest: Operation | None = None  # was taken in
        self._failed: tuple[object, ReductionError] | None = None  # the call it is of, and how
        self._leave_at = 0.0
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
        return self.place.ranks_of(self.inner.present)

    @property
    def straggler(self) -> Straggler | None:
        found = self.inner.straggler  # a node, as the ranks of this local rank see it
        return None if found is None else replace(found, rank=self.place.across[found.rank])

    @property
    def traffic(self) -> LinkTraffic:
        return self.inner.traffic.renumbered(self.place.across)

    @property
    def closing(self) -> bool:
        return self._node.failure is not None or self.inner.closing

    @property
    def busy(self) -> bool:
        return bool(self._open)

    @property
    def piecewise(self) -> bool:
        return False  # parts are its pieces

    @property
    def in_callback(self) -> bool:
        mine = self._first.is_current or self._second.is_current
        return mine or self._staging.is_this_thread or self.inner.in_callback

    def check(self) -> None:
        self._node.check_own()
        self.inner.check()

    def submit(self, operation: Operation) -> None:
        empty = not operation.view.nbytes  # which torch refuses
        data = _NOTHING if empty else torch.frombuffer(operation.view, dtype=torch.uint8)
        self._begin(_NodeCall(operation, data))

    def all_reduce(self, whole: Operation, flat: Flat) -> None:
        device = self._staging.device(flat.data.device)
        self._begin(_NodeCall(whole, flat.data, flat, device, device.mark(flat.data, flat.target)))

    def _begin(self, call: _NodeCall) -> None:
        asked = call.asked
        self._node.check_own()
        asked.deadline = time.monotonic() + asked.timeout_s
        try:
            self._open[asked] = None
            self._first.queue.put(call)
        except BaseException:  # an interrupt: nobody waits for it
            self._open.pop(asked, None)
            raise
        # If it has failed meanwhile, the second thread may have overlooked this.
        if self._node.failure is not None and self._open.pop(asked, asked) is None:
            self._node.check_own()

    def wait(self, done: Callable[[], bool], until: float) -> None:
        del done, until  # two threads of this object do everything
        if self.in_callback:
            raise LocalProtocolError("waiting in a callback of an all-reduce would last for ever")

    def stop(self) -> None:
        """Leave the job; the ranks of this node that are in an all-reduce get an error.

        After the loss of a rank it takes some seconds: the other nodes shall hear from their own
        reducers who is lost, and not that this rank left.
        """
        left = RankLostError(f"rank {self.rank}, of this node, has left", rank=self.rank)
        self._node.fail(LocalProtocolError("this client was shut down"), left)
        for thread in (self._first, self._second):
            thread.queue.put(None)
            thread.wait_for_end()
        self._node.close()
        time.sleep(max(0.0, self._leave_at - time.monotonic()))
        self.inner.stop()
        self._staging.stop(wait=not self.in_callback)

    # -- the first thread: within the node, and on to the reducers ------------------------------

    def _take_all_in(self) -> None:
        while (call := self._first.queue.get()) is not None:
            take_in = partial(self._take_in, call)
            # Where it may have to be made again, the next one is not sent before it has ended.
            self._second.queue.put(take_in if self.spec.elastic else self._try(take_in))

    def _take_in(self, call: _NodeCall) -> Step:
        asked, latest = call.asked, self._latest
        # All of its call was on its way when it was refused.
        too_late = latest is not None and asked.call is latest.call and not latest.more
        if too_late and asked.refusal is not None:
            return partial(self._conclude, call, None)
        self._latest, of_call = asked, asked.call or asked
        if self._failed is None or self._failed[0] is not of_call:
            error = self._disagreement(call)
            self._failed = None if error is None else (of_call, error)
            if error is not None:  # what the other nodes have of it ends as it does here
                why = refused(self.inner.rank, f"{type(error).__name__}: {error}")
                with suppress(ReductionError):  # it was stopped: they hear that
                    self.inner.submit(refusing(of_call, why, asked.timeout_s))
        if self._failed is not None:  # at all ranks of this node
            return partial(self._conclude, call, self._failed[1])
        self._fold(call)
        self._send(call)
        return partial(self._hand_out, call)

    def _disagreement(self, call: _NodeCall) -> ReductionError | None:
        """See whether all ranks of this node ask for the same, and none has refused it."""
        asked, name, ranks = call.asked, call.asked.name or "", self.place.peers
        mine = {
            "total_bytes": call.data.numel(),
            "dtype": asked.dtype.name,
            "op": asked.op.name,
            "name": name[:_SHOWN] or "no name",
            "hash of the name": fingerprint(name),
            "exact": not asked.rounded,
            "device": call.data.device.type,
        }
        refusal = reason(asked.refusal)[:_SHOWN]
        said = self._node.agree(IN, [mine, refusal], asked.deadline)
        for rank, (_, why) in zip(ranks, said, strict=True):
            if why:
                return asked.refusal or refused(rank, why)
        for what, expected in said[0][0].items():
            for rank, (other, _) in zip(ranks, said, strict=True):
                if other[what] != expected:
                    first, this = (ranks[0], expected), (rank, other[what])
                    return MismatchError.between("all-reduce within a node", what, first, this)
        return None

    def _fold(self, call: _NodeCall) -> None:
        """Get this rank's part from all ranks of its node, and fold them."""
        asked, ranks, data = call.asked, len(self.place.peers), call.data
        size = call.size = part_bytes(data.numel(), ranks, rounded=asked.rounded)
        sizes = [max(0, min(size, data.numel() - at * size)) for at in range(ranks)]
        here, nbytes = self.place.local_rank, sizes[self.place.local_rank]
        if asked.residual is not None:
            call.residual = asked.residual[here * size : here * size + nbytes]
        with call.leaving():
            call.rows = torch.empty(ranks * size, dtype=torch.uint8, device=data.device)
            rows = call.rows[: ranks * nbytes]
            self._node.swap(IN, rows, data, sizes, asked.deadline)
            rows = rows.view(TYPES[asked.dtype]).view(ranks, nbytes // asked.dtype.itemsize)
            call.part = fold(rows, asked.dtype, asked.op)
        if self.spec.elastic:
            call.brought = call.part.clone(), bytes(call.residual or b"")

    def _send(self, call: _NodeCall) -> None:
        """Start the all-reduce of this rank's part between the nodes, which replaces it."""
        asked, part = call.asked, call.part.view(torch.uint8)
        call.rail = rail = Operation(
            memoryview(b"") if call.device is not None else part.numpy().data,
            folded_as(asked.dtype),
            asked.op,
            f"{asked.name or 'an all-reduce'}, made again" if call.again else asked.name,
            max(asked.deadline - time.monotonic(), 0.001),
            call=asked.call or asked,
            more=asked.more,
            rounded=asked.rounded,
            residual=call.residual,
        )
        if call.device is not None:
            with call.leaving():
                self._staging.all_reduce(rail, Flat(part, rail.dtype, part, None))
        elif self._staging.in_order:
            self.inner.submit(rail)
        else:
            self._staging.follow(rail)

    # -- the second thread: the results, to the node --------------------------------------------

    def _hand_all_out(self) -> None:
        while self._node.failure is None:
            step = self._second.queue.get()
            while step is not None:
                step = self._try(step)
        self._first.queue.put(None)  # it is to read none of the buffers that are given back
        self._first.wait_for_end()
        while self._open:
            asked, _ = self._open.popitem()
            asked.end(self._node.failure)

    def _hand_out(self, call: _NodeCall) -> Step | None:
        """Hear how all rails have ended, and give this rank's part of the result to its node."""
        error, until = self._await_rail(call), call.asked.deadline + GRACE_S
        contributors = list(self.inner.contributors) if self.spec.elastic else []
        mine = [[], encode_error(error).decode()] if error else [contributors, ""]
        said = self._node.agree(OUT, mine, until)
        failed = next((why for _, why in said if why), "")
        if failed:
            first = error if error and failed == mine[1] else decode_error(failed.encode())
            if call.again:  # for other nodes it may be over, and their next call be at the reducers
                raise first
            return partial(self._conclude, call, first)
        nodes = [frozenset(its) for its, _ in said]
        common = frozenset.intersection(*nodes)
        if any(one != common for one in nodes):
            self._make_again(call, nodes[self.place.local_rank] - common)
            return partial(self._hand_out, call)
        with call.returning():
            own = rounded(call.part, call.asked.dtype).view(torch.uint8)
            padded = torch.empty(call.size, dtype=torch.uint8, device=own.device)
            padded[: own.numel()] = own
            self._node.gather(OUT, call.rows, padded, until)
            self._write(call, call.rows[: call.data.numel()], until)
            self._conclude(call, None)
        return None

    def _await_rail(self, call: _NodeCall) -> ReductionError | None:
        """Wait for the end between the nodes and return the error, in this job's ranks."""
        across, rail = self.place.across, call.rail
        assert rail is not None, "it was sent"
        while not rail.ends_within(_TICK_S):
            self._node.check()  # none of them can have this one's end
            call.asked.missing = tuple(across[node] for node in rail.missing)
        call.asked.sequence = rail.sequence
        try:
            rail.wait()
        except ReductionError as error:
            found = renumbered(error, across, "between nodes")
            if isinstance(found, RankLostError):
                raise found from None  # without it there are no more all-reduces
            return found
        return None

    def _make_again(self, call: _NodeCall, lost: frozenset[int]) -> None:
        """Make an all-reduce again without nodes that this rail had and another one had not."""
        call.again = True
        if not lost:
            return
        self.inner.lose(lost)
        part, kept = call.brought
        call.part.copy_(part)
        if call.residual is not None:
            call.residual[:] = kept
        self._send(call)

    def _write(self, call: _NodeCall, result: torch.Tensor, until: float) -> None:
        """Put the result where the caller expects it."""
        if call.flat is None or call.device is None:
            call.data.copy_(result)
            return
        copied = call.device.to_device(call.data, result)
        if call.flat.copy is not None:
            copied = call.device.to_device(call.flat.target, call.flat.copy)
        self._node.wait_for(copied.done, OUT, until)

    # -- ends -----------------------------------------------------------------------------------

    def _conclude(self, call: _NodeCall, error: Exception | None) -> None:
        self._open.pop(call.asked, None)
        call.asked.end(error)

    def _try(self, step: Step) -> Step | None:
        if self._node.failure is not None:
            return None
        try:
            return step()
        except ReductionError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 (its waiter gets it)
            self._fail(ReductionError(repr(error)))
        return None

    def _fail(self, error: ReductionError) -> None:
        """Take part no longer; the second thread ends what is open, as it writes to buffers."""
        if not self._node.fail(error):
            return
        self._second.queue.put(None)
        if isinstance(error, RankLostError) and not self.spec.elastic:
            self._leave_at = time.monotonic() + LINGER_S
        else:
            self.inner.stop()  # the other nodes shall not wait for this rank
