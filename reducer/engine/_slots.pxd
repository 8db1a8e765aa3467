"""The compiled members, rounds and slots, for the compiled loop: `slots.h` declared once."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef extern from "reducer/zmtp/block.h" nogil:
    struct block:
        unsigned char *data
        size_t nbytes

    struct block_pool:
        size_t most_spare_bytes

    block *block_take(block_pool *pool, size_t nbytes) noexcept
    void block_drop(block_pool *pool, block *dropped) noexcept
    void block_pool_free(block_pool *pool) noexcept


cdef extern from "reducer/engine/map.h" nogil:
    struct map_entry:
        uint64_t key
        void *value

    struct map:
        map_entry *entries
        size_t mask
        size_t count

    void *map_get(const map *self, uint64_t key)
    bint map_put(map *self, uint64_t key, void *value)
    void map_remove(map *self, uint64_t key)
    void map_free(map *self)


cdef extern from "reducer/engine/heap.h" nogil:
    struct heap:
        size_t count

    uint64_t heap_least(const heap *self)


cdef extern from "reducer/engine/lateness.h" nogil:
    ctypedef struct waits_t "struct waits":
        uint64_t us
        uint32_t *buckets

    struct rank_lateness:
        waits_t waits[3][2]

    ctypedef struct lateness_t "struct lateness":
        waits_t all[3][2]
        rank_lateness *ranks

    void lateness_turn(lateness_t *self, uint32_t world_size) noexcept
    uint64_t lateness_us(const lateness_t *self, uint32_t rank, bint lately) noexcept


cdef extern from "reducer/engine/traffic.h" nogil:
    ctypedef struct traffic_t "struct traffic":
        uint64_t bytes_in, bytes_out, us
        uint64_t *buckets


cdef extern from "reducer/wire/header.h" nogil:
    const int HEADER_BYTES

    ctypedef struct header_t "struct header":
        uint32_t nbytes
        uint32_t rank


cdef extern from "reducer/engine/slots.h" nogil:
    ctypedef struct member_t "struct member":
        uint64_t peer
        uint64_t window
        uint64_t held
        uint64_t watermark
        uint32_t rank
        bint regular

    enum:
        ABSENT
        PRESENT
        CLAIMED

    struct payloads:
        block **blocks
        uint8_t *present

    struct slot:
        uint64_t offset
        uint32_t nbytes
        uint32_t missing
        uint32_t first_rank
        uint32_t claims
        bint done
        bint is_asked
        uint32_t asked
        payloads *payloads

    struct timestamps:
        uint64_t begun_us, alone_us, complete_us, done_us, bytes
        uint32_t first_rank, last_rank, chunks

    struct round_times:
        uint64_t sequence
        timestamps timestamps

    struct round:
        uint64_t sequence
        timestamps timestamps
        header_t first
        bint has_first
        bint viewed
        uint32_t open
        bint live
        map slots
        uint8_t *spoke
        round *before
        uint64_t touched
        uint64_t born

    struct rounds:
        block_pool *pool
        block_pool own
        uint32_t world_size
        map by_sequence
        heap order
        uint64_t limit
        round *latest
        uint64_t touches
        uint64_t exits
        uint64_t reached
        uint32_t viewed
        uint64_t reserved
        uint64_t now_us
        traffic_t traffic
        lateness_t lateness
        round_times *ended
        size_t ended_count, ended_room
        member_t **members
        uint64_t job
        uint64_t max_chunk_bytes
        uint32_t generation

    round *rounds_open(rounds *self, uint64_t sequence, const header_t *first) noexcept
    slot *round_place(rounds *self, round *at, const header_t *header, block *payload) noexcept
    uint64_t rounds_used(const rounds *self) noexcept
    void round_finish(rounds *self, round *at, slot *finished) noexcept
    void round_drop(rounds *self, round *at, slot *dropped) noexcept
    void round_touch(rounds *self, round *at) noexcept
    void round_settle(rounds *self, round *at) noexcept
    void rounds_discard_oldest(rounds *self) noexcept
    void rounds_free(rounds *self) noexcept
    uint64_t peer_key(const void *id, size_t nbytes) noexcept


cdef class Member:
    cdef member_t c
    cdef readonly bytes peer
    cdef object _state


cdef class Rounds:
    cdef rounds c
    cdef dict _views
    cdef dict _latest
    cdef dict _left
    cdef dict _swept
    cdef object _owner  # of the pool, as long as payloads come from there

    cdef admit(self, list members, job, block_pool *pool, owner)
    cdef dismiss(self)
    cdef rest(self)
    cdef _view(self, round *found)
    cdef _release(self, sequence)
