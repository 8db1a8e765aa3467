/* All-reduces and their chunks, and lists of chunks: what the flight is made of. */
#ifndef WORKER_CHUNKS_H
#define WORKER_CHUNKS_H

#include "reducer/zmtp/block.h"
#include "worker_client/protocol/all_reduce.h"

struct range {
    uint32_t link;
    uint64_t start, end;
};

enum chunk_state {
    CHUNK_QUEUED,
    CHUNK_SENT,
    CHUNK_STRANDED, /* its link is lost */
    CHUNK_DROPPED,  /* nothing is expected any more */
    CHUNK_DONE
};

struct chunk {
    struct shard *of;
    struct chunk *before, *after; /* in its link's queue or among those in flight there */
    uint64_t sent_ns;
    struct block *result; /* what came, if it is kept */
    uint32_t link;        /* that it is assigned to now */
    uint8_t state;
};

/* A part of a buffer that the plan gave to one link. */
struct shard {
    struct operation *of;
    uint64_t start, end;
    uint64_t chunk_count; /* at least one: an empty buffer travels as an empty chunk */
    struct chunk *chunks;
    uint32_t home; /* that link */
};

/* One all-reduce, on its way. */
struct operation {
    struct operation *following; /* in the list `completed` or `ended` */
    struct all_reduce *asked;    /* what it does, until its end was told */
    struct header header;        /* what its contributions have in common */
    uint64_t chunk_bytes;        /* size of every chunk but the last of each shard */
    uint32_t parts;              /* subtrees of leaves in a contribution; without leaves 1 */
    uint64_t remaining;          /* chunks whose result has not come */
    uint64_t retained;           /* chunks whose result is kept */
    unsigned char *data;         /* where results go: the caller's, until the operation has ended */
    const unsigned char *source; /* what is sent, likewise */
    uint64_t sent_ns, answered_ns; /* as of `asked`; 0: none yet */
    size_t shard_count;
    struct shard *shards; /* in the order of their offsets */
};

/* Chunks in the order of their operations and offsets. */
struct chunk_list {
    struct chunk *first, *last;
    struct chunk *latest; /* that was put in, if it is still here: the next one is likely after it */
    size_t count;
};

#define FOR_EACH_CHUNK(chunk, operation)                                                           \
    for (size_t shard_ = 0; shard_ < (operation)->shard_count; shard_++)                           \
        for (struct chunk *chunk = (operation)->shards[shard_].chunks,                             \
                          *end_ = chunk + (operation)->shards[shard_].chunk_count;                 \
             chunk < end_; chunk++)

/* An all-reduce over ranges that are ascending, disjoint and together the whole buffer. NULL: out of
 * memory. Its owner frees it. */
struct operation *operation_allocate(uint64_t chunk_bytes, const struct range *ranges, size_t count);
/* The chunk that starts at an offset, or NULL. */
struct chunk *operation_chunk(const struct operation *operation, uint64_t offset);
/* Whether an operation lacks a result of this link. */
bool operation_needs(const struct operation *operation, uint32_t link);

uint64_t chunk_offset(const struct chunk *chunk);
uint32_t chunk_nbytes(const struct chunk *chunk);
/* Bytes of a chunk's contribution: it may be several subtrees. */
uint32_t chunk_contribution(const struct chunk *chunk);
/* Whether a chunk comes before another one, in the order that is the same at every rank. */
bool chunk_precedes(const struct chunk *one, const struct chunk *other);

/* Puts a chunk in its place, and takes it out. */
void chunk_list_put(struct chunk_list *list, struct chunk *chunk);
void chunk_list_take_out(struct chunk_list *list, struct chunk *chunk);

#endif
