/* Memory for one payload, shared by reference; and a pool of spare blocks. */
#ifndef REDUCER_BLOCK_H
#define REDUCER_BLOCK_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCK_ALIGNMENT = 64, /* a cache line, and the widest vector of a kernel */
    BLOCK_LEAST_BYTES = 1 << 10,
    BLOCK_CLASSES = 1 + 4 * 21 /* up to 2 GiB */
};

struct block {
    _Alignas(BLOCK_ALIGNMENT) struct block *next; /* in a list of spare ones */
    unsigned char *data; /* what the block holds, behind this record */
    size_t nbytes;       /* and how much that is */
    size_t room;         /* there is so much */
    unsigned class;
    atomic_uint refs;
};

/* Blocks that nobody uses, by size. From malloc, every page of a large block would fault anew. */
struct block_pool {
    struct block *spare[BLOCK_CLASSES];
    size_t spare_bytes, most_spare_bytes;
};

/* Rounds a size up by a quarter of a power of two at most. BLOCK_CLASSES: it is beyond all. */
static inline unsigned block_class(size_t nbytes, size_t *room)
{
    *room = BLOCK_LEAST_BYTES;
    if (nbytes <= BLOCK_LEAST_BYTES)
        return 0;
    unsigned top = 63 - (unsigned)__builtin_clzll(nbytes - 1);
    if (top > 30)
        return BLOCK_CLASSES;
    size_t quarter = (nbytes - 1) >> (top - 2); /* 4 to 7 of them are full */
    *room = (quarter + 1) << (top - 2);
    return 4 * (top - 10) + (unsigned)quarter - 3;
}

static inline void block_pool_free(struct block_pool *pool)
{
    for (unsigned class = 0; class < BLOCK_CLASSES; class++)
        while (pool->spare[class] != NULL) {
            struct block *block = pool->spare[class];
            pool->spare[class] = block->next;
            free(block);
        }
    pool->spare_bytes = 0;
}

/* A block with one reference. NULL: out of memory. */
static inline struct block *block_take(struct block_pool *pool, size_t nbytes)
{
    size_t room;
    unsigned class = block_class(nbytes, &room);
    if (class == BLOCK_CLASSES)
        return NULL;
    struct block *block = pool->spare[class];
    if (block != NULL) {
        pool->spare[class] = block->next;
        pool->spare_bytes -= room;
    } else {
        size_t most = sizeof *block + room + (BLOCK_ALIGNMENT - 1);
        block = aligned_alloc(BLOCK_ALIGNMENT, most & -(size_t)BLOCK_ALIGNMENT);
        if (block == NULL)
            return NULL;
        block->class = class;
        block->room = room;
    }
    block->data = (unsigned char *)(block + 1);
    block->nbytes = nbytes;
    atomic_init(&block->refs, 1);
    return block;
}

/* A block with a copy of these bytes. NULL: out of memory. */
static inline struct block *block_copy(struct block_pool *pool, const void *data, size_t nbytes)
{
    struct block *copy = block_take(pool, nbytes);
    if (copy != NULL)
        memcpy(copy->data, data, nbytes);
    return copy;
}

static inline struct block *block_share(struct block *block)
{
    atomic_fetch_add_explicit(&block->refs, 1, memory_order_relaxed);
    return block;
}

/* Gives up one reference; the last one gives the block to the pool. */
static inline void block_drop(struct block_pool *pool, struct block *block)
{
    if (atomic_fetch_sub_explicit(&block->refs, 1, memory_order_acq_rel) != 1)
        return;
    if (block->room > pool->most_spare_bytes) {
        free(block);
        return;
    }
    if (pool->spare_bytes + block->room > pool->most_spare_bytes)
        block_pool_free(pool); /* sizes that are used no more; the others come again */
    block->next = pool->spare[block->class];
    pool->spare[block->class] = block;
    pool->spare_bytes += block->room;
}

#endif
