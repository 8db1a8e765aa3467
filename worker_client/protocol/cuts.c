#include "cuts.h"

#include <stdlib.h>

#include "all_reduce.h"

static size_t place_of(uint64_t nbytes, uint64_t turn, uint8_t dtype)
{
    return (nbytes / 64 * 31 + nbytes + turn * 61 + dtype * 997u) % CUTS;
}

const struct cut *cuts_find(const struct cuts *cuts, uint64_t nbytes, uint64_t sequence,
                            uint8_t dtype)
{
    if (cuts->turns == 0)
        return NULL;
    uint64_t turn = turn_of(sequence) % cuts->turns;
    const struct cut *cut = cuts->first[place_of(nbytes, turn, dtype)];
    while (cut != NULL && (cut->nbytes != nbytes || cut->turn != turn || cut->dtype != dtype))
        cut = cut->following;
    return cut;
}

bool cuts_remember(struct cuts *cuts, uint64_t nbytes, uint64_t sequence, uint8_t dtype,
                   uint64_t chunk_bytes, const struct range *ranges, size_t count)
{
    if (cuts->turns == 0 || cuts_find(cuts, nbytes, sequence, dtype) != NULL)
        return true;
    if (cuts->count == CUTS)
        cuts_forget(cuts, cuts->turns);
    struct cut *cut = malloc(sizeof *cut + count * sizeof *ranges);
    if (cut == NULL)
        return false;
    uint64_t turn = turn_of(sequence) % cuts->turns;
    struct cut **first = &cuts->first[place_of(nbytes, turn, dtype)];
    *cut = (struct cut){*first, nbytes, turn, dtype, chunk_bytes, count};
    memcpy(cut->ranges, ranges, count * sizeof *ranges);
    *first = cut;
    cuts->count++;
    return true;
}

void cuts_forget(struct cuts *cuts, uint64_t turns)
{
    for (size_t at = 0; at < CUTS; at++)
        for (struct cut *cut = cuts->first[at], *following; cut != NULL; cut = following) {
            following = cut->following;
            free(cut);
        }
    *cuts = (struct cuts){.turns = turns};
}
