"""The structs and functions of `loop.h`, and the class over them."""

from libc.stdint cimport uint32_t, uint64_t

from reducer.zmtp.curve cimport curve_keys
from reducer.zmtp.net cimport connection, pair
from worker_client.protocol._flight cimport CompiledFlight, flight as flight_t


cdef extern from "worker_client/runtime/loop.h" nogil:
    enum loop_event:
        LOOP_QUIET
        LOOP_MESSAGE
        LOOP_CHANGE
        LOOP_FAILED

    struct loop_line:
        uint32_t link
        connection *connection
        bint changed

    ctypedef struct loop_t "struct loop":
        uint32_t lines, links
        loop_line *line
        uint32_t from_ "from"
        bint changes
        int error

    bint loop_init(loop_t *self, flight_t *within, uint64_t every_ns) noexcept
    void loop_end(loop_t *self, long linger_ms) noexcept
    void loop_free(loop_t *self) noexcept
    bint loop_add(loop_t *self, uint32_t link, bint apart) noexcept
    bint loop_open(loop_t *self, uint32_t line, int fd, const curve_keys *keys) noexcept
    bint loop_join(loop_t *self, uint32_t line, pair *pair) noexcept
    void loop_carry(loop_t *self, uint32_t line) noexcept
    void loop_keep(loop_t *self, uint32_t line) noexcept
    bint loop_splice(loop_t *self, uint32_t line, uint32_t fresh, uint64_t peer_read) noexcept
    void loop_break(loop_t *self, uint32_t line) noexcept
    uint64_t loop_paused_ns(loop_t *self) noexcept
    void loop_close(loop_t *self, uint32_t line) noexcept
    loop_event loop_run(loop_t *self, long timeout_ms) noexcept
    void loop_next(loop_t *self) noexcept
    bint loop_send(loop_t *self, uint32_t line, const void *header, const void *payload,
                   size_t nbytes) noexcept
    void loop_refill(loop_t *self) noexcept
    bint loop_detach(loop_t *self, uint64_t sequence) noexcept
    void loop_wake(loop_t *self) noexcept
    void loop_rest(loop_t *self, int first_ms, int longest_ms, int longest_of_one_ms) noexcept
    void loop_resume(loop_t *self, bint at_once) noexcept


cdef class Loop:
    cdef loop_t its
    cdef loop_event _event  # what `news` has not told yet
    cdef CompiledFlight _flight

    cpdef run(self, long timeout_ms)
    cdef bint is_healthy(self)
    cdef uint32_t check(self, line) except? 0xFFFFFFFF
    cpdef refill(self)
    cdef message(self)
