/* Where every all-reduce gets its number: a call has one, and each all-reduce in it a place, so that
 * number * PLACES + place is its sequence number; and the checksum of the calls before it. */
#include "all_reduce.h"

enum { FIRST_PLACE = 1 }; /* of an all-reduce in its call; place 0 is for the ranks' own question */
static const uint64_t FACTOR = UINT64_C(0x9E3779B97F4A7C15); /* multiplicative hashing */

void numbering_init(struct numbering *numbering)
{
    *numbering = (struct numbering){.number = -1, .place = PLACES - 1};
}

/* Whether it is one more of the latest call. */
static bool follows(const struct numbering *numbering, const struct all_reduce *asked)
{
    return asked->call != 0 && asked->call == numbering->call;
}

uint64_t numbering_next(const struct numbering *numbering, const struct all_reduce *asked)
{
    if (!follows(numbering, asked))
        return (uint64_t)(numbering->number + 1) * PLACES + FIRST_PLACE;
    if (numbering->failed || numbering->place == PLACES - 1)
        return NO_SEQUENCE;
    return (uint64_t)numbering->number * PLACES + numbering->place + 1;
}

bool numbering_give(struct numbering *numbering, struct all_reduce *asked)
{
    if (!follows(numbering, asked)) {
        numbering->call = asked->call;
        numbering->number++;
        numbering->place = FIRST_PLACE;
        numbering->failed = false;
    } else if (numbering->place == PLACES - 1) {
        return false;
    } else {
        numbering->place++;
    }
    asked->sequence = numbering->number * PLACES + numbering->place;
    asked->since = (uint32_t)numbering->since;
    asked->history = numbering->history;
    if ((uint64_t)numbering->number >= numbering->since) {
        uint64_t what = asked->nbytes << 8 | (uint64_t)asked->dtype << 4 | asked->op;
        uint64_t told = asked->tag ^ (uint64_t)asked->leaves << 32;
        numbering->history = (numbering->history ^ told) * FACTOR + what;
    }
    return true;
}

void numbering_forget(struct numbering *numbering, const struct all_reduce *failed)
{
    if (failed->call != 0 && failed->call == numbering->call)
        numbering->failed = true;
    numbering->since = (uint64_t)(numbering->number + 1);
    numbering->history = 0;
}

uint64_t turn_of(uint64_t sequence)
{
    uint64_t call = sequence / PLACES, place = sequence % PLACES;
    return place == 0 ? call : call + place - 1;
}
