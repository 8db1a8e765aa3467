/* The leaves of a step (docs/protocol.md, section 4): the twin of leaves.py. */
#ifndef REDUCER_WIRE_LEAVES_H
#define REDUCER_WIRE_LEAVES_H

#include "header.h"

enum { MAX_LEAVES = 1 << 16 };

/* The first leaf of a rank; of the rank after the last one, how many there are. */
static inline uint32_t leaves_first(uint32_t leaves, uint32_t world_size, uint32_t rank)
{
    uint32_t more = leaves % world_size;
    return rank * (leaves / world_size) + (rank < more ? rank : more);
}

/* The end of the largest subtree that begins at `first` and has no leaf from `last` on. */
static inline uint32_t leaves_subtree_end(uint32_t leaves, uint32_t first, uint32_t last)
{
    uint32_t size = first == 0 ? MAX_LEAVES : first & -first;
    if (last == leaves && first + size >= leaves)
        return leaves;
    while (first + size > last)
        size >>= 1;
    return first + size;
}

/* Of how many subtrees a rank's contribution is made: 1 without leaves; 0 if it cannot be. */
static inline uint32_t leaves_parts(const struct header *header, uint32_t world_size, uint32_t rank)
{
    if (header->window == 0)
        return 1;
    if (header->window > MAX_LEAVES || header->window < world_size ||
        header->dtype >= DTYPE_BLOCK8)
        return 0;
    uint32_t leaves = (uint32_t)header->window, count = 0;
    uint32_t last = leaves_first(leaves, world_size, rank + 1);
    for (uint32_t first = leaves_first(leaves, world_size, rank); first < last; count++)
        first = leaves_subtree_end(leaves, first, last);
    return count;
}

/* Nodes that a fold has left after a subtree that ends here (reducer/kernels/fold.h). */
static inline uint8_t leaves_depth(uint32_t leaves, uint32_t end)
{
    return end == leaves ? 1 : (uint8_t)__builtin_popcount(end);
}

#endif
