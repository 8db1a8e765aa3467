/* The fixed header (docs/protocol.md, section 2) for the compiled loops: the twin of header.py.
 *
 * Every field is naturally aligned and the wire is little-endian, so the struct is the 96 bytes. A
 * frame may start at any address: copy it in before reading.
 */
#ifndef REDUCER_WIRE_HEADER_H
#define REDUCER_WIRE_HEADER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the compiled loops are for little-endian CPUs, as the wire is"
#endif

/* The values of constants.py; a test compares them. */
enum {
    HEADER_BYTES = 96,
    VERSION_MAJOR = 1,
    TYPE_CONTRIBUTION = 3,
    TYPE_RESULT = 4,
    TYPE_PING = 8,
    TYPE_RESUME = 15,
    DTYPE_BFLOAT16 = 4, /* those up to it are floating-point numbers */
    DTYPE_BLOCK8 = 9, /* those from it on are blocks */
    DTYPE_LAST = 10,
    OP_MEAN = 2,
    OP_LAST = 5,
    MIN_COST = 1024,
    PLACES = 128,
    MAX_ROUNDS_AHEAD = PLACES << 14,
    SPARE_CHUNKS = 4
};
static const uint8_t HEADER_MAGIC[4] = {'R', 'D', 'S', 'V'};
static const uint64_t NO_SEQUENCE = UINT64_MAX;
static const uint64_t MAX_TOTAL_BYTES = UINT64_C(1) << 48;

struct header {
    uint8_t magic[4];
    uint8_t version;
    uint8_t type;
    uint16_t flags;
    uint64_t job;
    uint32_t generation;
    uint32_t epoch;
    uint64_t sequence;
    uint64_t watermark;
    uint64_t total_bytes;
    uint64_t offset;
    uint32_t nbytes;
    uint32_t rank;
    uint8_t dtype;
    uint8_t op;
    uint8_t wire_dtype;
    uint8_t reserved;
    uint32_t since;
    uint64_t tag;
    uint64_t window;
    uint64_t history;
};
_Static_assert(sizeof(struct header) == HEADER_BYTES, "the struct is the frame");

/* Bytes per element of a dtype's code. */
static inline uint32_t dtype_itemsize(uint8_t dtype)
{
    static const uint16_t sizes[DTYPE_LAST + 1] = {0, 4, 8, 2, 2, 1, 4, 8, 1, 256, 256};
    return sizes[dtype];
}

/* Whether a reduction is defined for a dtype (constants.py, `DType.defines`). */
static inline bool dtype_defines(uint8_t dtype, uint8_t op)
{
    if (dtype >= DTYPE_BLOCK8)
        return op <= OP_MEAN;
    return op != OP_MEAN || dtype <= DTYPE_BFLOAT16;
}

/* What a contribution of `nbytes` takes of a window (layout.py, `cost`). */
static inline uint64_t window_cost(uint64_t nbytes)
{
    return nbytes < MIN_COST ? MIN_COST : nbytes;
}

/* Reads a header of this version without flags; false if the frame is anything else. */
static inline bool header_read(struct header *header, const void *frame, size_t nbytes)
{
    if (nbytes != HEADER_BYTES)
        return false;
    memcpy(header, frame, HEADER_BYTES);
    return memcmp(header->magic, HEADER_MAGIC, sizeof HEADER_MAGIC) == 0 &&
           header->version == VERSION_MAJOR && header->flags == 0;
}

/* Whether the fields about elements are sound: header.py, `check_chunk`, which words the errors. */
static inline bool header_chunk_is_sound(const struct header *h, size_t payload, uint64_t max_chunk)
{
    if (h->dtype < 1 || h->dtype > DTYPE_LAST || h->op < 1 || h->op > OP_LAST)
        return false;
    if (!dtype_defines(h->dtype, h->op))
        return false;
    if (h->wire_dtype != h->dtype || h->sequence == NO_SEQUENCE)
        return false;
    if (payload != h->nbytes || h->nbytes > max_chunk || (h->nbytes == 0 && h->total_bytes > 0))
        return false;
    if (h->total_bytes > MAX_TOTAL_BYTES || h->offset > h->total_bytes ||
        h->nbytes > h->total_bytes - h->offset)
        return false;
    return (h->offset | h->nbytes | h->total_bytes) % dtype_itemsize(h->dtype) == 0;
}

#endif
