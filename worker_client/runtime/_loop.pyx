"""The loop over a worker's connections, over the structs of `loop.h`."""

cimport cython
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_SetName
from libc.errno cimport errno
from libc.stdint cimport uint32_t, uint64_t

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
    pair,
)
from worker_client.protocol._flight cimport CompiledFlight, HEADER_BYTES

from enum import IntEnum
from typing import NamedTuple


class Fault(IntEnum):
    """Why a handshake has failed, as far as it matters here; see `zmtp.h`."""

    DIFFERS = ZMTP_DIFFERS
    REFUSED = ZMTP_REFUSED
    WRONG_KEY = ZMTP_WRONG_KEY


class Change(NamedTuple):
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
        if not loop_init(&self.its, &flight.its, <uint64_t>(every_s * 1e9)):
            raise OSError(errno, "the loop cannot be set up")

    def __dealloc__(self):
        if self._flight is not None:  # else the arguments were wrong, and there is no loop
            loop_free(&self.its)

    def end(self, long linger_ms):
        """Give what has yet to be sent so much time, and close all connections."""
        with nogil:
            loop_end(&self.its, linger_ms)

    def add(self, uint32_t link, *, bint apart=False):
        """Add a line: of the next link of the flight, or a further stream of an earlier link.

        Args:
            link: of the flight.
            apart: it is neither, but one over which that of another line is to go on.

        Returns:
            Its number, counted from 0.
        """
        if not loop_add(&self.its, link, apart):
            raise MemoryError
        return self.its.lines - 1

    cdef uint32_t check(self, line) except? 0xFFFFFFFF:
        if not 0 <= line < self.its.lines:
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
        cdef bint opened = loop_open(&self.its, number, descriptor,
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
        cdef pair *its = <pair *>PyCapsule_GetPointer(met, b"pair")
        PyCapsule_SetName(met, b"joined")
        if not loop_join(&self.its, number, its):
            raise OSError(errno, "the connection cannot be set up")

    def carry(self, line):
        """Have a further stream carry contributions, as the reducer agrees to."""
        loop_carry(&self.its, self.check(line))

    def keep(self, line):
        """Keep a line's connection when its socket breaks: `splice`, or `break_`, is to follow."""
        loop_keep(&self.its, self.check(line))

    def splice(self, line, fresh, uint64_t peer_read):
        """Have a line's connection go on over the socket of another line, which is closed.

        Args:
            line: whose connection is suspended.
            fresh: over whose connection the reducer has agreed to that.
            peer_read: bytes that the reducer has read over the first one.

        Returns:
            False if that is not possible.
        """
        return loop_splice(&self.its, self.check(line), self.check(fresh), peer_read)

    def break_(self, line):
        """Have a line's connection end, if there is one, when all that came over it is read."""
        loop_break(&self.its, self.check(line))

    def close(self, line):
        """Drop a line's connection, if there is one, with what it has not sent."""
        loop_close(&self.its, self.check(line))

    def connected(self, line):
        """Whether TCP's handshake is done."""
        cdef connection *its = self.its.line[self.check(line)].connection
        return its != NULL and its.reached != CONNECTING

    def paused_s(self):
        """Return for how many seconds the process did not run before it ran again, within the last
        second; 0.0 if it did."""
        cdef uint64_t paused_ns
        with nogil:
            paused_ns = loop_paused_ns(&self.its)
        return paused_ns / 1e9

    def received(self, line):
        """Return how many bytes have come over a line's connection, and whether a frame's rest has
        not.
        """
        cdef connection *its = self.its.line[self.check(line)].connection
        if its == NULL:
            return 0, False
        return its.bytes_read, its.in_frame

    cpdef run(self, long timeout_ms):
        """Wait until there is something for the session, or the time is up."""
        if self._event == LOOP_QUIET and self._flight.its.completed == NULL:
            with nogil:
                self._event = loop_run(&self.its, timeout_ms)

    cdef bint is_healthy(self):
        """Whether there is nothing for the session but all-reduces that were completed."""
        return self._event == LOOP_QUIET and not self.its.changes

    def news(self):
        """Return what there is for the session, once.

        Returns:
            The all-reduces that were completed; the message that is not a healthy result, as
            ``(line, header, payload)``, or None; and whether there is a `change`.

        Raises:
            OSError: the kernel refused to poll.
        """
        cdef loop_event event = self._event
        self._event = LOOP_QUIET
        if event == LOOP_FAILED:
            raise OSError(self.its.error, "the sockets cannot be polled")
        message = self.message() if event == LOOP_MESSAGE else None
        return self._flight.completed(), message, self.its.changes

    def change(self):
        """Return the next connection that was made or has ended, once; None if there is none."""
        cdef connection *its
        if not self.its.changes:
            return None
        for line in range(self.its.lines):
            its = self.its.line[line].connection
            if its == NULL or not self.its.line[line].changed:
                continue
            self.its.line[line].changed = False
            return Change(
                line, its.state == OPEN, its.state == SUSPENDED, its.zmtp.ready,
                its.error, its.zmtp.fault,
                its.zmtp.peer_mechanism.decode("ascii", "replace"),
                its.zmtp.reason.decode("ascii", "replace"),
            )
        self.its.changes = False
        return None

    def send(self, line, bytes header, payload):
        """Send a message that is no contribution; it is lost if there is no connection."""
        cdef const unsigned char[::1] body
        if payload is None:
            loop_send(&self.its, self.check(line), PyBytes_AsString(header), NULL, 0)
            return
        body = payload
        loop_send(&self.its, self.check(line), PyBytes_AsString(header),
                  &body[0] if body.shape[0] else <const void *>b"", body.shape[0])

    cpdef refill(self):
        """Send what the windows have room for."""
        loop_refill(&self.its)

    def detach(self, uint64_t sequence):
        """Read the buffer of an all-reduce no more: what has yet to be sent of it is copied."""
        if not loop_detach(&self.its, sequence):
            raise MemoryError

    def wake(self):
        """Make `run` return at once; any thread may call it."""
        loop_wake(&self.its)

    def rest(self, int first_ms, int longest_ms, int longest_of_one_ms):
        """Return when no thread has run the loop for a while, and after `resume`.

        It looks after the first time, then after times twice as long each, up to the longest
        between runs, and up to that of one run while it lasts.
        """
        with nogil:
            loop_rest(&self.its, first_ms, longest_ms, longest_of_one_ms)

    def resume(self, bint at_once):
        """Make `rest` return, or look again soon; any thread may call it, in any signal handler."""
        loop_resume(&self.its, at_once)

    cdef message(self):
        cdef connection *sender = self.its.line[self.its.from_].connection
        if sender == NULL or sender.message.frames == 0:
            return None  # the connection was closed meanwhile
        cdef message_t *found = &sender.message
        header = payload = b""
        if not found.foreign:
            header = PyBytes_FromStringAndSize(<char *>found.header, HEADER_BYTES)
        if not found.foreign and found.payload != NULL:
            payload = PyBytes_FromStringAndSize(<char *>found.payload.data, found.payload.nbytes)
        loop_next(&self.its)
        return self.its.from_, header, payload
