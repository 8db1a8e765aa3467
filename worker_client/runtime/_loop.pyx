"""The loop over a worker's connections, and the core that moves all-reduces over them.

With more processes than cores every small all-reduce finds cold caches, and then the interpreter
takes longer than the network. So nothing of one is interpreted in here, from its call to its end,
unless something is unusual: that is left to the driver and its session.

Handlers of signals run in the main thread, between any two lines that are interpreted, and may
raise. So there nothing of a step is interpreted: the driver's own thread does what is unusual.
"""

cimport cython
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.pycapsule cimport (
    PyCapsule_GetContext,
    PyCapsule_GetPointer,
    PyCapsule_New,
    PyCapsule_SetContext,
    PyCapsule_SetName,
)
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport errno
from libc.stdint cimport uint32_t, uint64_t

from cpython.exc cimport PyErr_CheckSignals
from libc.math cimport INFINITY, fmin

from reducer.zmtp.curve cimport copy_keys, curve_keys, explicit_bzero
from reducer.zmtp.net cimport (
    CONNECTING,
    OPEN,
    SUSPENDED,
    ZMTP_DIFFERS,
    ZMTP_REFUSED,
    ZMTP_WRONG_KEY,
    connection,
    message as message_t,
    channel,
)
from worker_client.protocol._flight cimport (
    ALL_REDUCE_DONE,
    ALL_REDUCE_PENDING,
    CompiledFlight,
    HEADER_BYTES,
    MeteredCall,
    OperationState,
    all_reduce,
    durations_add,
    now_ns,
    operation_t,
)

from enum import IntEnum
from threading import get_ident, main_thread
from time import monotonic
from types import MethodType
from typing import NamedTuple

from reducer.errors import LocalProtocolError
from worker_client.runtime import service_thread
from worker_client.work import Work

SHUT_DOWN = "this client was shut down: call worker_client.init() again"
IDLE_S = 0.1  # who leads looks at the clock this often
LONGEST_REST_S = 0.01  # the driver's own thread rests so long between two looks, at most
OFTEN_S = 0.005  # who waits again within this time of the last wait asks to lead
ASKING_S = 0.005  # how long it does

cdef object _DONE = Work.done
cdef double _IDLE_S = IDLE_S, _LONGEST_REST_S = LONGEST_REST_S


class Fault(IntEnum):
    """Why a handshake has failed, as far as it matters here; see `zmtp.h`."""

    DIFFERS = ZMTP_DIFFERS
    REFUSED = ZMTP_REFUSED
    WRONG_KEY = ZMTP_WRONG_KEY


class LineChange(NamedTuple):
    """What has become of a connection.

    Attributes:
        line: which it is.
        ready: its handshake is done, and it can be used.
        suspended: it is kept, and its socket has broken.
        shook: its handshake had been done when it ended.
        error: errno of the call that has failed, 0 if none has.
        fault: a value of `enum zmtp_fault`.
        mechanism: the peer's, as it says; empty if it has not.
        reason: the peer's, for refusing us.
    """

    line: int
    ready: bool
    suspended: bool
    shook: bool
    error: int
    fault: int
    mechanism: str
    reason: str


