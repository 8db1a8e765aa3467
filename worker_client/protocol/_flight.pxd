"""The structs and functions of `chunks.h` and `flight.h`, and the class over them."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from reducer.zmtp.net cimport block, block_pool
from worker_client.protocol._state cimport OperationState


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


cdef extern from "worker_client/protocol/flight.h" nogil:
    ctypedef enum:
        CHUNK_DONE

    ctypedef struct operation_t "struct operation":
        header_t header
        uint64_t sent_ns, answered_ns
        operation_t *following

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
        bint calm
        uint64_t window, in_flight
        uint64_t bytes_sent, bytes_received, results
        uint64_t rtt_ns, min_rtt_ns

    struct flight:
        flight_link *links
        uint32_t link_count
        header_t identity
        uint64_t watermark, next, reached, kept_bytes
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

    bint flight_init(flight *self, const void *identity, uint64_t max_chunk_bytes) noexcept
    bint flight_add_link(flight *self, uint64_t window, bint keep, bint in_place) noexcept
    void flight_free(flight *self) noexcept
    operation_t *flight_submit(flight *self, void *data, uint64_t total_bytes,
                               const header_t *said, uint64_t chunk_bytes, const range_t *ranges,
                               size_t count) noexcept
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
    bint flight_completed(flight *self, uint64_t *sequence) noexcept
    uint64_t chunk_offset(const chunk_t *self) noexcept
    uint32_t chunk_nbytes(const chunk_t *self) noexcept


cdef class CompiledFlight:
    cdef flight its
    cdef dict _operations  # by sequence number: keeps the memory for as long as it is used

    cpdef submit(self, OperationState operation, shards, uint64_t chunk_bytes, uint32_t epoch)
    cdef list completed(self)
    cdef uint32_t check(self, link) except? 0
