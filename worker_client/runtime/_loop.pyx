"""The loop over a worker's sockets, over the structs of `loop.h`."""

from cpython.bytes cimport PyBytes_FromStringAndSize

from libc.errno cimport errno
from libc.stdint cimport uint32_t, uintptr_t

from reducer._libzmq cimport libzmq, zmq_msg_t
from reducer.failpoints._failpoints cimport arm_table, pass_place
from worker_client.protocol._flight cimport CompiledFlight, flight as flight_t


cdef extern from "worker_client/runtime/loop.h" nogil:
    enum loop_event:
        LOOP_QUIET
        LOOP_MESSAGE
        LOOP_CHANGE
        LOOP_FAILED

    ctypedef struct loop_t "struct loop":
        libzmq zmq
        uint32_t link
        int received
        zmq_msg_t *frames

    bint loop_init(loop_t *self, const libzmq *zmq, flight_t *within) noexcept
    bint loop_add(loop_t *self, void *socket, int socket_fd, int monitor_fd) noexcept
    void loop_replace(loop_t *self, uint32_t link, void *socket, int socket_fd,
                      int monitor_fd) noexcept
    void loop_free(loop_t *self) noexcept
    loop_event loop_run(loop_t *self, long timeout_ms) noexcept
    void loop_close_message(loop_t *self) noexcept
    void loop_refill(loop_t *self) noexcept
    void loop_touch(loop_t *self, uint32_t link) noexcept
    void loop_wake(loop_t *self) noexcept


def arm(failpoints):
    """Arm the table of `loop.c`; see `reducer.failpoints.arm`."""
    arm_table(failpoints)
    return hit


def hit(place):
    """Pass a place of that table; whether what is at hand is to be dropped."""
    return pass_place(place)


cdef class Loop:
    """The loop over all sockets of a worker; one thread uses it, but for `wake`.

    Args:
        flight: what it sends from and receives into.
        functions: addresses of libzmq's functions, in the order of `reducer.libzmq.FUNCTIONS`.
    """

    cdef loop_t its
    cdef loop_event _event  # what `news` has not told yet
    cdef int _errno
    cdef CompiledFlight _flight

    def __cinit__(self, CompiledFlight flight, functions):
        cdef libzmq zmq
        for at, address in enumerate(functions):
            (<void **>&zmq)[at] = <void *><uintptr_t>address
        if not loop_init(&self.its, &zmq, &flight.its):
            raise OSError(errno, "the loop cannot be set up")
        self._flight = flight

    def __dealloc__(self):
        loop_free(&self.its)

    def add(self, socket, socket_fd, monitor_fd):
        """Give the next link of the flight its socket.

        Args:
            socket: address of libzmq's socket, which must live for as long as `run` and `refill`
                are called.
            socket_fd, monitor_fd: descriptors of that socket and of its monitor.
        """
        if not loop_add(&self.its, <void *><uintptr_t>socket, socket_fd, monitor_fd):
            raise MemoryError

    def replace(self, link, socket, socket_fd, monitor_fd):
        """Give a link another socket; arguments as for `add`."""
        loop_replace(
            &self.its, self._flight.check(link), <void *><uintptr_t>socket, socket_fd, monitor_fd
        )

    def run(self, long timeout_ms):
        """Wait until there is something for the session, or the time is up."""
        if self._event == LOOP_QUIET and self._flight.its.completed == NULL:
            with nogil:
                self._event = loop_run(&self.its, timeout_ms)
                self._errno = self.its.zmq.last_errno()

    def news(self):
        """Return what there is for the session, once.

        Returns:
            The all-reduces that were completed; the message that is not a healthy result, as
            ``(link, header, payload)``, or None; whether a monitor has something to say.

        Raises:
            OSError: libzmq refused.
        """
        cdef loop_event event = self._event
        self._event = LOOP_QUIET
        if event == LOOP_FAILED:
            raise OSError(self._errno, "libzmq refused to receive")
        message = self.message() if event == LOOP_MESSAGE else None
        return self._flight.completed(), message, event == LOOP_CHANGE

    def refill(self):
        """Send what the windows have room for."""
        loop_refill(&self.its)

    def touch(self, link):
        """Take note that something else than `refill` has sent over a link."""
        loop_touch(&self.its, self._flight.check(link))

    def wake(self):
        """Make `run` return at once; any thread may call it."""
        loop_wake(&self.its)

    cdef tuple message(self):
        # A message of three frames or more is none of ours.
        header = self.frame(0) if self.its.received <= 2 else b""
        payload = self.frame(1) if self.its.received == 2 else b""
        loop_close_message(&self.its)
        return self.its.link, header, payload

    cdef bytes frame(self, int index):
        cdef zmq_msg_t *frame = &self.its.frames[index]
        return PyBytes_FromStringAndSize(
            <char *>self.its.zmq.msg_data(frame), self.its.zmq.msg_size(frame)
        )
