/* What the all-reduces of a job have moved, and how long they took: the twin of traffic.py. */
#ifndef REDUCER_TRAFFIC_H
#define REDUCER_TRAFFIC_H

#include <stdint.h>

enum { TRAFFIC_OCTAVES = 26, TRAFFIC_BUCKETS = 8 * TRAFFIC_OCTAVES };

struct traffic {
    uint64_t bytes_in, bytes_out; /* of contributions, and of results to all ranks */
    uint64_t us;                  /* how long the all-reduces took that are over, together */
    uint64_t buckets[TRAFFIC_BUCKETS]; /* how many: by eighths of an octave, and above */
};

/* Counts an all-reduce that is over. */
static inline void traffic_add(struct traffic *self, uint64_t us)
{
    unsigned octave = 63 - (unsigned)__builtin_clzll(us | 1);
    unsigned bucket = 8 * octave + (unsigned)((us << 3 >> octave) & 7);
    self->us += us;
    self->buckets[octave < TRAFFIC_OCTAVES ? bucket : TRAFFIC_BUCKETS - 1]++;
}

#endif
