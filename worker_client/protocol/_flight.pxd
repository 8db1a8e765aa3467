"""The structs and functions of `all_reduce.h`, `chunks.h` and `flight.h`, and classes over them."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from reducer.zmtp.net cimport block, block_pool


cdef extern from "reducer/wire/header.h" nogil:
    const int HEADER_BYTES

    ctypedef struct header_t "struct header":
        uint8_t type
        uint32_t epoch
        uint64_t sequence
        uint64_t watermark
        uint64_t offset
        uint32_t nbytes
        uint8_t dtype, op, wire_dtype
        uint32_t since
        uint64_t tag
        uint64_t history


cdef extern from "reducer/zmtp/heartbeat.h" nogil:
    uint64_t now_ns() noexcept


cdef extern from "worker_client/protocol/durations.h" nogil:
    ctypedef struct durations_t "struct durations":
        uint64_t count

    void durations_add(durations_t *self, uint64_t ns) noexcept
    void durations_merge(durations_t *self, const durations_t *others) noexcept
    double durations_quantile(const durations_t *self, double share) noexcept


cdef extern from "worker_client/protocol/all_reduce.h" nogil:
    enum all_reduce_state:
        ALL_REDUCE_PENDING
        ALL_REDUCE_DONE
        ALL_REDUCE_FAILED

    struct all_reduce:
        void *data
        uint64_t nbytes, call, tag
        double timeout_s
        uint32_t leaves, parts
        uint8_t dtype, op
        bint unready
        void *owner
        char *why
        uint64_t why_bytes
        int state  # atomic
        int64_t sequence
        uint64_t since, history
        double begun, deadline, ask_at, ask_last_at, sent, answered

    ctypedef struct numbering_t "struct numbering":
        int64_t number
        uint32_t place

    bint numbering_give(numbering_t *self, all_reduce *asked) noexcept
    void numbering_forget(numbering_t *self, const all_reduce *failed) noexcept


cdef extern from "worker_client/protocol/flight.h" nogil:
    ctypedef enum:
        CHUNK_DONE

    ctypedef struct operation_t "struct operation":
        header_t header
        all_reduce *asked
        unsigned char *data
        uint32_t parts
        operation_t *following

    const double of_c_STRAGGLER_S "STRAGGLER_S"
    const double of_c_LAST_S "LAST_S"
    struct shard:
        operation_t *of
        uint32_t home
        chunk_t *chunks

    ctypedef struct chunk_t "struct chunk":
        shard *of
        uint32_t link
        uint8_t state
        block *result

    struct flight_link:
        bint open
        bint pings_suppressed
        uint64_t window, in_flight
        uint64_t bytes_sent, bytes_received, bytes_before, results
        uint64_t rtt_ns, min_rtt_ns

    ctypedef struct cuts_t "struct cuts":
        pass

    struct flight:
        flight_link *links
        uint32_t link_count
        header_t identity
        uint64_t watermark, next, reached, retained_bytes
        uint64_t large_bytes
        size_t active, large
        uint64_t busy_ns
        durations_t unowned
        double earliest, measured_since, large_ended, fast_path_limit
        uint32_t epoch
        bint lacks_leaves
        numbering_t numbering
        cuts_t cuts
        block_pool pool
        operation_t *completed

    ctypedef struct range_t "struct range":
        uint32_t link
        uint64_t start, end

    struct contribution:
        header_t header
        chunk_t *chunk

    struct walk:
        pass

    ctypedef struct turn_t "struct turn":
        uint32_t step, idle

    bint flight_init(flight *self, const void *identity, uint64_t max_chunk_bytes,
                     uint64_t large_bytes) noexcept
    bint flight_add_link(flight *self, uint64_t window, bint retain, bint in_place) noexcept
    void flight_free(flight *self) noexcept
    bint flight_submit(flight *self, all_reduce *asked, uint64_t chunk_bytes, uint32_t epoch,
                       const range_t *ranges, size_t count, double now) noexcept
    bint flight_begin(flight *self, all_reduce *asked, double now) noexcept
    void flight_measure(flight *self, uint32_t link) noexcept
    bint flight_next_in_turn(flight *self, turn_t *turn, uint64_t now_ns,
                             contribution *next) noexcept
    bint flight_take(flight *self, uint32_t link, const void *frame, size_t frame_bytes,
                     block *payload, size_t placed_bytes, uint64_t now_ns) noexcept
    operation_t *flight_find(const flight *self, uint64_t sequence) noexcept
    bint flight_expects(const flight *self, uint32_t link, uint64_t sequence,
                        uint64_t offset) noexcept
    bint flight_waits_for(const flight *self, uint32_t link, uint64_t sequence) noexcept
    bint operation_needs(const operation_t *self, uint32_t link) noexcept
    void flight_forget(flight *self, uint32_t link, uint64_t sequence) noexcept
    void flight_end(flight *self, uint64_t sequence) noexcept
    void flight_shut(flight *self, uint32_t link) noexcept
    chunk_t *flight_chunk(const flight *self, uint64_t sequence, uint64_t offset) noexcept
    chunk_t *flight_walk(const flight *self, walk *at, uint32_t link) noexcept
    void flight_move(flight *self, chunk_t *moved, uint32_t link) noexcept
    void flight_confirm(flight *self, uint64_t reached) noexcept
    all_reduce *flight_completed(flight *self) noexcept
    bint cuts_remember(cuts_t *self, uint64_t nbytes, uint64_t sequence, uint8_t dtype,
                       uint64_t chunk_bytes, const range_t *ranges, size_t count) noexcept
    void cuts_forget(cuts_t *self, uint64_t turns) noexcept
    uint64_t chunk_offset(const chunk_t *self) noexcept
    uint32_t chunk_nbytes(const chunk_t *self) noexcept


cdef class Call:
    cdef readonly uint64_t number  # which no other call of this process has


cdef class Durations:
    cdef durations_t c


cdef class CallMeter:
    cdef readonly Durations durations
    cdef public int64_t calls, pending, bytes_reduced
    cdef public double since, waited_s
    cdef public str failure


cdef class MeteredCall(Call):
    cdef CallMeter _meter
    cdef uint64_t _begun_ns
    cdef public bint pending
    cdef public uint64_t nbytes


cdef class OperationState(Call):
    cdef all_reduce own
    cdef all_reduce *c  # that, or another thread's that Python has not asked for
    cdef public object view, dtype, op, name, call, refusal, residual, data, write_back, ended
    cdef public object error, pieces, fill
    cdef readonly object leaves
    cdef public object _lead, _missing, _future, _waiters, _lock, _release, _claims
    cdef public bint more, rounded, over, overdue, unwatched, cut

    cdef void adopt(self, all_reduce *foreign)
    cdef aim(self)


cdef class CompiledFlight:
    cdef flight c
    cdef dict _held  # what `submit` has begun, and of other threads' what Python has seen

    cpdef bint begin(self, OperationState operation, double now) except -1
    cpdef submit(self, OperationState operation, shards, uint64_t chunk_bytes, uint32_t epoch,
                 double now=*)
    cpdef list completed(self)
    cdef let_go(self, OperationState operation)
    cdef OperationState owner(self, all_reduce *asked)
    cdef OperationState wrapped(self, all_reduce *asked)
    cdef uint32_t check(self, link) except? 0
