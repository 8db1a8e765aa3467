"""The public object: what `all_reduce` takes and gives."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from reducer.errors import (
    ConfigError,
    LocalProtocolError,
    ReductionError,
)
from reducer.wire.constants import ReduceOp
from worker_client import config, faults, implementation
from worker_client.host_buffer import host_buffer
from worker_client.names import own
from worker_client.part import Part
from worker_client.survivors import Survivors
from worker_client.wire_cast import WireCast
from worker_client.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reducer.failpoints import Failpoint
    from reducer.wire.constants import DType
    from worker_client.call import Call
    from worker_client.fallback import Fallback
    from worker_client.handover import Unfinished
    from worker_client.operation import Operation
    from worker_client.settings import Settings
    from worker_client.survivors import Ended, Left


class Counters(NamedTuple):
    """What a client has gone through.

    Attributes:
        losses: how often a reducer was lost.
        moved: chunks that were sent again to another reducer.
        claimed: chunks whose result was here, of which another reducer was told.
        supplied: results that other ranks needed from here.
        fallbacks: all-reduces that the process group did, as no reducer was left.
    """

    losses: int
    moved: int
    claimed: int
    supplied: int
    fallbacks: int


class Client:
    """One worker of one job. Threads may share it; a forked child may not use it.

    Args:
        settings: who we are and where the reducers are.
        timeout_s: default for `all_reduce`, in seconds.
        connect_timeout_s: how long to wait for every reducer's welcome.
        impl: ``"plain"``, ``"compiled"``, or None for the best that can be had.
        io_threads: threads of libzmq that serve the connections.
        context: libzmq's context of the reducer that this process hosts, if it does.
        fallback: what brings all-reduces to their end when no reducer is left, if
            `settings.fallback`.
        on_shutdown: called once, after the farewell (embedded reducers stop there).
        failpoints: what tests make happen at the worker's places; of all clients of a process that
            have the compiled implementation, the latest one's count.
        wire_dtype: what float32 buffers travel as, FLOAT16 or BFLOAT16; None for what they are.

    Attributes:
        bytes_reduced: of callers' buffers, in calls that have ended well.

    Raises:
        ConfigError: an address cannot be resolved, or `impl` cannot be had.
        ReducerLostError: a reducer did not answer in time; the message names it and says why.
        ReductionError: a reducer refused this worker; the class says why.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        impl: str | None = None,
        io_threads: int = 1,
        context: Any = None,
        fallback: Fallback | None = None,
        on_shutdown: Callable[[], None] | None = None,
        failpoints: Sequence[Failpoint] = (),
        wire_dtype: DType | None = None,
    ) -> None:
        self.settings = settings
        self.timeout_s = timeout_s
        self.bytes_reduced = 0
        self._fallback = fallback
        self._on_shutdown = on_shutdown
        self._host_failure: BaseException | None = None
        chosen = faults.around(implementation.select(impl), failpoints)
        self.impl = chosen.name
        # Pieces of one call follow each other, whatever other threads call meanwhile.
        self._order = threading.RLock()
        self._works: dict[Operation, Call] = {}
        self._wire = WireCast(wire_dtype, whole=settings.outlive)
        self._pid = os.getpid()

        def enter(settings: Settings, ended: Ended, left: Left) -> Part:
            return Part(
                settings,
                chosen,
                io_threads=io_threads,
                context=context,
                ended=ended,
                left=left,
                hand_over=lambda calls: self._hand_over(calls, ended),
            )

        self._survivors: Survivors | None = None
        if settings.outlive:
            self._survivors = Survivors(
                settings,
                enter,
                self._end,
                self._leave,
                timeout_s=timeout_s,
                connect_timeout_s=connect_timeout_s,
            )
        else:
            self._whole = enter(settings, self._end, self._leave)
        self._driver = self._survivors or self._whole.driver
        try:
            self._part.join(connect_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self.settings.rank

    @property
    def world_size(self) -> int:
        """Number of workers that the job began with."""
        return self.settings.world_size

    @property
    def wire_dtype(self) -> str:
        """What large float32 buffers travel as: ``float16``, ``bfloat16`` or ``float32``."""
        dtype = self._wire.wire_dtype
        return "float32" if dtype is None else dtype.name.lower()

    @property
    def present(self) -> tuple[int, ...]:
        """Ranks that take part: all of them, but for those that the job goes on without."""
        lost = self._survivors.lost if self._survivors is not None else ()
        return tuple(rank for rank in range(self.world_size) if rank not in lost)

    @property
    def lanes(self) -> list[int]:
        """Number of connections to each reducer, one for each of its threads."""
        session = self._part.session
        reducers = [link.reducer for link in session.links]
        return [reducers.count(reducer) for reducer in range(len(session.settings.reducers))]

    @property
    def in_use(self) -> list[bool]:
        """Whether each reducer is in use, in the order of the settings."""
        part = self._part
        used = dict(zip(part.session.settings.reducers, part.in_use, strict=True))
        return [used.get(address, False) for address in self.settings.reducers]

    @property
    def counters(self) -> Counters:
        """What has happened to this client's reducers so far."""
        failover = self._part.session.failover
        return Counters(
            losses=failover.losses,
            moved=failover.moved,
            claimed=failover.claimed,
            supplied=failover.supplied,
            fallbacks=0 if self._fallback is None else self._fallback.count,
        )

    @property
    def _part(self) -> Part:
        return self._whole if self._survivors is None else self._survivors.part

    @property
    def usable(self) -> bool:
        """Whether this process may call `all_reduce`."""
        return not self._driver.closing and os.getpid() == self._pid

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

        Every rank must make the same calls in the same order. Several may be in flight.

        Args:
            data: NumPy array or CPU torch tensor of any shape, of dtype float32, float64, float16,
                bfloat16, int8, int32, int64 or uint8. Contiguous data is sent from, and the result
                written to, its own memory.
            op: ``"sum"``, ``"mean"`` (floating types only), ``"min"``, ``"max"`` or ``"product"``.
            name: compared between ranks, so that a different order of calls shows as an error.
            timeout: seconds (or ``"300s"``, ``"5ms"``) until it fails, this client's default if
                None. Failing may take longer: what is on its way has to leave `data` first.
            weight: of this rank in a weighted mean, ``sum(weight * data) / sum(weight)``, such as
                its number of samples; 0 or more, and given by all ranks or none. For float32 and
                float64. `data` times the weight is rounded, then the mean of these, and last that
                mean over the mean of all weights, which float64 adds up.
            residual: contiguous float32 array or tensor like `data`, zeros at first: what the cast
                to the wire's type takes away is kept there and added to the next call that is given
                it (error feedback). Owned by the call until it has returned.

        Returns:
            A handle; wait for it before reading or writing `data`.

        Raises:
            ConfigError: `data` or another argument is not supported.
            LocalProtocolError: the client was shut down, or belongs to the parent process.
        """
        self._check_usable()
        buffer = host_buffer(data)
        reduction = _parse_op(op)
        if reduction is ReduceOp.MEAN and not buffer.dtype.is_floating:
            raise ConfigError(
                f"the mean of {buffer.dtype.name.lower()} is not defined: "
                "use op='sum' and divide, or a floating type"
            )
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"name must be a string, got {name!r}")
        timeout_s = self.timeout_s if timeout is None else config.seconds("timeout", timeout)
        what = f"all-reduce{f' {name!r}' if name else ''} of {buffer.view.nbytes} bytes"
        work = Work(what, self._wait)
        with self._order:
            call = self._wire.call(
                work,
                data,
                buffer,
                reduction,
                name=name,
                timeout_s=timeout_s,
                weight=weight,
                residual=residual,
            )
            self._submit(call)
        return work

    def shutdown(self) -> None:
        """Leave the job and free everything; what is in progress fails. May be called again."""
        if os.getpid() != self._pid:
            return  # the sockets and the thread belong to the parent process
        self._driver.stop()
        if self._host_failure is not None:
            raise self._host_failure

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    # -- the start and the end of a call ------------------------------------------------------

    def _submit(self, call: Call) -> None:
        begun = False
        refused: LocalProtocolError | None = None
        for operation in call.prepared():
            self._works[operation] = call
            if refused is None:
                try:
                    self._driver.submit(operation)
                except LocalProtocolError as error:
                    if not begun:
                        self._works.pop(operation, None)
                        raise
                    refused = error
            if refused is not None:  # pieces before it are on their way: the work tells of the end
                self._end(operation, refused)
            begun = True

    def _end(self, operation: Operation, error: ReductionError | None) -> None:
        if (call := self._works.get(operation)) is None:
            return  # the call that made it has taken it back
        if call.ended(operation, error):
            if call.error is None:
                self.bytes_reduced += call.nbytes
            call.finish()
        self._works.pop(operation, None)  # last: what an interrupt leaves here ends with the client

    def _wait(self, done: Callable[[], bool], until: float) -> None:
        if self._fallback is not None and self._fallback.is_this_thread:
            raise LocalProtocolError("waiting in a callback of an all-reduce would last for ever")
        self._driver.wait(done, until)

    def _hand_over(self, calls: list[Unfinished], ended: Ended) -> None:
        if self._fallback is None:
            raise RuntimeError("calls were handed over, and nobody is there to take them")
        self._fallback.take(calls, ended)

    def _leave(self, failed: list[tuple[Operation, ReductionError]], error: ReductionError) -> None:
        # The reducer in this process first: it still sums what it has for others, out of buffers.
        try:
            if self._on_shutdown is not None:
                self._on_shutdown()
        except BaseException as failure:  # noqa: BLE001 (whoever shuts the client down gets it)
            self._host_failure = failure
        if self._fallback is not None:
            self._fallback.stop()
        for one in failed:
            self._end(*one)
        for operation in list(self._works):
            self._end(operation, own(error, operation))

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise LocalProtocolError(
                "this client belongs to the parent process: a forked child (such as a DataLoader "
                "worker) cannot use it"
            )
        if self._driver.closing:
            raise LocalProtocolError("this client was shut down: call worker_client.init() again")


def _parse_op(op: str | ReduceOp) -> ReduceOp:
    if isinstance(op, ReduceOp):
        return op
    try:
        return ReduceOp[op.upper()]
    except (KeyError, AttributeError):
        known = ", ".join(repr(known.name.lower()) for known in ReduceOp)
        raise ConfigError(f"unknown op {op!r}: use one of {known}") from None
