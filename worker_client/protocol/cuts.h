/* How buffers were cut, by their sizes: they return, and the session need not cut them again. */
#ifndef WORKER_CUTS_H
#define WORKER_CUTS_H

#include "chunks.h"

enum { CUTS = 1024 }; /* that are known at most: then all are forgotten */

/* The parts of buffers of one size, type and turn. */
struct cut {
    struct cut *following; /* of those with the same hash */
    uint64_t nbytes, turn;
    uint8_t dtype;
    uint64_t chunk_bytes; /* size of every chunk but the last of each shard */
    size_t count;
    struct range ranges[]; /* ascending, disjoint, together the whole buffer */
};

struct cuts {
    uint64_t turns; /* after so many all-reduces the first shard is at the same place; 0: nothing is */
    size_t count;
    struct cut *first[CUTS];
};

/* The parts of a buffer; NULL: they are not known. */
const struct cut *cuts_find(const struct cuts *cuts, uint64_t nbytes, uint64_t sequence,
                            uint8_t dtype);
/* Remembers them for the buffers that are like it. False: out of memory. */
bool cuts_remember(struct cuts *cuts, uint64_t nbytes, uint64_t sequence, uint8_t dtype,
                   uint64_t chunk_bytes, const struct range *ranges, size_t count);
/* Forgets all; buffers are cut among other links from now on. */
void cuts_forget(struct cuts *cuts, uint64_t turns);

#endif