@cython.no_gc_clear  # a collector leaves it its flight until its connections have ended
cdef class Loop:
    """The loop over all connections of a worker; one thread at a time uses it, but for `wake`.

    A line is a connection, or the place of one: the main one of a link of the flight, or one of its
    further streams, over which contributions and results travel as well.

    Args:
        flight: what it sends from and receives into.
        every_s: time between two heartbeats.

    Raises:
        OSError: no files or threads are left.
    """

    def __cinit__(self, CompiledFlight flight not None, double every_s):
        self._flight = flight
        if not loop_init(&self.c, &flight.c, <uint64_t>(every_s * 1e9)):
            raise OSError(errno, "the loop cannot be set up")

    def __dealloc__(self):
        if self._flight is not None:  # else the arguments were wrong, and there is no loop
            loop_free(&self.c)

    def end(self, long linger_ms):
        """Give what has yet to be sent so much time, and close all connections."""
        with nogil:
            loop_end(&self.c, linger_ms)

    def add(self, uint32_t link, *, bint apart=False):
        """Add a line: of the next link of the flight, or a further stream of an earlier link.

        Args:
            link: of the flight.
            apart: it is neither, but one over which that of another line is to go on.

        Returns:
            Its number, counted from 0.
        """
        if not loop_add(&self.c, link, apart):
            raise MemoryError
        return self.c.lines - 1

    cdef uint32_t check(self, line) except? 0xFFFFFFFF:
        if not 0 <= line < self.c.lines:
            raise IndexError(f"there is no line {line}")
        return line

    def open(self, line, int descriptor, keys):
        """Begin to speak over a socket, which must not be closed before `close`.

        Args:
            line: whose connection it is.
            descriptor: of a socket that does not block; it need not be connected yet.
            keys: our public and secret key, and the reducer's public one, 32 bytes each; or None.

        Raises:
            OSError: it cannot be polled, or there is no memory.
        """
        cdef curve_keys curve
        cdef uint32_t number = self.check(line)
        if keys is not None:
            copy_keys(&curve, keys)
        cdef bint opened = loop_open(&self.c, number, descriptor,
                                     NULL if keys is None else &curve)
        explicit_bzero(&curve, sizeof(curve))
        if not opened:
            raise OSError(errno, "the connection cannot be set up")

    def join(self, line, met):
        """Begin to speak with a reducer of this process.

        Args:
            line: whose connection it is.
            met: what the `meet` of that reducer's `Sockets` has returned, which may be used once.

        Raises:
            OSError: it cannot be polled, or there is no memory.
        """
        cdef uint32_t number = self.check(line)
        cdef channel *c = <channel *>PyCapsule_GetPointer(met, b"channel")
        PyCapsule_SetName(met, b"joined")
        if not loop_attach(&self.c, number, c):
            raise OSError(errno, "the connection cannot be set up")

    def carry(self, line):
        """Have a further stream carry contributions, as the reducer agrees to."""
        loop_carry(&self.c, self.check(line))

    def make_resumable(self, line):
        """Keep a line's connection when its socket breaks: `resume_over` or `break_` follows."""
        loop_make_resumable(&self.c, self.check(line))

    def resume_over(self, line, successor, uint64_t peer_read):
        """Have a line's connection go on over the socket of another line, which is closed.

        Args:
            line: whose connection is suspended.
            successor: over whose connection the reducer has agreed to that.
            peer_read: bytes that the reducer has read over the first one.

        Returns:
            False if that is not possible.
        """
        return loop_resume_over(&self.c, self.check(line), self.check(successor), peer_read)

    def break_(self, line):
        """Have a line's connection end, if there is one, when all that came over it is read."""
        loop_break(&self.c, self.check(line))

    def close(self, line):
        """Drop a line's connection, if there is one, with what it has not sent."""
        loop_close(&self.c, self.check(line))

    def connected(self, line):
        """Whether TCP's handshake is done."""
        cdef connection *c = self.c.line[self.check(line)].connection
        return c != NULL and c.reached != CONNECTING

    def paused_s(self):
        """Return for how many seconds the process did not run before it ran again, within the last
        second; 0.0 if it did."""
        cdef uint64_t paused_ns
        with nogil:
            paused_ns = loop_paused_ns(&self.c)
        return paused_ns / 1e9

    def received(self, line):
        """Return how many bytes have come over a line's connection, and whether a frame's rest has
        not.
        """
        cdef connection *c = self.c.line[self.check(line)].connection
        if c == NULL:
            return 0, False
        return c.bytes_read, c.in_frame

    def change(self):
        """Return the next connection that was made or has ended, once; None if there is none."""
        cdef connection *c
        cdef connection_state state
        cdef int error
        if not self.c.changes:
            return None
        for line in range(self.c.lines):
            c = self.c.line[line].connection
            if c == NULL or not self.c.line[line].changed:
                continue
            self.c.line[line].changed = False
            state = loop_state(&self.c, line, &error)
            return LineChange(
                line, state == OPEN, state == SUSPENDED, c.zmtp.ready, error, c.zmtp.fault,
                c.zmtp.peer_mechanism.decode("ascii", "replace"),
                c.zmtp.reason.decode("ascii", "replace"),
            )
        self.c.changes = False
        return None

    def send(self, line, bytes header, payload):
        """Send a message that is no contribution; it is lost if there is no connection."""
        cdef const unsigned char[::1] body
        if payload is None:
            loop_send(&self.c, self.check(line), PyBytes_AsString(header), NULL, 0)
            return
        body = payload
        loop_send(&self.c, self.check(line), PyBytes_AsString(header),
                  &body[0] if body.shape[0] else <const void *>b"", body.shape[0])

    def refill(self):
        """Send what the windows have room for."""
        loop_refill(&self.c)

    def detach(self, uint64_t sequence):
        """Read the buffer of an all-reduce no more: what has yet to be sent of it is copied."""
        if not loop_detach(&self.c, sequence):
            raise MemoryError

    cdef message(self):
        cdef connection *sender = self.c.line[self.c.from_].connection
        if sender == NULL or sender.message.frames == 0:
            return None  # the connection was closed meanwhile
        cdef message_t *found = &sender.message
        header = payload = b""
        if not found.foreign:
            header = PyBytes_FromStringAndSize(<char *>found.header, HEADER_BYTES)
        if not found.foreign and found.payload != NULL:
            payload = PyBytes_FromStringAndSize(<char *>found.payload.data, found.payload.nbytes)
        loop_next(&self.c)
        return self.c.from_, header, payload


