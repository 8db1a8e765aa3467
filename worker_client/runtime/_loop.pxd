"""The structs and functions of `loop.h` and `core.h`, and the classes over them."""

from libc.stdint cimport uint32_t, uint64_t

from reducer.zmtp.curve cimport curve_keys
from reducer.zmtp.net cimport channel, connection, connection_state
from worker_client.protocol._flight cimport (
    CompiledFlight, OperationState, all_reduce, all_reduce_state, flight as flight_t,
)


cdef extern from "worker_client/runtime/loop.h" nogil:
    enum loop_event:
        LOOP_IDLE
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
    bint loop_attach(loop_t *self, uint32_t line, channel *channel) noexcept
    void loop_carry(loop_t *self, uint32_t line) noexcept
    void loop_make_resumable(loop_t *self, uint32_t line) noexcept
    bint loop_resume_over(loop_t *self, uint32_t line, uint32_t successor,
                          uint64_t peer_read) noexcept
    void loop_break(loop_t *self, uint32_t line) noexcept
    uint64_t loop_paused_ns(loop_t *self) noexcept
    connection_state loop_state(loop_t *self, uint32_t line, int *error) noexcept
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


cdef extern from "worker_client/runtime/core.h" nogil:
    enum core_submitted:
        CORE_BEGUN
        CORE_ASKED
        CORE_CLOSED
        CORE_REFUSED

    ctypedef struct core_t "struct core":
        bint closed
        loop_event event
        double due

    struct core_calls:
        core_t *core
        core_submitted (*submit)(core_t *self, all_reduce *asked) noexcept
        all_reduce_state (*test)(const all_reduce *asked) noexcept
        void (*lead)(core_t *self, const all_reduce *asked, double until) noexcept

    bint core_init(core_t *self, flight_t *within, loop_t *loop) noexcept
    void core_free(core_t *self) noexcept
    core_submitted core_submit(core_t *self, all_reduce *asked) noexcept
    all_reduce_state core_test(const all_reduce *asked) noexcept
    void core_lead(core_t *self, const all_reduce *asked, double until) noexcept
    void core_call(core_t *self) noexcept
    void core_close(core_t *self) noexcept
    uint64_t core_leader(core_t *self) noexcept
    bint core_take_lead(core_t *self, double until) noexcept
    bint core_leave_lead(core_t *self) noexcept
    bint core_start(core_t *self) noexcept
    all_reduce *core_first(core_t *self) noexcept
    void core_drop_first(core_t *self) noexcept
    void core_put_off(core_t *self) noexcept
    bint core_run(core_t *self, const all_reduce *asked, double until) noexcept


cdef class Loop:
    cdef loop_t c
    cdef CompiledFlight _flight

    cdef uint32_t check(self, line) except? 0xFFFFFFFF
    cdef message(self)


cdef class Core:
    cdef core_t c
    cdef core_calls _calls
    cdef Loop _loop
    cdef CompiledFlight _flight
    cdef readonly dict open
    cdef public object failing
    cdef object _failure
    cdef object _driver, _trace
    cdef public bint retired
    cdef double _wanted_until, _waited_at
    cdef bint _stands_in
    cdef uint64_t _forks, _main, _own

    cdef list completed(self)
    cpdef submit(self, OperationState operation)
    cpdef wait(self, done, double until)
    cpdef resume(self, bint at_once)
    cdef double ask_for_lead(self, double until, double now)
    cdef move_on(self, done, double until, bint main)
    cdef bint advance(self, bint main) except -1
    cdef bint all_end_well(self) except -1
    cdef end(self, OperationState operation)
