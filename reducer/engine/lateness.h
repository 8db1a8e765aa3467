/* How long the ranks of a job wait for one of them, and why: the twin of lateness.py, which
 * explains it. */
#ifndef REDUCER_LATENESS_H
#define REDUCER_LATENESS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

enum { LATE, SLOW, CAUSES };
enum { NOW, BEFORE, EVER, SPANS }; /* since the latest turn, between the two latest ones, always */
enum { BUCKETS = 64 };

/* Waits for one rank, or for all. */
struct waits {
    uint64_t us;
    uint32_t buckets[BUCKETS]; /* how many: below 1 ms, by quarters of an octave, and above */
};

struct rank_lateness {
    uint64_t latest_sequence;   /* the all-reduce of its latest contribution, plus one; 0: none */
    uint64_t until_us;          /* the end of the latest wait for it, ... */
    uint64_t cost_us[CAUSES];   /* ... which may go on, and what it has cost */
    struct waits waits[SPANS][CAUSES];
};

struct lateness {
    struct waits all[SPANS][CAUSES]; /* for whatever rank */
    struct rank_lateness *ranks;     /* NULL before the first round */
};

/* Makes room for the ranks. Returns false when out of memory. */
static inline bool lateness_begin(struct lateness *lateness, uint32_t world_size)
{
    if (lateness->ranks == NULL)
        lateness->ranks = calloc(world_size, sizeof *lateness->ranks);
    return lateness->ranks != NULL;
}

static inline unsigned bucket_of(uint64_t us)
{
    static const uint64_t edges_us[] = {1000, 1189, 1414, 1682};
    unsigned bucket = 0;
    while (bucket < BUCKETS - 1 && us >= edges_us[bucket % 4] << bucket / 4)
        bucket++;
    return bucket;
}

static inline void waits_add(struct waits *waits, unsigned bucket, uint64_t us)
{
    waits->us += us;
    waits->buckets[bucket]++;
}

/* Counts the latest wait for a rank: it is over. */
static inline void lateness_close(struct lateness *lateness, uint32_t rank)
{
    struct rank_lateness *self = &lateness->ranks[rank];
    uint64_t us = self->cost_us[LATE] + self->cost_us[SLOW];
    if (us == 0)
        return;
    unsigned cause = self->cost_us[LATE] >= self->cost_us[SLOW] ? LATE : SLOW, bucket = bucket_of(us);
    for (unsigned span = NOW; span < SPANS; span += EVER) {
        waits_add(&self->waits[span][cause], bucket, us);
        waits_add(&lateness->all[span][cause], bucket, us);
    }
    self->cost_us[LATE] = self->cost_us[SLOW] = 0;
}

/* Counts a contribution to an all-reduce. `alone_us`: since when its slot has waited for this rank
 * alone; 0 if it still waits for others. */
static inline void lateness_record(struct lateness *lateness, uint32_t rank, uint64_t sequence,
                                   uint64_t now_us, uint64_t alone_us)
{
    struct rank_lateness *self = &lateness->ranks[rank];
    if (alone_us != 0) {
        bool goes_on = sequence + 1 == self->latest_sequence;
        if (alone_us > self->until_us && !goes_on)
            lateness_close(lateness, rank);
        uint64_t known_us = self->cost_us[LATE] + self->cost_us[SLOW], behind_us = now_us - alone_us;
        if (behind_us > known_us)
            self->cost_us[goes_on ? SLOW : LATE] += behind_us - known_us;
        self->until_us = now_us;
    }
    self->latest_sequence = sequence + 1;
}

/* Begins a new span. */
static inline void lateness_turn(struct lateness *lateness, uint32_t world_size)
{
    for (unsigned cause = 0; cause < CAUSES; cause++) {
        lateness->all[BEFORE][cause] = lateness->all[NOW][cause];
        lateness->all[NOW][cause] = (struct waits){0};
    }
    for (uint32_t rank = 0; lateness->ranks != NULL && rank < world_size; rank++)
        for (unsigned cause = 0; cause < CAUSES; cause++) {
            struct waits *waits = lateness->ranks[rank].waits[NOW] + cause;
            lateness->ranks[rank].waits[BEFORE][cause] = *waits;
            *waits = (struct waits){0};
        }
}

/* Returns what waits for a rank have cost, in the latest two spans or ever, us. */
static inline uint64_t lateness_us(const struct lateness *lateness, uint32_t rank, bool lately)
{
    uint64_t us = 0;
    for (unsigned span = lately ? NOW : EVER; span < (lately ? EVER : SPANS); span++)
        us += lateness->ranks[rank].waits[span][LATE].us + lateness->ranks[rank].waits[span][SLOW].us;
    return us;
}

#endif
