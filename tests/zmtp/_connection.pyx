"""One connection over a socket, and the table of its states; see `connection.c`."""

from libc.stdint cimport uint32_t, uint64_t

from reducer.zmtp.curve cimport curve_keys
from reducer.zmtp.net cimport block_pool, connection, connection_state


cdef extern from "reducer/zmtp/connection.c" nogil:  # whose table no other file sees
    enum:
        OCCURRENCES

    connection_state transitions[6][6]

    bint connection_init(
        connection *self, int fd, bint server, const curve_keys *keys, uint64_t max_frame_bytes,
        block_pool *pool
    ) noexcept
    void connection_free(connection *self) noexcept
    void connection_note(connection *self, uint32_t events) noexcept
    int connection_read(connection *self) noexcept
    void connection_make_resumable(connection *self) noexcept
    void connection_break(connection *self, int error) noexcept
    void connection_refuse(connection *self) noexcept
    bint connection_resume(connection *self, connection *fresh, uint64_t peer_read) noexcept

STATES = ("connecting", "handshake", "open", "suspended", "closing", "closed")


def following():
    """Return what may follow each state, from the table."""
    return {
        state: {STATES[transitions[at][occurrence]] for occurrence in range(OCCURRENCES)} - {state}
        for at, state in enumerate(STATES)
    }


cdef class Connection:
    """A connection without keys.

    Args:
        socket: which does not block, and may be closed after this.
        server: whether this side was connected to.
    """

    cdef connection c
    cdef block_pool _pool
    cdef object _socket

    def __cinit__(self, socket, *, bint server=False):
        self._socket = socket
        if not connection_init(&self.c, socket.fileno(), server, NULL, 1 << 20, &self._pool):
            raise MemoryError

    def __dealloc__(self):
        connection_free(&self.c)

    @property
    def state(self):
        """The name of its state."""
        return STATES[self.c.state]

    def note(self, uint32_t events):
        """Record events of epoll, and read on to the next event of its own."""
        connection_note(&self.c, events)
        connection_read(&self.c)

    def keep(self):
        """Make it resumable."""
        connection_make_resumable(&self.c)

    def break_(self, int error):
        """Have it end when all that came is read."""
        connection_break(&self.c, error)

    def refuse(self):
        """Have it end at the next read."""
        connection_refuse(&self.c)

    def splice(self, Connection fresh not None):
        """Go on over the socket of another one, whose peer has read all that was sent here."""
        return connection_resume(&self.c, &fresh.c, self.c.bytes_written)
