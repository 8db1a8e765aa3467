/* How long things have taken: a histogram of fixed size, a few nanoseconds for each. */
#ifndef WORKER_DURATIONS_H
#define WORKER_DURATIONS_H

#include <math.h>
#include <stdint.h>

/* The first DURATION_PARTS buckets are of one unit each, 128 ns; from there on each octave has as many:
 * from 1.024 us to 1100 s, an eighth of an octave's beginning wide. The last one has what took longer. */
enum { DURATION_PARTS = 8, DURATION_UNIT_BITS = 7, DURATION_BUCKETS = 248 };

struct durations {
    uint64_t count;
    uint64_t buckets[DURATION_BUCKETS];
};

static inline void durations_add(struct durations *durations, uint64_t ns)
{
    uint64_t units = ns >> DURATION_UNIT_BITS, bucket = units;
    if (units >= DURATION_PARTS) {
        unsigned octave = 60 - (unsigned)__builtin_clzll(units); /* 0: of 8 to 15 units */
        bucket = DURATION_PARTS * octave + (units >> octave);
    }
    durations->buckets[bucket < DURATION_BUCKETS ? bucket : DURATION_BUCKETS - 1]++;
    durations->count++;
}

static inline void durations_merge(struct durations *durations, const struct durations *others)
{
    for (unsigned bucket = 0; bucket < DURATION_BUCKETS; bucket++)
        durations->buckets[bucket] += others->buckets[bucket];
    durations->count += others->count;
}

/* What so large a share of them, 0 to 1, have not exceeded, in ns: the middle of a bucket, so off by a
 * sixteenth at most, and by 64 ns below 1.024 us. 0: there are none. */
static inline double durations_quantile(const struct durations *durations, double share)
{
    uint64_t wanted = (uint64_t)ceil(share * (double)durations->count), seen = 0;
    for (unsigned bucket = 0; bucket < DURATION_BUCKETS; bucket++) {
        seen += durations->buckets[bucket];
        if (seen == 0 || seen < wanted)
            continue;
        unsigned octave = bucket < DURATION_PARTS ? 0 : bucket / DURATION_PARTS - 1;
        double width = ldexp(1, (int)octave + DURATION_UNIT_BITS);
        return ((bucket - DURATION_PARTS * octave) + 0.5) * width;
    }
    return 0;
}

#endif
