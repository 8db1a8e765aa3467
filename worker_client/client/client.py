"""The public object: what `all_reduce` takes and gives."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from reducer.errors import ConfigError, LocalProtocolError, MembershipError, ReductionError
from reducer.wire.constants import DType, ReduceOp
from worker_client.communicators.elastic import Change, ElasticCommunicator
from worker_client.communicators.flat import FlatCommunicator
from worker_client.communicators.lobby import LOOK_S, Lobby, Offer
from worker_client.communicators.membership import Membership
from worker_client.communicators.returning import Past, Returning
from worker_client.protocol.names import own, refused
from worker_client.protocol.operation import Operation
from worker_client.runtime import faults, implementation
from worker_client.runtime.service_thread import forks
from worker_client.staging import device
from worker_client.staging.arguments import Arguments, describe, parse, refuse_extras
from worker_client.staging.device_copies import DeviceStaging
from worker_client.staging.host_buffer import flatten, host_buffer
from worker_client.staging.wire_cast import WireCast
from worker_client.work import PlainWork

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from reducer.failpoints import Failpoint
    from worker_client.communicators.elastic import Ended, Left
    from worker_client.communicators.fallback import Fallback
    from worker_client.communicators.lobby import Application
    from worker_client.fusion.fusion import Fusion
    from worker_client.fusion.negotiation import Tensor
    from worker_client.protocol.operation import Unfinished
    from worker_client.protocol.spec import JobSpec
    from worker_client.runtime.credentials import Keys
    from worker_client.staging.host_buffer import HostBuffer
    from worker_client.staging.split_call import Call
    from worker_client.work import Work


log = logging.getLogger(__name__)
ENDS_S = 1.0  # for a call to end whose caller has heard that it has


class Counters(NamedTuple):
    """What a client has gone through.

    Attributes:
        losses: how often a reducer that was in use was lost.
        moved: chunks that were sent again to another reducer.
        claimed: chunks whose result was here, of which another reducer was told.
        supplied: results that other ranks needed from here.
        fallbacks: all-reduces that the process group did, as no reducer was left.
        returns: how often they went back from the process group to reducers.
    """

    losses: int
    moved: int
    claimed: int
    supplied: int
    fallbacks: int
    returns: int


class Client:
    """One worker of one job. Threads may share it; a forked child may not use it.

    Args:
        spec: who we are and where the reducers are.
        timeout_s: default for `all_reduce`, in seconds.
        connect_timeout_s: how long to wait for every reducer's welcome.
        impl: ``"plain"``, ``"compiled"``, or None for the best that can be had.
        io_threads: threads of libzmq that serve the connections.
        context: that of the reducer that this process hosts, if it does.
        keys: what to show to reducers; by default none.
        fusion: what reduces tensors that have names; without it, names are merely compared.
        fallback: what brings all-reduces to their end when no reducer is left, if
            `spec.fallback`.
        on_shutdown: called once, after the farewell (embedded reducers stop there).
        failpoints: what tests make happen at the worker's places; of all clients of a process that
            have the compiled implementation, the latest one's count.
        wire_dtype: what float32 buffers travel as, FLOAT16 or BFLOAT16; None for what they are.
        lost: ranks of the spec that the job goes on without already, if it has been going on with
            `spec.elastic`; None for a job that begins.
        application: lets this rank join a job that runs.
        new_fusion: makes what reduces tensors with names when ranks have joined, from the ranks
            that have ever taken part and those that are lost.

    Attributes:
        on_end: called once, with this client, when it begins to shut down.

    Raises:
        ConfigError: an address cannot be resolved, or `impl` cannot be had.
        ReducerLostError: a reducer did not answer in time; the message names it and says why.
        ReductionError: a reducer refused this worker; the class says why.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        impl: str | None = None,
        io_threads: int = 1,
        context: Any = None,
        keys: Keys | None = None,
        fusion: Fusion[Client] | None = None,
        fallback: Fallback | None = None,
        on_shutdown: Callable[[], None] | None = None,
        failpoints: Sequence[Failpoint] = (),
        wire_dtype: DType | None = None,
        lost: Collection[int] | None = None,
        application: Application | None = None,
        new_fusion: Callable[[int, Collection[int]], Fusion[Client]] | None = None,
    ) -> None:
        self.spec = spec
        self.timeout_s = timeout_s
        self.on_end: Callable[[Client], None] | None = None
        self._bytes_reduced = 0
        self._calls = 0
        self._begun_at = 0.0  # the latest operation, in seconds of the monotonic clock
        self._waited_s = 0.0
        self._fusion = fusion
        self._fallback = fallback
        self._on_shutdown = on_shutdown
        self._new_fusion = new_fusion
        self._lobby: Lobby | None = None
        self._newcomer = application is not None  # and has not called `admit` yet
        self._on_membership: list[Callable[[Change], None]] = []
        self._newcomers_refused: str | None = None  # why no rank can join
        self._host_failure: BaseException | None = None
        chosen = faults.around(implementation.select(impl), failpoints)
        self.impl = chosen.name
        # Pieces of one call follow each other, whatever other threads call meanwhile.
        self._order = threading.RLock()
        self._works: dict[Operation, Callable[[Exception | None], None]] = {}  # whom to tell
        self._wire = WireCast(wire_dtype, whole=spec.elastic)
        self._staging = DeviceStaging(self._drive)
        self._forks = forks()

        def enter(
            spec: JobSpec, ended: Ended, left: Left, back: Returning | None = None
        ) -> FlatCommunicator:
            return FlatCommunicator(
                spec,
                chosen,
                io_threads=io_threads,
                context=context,
                keys=keys,
                ended=ended,
                left=left,
                hand_over=_keep if fallback is None else fallback.stay(ended, back).take,
            )

        self._enter = enter
        self._elastic: ElasticCommunicator | None = None
        self._returning: Returning | None = None
        if spec.elastic:
            whole = Membership.whole(spec)
            self._elastic = ElasticCommunicator(
                whole if lost is None else whole.without(lost, ()),
                enter,
                self._end,
                self._leave,
                timeout_s=timeout_s,
                connect_timeout_s=connect_timeout_s,
                joins=application is not None,
                changed=self._tell_of_membership,
            )
        elif fallback is not None:
            self._returning = Returning(
                spec, enter, self._end, self._leave, announced=fallback.announced
            )
        else:
            self._whole = enter(spec, self._end, self._leave)
        self._driver = self._elastic or self._returning or self._whole.driver
        try:
            self._communicator.join(connect_timeout_s)
            if application is not None:
                self._enter_job(application)
        except BaseException:
            self.shutdown()
            raise

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self.spec.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that have ever taken part: at the start, and joined since."""
        if self._elastic is None:
            return self.spec.world_size
        return self._elastic.membership.all.world_size

    @property
    def wire_dtype(self) -> str:
        """What large float32 buffers travel as: ``float16``, ``bfloat16`` or ``float32``."""
        dtype = self._wire.wire_dtype
        return "float32" if dtype is None else dtype.name.lower()

    @property
    def present(self) -> tuple[int, ...]:
        """Ranks that take part: all of them, but for those that the job goes on without."""
        if self._elastic is None:
            return tuple(range(self.world_size))
        return self._elastic.membership.present

    @property
    def lanes(self) -> list[int]:
        """Number of connections to each reducer, one for each of its threads."""
        session = self._communicator.session
        reducers = [link.reducer for link in session.links]
        return [reducers.count(reducer) for reducer in range(len(session.spec.reducers))]

    @property
    def in_use(self) -> list[bool]:
        """Whether each reducer is in use, in the order of the spec."""
        communicator = self._communicator
        used = dict(zip(communicator.session.spec.reducers, communicator.in_use, strict=True))
        return [used.get(address, False) for address in self.spec.reducers]

    @property
    def counters(self) -> Counters:
        """What has happened to this client's reducers so far."""
        mine = self._counters_without_names
        if (named := self._named) is None:
            return mine
        return Counters(*map(sum, zip(mine, named.counters, strict=True)))

    @property
    def losses(self) -> int:
        """How often a reducer in use was lost; `counters` has those of calls with names besides."""
        named = self._named
        return max(self._counters_without_names.losses, named.losses if named is not None else 0)

    @property
    def _counters_without_names(self) -> Counters:
        past = Past() if self._returning is None else self._returning.past
        return Counters(
            *past.plus(self._communicator),
            fallbacks=0 if self._fallback is None else self._fallback.count,
            returns=0 if self._returning is None else self._returning.returns,
        )

    @property
    def bytes_reduced(self) -> int:
        """Bytes of all buffers that were reduced so far."""
        named = 0 if self._fusion is None else self._fusion.bytes_reduced
        return self._bytes_reduced + named

    @property
    def calls(self) -> int:
        """Number of all-reduces that callers have started; of those with names, that were made."""
        return self._calls + (0 if self._fusion is None else self._fusion.calls)

    @property
    def waited_s(self) -> float:
        """Seconds during which all was under way that callers had started so far.

        They are counted from the latest call until none is in progress, so what a backward pass
        hides before its last bucket is not among them.
        """
        return self._waited_s + (0.0 if self._fusion is None else self._fusion.waited_s)

    @property
    def _named(self) -> Client | None:
        return None if self._fusion is None else self._fusion.channel

    @property
    def _communicator(self) -> FlatCommunicator:
        if self._elastic is not None:
            return self._elastic.communicator
        return self._whole if self._returning is None else self._returning.communicator

    @property
    def in_callback(self) -> bool:
        """Whether this thread is in a callback of an all-reduce, which may wait for none."""
        return self._driver.in_callback

    @property
    def usable(self) -> bool:
        """Whether this process may call `all_reduce`."""
        return not self._driver.closing and forks() == self._forks

    def all_reduce(
        self,
        data: Any,
        op: str | ReduceOp = ReduceOp.MEAN,
        *,
        name: str | None = None,
        timeout: float | str | None = None,
        weight: float | None = None,
        residual: Any = None,
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
                call waits for the copy.
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
                it (error feedback). Owned by the call until it has returned. As `weight`, without
                a name and in host memory.

        Returns:
            A handle; wait for it before reading or writing `data`.

        Raises:
            ConfigError: `data` or another argument is not supported.
            LocalProtocolError: the client was shut down, or belongs to the parent process.
            DeviceError: a device failed, now or in an earlier call.
        """
        if name is not None and self._fusion is not None:
            # All is done in there: what interrupts it, or refuses the call, uses up its number.
            check = partial(self._check_named, weight, residual)
            return self._fusion.submit(data, op, name, timeout, check)
        call = object()
        with self._order:
            try:
                self._check_usable()
                self._calls += 1
                if self._is_staged(data):
                    refuse_extras(weight, residual, "tensors on a device")
                    return self._stage(call, data, op, name, timeout)
                buffer = host_buffer(data)
                reduction, timeout_s = parse(buffer.dtype, op, name, timeout, self.timeout_s)
                asked = buffer, reduction, name, timeout_s, data, weight, residual, None
                return self._submit_buffer(call, asked)
            except BaseException as error:
                self._give_up(call, error)
                raise

    def join(self, data: Any, stand_in: Callable[[Tensor], Any]) -> Work:
        """Start a sum that ends when all ranks have started it, and no call with a name is left.

        Until then this rank takes part in the others' calls that have names.

        Args:
            data: as of `all_reduce`.
            stand_in: returns what this rank contributes to a tensor, as of `all_reduce`, or raises
                a ReductionError, with which the others' call fails. On a thread of this client's.

        Raises:
            ConfigError, LocalProtocolError: as `all_reduce`.
        """
        self._check_usable()
        if self._fusion is None:
            raise ConfigError("this client makes no calls with names, which join() is about")
        return self._fusion.join(data, stand_in)

    def admit(self, *, timeout: float | str | None = None) -> bool:
        """Let ranks join that wait for it; every rank calls this at the same point, as any call.

        Between two steps, say: no all-reduce may be in progress. Afterwards the ranks that have
        joined take part in all calls, and `present` has them; they got what `worker_client.init`
        with ``join=True`` returns, and the first call of this of theirs returns at once. They have
        nothing of the training's state yet: `worker_client.elastic.sync` calls this, and sends it.

        Args:
            timeout: as of `all_reduce`.

        Returns:
            Whether ranks have joined, the same at every rank.

        Raises:
            ConfigError: the job does not go on without lost ranks, its ranks host reducers, it
                refuses newcomers, or a call is in progress.
            LocalProtocolError: the client was shut down, or belongs to the parent process.
            ReductionError: as `all_reduce`.
        """
        self._check_usable()
        if self._elastic is None or self.spec.hosts or self._new_fusion is None:
            raise ConfigError(
                "ranks can join only where REDUCTION_ON_RANK_LOST=continue is set, and reducers "
                "are those of a pool (REDUCTION_SERVERS)"
            )
        if self._newcomers_refused is not None:
            raise ConfigError(self._newcomers_refused)
        _, timeout_s = parse(DType.INT64, ReduceOp.MAX, None, timeout, self.timeout_s)
        self._await_calls()
        if self._newcomer:
            self._newcomer = False
            return True
        more = self._ready()
        joined = self._elastic.admit(more, timeout_s)
        if more and self._lobby is not None:
            self._lobby.decide(admitted=joined and self.present[-1] == self.world_size - 1)
        if joined:
            earlier = self._fusion
            self._fusion = self._new_fusion(self.world_size, self._elastic.lost_at_admission)
            try:
                self.settle_in()
            finally:
                if earlier is not None:  # all have left it behind
                    earlier.stop()
                    self._bytes_reduced += earlier.bytes_reduced
                    self._calls += earlier.calls
                    self._waited_s += earlier.waited_s
        return joined

    @property
    def newcomer(self) -> bool:
        """Whether this rank has joined a job that runs, and not called `admit` yet."""
        return self._newcomer

    def settle_in(self) -> None:
        """Be ready for calls with names, and wait until all ranks are, in a new membership."""
        assert self._fusion is not None, "ranks join where there are calls with names"
        assert self._elastic is not None, "ranks join where lost ones are gone on without"
        try:
            self._fusion.open()
            self._check_usable()  # or nobody would stop that any more
            self._lose_named()
            self._elastic.admit(0, self.timeout_s)
        except BaseException:
            self._fusion.stop()
            raise

    def refuse_newcomers(self, why: str) -> None:
        """Let `admit` fail from now on, with this reason: calls would not match a newcomer's."""
        self._newcomers_refused = why

    def on_membership(self, callback: Callable[[Change], None]) -> None:
        """Have a function called with every new membership, before any result of it is there.

        It is called by a thread of the client's, and must not wait for all-reduces. At a rank that
        joins it is called at once, with the membership that this one has joined.

        Args:
            callback: takes what has changed: ranks that are ``present``, that ``joined`` and that
                were ``lost``.
        """
        self._on_membership.append(callback)
        if self._newcomer:
            callback(Change(self.present, (self.rank,), ()))

    def decline(self, why: BaseException, *, name: str | None = None) -> None:
        """Take no part in the next call: the other ranks get an error that says why.

        For whoever refuses a call before it comes to `all_reduce`, or makes it by other means.

        Args:
            why: the reason.
            name: the next call of this name is meant; None for the next one without a name.
        """
        self._check_usable()
        if name is not None and self._fusion is not None:
            self._fusion.decline(name, why)
            return
        with self._order:
            self._give_up(object(), why)

    def submit(
        self,
        buffer: HostBuffer,
        op: ReduceOp,
        name: str | None,
        timeout_s: float,
        *,
        data: Any = None,
        weight: float | None = None,
        residual: Any = None,
        rounded: bool | None = None,
    ) -> Work:
        """Start an all-reduce of host memory, in the same order at every rank.

        Args:
            buffer: the memory.
            op: reduction.
            name: compared between ranks, so that a different order of calls shows as an error.
            timeout_s: seconds until it fails.
            data: what the handle returns in the end.
            weight: as of `all_reduce`.
            residual: as of `all_reduce`.
            rounded: whether it travels in 16 bits, as `rounds` says of the tensors in it; None for
                what that says of `buffer`.

        Raises:
            ConfigError: `weight` or `residual` does not go with the others.
            LocalProtocolError: the client was shut down, or belongs to the parent process.
        """
        call = object()
        with self._order:
            try:
                self._check_usable()
                self._calls += 1
                asked = buffer, op, name, timeout_s, data, weight, residual, rounded
                return self._submit_buffer(call, asked)
            except BaseException as error:
                self._give_up(call, error)
                raise

    def packs(self, tensors: Sequence[tuple[DType, int]], op: ReduceOp) -> list[list[int]]:
        """Say which tensors may be packed into one buffer, so that each travels as it would alone.

        Args:
            tensors: dtype and bytes of each.
            op: reduction of all of them.

        Returns:
            Their places, in groups of one dtype.
        """
        return self._wire.packs(tensors, op)

    def rounds(self, dtype: DType, op: ReduceOp, nbytes: int) -> bool:
        """Whether a tensor travels in 16 bits: its dtype, reduction and bytes alone decide."""
        return self._wire.rounds(dtype, op, nbytes)

    def shutdown(self) -> None:
        """Leave the job and free everything; what is in progress fails. May be called again."""
        if forks() != self._forks:
            return  # the sockets and the thread belong to the parent process
        if self._lobby is not None:
            self._lobby.stop()
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(self)
        if self._fusion is not None:
            self._fusion.stop()
        self._driver.stop()
        # A callback keeps the driver from ending what staging would wait for.
        self._staging.stop(wait=not self._driver.in_callback)
        if self._host_failure is not None:
            raise self._host_failure

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    # -- ranks that join ----------------------------------------------------------------------

    def _enter_job(self, application: Application) -> None:
        """Wait until the others let this rank in.

        Raises:
            MembershipError: they have another membership by now.
            ReductionError: they cannot be waited for.
        """
        assert self._elastic is not None, "who joins a job goes on without lost ranks"
        application.accept()
        self._elastic.join()
        while not self._elastic.await_members(timeout_s=LOOK_S):
            if application.refused.is_set():
                raise MembershipError("the membership has changed before this rank was in it")

    def _ready(self) -> int:
        """Return how many ranks are ready to join, if it is this rank that lets them in."""
        if self.present[0] != self.rank:
            if self._lobby is not None:
                self._lobby.stop()
                self._lobby = None
            return 0
        if self._lobby is None:
            self._lobby = Lobby(self._enter, self.spec, self._offer)
            if not self.usable:  # it was shut down meanwhile
                self._lobby.stop()
        return int(self._lobby.ready())

    def _offer(self) -> Offer:
        assert self._elastic is not None, "ranks join where lost ones are gone on without"
        if self._elastic.failed or not self.usable:
            raise LocalProtocolError("this rank goes on no more, and lets nobody in")
        lost = sorted(self._elastic.lost)
        return Offer(self.world_size + 1, lost, self.spec.run, self.spec.generation)

    def _await_calls(self) -> None:
        """Wait for the moments that a call takes to end after its caller has heard of the end."""
        until = time.monotonic() + ENDS_S
        while self._works or not self._staging.in_order or (self._fusion and self._fusion.busy):
            if time.monotonic() > until:
                raise ConfigError("ranks join between calls: wait for all calls before admit()")
            time.sleep(0.001)

    def _lose_named(self) -> None:
        """Go on without lost ranks in calls with names as well, where they may never have been."""
        named = self._named
        if self._elastic is not None and named is not None and named._elastic is not None:  # noqa: SLF001 (of this class)
            named._elastic.lose(self._elastic.lost)  # noqa: SLF001

    def _tell_of_membership(self, change: Change) -> None:
        self._lose_named()
        for callback in self._on_membership:
            _tell(callback, change)

    # -- the way of an all-reduce -------------------------------------------------------------

    def _is_staged(self, data: Any) -> bool:
        """Whether data goes through page-locked memory, piece by piece."""
        return device.is_on_device(data)

    def _submit_buffer(self, call: object, asked: Arguments) -> Work:
        """Start an all-reduce as `submit` does; its operations are those of `call`."""
        buffer, op, name, timeout_s, data, weight, residual, _ = asked
        if not (self._wire.wire_dtype is None and weight is None and residual is None):
            return self._submit_pieces(call, asked)
        # One all-reduce of its memory: small ones should take little time.
        operation = Operation(buffer.view, buffer.dtype, op, name, timeout_s, call=call)
        work = PlainWork(operation, self.lead, lambda: operation.missing)

        def ended(error: Exception | None) -> None:
            work.finish(data, error, buffer.write_back)

        self._submit(operation, ended)
        return work

    def _submit_pieces(self, call: object, asked: Arguments) -> Work:
        """Start a call that several all-reduces may make up, of memory that is prepared first."""
        buffer, _, name, *_ = asked
        whole: Call
        work = PlainWork(describe(name, buffer.view.nbytes), self.lead, lambda: whole.missing)
        whole = self._wire.call(call, work, asked)
        stopped: ReductionError | None = None
        for number, operation in enumerate(whole.prepared()):
            end = partial(whole.end, operation)
            if stopped is None:
                try:
                    self._submit(operation, end)
                except ReductionError as error:
                    if number == 0:
                        raise
                    stopped = error
            if stopped is not None:  # pieces before it are on their way: the work tells of the end
                end(stopped)
        return work

    def _stage(
        self,
        call: object,
        tensor: Any,
        op: str | ReduceOp,
        name: str | None,
        timeout: float | str | None,
    ) -> Work:
        """Start an all-reduce of a tensor on a device."""
        flat = flatten(tensor)
        reduction, timeout_s = parse(flat.dtype, op, name, timeout, self.timeout_s)
        work = PlainWork(describe(name, flat.data.nbytes), self._wait_for_device)
        self._staging.all_reduce(
            call, work, tensor, flat, op=reduction, name=name, timeout_s=timeout_s
        )
        return work

    def _give_up(self, call: object, why: BaseException) -> None:
        """Use up the number of a call that this rank was refused, or was interrupted in.

        Whatever of it has begun ends badly, and the other ranks hear why.
        """
        if not self.usable:
            return  # it makes no calls any more, as the others hear
        refusal = refused(self.spec.rank, f"{type(why).__name__}: {why}")
        nothing = Operation(
            memoryview(b""),
            DType.UINT8,
            ReduceOp.SUM,
            None,
            self.timeout_s,
            call=call,
            refusal=refusal,
        )
        with suppress(ReductionError):  # it was shut down, or a device failed: the others hear that
            self._submit(nothing, lambda _: None)

    def _submit(self, operation: Operation, ended: Callable[[Exception | None], None]) -> None:
        """Start an all-reduce behind all calls that wait for a device."""
        if self._staging.in_order:
            self._drive(operation, ended)
        else:
            self._staging.follow(operation, ended)

    def _drive(self, operation: Operation, ended: Callable[[Exception | None], None]) -> None:
        self._works[operation] = ended
        self._begun_at = time.monotonic()
        try:
            self._driver.submit(operation)
        except LocalProtocolError:
            self._works.pop(operation, None)
            raise

    def _end(self, operation: Operation, error: ReductionError | None) -> None:
        if (ended := self._works.get(operation)) is None:
            return  # the call that made it has taken it back
        if error is None:
            self._bytes_reduced += operation.data_bytes
        ended(error)
        self._works.pop(operation, None)  # last: what an interrupt leaves here ends with the client
        if not self._works:
            self._waited_s += time.monotonic() - self._begun_at

    def _wait_for_device(self, done: Callable[[], bool], until: float) -> None:
        del done, until  # the driver's own thread leads, and staging's bring the end
        fallback = self._fallback is not None and self._fallback.is_this_thread
        if fallback or self._staging.is_this_thread or self._driver.in_callback:
            raise LocalProtocolError("waiting in a callback of an all-reduce would last for ever")

    def lead(self, done: Callable[[], bool], until: float) -> None:
        """Move all-reduces on until `done`, or `until`, if this thread can; else return at once.

        Raises:
            LocalProtocolError: this is a callback of an all-reduce: nobody else can bring its end.
        """
        if self._fallback is not None and self._fallback.is_this_thread:
            raise LocalProtocolError("waiting in a callback of an all-reduce would last for ever")
        self._driver.wait(done, until)

    def _leave(self, error: ReductionError) -> None:
        try:
            if self._on_shutdown is not None:
                self._on_shutdown()
        except BaseException as failure:  # noqa: BLE001 (whoever shuts the client down gets it)
            self._host_failure = failure
        if self._fallback is not None:
            self._fallback.stop()
        for operation in list(self._works):
            self._end(operation, own(error, operation))

    def _check_named(self, weight: float | None, residual: Any) -> None:
        self._check_usable()
        refuse_extras(weight, residual, "calls that have names")

    def _check_usable(self) -> None:
        if forks() != self._forks:
            raise LocalProtocolError(
                "this client belongs to the parent process: a forked child (such as a DataLoader "
                "worker) cannot use it"
            )
        if self._driver.closing:
            raise LocalProtocolError("this client was shut down: call worker_client.init() again")


def _tell(callback: Callable[[Change], None], change: Change) -> None:
    try:
        callback(change)
    except Exception:  # the job goes on all the same
        log.exception("a callback of on_membership() failed")


def _keep(calls: list[Unfinished]) -> None:
    raise RuntimeError(f"{len(calls)} calls were handed over, and nobody is there to take them")