cdef class Core:
    """Begins and ends all-reduces, and has one thread at a time move them on: who has the lead.

    Args:
        flight, loop: what it moves.

    Attributes:
        open: what was submitted and has not ended, besides what is in a callback just now.
        due: when `advance` is to be called, if nothing happens before, by the monotonic clock.
        failing: why all that is in progress is to end; None if it is not.
        failure: what has ended a step of a thread that led for a while; None if nothing has.
        retired: all calls are brought to their end by other means.
    """

    def __cinit__(self, CompiledFlight flight not None, Loop loop not None):
        self._flight, self._loop = flight, loop
        self.open = {}
        self._forks, self._main = service_thread.forks, main_thread().ident
        if not core_init(&self.c, &flight.c, &loop.c):
            raise MemoryError
        self._calls.core, self._calls.submit = &self.c, core_submit
        self._calls.test, self._calls.lead = core_test, core_lead

    def __dealloc__(self):
        core_free(&self.c)

    def serve(self, driver, trace):
        """Leave what is unusual to a driver.

        Args:
            driver: whose `wait`, `advance` and `end` are called by who has the lead, and `follow`
                by who submits while there is a timeline.
            trace: has that.
        """
        self._driver, self._trace = driver, trace

    # -- any thread ---------------------------------------------------------------------------

    @property
    def closed(self):
        return self.c.closed

    @property
    def failure(self):
        return self._failure

    @failure.setter
    def failure(self, error):
        self._failure = error
        core_close(&self.c)  # now: nothing more is begun with things half done

    @property
    def due(self):
        return self.c.due

    @due.setter
    def due(self, double when):
        self.c.due = when

    @property
    def leader(self):
        """Which thread has the lead; 0 if none does."""
        return core_leader(&self.c)

    cpdef submit(self, OperationState operation):
        """Begin an all-reduce, or have it begun by the thread that has the lead.

        Raises:
            LocalProtocolError: nothing may be submitted any more.
        """
        if self._trace.timeline is not None:
            self._driver.follow(operation)
        operation.aim()
        self.open[operation] = None
        cdef core_submitted how = core_submit(&self.c, operation.c)
        if how == CORE_CLOSED:
            self.open.pop(operation, None)
            failed = f"the client failed: {self._failure!r}"
            raise LocalProtocolError(SHUT_DOWN if self._failure is None else failed)
        if how == CORE_ASKED:
            self._stands_in = True

    cpdef wait(self, done, double until):
        """Move all-reduces on until `done`, or the clock says `until`, unless others have the lead.

        Raises:
            LocalProtocolError: this thread leads already, in whose callback or signal handler this
                is: nobody else could bring the end.
        """
        cdef uint64_t me = get_ident()
        cdef double since, now = monotonic()
        cdef double patience_s
        cdef bint leads, asked
        if service_thread.forks != self._forks or self.retired:
            return
        if core_leader(&self.c) == me:
            raise LocalProtocolError(
                "waiting here would last for ever: this is a callback of an all-reduce, or a "
                "signal handler that interrupted a wait for one"
            )
        if self._failure is not None:
            return
        leads = core_take_lead(&self.c, 0)
        if not leads and (patience_s := self.ask_for_lead(until, now)) > 0:
            with nogil:
                leads = core_take_lead(&self.c, now + patience_s)
            self._wanted_until = 0
        if leads:
            since = monotonic()
            try:
                self.move_on(done, until, me == self._main)
            finally:
                asked = core_leave_lead(&self.c)
                now = monotonic()
                # Also after an interrupt, of which others know nothing.
                if asked or self.open or self._flight.c.active:
                    self.resume(True)
                elif now - since > _LONGEST_REST_S:  # it may rest for long, as this wait was long
                    self.resume(False)
            self._waited_at = now
        else:
            self._waited_at = monotonic()

    def calls(self):
        """Return a capsule of `struct core_calls`, for threads without an interpreter.

        It keeps this object: a thread that calls holds the capsule.
        """
        capsule = PyCapsule_New(&self._calls, b"worker_client.core", _let_go)
        PyCapsule_SetContext(capsule, <void *>self)
        Py_INCREF(self)
        return capsule

    def call(self):
        """Have the thread that leads look at what is unusual; any thread, in any signal handler."""
        core_call(&self.c)

    def close(self):
        """Accept nothing any more; may be called again."""
        core_close(&self.c)
        self.call()
        self.resume(True)

    cpdef resume(self, bint at_once):
        """Have the driver's own thread lead again, if it rests: at once, or if nobody else does."""
        self._stands_in = at_once
        loop_resume(&self._loop.c, at_once)

    cdef double ask_for_lead(self, double until, double now):
        """Have the driver's own thread step aside, if that is likely to pay.

        Returns:
            Seconds to wait for the lead; 0 if it does not.
        """
        if not (now < until and now - self._waited_at < <double>OFTEN_S):
            return 0
        if core_leader(&self.c) != self._own or self._flight.c.active > 1:
            return 0
        cdef double patience_s = fmin(ASKING_S, until - now)
        self._wanted_until = now + patience_s
        self.call()
        return patience_s

    # -- the driver's own thread --------------------------------------------------------------

    def lead(self):
        """Wait for the lead, and take it."""
        self._own = get_ident()
        with nogil:
            core_take_lead(&self.c, INFINITY)

    def leave(self):
        """Let others lead."""
        self._stands_in = self._stands_in and (self.open or self._flight.c.active)
        if core_leave_lead(&self.c):
            loop_resume(&self._loop.c, True)  # what was asked for in this instant is begun

    def is_wanted(self, double now):
        """Whether another thread asks to lead, or has left off and may go on."""
        if now < self._wanted_until and self._flight.c.active <= 1:
            return True
        return self._stands_in and not (self.open or self._flight.c.active)

    def rest(self, double first_s):
        """Return when no thread has led for a while, and after `resume`.

        Args:
            first_s: when to look for the first time, seconds; then after times twice as long each.
        """
        cdef int first_ms = round(1000 * first_s), longest_ms = round(1000 * LONGEST_REST_S)
        cdef int longest_of_one_ms = round(1000 * IDLE_S)
        with nogil:
            loop_rest(&self._loop.c, first_ms, longest_ms, longest_of_one_ms)

    # -- who has the lead ---------------------------------------------------------------------

    def run(self, double timeout_s):
        """Wait until there is something for the session, or the time is up."""
        cdef double until = monotonic() + timeout_s
        with nogil:
            core_run(&self.c, NULL, until)

    def news(self):
        """Return what there is for the session, once.

        Returns:
            The all-reduces that were completed; the message that is not a healthy result, as
            ``(line, header, payload)``, or None; and whether there is a `change`.

        Raises:
            OSError: the kernel refused to poll.
        """
        cdef loop_event event = self.c.event
        self.c.event = LOOP_IDLE
        if event == LOOP_FAILED:
            raise OSError(self._loop.c.error, "the sockets cannot be polled")
        message = self._loop.message() if event == LOOP_MESSAGE else None
        return self.completed(), message, self._loop.c.changes

    cdef list completed(self):
        """Return what has ended well, once; another thread's is open until it is told so."""
        cdef OperationState operation
        cdef double elapsed_s
        completed = self._flight.completed()
        for operation in completed:
            if operation.c != &operation.own:
                self.open[operation] = None
                elapsed_s = now_ns() / 1e9 - operation.c.begun
                durations_add(&self._flight.c.unowned, <uint64_t>(1e9 * max(0.0, elapsed_s)))
        return completed

    def start(self):
        """Begin what was asked for, as far as it needs no session; return whether that is all."""
        return core_start(&self.c)

    def first(self):
        """Return what was asked for first and not begun; None if there is nothing."""
        cdef all_reduce *asked = core_first(&self.c)
        if asked == NULL:
            return None
        operation = self._flight.owner(asked)
        self.open[operation] = None  # which keeps another thread's from now on
        self._flight.let_go(operation)
        return operation

    def drop_first(self):
        """Leave that to the thread that asked for it here."""
        core_drop_first(&self.c)

    def put_off(self):
        """Leave it where it is, and whatever comes after it, until this is asked again."""
        core_put_off(&self.c)

    cdef move_on(self, done, double until, bint main):
        """Lead until `done`, or `until`, or until nothing is in progress.

        The main thread leads only as long as nothing is to be interpreted but `done`.
        """
        cdef double now, most
        while (
            self.open
            and not self.c.closed
            and self._failure is None
            and not _is_true(done)
            and (now := monotonic()) < until
        ):
            most = fmin(until, now + _IDLE_S)
            # A signal handler's exception may end this wait, which loses nothing, ...
            if self._flight.c.fast_path_limit:
                with nogil:
                    core_run(&self.c, NULL, most)
                PyErr_CheckSignals()
            elif main:
                return
            else:
                self._driver.wait(most - now)
            try:
                if not self.advance(main):
                    if main:
                        return
                    self._driver.advance()
            except BaseException as error:  # ... but one in here may leave things half done
                self.failure = error
                self.resume(True)
                raise

    cdef bint advance(self, bint main) except -1:
        """Do what the driver does; false: it has to, as something is unusual or rare."""
        cdef bint healthy = self.c.event == LOOP_IDLE and not self._loop.c.changes
        cdef double now
        if not (healthy and self._flight.c.fast_path_limit and self.failing is None):
            return False
        if main and (core_first(&self.c) != NULL or not self.all_end_well()):
            return False
        for operation in self.completed():
            self.end(operation)
        if core_first(&self.c) != NULL:
            return False
        now = monotonic()
        return now < self.c.due and now < self._flight.c.earliest

    cdef bint all_end_well(self) except -1:
        """Whether nothing is interpreted when `end` ends what has been completed."""
        cdef operation_t *completed = self._flight.c.completed
        cdef OperationState operation
        while completed != NULL:
            operation = <OperationState>completed.asked.owner
            if not (
                operation.c.nbytes < self._flight.c.large_bytes
                and _ends_well(operation)
                and _is_unheard(operation)
                and (operation.ended is None or type(operation.ended) is MeteredCall)
            ):
                return False
            completed = completed.following
        return True

    cdef end(self, OperationState operation):
        """End an all-reduce of which all results are here."""
        if operation.c.nbytes >= self._flight.c.large_bytes:
            self._driver.end([operation])
            return
        try:
            self.open.pop(operation, None)
            _end_well(operation)
        except BaseException:
            self.open[operation] = None  # it ends when the driver does
            raise


cdef void _let_go(object capsule) noexcept:
    Py_DECREF(<object>PyCapsule_GetContext(capsule))


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
        if operation.c == &operation.own:
            operation.c.state = ALL_REDUCE_DONE  # the GIL stands for its lock
        else:
            operation._ended = True
    else:
        (<object>operation).finish(None)
    operation.over = True
    operation.ended = None


cdef bint _is_true(done) except -1:
    """Whether what is waited for has come: mostly an all-reduce, which needs no call to tell."""
    if type(done) is MethodType and done.__func__ is _DONE:
        done = done.__self__
        if isinstance(done, OperationState):
            return (<OperationState>done).c.state != ALL_REDUCE_PENDING
        return done._ended
    return done()
