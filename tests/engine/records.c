/* What the records of rounds take, as malloc sees it, beside what is counted; and what is left of a
 * contribution for which there was no memory. */
#include <malloc.h>
#include <stdio.h>

#include "reducer/engine/slots.h"

static long left = -1; /* allocations before one fails; less than 0: none does */

void *__real_calloc(size_t count, size_t nbytes);
void *__real_realloc(void *held, size_t nbytes);

void *__wrap_calloc(size_t count, size_t nbytes)
{
    return left >= 0 && left-- == 0 ? NULL : __real_calloc(count, nbytes);
}

void *__wrap_realloc(void *held, size_t nbytes)
{
    return left >= 0 && left-- == 0 ? NULL : __real_realloc(held, nbytes);
}

static size_t in_use(void)
{
    struct mallinfo2 found = mallinfo2();
    return found.uordblks + found.hblkhd;
}

static struct header chunk(uint64_t sequence, uint64_t offset)
{
    return (struct header){.sequence = sequence, .offset = offset, .nbytes = 4, .total_bytes = 1 << 30,
                           .dtype = 1, .wire_dtype = 1, .op = 1};
}

/* Opens so many slots, with the contribution of one rank each. */
static struct round *open_slots(struct rounds *rounds, uint64_t sequence, uint64_t slots)
{
    struct header first = chunk(sequence, 0);
    struct round *round = rounds_open(rounds, sequence, &first);
    for (uint64_t at = 0; at < slots; at++) {
        struct header header = chunk(sequence, 4 * at);
        round_place(rounds, round, &header, block_take(rounds->pool, 4));
    }
    return round;
}

/* Prints what is in use and what is counted, both beyond what they were. */
static void print(const char *state, const struct rounds *rounds, size_t before, uint64_t counted)
{
    printf("%s %zu %llu\n", state, in_use() - before,
           (unsigned long long)(rounds_used(rounds) - counted));
}

/* Brings slots into each state that they have, in a job that has had a round before. */
static void measure(uint32_t world_size, uint64_t slots)
{
    struct rounds rounds = {.pool = &rounds.own, .world_size = world_size};
    rounds.own.most_spare_bytes = SIZE_MAX;
    struct block *held = NULL; /* payloads are no records: they are taken before anything is counted */
    for (uint64_t at = 0; at < slots; at++) {
        struct block *block = block_take(&rounds.own, 4);
        block->next = held;
        held = block;
    }
    while (held != NULL) {
        struct block *block = held;
        held = block->next;
        block_drop(&rounds.own, block);
    }
    open_slots(&rounds, 0, 1);
    rounds_discard_oldest(&rounds);
    size_t before = in_use();
    uint64_t counted = rounds_used(&rounds);
    struct round *round = open_slots(&rounds, 1, slots);
    print("open", &rounds, before, counted);
    for (uint64_t at = 0; at < slots; at++)
        round_finish(&rounds, round, map_get(&round->slots, 4 * at));
    print("done", &rounds, before, counted);
    round = open_slots(&rounds, 2, slots);
    for (uint64_t at = 0; at + 1 < slots; at++)
        round_drop(&rounds, round, map_get(&round->slots, 4 * at));
    rounds_discard_oldest(&rounds);
    print("dropped", &rounds, before, counted);
    rounds_free(&rounds);
}

/* Has one allocation after the other fail. Returns "changed" if a contribution that is left to the
 * engine has changed anything, "leaked" if nobody has one for which there was no memory. */
static const char *starve(void)
{
    for (long failing = 0;; failing++) {
        struct rounds rounds = {.pool = &rounds.own, .world_size = 1, .limit = 100, .reserved = 1 << 30,
                                .max_chunk_bytes = 1 << 20};
        rounds.own.most_spare_bytes = SIZE_MAX;
        struct member member = {.window = 1 << 20, .regular = true};
        rounds.members = calloc(1, sizeof *rounds.members);
        rounds.members[0] = &member;
        struct header header = chunk(5 * PLACES + 1, 0);
        header.watermark = 5 * PLACES;
        struct block *payload = block_take(&rounds.own, 4);
        struct round *round;
        struct slot *slot;
        left = failing;
        enum verdict verdict = rounds_offer(&rounds, &member, &header, payload, &round, &slot);
        left = -1;
        bool changed = member.watermark != 0 || member.held != 0 || rounds.by_sequence.count != 0;
        bool leaked = verdict == OUT_OF_MEMORY && rounds.own.spare_bytes == 0;
        rounds_free(&rounds);
        if (verdict == COMPLETE)
            return "unchanged";
        if (verdict == IRREGULAR && changed)
            return "changed";
        if (leaked)
            return "leaked";
    }
}

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IONBF, 0); /* which takes memory, too */
    if (count == 3)
        measure((uint32_t)atol(arguments[1]), (uint64_t)atol(arguments[2]));
    else
        printf("%s\n", starve());
    return 0;
}
