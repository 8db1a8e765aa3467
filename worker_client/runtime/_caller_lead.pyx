"""A caller's thread that leads: it sends what it asks for itself, and takes the results.

With more processes than cores every small all-reduce finds cold caches, and then the interpreter
takes longer than the network. So nothing of one is interpreted in here, from its call to its end,
unless something is unusual: that is left to the driver and its session, whose part this has.

Handlers of signals run in the main thread, between any two lines that are interpreted, and may
raise. So there nothing of a step is interpreted: the driver's own thread does what is unusual.
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.math cimport ceil, fmax, fmin
from libc.stdint cimport uint32_t, uint64_t

from worker_client.protocol._flight cimport CompiledFlight, operation_t
from worker_client.protocol._state cimport (
    DriverState, MeteredCall, NumberingState, OperationState, PendingState, PlanState,
    SessionState,
)
from worker_client.runtime._loop cimport Loop

from threading import get_ident, main_thread
from time import monotonic
from types import MethodType

from reducer.wire.constants import PLACES
from reducer.wire.layout import MEASURED_BYTES
from worker_client.protocol.lifecycle import FACTOR, FIRST_PLACE
from worker_client.protocol.operation import LAST_S, STRAGGLER_S
from worker_client.runtime import service_thread
from worker_client.runtime.driver import IDLE_S, LISTEN_S, LONGEST_REST_S
from worker_client.work import Work

cdef object _DONE = Work.done
cdef uint64_t _FACTOR = FACTOR, _PLACES = PLACES, _FIRST_PLACE = FIRST_PLACE
cdef uint64_t _MEASURED_BYTES = MEASURED_BYTES
cdef double _LAST_S = LAST_S, _STRAGGLER_S = STRAGGLER_S, _IDLE_S = IDLE_S, _LISTEN_S = LISTEN_S
cdef double _LONGEST_REST_S = LONGEST_REST_S


cdef class CallerLead:
    """What a thread does that has a driver's lead for as long as a call, or a wait for one, takes.

    Args:
        driver: whose lead it takes, and whose messages the loop moves.
        loop: that.
    """

    cdef DriverState _driver
    cdef SessionState _session
    cdef NumberingState _numbering
    cdef PendingState _pending
    cdef PlanState _plan
    cdef object _map
    cdef dict _open
    cdef Loop _loop
    cdef CompiledFlight _flight
    cdef uint64_t _main  # the thread whose interpreted lines signal handlers interrupt

    def __init__(self, driver, Loop loop):
        session = driver.session
        self._driver, self._session, self._open = driver, session, driver.open
        self._loop, self._flight = loop, loop._flight
        self._map, self._plan = session.failover.map, session.plan
        self._numbering, self._pending = session.calls.numbering, session.calls.active
        self._main = main_thread().ident

    def submit(self, OperationState operation):
        """Start an all-reduce and send it; leave it to others if they have the lead.

        Raises:
            LocalProtocolError: the driver has stopped.
        """
        cdef DriverState driver = self._driver
        if driver._trace.timeline is not None:
            driver._trace.follow(operation, self._session.spec)
        if not self._start(operation):
            driver._enqueue(operation)
            if not driver._leader:
                driver._resume()

    cdef bint _start(self, OperationState operation) except -1:
        cdef DriverState driver = self._driver
        cdef uint64_t me = get_ident()
        if driver._leader == me:
            return False  # a callback in the middle of a step, or a signal handler
        lead = driver._lead
        if not lead.acquire(blocking=False):
            return False
        driver._leader = me
        try:
            if driver.closing or driver._failure is not None:
                return False
            cut = None if driver._queue else self._cut(operation)  # what interrupts it is harmless
            if cut is None and me == self._main:
                return False
            try:
                self._open[operation] = None
                if cut is None:
                    driver._queue.append(operation)
                    driver._start()
                else:
                    self._begin(operation, cut)
                    self._loop.refill()
            except BaseException as error:  # things may be half done
                driver._failure = error
                driver._resume()
                raise
        finally:
            driver._leader = 0
            lead.release()
        return True

    def wait(self, done, double until):
        """Move all-reduces on until `done`, or the clock says `until`, unless others have the lead.

        Raises:
            LocalProtocolError: as `Driver.wait`.
        """
        cdef DriverState driver = self._driver
        cdef uint64_t me = get_ident()
        cdef double since, now
        if service_thread.forks != driver._forks or self._session.handed_over:
            return
        if driver._leader == me:
            driver._refuse_to_wait()
        if driver._failure is not None:
            return
        lead = driver._lead
        leads = lead.acquire(blocking=False)
        if not leads and (patience_s := driver._ask_for_lead(until)) > 0:
            leads = lead.acquire(timeout=patience_s)
            driver._wanted_until = 0.0
        if leads:
            driver._leader = me
            since = monotonic()
            try:
                self._move_on(done, until, me == self._main)
            finally:
                driver._leader = 0
                lead.release()
                now = monotonic()
                if self._open:  # also after an interrupt, of which others know nothing
                    driver._resume()
                elif now - since > _LONGEST_REST_S:  # it may rest for long, as this wait was long
                    driver._resume(at_once=False)
            driver._waited_at = now
        else:
            driver._waited_at = monotonic()

    cdef _cut(self, OperationState operation):
        """Return the parts of the next all-reduce; None if `Session.submit` has to begin it.

        Large ones are left to it: it measures their rate, and is a small part of their time.
        """
        cdef NumberingState numbering = self._numbering
        cdef uint64_t number = numbering.number + 1, nbytes = operation.view.nbytes
        cdef uint64_t sequence = number * _PLACES + _FIRST_PLACE
        call, dtype = operation.call, operation.dtype
        if (
            sequence >= self._session.steady_until
            or nbytes >= _MEASURED_BYTES
            or operation.name
            or operation.prepare is not None
            or operation.refusal is not None
            or (call is not None and call is numbering.call)
        ):
            return None
        cut = self._plan.known.get((nbytes, number % <uint64_t>self._plan.turns, dtype))
        return self._plan.cut(nbytes, sequence, dtype) if cut is None else cut

    cdef _begin(self, OperationState operation, cut):
        """Begin an all-reduce as `Session.submit` does, cut into these parts."""
        cdef NumberingState numbering = self._numbering
        cdef uint64_t number = numbering.number + 1, history = numbering.history
        cdef uint64_t sequence = number * _PLACES + _FIRST_PLACE, since = numbering.since
        cdef uint64_t nbytes = operation.view.nbytes, asked
        cdef double now = monotonic(), deadline = now + operation.timeout_s
        call, dtype = operation.call, operation.dtype
        shards, chunk_bytes = cut
        # As `Numbering.give`.
        numbering.call, numbering.failure = call, None
        numbering.number, numbering.place = number, _FIRST_PLACE
        operation.sequence = sequence
        operation.since, operation.history = <uint32_t>since, history
        if number >= since:
            asked = nbytes << 8 | <uint64_t>dtype << 4 | <uint64_t>operation.op
            numbering.history = history * _FACTOR + asked
        self._flight.submit(operation, shards, chunk_bytes, self._map.epoch)
        # As `Pending.begin`; the flow counts no small ones.
        operation.begun, operation.ask_at, operation.deadline = now, now + _STRAGGLER_S, deadline
        operation.ask_last_at = deadline - fmin(_LAST_S, operation.timeout_s / 2)
        self._pending.operations[sequence] = operation
        if deadline < self._pending.earliest:
            self._pending.earliest = deadline

    cdef _move_on(self, done, double until, bint main):
        """Lead until `done`, or `until`, or until nothing is in progress.

        The main thread leads only as long as nothing is to be interpreted but `done`.
        """
        cdef DriverState driver = self._driver
        cdef double now, idle_s
        while (
            self._open
            and not driver.closing
            and driver._failure is None
            and not _is_true(done)
            and (now := monotonic()) < until
        ):
            idle_s = fmin(fmin(_IDLE_S, self._pending.earliest - now), until - now)
            # A signal handler's exception may end this wait, which loses nothing, ...
            if self._session.steady_until:
                self._loop.run(<long>ceil(fmax(0, idle_s) * 1000))
                PyErr_CheckSignals()
            elif main:
                return
            else:
                driver._transport.wait(idle_s)
            try:
                if not self._advance(main):
                    if main:
                        return
                    driver._advance()
            except BaseException as error:  # ... but one in here may leave things half done
                driver._failure = error
                driver._resume()
                raise

    cdef bint _advance(self, bint main) except -1:
        """Do what `Driver._advance` does; false: it has to, as something is unusual or rare."""
        cdef DriverState driver = self._driver
        cdef double now
        if not (self._session.steady_until and self._loop.is_healthy() and driver._failing is None):
            return False
        if main and (driver._queue or not self._all_end_well()):
            return False
        for sequence in self._flight.completed():
            self._end(sequence)
        if driver._queue:
            driver._start()
        elif self._open:
            self._loop.refill()
        now = monotonic()
        return (
            now < self._session.looks_at
            and now < self._pending.earliest
            and now - driver._listened < _LISTEN_S
        )

    cdef bint _all_end_well(self) except -1:
        """Whether nothing is interpreted when `_end` ends what has been completed."""
        cdef operation_t *completed = self._flight.its.completed
        cdef OperationState operation
        while completed != NULL:
            operation = <OperationState>self._pending.operations[completed.header.sequence]
            if not (
                <uint64_t>operation.view.nbytes < _MEASURED_BYTES
                and _ends_well(operation)
                and _is_unheard(operation)
                and (operation.ended is None or type(operation.ended) is MeteredCall)
            ):
                return False
            completed = completed.following
        return True

    cdef _end(self, sequence):
        """End an all-reduce of which all results are here, as `Session.completed` says."""
        cdef OperationState operation = <OperationState>self._pending.operations[sequence]
        if <uint64_t>operation.view.nbytes >= _MEASURED_BYTES:
            self._driver._do(self._session.completed([sequence], monotonic()), given_back=True)
            return
        del self._pending.operations[sequence]
        try:
            self._open.pop(operation, None)
            _end_well(operation)
        except BaseException:
            self._open[operation] = None  # it ends in `_close`
            raise


cdef bint _ends_well(OperationState operation) except -1:
    """Whether nothing is left to do for an all-reduce whose result is here, but to say so."""
    return not operation.over and operation.write_back is None


cdef bint _is_unheard(OperationState operation) except -1:
    """Whether nobody is to be woken, or called, at its end, but for `ended`."""
    return operation._future is None and operation._waiters is None


cdef _end_well(OperationState operation):
    """End an all-reduce whose result is in its buffer, as `Operation.end` does."""
    if not _ends_well(operation):
        (<object>operation).end(None)
        return
    ended = operation.ended
    if ended is not None:
        ended(None)
    if _is_unheard(operation):
        operation._ended = True  # the GIL stands for its lock, as nothing here gives it away
    else:
        (<object>operation).finish(None)
    operation.over = True
    operation.ended = None


cdef bint _is_true(done) except -1:
    """Whether what is waited for has come: mostly an all-reduce, which needs no call to tell."""
    if type(done) is MethodType and done.__func__ is _DONE:
        done = done.__self__
        if isinstance(done, OperationState):
            return (<OperationState>done)._ended
        return done._ended
    return done()
