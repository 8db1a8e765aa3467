/* How long ranks let the others wait, and why: the twin of lateness.py, which explains it. */
#ifndef REDUCER_LATENESS_H
#define REDUCER_LATENESS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

enum { LATE, SLOW, CAUSES };
enum { NOW, BEFORE, EVER, SPANS }; /* since the latest turn, between the two latest ones, always */
enum { BUCKETS = 14 };

/* What the others have lost by one rank. */
struct waits {
    uint64_t us;
    uint32_t buckets[BUCKETS]; /* rounds: below 1, 2, 4 ... 4096 ms, and above */
};

struct lateness {
    uint64_t rounds[SPANS];
    struct waits (*of)[SPANS][CAUSES]; /* by rank; NULL before the first round */
};

/* When contributions of a rank came, in us after the round's first one, plus one; 0 for never. And
 * the last one before these, of any round; 0 for before this one began. */
struct arrival {
    uint32_t first, last, before;
};

static inline void waits_add(struct waits *waits, uint32_t us)
{
    unsigned bucket = 0;
    while (bucket < BUCKETS - 1 && us >= UINT32_C(1000) << bucket)
        bucket++;
    waits->us += us;
    waits->buckets[bucket]++;
}

static inline void lateness_count(struct lateness *lateness, unsigned cause, uint32_t rank,
                                  uint32_t us)
{
    if (us == 0)
        return;
    waits_add(&lateness->of[rank][NOW][cause], us);
    waits_add(&lateness->of[rank][EVER][cause], us);
}

/* Takes what is known of a round that is over; one that lacks a rank does not count. */
static inline void lateness_take(struct lateness *lateness, uint32_t world_size,
                                 const struct arrival *arrivals)
{
    if (world_size < 2)
        return;
    uint32_t most[CAUSES] = {0}, next[CAUSES] = {0}, rank[CAUSES] = {0};
    for (uint32_t at = 0; at < world_size; at++) {
        if (arrivals[at].first == 0)
            return;
        uint32_t took[CAUSES] = {arrivals[at].first, arrivals[at].last - arrivals[at].first};
        for (unsigned cause = 0; cause < CAUSES; cause++) {
            if (took[cause] > most[cause]) {
                next[cause] = most[cause];
                most[cause] = took[cause];
                rank[cause] = at;
            } else if (took[cause] > next[cause]) {
                next[cause] = took[cause];
            }
        }
    }
    if (lateness->of == NULL && (lateness->of = calloc(world_size, sizeof *lateness->of)) == NULL)
        return;
    lateness->rounds[NOW]++;
    lateness->rounds[EVER]++;
    uint32_t late = most[LATE] - next[LATE], before = arrivals[rank[LATE]].before;
    bool queued = before > next[LATE] && before - next[LATE] > late / 2;
    lateness_count(lateness, queued ? SLOW : LATE, rank[LATE], late);
    lateness_count(lateness, SLOW, rank[SLOW], most[SLOW] - next[SLOW]);
}

/* What was lost by a rank; NULL before the first round. */
static inline struct waits *lateness_of(struct lateness *lateness, uint32_t rank, unsigned span,
                                        unsigned cause)
{
    return lateness->of == NULL ? NULL : &lateness->of[rank][span][cause];
}

/* Begins a new span. */
static inline void lateness_turn(struct lateness *lateness, uint32_t world_size)
{
    lateness->rounds[BEFORE] = lateness->rounds[NOW];
    lateness->rounds[NOW] = 0;
    if (lateness->of == NULL)
        return;
    for (uint32_t rank = 0; rank < world_size; rank++)
        for (unsigned cause = 0; cause < CAUSES; cause++) {
            lateness->of[rank][BEFORE][cause] = lateness->of[rank][NOW][cause];
            lateness->of[rank][NOW][cause] = (struct waits){0};
        }
}

#endif
