"""The public object: what `all_reduce` takes and gives."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from reducer.errors import ConfigError, LocalProtocolError, ReductionError
from reducer.wire.constants import MAX_JOB_NAME_BYTES, DType, ReduceOp
from reducer.wire.leaves import MAX_LEAVES, Share
from reducer.wire.messages import worst
from worker_client.client.summary import Summary
from worker_client.communicators.membership import REDUCERS_TIMEOUT_S
from worker_client.protocol import _flight
from worker_client.protocol.operation import Operation, refused, refusing
from worker_client.runtime import service_thread
from worker_client.staging.arguments import DEFINED, parse, parse_op, refuse_weight
from worker_client.staging.device_copies import DeviceStaging
from worker_client.staging.host_buffer import DTYPES, flatten, host_buffer, is_on_device
from worker_client.staging.split_call import submit_pieces
from worker_client.staging.weighted import weigh

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from reducer.wire.messages import Straggler
    from worker_client.client.membership_change import MembershipChange, Resources
    from worker_client.communicators.communicator import Communicator, Counters, LinkTraffic
    from worker_client.communicators.elastic import Change
    from worker_client.fusion.fusion import Fusion
    from worker_client.fusion.negotiation import Tensor
    from worker_client.protocol.spec import JobSpec
    from worker_client.runtime.trace import Trace
    from worker_client.staging.wire_rule import WireRule
    from worker_client.work import Work


class CallObserver(Protocol):
    """Sees all calls of a client, when they are made or refused, and when they have ended."""

    def begun(self, name: object, data: Any, op: object, work: Work | None = None) -> Any:
        """Record a call, and follow its handle to its end; return what `ended` is given."""

    def ended(self, call: Any, error: BaseException | None) -> None:
        """Record how a call has ended."""

    def finish(self) -> None:
        """Record that the client has ended."""


class Client:
    """One worker of one job. Threads may share it; a forked child may not use it.

    Through `ordered`, which has joined the job, go all-reduces in the order of calls; it releases
    `resources` after its farewell. `enter` joins another job at the same reducers, from its spec.

    Attributes:
        timeout_s: default for `all_reduce`, in seconds.
        impl: name of the implementation.
        on_end: called once, with this client, when it begins to shut down.
        observer: sees its calls, if there is one.
    """

    impl = "compiled"

    def __init__(
        self,
        ordered: Communicator,
        resources: Resources,
        *,
        wire: WireRule,
        timeout_s: float,
        trace: Trace,
        membership_change: MembershipChange | None = None,
        enter: Callable[[JobSpec], Client] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.on_end: Callable[[Client], None] | None = None
        self.observer: CallObserver | None = None
        self._ordered = ordered
        self._resources = resources
        self._wire = wire
        self._casts = wire.wire_dtype is not None
        self._stages = ordered.piecewise or ordered.takes_devices
        self._membership_change = membership_change
        self._enter = enter
        self._meter = _flight.CallMeter()
        # All-reduces of one call follow each other, whatever other threads call meanwhile.
        self._order = threading.RLock()
        # What other ranks are to hear of.
        self._given_up: deque[tuple[_flight.MeteredCall, BaseException]] = deque()
        self._trace = trace
        self._staging = DeviceStaging(ordered.submit, trace)
        self._submit = ordered.submit  # until there is a tensor on a device
        self._forks = service_thread.forks

    @property
    def _fusion(self) -> Fusion:
        return self._resources.fusion

    @property
    def spec(self) -> JobSpec:
        """The job, as it began: between the nodes, if all-reduces go through nodes first."""
        return self._ordered.spec

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self._ordered.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that have ever taken part: at the start, and joined since."""
        return self._ordered.world_size

    @property
    def present(self) -> tuple[int, ...]:
        """Ranks that take part: all of them, but for those that the job goes on without."""
        return self._ordered.present

    @property
    def wire_dtype(self) -> str:
        """What large float32 buffers travel as, in the words of ``REDUCTION_WIRE_DTYPE``.

        One of ``none``, ``bf16``, ``fp16``, ``int8`` and ``fp8_e4m3``.
        """
        return self._wire.setting

    @property
    def lanes(self) -> list[int]:
        """Number of links to each reducer, one to each of its threads."""
        reducers = [link.reducer for link in self._ordered.links]
        return [reducers.count(reducer) for reducer in range(max(reducers) + 1)]

    @property
    def in_use(self) -> list[bool]:
        """Whether each reducer is in use, in the order of the spec."""
        return self._ordered.in_use

    @property
    def straggler(self) -> Straggler | None:
        """The rank that the others have waited for again and again in the last seconds, and why.

        As the reducers say, twice a second; None if they know of none. With
        ``REDUCTION_HIERARCHY=auto`` it is a rank of the node that the other nodes wait for.
        """
        named = self._fusion.communicator
        return worst([self._ordered.straggler, None if named is None else named.straggler])

    @property
    def counters(self) -> Counters:
        """What has happened to this client's reducers so far."""
        named = self._fusion.communicator
        mine = self._ordered.counters
        return mine if named is None else mine.plus(named.counters)

    @property
    def traffic(self) -> LinkTraffic:
        """What this client's links have carried so far, and whom the ranks waited for."""
        return self._ordered.traffic.plus(self._fusion.traffic)

    @property
    def carries(self) -> float:
        """What the links to other machines carry at best, bytes a second; 0 if that is unknown.

        It is measured while all-reduces of 1 MiB or more are on their way.
        """
        named = self._fusion.communicator
        return max(self._ordered.carries, 0.0 if named is None else named.carries)

    @property
    def losses(self) -> int:
        """How often a reducer in use was lost; `counters` has those of calls with names besides."""
        named = self._fusion.communicator
        return max(self._ordered.counters.losses, named.counters.losses if named else 0)

    @property
    def bytes_reduced(self) -> int:
        """Bytes of all buffers that were reduced so far."""
        return self._meter.bytes_reduced + self._staging.bytes_reduced + self._fusion.bytes_reduced

    @property
    def calls(self) -> int:
        """Number of all-reduces that callers have started; of those with names, that were made.

        After an exception out of a signal handler this tells whether the call that it interrupted
        counts at the other ranks: if it has no name, it has begun if it is among these.
        """
        return self._meter.calls + self._fusion.calls

    @property
    def waited_s(self) -> float:
        """Seconds during which all was under way that callers had started so far.

        They are counted from the latest call until none is in progress, so what a backward pass
        hides before its last bucket is not among them.
        """
        return self._meter.waited_s + self._fusion.waited_s

    def summary(self) -> Summary:
        """Return what this client has gone through so far, the straggler included; prints well."""
        durations = _flight.Durations()
        for some in (self._meter.durations, self._fusion.durations):
            durations.merge(some)
        return Summary(
            rank=self.rank,
            world_size=self.world_size,
            present=self.present,
            calls=self.calls,
            bytes_reduced=self.bytes_reduced,
            waited_s=self.waited_s,
            losses=self.losses,
            fallbacks=self.counters.fallbacks,
            straggler=self.straggler,
            failure=self._meter.failure,
            traffic=self.traffic,
            carries=self.carries,
            durations=durations,
        )

    @property
    def in_callback(self) -> bool:
        """Whether this thread is in a callback of an all-reduce, which may wait for none."""
        return self._ordered.in_callback

    @property
    def usable(self) -> bool:
        """Whether this process may call `all_reduce`."""
        return not self._ordered.closing and service_thread.forks == self._forks

    # -- calls --------------------------------------------------------------------------------

    def all_reduce(
        self,
        data: Any,
        op: str | ReduceOp = ReduceOp.MEAN,
        *,
        name: str | None = None,
        timeout: float | str | None = None,
        weight: float | None = None,
        residual: Any = None,
        exact: bool = False,
        shape: str = "",
    ) -> Work:
        """Replace `data` by its reduction over all ranks; every rank gets the same bits.

        Every rank must make the same calls. Those without a name must be in the same order at
        every rank; those with one may be in any, among each other: they are matched by name, and
        small ones are packed and reduced together (`worker_client.fusion`). Several may be in
        flight.

        Args:
            data: NumPy array or torch tensor of any shape, of dtype float32, float64, float16,
                bfloat16, int8, int32, int64 or uint8. Contiguous data in host memory is sent from,
                and the result written to, its own memory. A tensor on a CUDA device is copied to
                the host and back, as soon as this thread's current stream is done with what it has
                been given so far; every rank must then pass one on a device. With a name, this
                call waits for the copy, as it always does for one of any other device.
            op: ``"sum"``, ``"mean"`` (floating types only), ``"min"``, ``"max"`` or ``"product"``.
            name: the same at every rank, and of one call at a time. The n-th calls of a name belong
                together, also after one that failed.
            timeout: seconds (or ``"300s"``, ``"5ms"``) until it fails, this client's default if
                None. Failing may take longer: what is on its way has to leave `data` first. For a
                tensor on a device it counts from when a part of it is in host memory.
            weight: of this rank in a weighted mean, ``sum(weight * data) / sum(weight)``, such as
                its number of samples; 0 or more, and given by all ranks or none. For float32 and
                float64 in host memory, without a name. `data` times the weight is rounded, then
                the mean of these, and last that mean over the mean of all weights, which float64
                adds up.
            residual: contiguous float32 array or tensor like `data`, zeros at first: what the cast
                to the wire's type takes away is kept there and added to the next call that is given
                it (error feedback). In host memory, whatever `data` is in. Owned by the call until
                it has ended; after an error restore a copy to make the step again.
            exact: whether `data` travels as it is, whatever the wire's type; the same at every
                rank.
            shape: with a name: any text that is to be the same at every rank, such as the shape of
                what `data` was made of; ranks that differ in it get a MismatchError.

        Returns:
            A handle; wait for it before reading or writing `data`.

        Raises:
            ConfigError: `data` or another argument is not supported.
            LocalProtocolError: the client was shut down, or belongs to the parent process.
            DeviceError: a device failed, now or in an earlier call.
        """
        if name is not None:
            # All is done in there: what interrupts it, or refuses the call, uses up its number.
            check = partial(self._check_named, weight, residual, exact, shape)
            try:
                work = self._fusion.submit(
                    data,
                    op,
                    name,
                    timeout,
                    exact=bool(exact),
                    shape=shape,
                    residual=residual,
                    check=check,
                )
            except BaseException as error:
                self._observe_refusal(name, data, op, error)
                raise
            if self.observer is not None:
                self.observer.begun(name, data, op, work)
            return work
        start = partial(
            self._start,
            data=data,
            op=op,
            timeout=timeout,
            weight=weight,
            residual=residual,
            exact=exact,
            shape=shape,
        )
        return self._begin(start, data, op)

    def reduce_leaves(
        self,
        sums: Any,
        share: Share,
        op: str | ReduceOp = ReduceOp.SUM,
        *,
        timeout: float | str | None = None,
    ) -> Work:
        """Replace ``sums[0]`` by the reduction over all leaves of a step, in the order of calls.

        Args:
            sums: NumPy array or torch tensor in host memory with a first axis: for each of
                ``share.parts`` the reduction of its leaves, as the tree has it. Travels as it is.
            share: what `leaves` has returned.
            op: as in `all_reduce`; a mean is over all leaves.
            timeout: as in `all_reduce`.

        Returns:
            A handle, as `all_reduce`. Its `wait` may raise a LeavesMovedError as well: ranks were
            lost or have joined since, and all ranks make the step again.

        Raises:
            ConfigError, LocalProtocolError: as `all_reduce`.
        """
        start = partial(self._start_leaves, sums=sums, share=share, op=op, timeout=timeout)
        return self._begin(start, sums, op)

    def leaves(self, count: int) -> Share:
        """Deal the leaves of a step among the ranks that are present.

        A step's batch is cut into `count` leaves, and the sum over them depends on nothing else:
        neither on how many ranks there are, nor on which of them has which leaf (docs/leaves.md).

        Args:
            count: leaves of the step: the same at every rank, and one for each at least.

        Returns:
            Which are this rank's, and the subtrees of which it passes `reduce_leaves` the sums.

        Raises:
            ConfigError: there are too few or too many, or this job cannot sum leaves.
            LocalProtocolError: the client was shut down, or belongs to the parent process.
            ReductionError: ranks were lost, and this one cannot go on.
        """
        self._check_usable()
        if self._membership_change is not None:
            self._membership_change.settle()
        if self.spec.fallback or self._ordered.takes_devices:
            raise ConfigError(
                "sums of leaves go to reducers directly: leave REDUCTION_FALLBACK and "
                "REDUCTION_HIERARCHY out"
            )
        present = self.present
        if not len(present) <= count <= MAX_LEAVES:
            raise ConfigError(
                f"{len(present)} ranks need as many leaves at least, and {MAX_LEAVES} at most: "
                f"got {count}"
            )
        share = Share(int(count), present, present.index(self.rank))
        if 0 < self.spec.chunk_bytes < share.least_chunk_bytes:
            raise ConfigError(
                f"REDUCTION_CHUNK_BYTES must be {share.least_chunk_bytes} at least for {count} "
                f"leaves of {len(present)} ranks"
            )
        return share

    def join(self, data: Any, stand_in: Callable[[Tensor], Any]) -> Work:
        """Start a sum that ends when all ranks have started it, and no call with a name is left.

        Until then this rank takes part in the others' calls that have names.

        Args:
            data: what `all_reduce` takes.
            stand_in: returns what this rank contributes to a tensor of the others', or raises
                a ReductionError, with which the others' call fails. On a thread of this client's.

        Raises:
            ConfigError, LocalProtocolError: as `all_reduce`.
        """
        self._check_usable()
        return self._fusion.join(data, stand_in)

    def decline(self, why: BaseException, *, name: str | None = None) -> None:
        """Take no part in the next call: the other ranks get an error that says why.

        For a caller that refuses a call before `all_reduce` hears of it, or makes it otherwise.

        Args:
            why: the reason.
            name: the next call of this name is meant; None for the next one without a name.
        """
        self._check_usable()
        with self._order:
            self._observe_refusal(name, None, "declined", why)
            if name is not None:
                self._fusion.decline(name, why)
                return
            call = _flight.MeteredCall(self._meter)
            call.begin()
            self._given_up.append((call, why))
            self._give_up()

    def rounds(self, data: Any, op: str | ReduceOp = ReduceOp.MEAN) -> bool:
        """Say whether `all_reduce(data, op)`, without a name, rounds it to the wire's type.

        Args:
            data: NumPy array or torch tensor.
            op: reduction.
        """
        if not self._casts:
            return False
        dtype = DTYPES.get(str(data.dtype).removeprefix("torch."))
        return dtype is not None and self._wire.rounds(dtype, parse_op(op), data.nbytes)

    def packs(self, tensors: Sequence[tuple[DType, int]], op: ReduceOp) -> list[list[int]]:
        """Say which tensors may be packed into one buffer, so that each travels as it would alone.

        Args:
            tensors: dtype and bytes of each.
            op: reduction of all of them.

        Returns:
            Their places, in groups of one dtype.
        """
        return self._wire.packs(tensors, op)

    def shutdown(self) -> None:
        """Leave the job and free everything; what is in progress fails. May be called again."""
        if service_thread.forks != self._forks:
            return  # the sockets and the thread belong to the parent process
        if self._membership_change is not None:
            self._membership_change.stop()
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(self)
        self._fusion.stop()
        self._ordered.stop()
        # A callback keeps the driver from ending what staging would wait for.
        self._staging.stop(wait=not self._ordered.in_callback)
        self._trace.stop()
        atexit.unregister(self.shutdown)  # who registered that would keep all of this
        if self.observer is not None:
            self.observer.finish()
        if self._resources.failure is not None:
            raise self._resources.failure

    def start_timeline(self, path: str | PathLike[str]) -> None:
        """Write what happens from now on to a file, which Perfetto opens.

        Args:
            path: of the file, which is replaced; another one at each rank.

        Raises:
            ConfigError: it cannot be written.
            LocalProtocolError: the client was shut down, or belongs to the parent process.
        """
        self._check_usable()
        self._trace.start(Path(path), self.spec)

    def stop_timeline(self) -> None:
        """Complete the file; nothing more is written to it."""
        self._trace.stop()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def subgroup(self, name: str, ranks: Sequence[int]) -> Client:
        """Join a job of some of this job's ranks, at the same reducers; shut it down afterwards.

        The other ranks, and what becomes of this job, do not concern it.

        Args:
            name: the same at all of them, and of one such job at a time.
            ranks: of this job, this one among them; in that job they count from 0, in this order.

        Raises:
            ConfigError: this job's ranks host reducers or go through nodes first, it goes on
                without reducers or ranks, or the name is too long.
            LocalProtocolError: the client was shut down, or belongs to the parent process.
            ReductionError: as `worker_client.init`.
        """
        self._check_usable()
        enter, spec = self.check_subgroups(), self.spec
        job = f"{spec.job}/{name}"
        if len(job.encode()) > MAX_JOB_NAME_BYTES:
            raise ConfigError(
                f"the job's name {spec.job!r} is too long for a job of some of its ranks, "
                f"{job!r}: give it {len(job.encode()) - MAX_JOB_NAME_BYTES} bytes less"
            )
        named_spec = replace(
            spec, job=job, rank=list(ranks).index(spec.rank), world_size=len(ranks)
        )
        # Who begins when a reducer is lost already does not wait for it.
        return enter(
            named_spec
            if all(self.in_use)
            else replace(named_spec, reducers_timeout_s=REDUCERS_TIMEOUT_S)
        )

    def check_subgroups(self) -> Callable[[JobSpec], Client]:
        """Return what joins a job of some of this job's ranks.

        Raises:
            ConfigError: there can be none, as `subgroup` says.
        """
        spec = self.spec
        if spec.hosts or spec.fallback or spec.elastic or self._enter is None:
            raise ConfigError(
                "ranks of a job can have another one among themselves only at reducers of a pool "
                "(REDUCTION_SERVERS), and without REDUCTION_FALLBACK, REDUCTION_ON_RANK_LOST and "
                "REDUCTION_HIERARCHY: leave these out"
            )
        return self._enter

    # -- ranks that join ----------------------------------------------------------------------

    def admit(self, *, timeout: float | str | None = None) -> bool:
        """Let ranks join that wait for it; every rank calls this at the same point, as any call.

        Between two steps, say: no all-reduce may be in progress. Afterwards the ranks that have
        joined take part in all calls, and `present` has them; they got what `worker_client.init`
        with ``join=True`` returns, and the first call of this of theirs returns at once. They have
        nothing of the training's state yet: `worker_client.elastic.sync` calls this, and sends it.

        Args:
            timeout: seconds, or text such as ``"5s"``, for the other ranks to call this.

        Returns:
            Whether ranks have joined, the same at every rank.

        Raises:
            ConfigError: the job does not go on without lost ranks, its ranks host reducers, it
                refuses newcomers, or a call is in progress.
            LocalProtocolError: the client was shut down, or belongs to the parent process.
            ReductionError: as `all_reduce`.
        """
        self._check_usable()
        if not self.admits or self._membership_change is None:
            raise ConfigError(
                "ranks can join only where REDUCTION_ON_RANK_LOST=continue is set, and reducers "
                "are those of a pool (REDUCTION_SERVERS), and not with REDUCTION_HIERARCHY"
            )
        _, timeout_s = parse(DType.INT64, ReduceOp.MAX, None, timeout, self.timeout_s)
        return self._membership_change.admit(timeout_s, self._is_busy)

    @property
    def admits(self) -> bool:
        """Whether ranks can join: the job goes on without lost ones, at reducers of a pool."""
        pool = self._membership_change is not None and not self.spec.hosts
        return pool and self._enter is not None  # not if all-reduces go through nodes first

    @property
    def newcomer(self) -> bool:
        """Whether this rank has joined a job that runs, and not called `admit` yet."""
        return self._membership_change is not None and self._membership_change.newcomer

    def refuse_newcomers(self, why: str) -> None:
        """Let `admit` fail from now on, with this reason: calls would not match a newcomer's."""
        if self._membership_change is not None:
            self._membership_change.refusal = why

    def on_membership(self, callback: Callable[[Change], None]) -> None:
        """Have a function called with every new membership, before any result of it is there.

        It is called by a thread of the client's, and must not wait for all-reduces. At a rank that
        joins it is called at once, with the membership that this one has joined.

        Args:
            callback: takes what has changed: ranks that are ``present``, that ``joined`` and that
                were ``lost``.
        """
        if self._membership_change is not None:
            self._membership_change.subscribe(callback)

    def _is_busy(self) -> bool:
        """Whether a call is in progress, if only for the moment in which its caller hears."""
        return self._ordered.busy or not self._staging.in_order or self._fusion.busy

    # -- the way of an all-reduce -------------------------------------------------------------

    def _begin(
        self, start: Callable[[_flight.MeteredCall], Operation], data: Any, op: str | ReduceOp
    ) -> Operation:
        """Make a call without a name, whatever becomes of `start`."""
        if service_thread.forks != self._forks:  # now: who held the lock is not in this process
            self._check_usable()
        call = _flight.MeteredCall(self._meter)
        with self._order:
            try:
                call.begin()  # first: a call that is interrupted in a function below has a number
                if self._given_up:
                    self._give_up()
                if self._casts:
                    self._check_usable()  # before a residual is used up; others see it later
                operation = start(call)
            except BaseException as error:
                self._given_up.append((call, error))  # first: a second interrupt may follow
                self._give_up()
                self._observe_refusal(None, data, op, error)
                raise
            if self.observer is not None:
                self.observer.begun(None, data, op, operation)
            return operation

    def _start_leaves(
        self,
        call: _flight.MeteredCall,
        *,
        sums: Any,
        share: Share,
        op: str | ReduceOp,
        timeout: float | str | None,
    ) -> Operation:
        if not isinstance(share, Share) or len(sums) != len(share.parts):
            raise ConfigError(
                "reduce_leaves() takes one array for each part of what Client.leaves has returned: "
                f"got {len(sums)} for {share!r:.80}"
            )
        view, dtype, write_back = host_buffer(sums)
        reduction, timeout_s = parse(dtype, op, None, timeout, self.timeout_s)
        operation = Operation(
            view,
            dtype,
            reduction,
            None,
            timeout_s,
            call=call,
            data=sums,
            write_back=write_back,
            lead=self._ordered.wait,
            ended=call,
            leaves=share,
        )
        call.nbytes = operation.nbytes
        self._submit(operation)
        return operation

    def _start(
        self,
        call: _flight.MeteredCall,
        *,
        data: Any,
        op: str | ReduceOp,
        timeout: float | str | None,
        weight: float | None,
        residual: Any,
        exact: bool,
        shape: str,
    ) -> Operation:
        """Start the all-reduce of a call without a name, and return it."""
        if shape:
            raise ConfigError("shape= is compared in calls with a name: give name= as well")
        array = type(data) is np.ndarray  # which is no tensor, and asked faster
        if self._stages and not array and is_on_device(data):
            self._check_usable()
            refuse_weight(weight, "the host multiplies, so pass tensor.cpu()")
            return self._stage(call, data, op, timeout, residual=residual, exact=exact)
        view, dtype, write_back = host_buffer(data)
        call.nbytes = view.nbytes
        reduction, timeout_s = None, self.timeout_s
        if timeout is None and type(op) is str:
            reduction = DEFINED.get((dtype, op))  # a call less, mostly
        if reduction is None:
            reduction, timeout_s = parse(dtype, op, None, timeout, timeout_s)
        operation = Operation(
            view,
            dtype,
            reduction,
            None,
            timeout_s,
            call=call,
            data=data,
            write_back=write_back,
            lead=self._ordered.wait,
            ended=call,
        )
        if self._casts or residual is not None:
            self._round(operation, view.nbytes, residual, exact)
        if weight is not None:
            self._start_weighted(operation, weight)
        else:
            self._submit(operation)
        return operation

    def _start_weighted(self, operation: Operation, weight: float) -> None:
        if self.spec.elastic:
            raise ConfigError(
                "weight= cannot be combined with on_rank_lost='continue': a rank could be lost "
                "between the weights' all-reduce and the data's"
            )
        submit_pieces(operation, weigh(operation, weight), self._submit)

    def _round(self, operation: Operation, nbytes: int, residual: Any, exact: bool) -> None:
        """Let an all-reduce of so many bytes be rounded, if the wire's rule says so."""
        if self._casts and not exact:
            operation.rounded = self._wire.rounds(operation.dtype, operation.op, nbytes)
        if residual is not None:
            _check_residual(exact)
            operation.residual = self._wire.residual(residual, operation.dtype, nbytes)

    def _stage(
        self,
        call: _flight.MeteredCall,
        tensor: Any,
        op: str | ReduceOp,
        timeout: float | str | None,
        *,
        residual: Any,
        exact: bool,
    ) -> Operation:
        """Start an all-reduce of a tensor on a device."""
        flat = flatten(tensor)
        reduction, timeout_s = parse(flat.dtype, op, None, timeout, self.timeout_s)
        operation = Operation(
            memoryview(b""),
            flat.dtype,
            reduction,
            None,
            timeout_s,
            call=call,
            data=tensor,
            lead=self._wait_for_device,
            ended=call,  # of no bytes where staging counts them
        )
        self._round(operation, flat.data.nbytes, residual, exact)
        if self._ordered.takes_devices:
            call.nbytes = flat.data.nbytes
            self._ordered.all_reduce(operation, flat)
            return operation
        self._submit = self._submit_in_order
        self._staging.all_reduce(operation, flat)
        return operation

    def _give_up(self) -> None:
        """Use up the numbers of calls that this rank was refused, or was interrupted in.

        Whatever of them has begun ends badly, and the other ranks hear why. If this is interrupted,
        the next call goes on with it.
        """
        while self._given_up:
            call, why = self._given_up[0]
            if self.usable and call.pending:  # else others hear that it left, or of no such call
                self._refuse(call, why)
            call(why)
            self._given_up.popleft()

    def _observe_refusal(self, name: object, data: Any, op: object, why: BaseException) -> None:
        if self.observer is not None:
            self.observer.ended(self.observer.begun(name, data, op), why)

    def _refuse(self, call: _flight.MeteredCall, why: BaseException) -> None:
        refusal = refused(self._ordered.rank, f"{type(why).__name__}: {why}")
        with suppress(ReductionError):  # it was shut down, or a device failed: the others hear that
            self._submit(refusing(call, refusal, self.timeout_s))

    def _submit_in_order(self, operation: Operation) -> None:
        """Start an all-reduce behind all calls that wait for a device."""
        if self._staging.in_order:
            self._ordered.submit(operation)
        else:
            self._staging.follow(operation)

    def _wait_for_device(self, done: Callable[[], bool], until: float) -> None:
        del done, until  # the driver's own thread leads, and staging's bring the end
        if self._staging.is_this_thread or self._ordered.in_callback:
            raise LocalProtocolError("waiting in a callback of an all-reduce would last for ever")

    def _check_named(self, weight: float | None, residual: Any, exact: bool, shape: str) -> None:
        self._check_usable()
        if type(shape) is not str:
            raise ConfigError(f"shape= takes text, such as str(array.shape), got {shape!r}")
        refuse_weight(weight, "calls with names are packed together, so leave out name=")
        if residual is not None:
            _check_residual(exact)

    def _check_usable(self) -> None:
        if service_thread.forks != self._forks:
            raise LocalProtocolError(
                "this client belongs to the parent process: a forked child (such as a DataLoader "
                "worker) cannot use it"
            )
        self._ordered.check()


def _check_residual(exact: bool) -> None:
    if exact:
        raise ConfigError(
            "residual= keeps what the cast takes away, and exact=True casts nothing: leave one of "
            "them out"
        )
