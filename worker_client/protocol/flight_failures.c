/* What becomes of chunks when something fails: an all-reduce, or a link. */
#include "flight.h"

#include <stdlib.h>

/* -- an all-reduce ----------------------------------------------------------------------------- */

bool flight_waits_for(const struct flight *flight, uint32_t link, uint64_t sequence)
{
    const struct operation *operation = flight_find(flight, sequence);
    if (operation == NULL)
        return false;
    FOR_EACH_CHUNK(chunk, operation)
        if (chunk->link == link && chunk->state == CHUNK_SENT)
            return true;
    return false;
}

void flight_forget(struct flight *flight, uint32_t link, uint64_t sequence)
{
    struct operation *operation = flight_find(flight, sequence);
    if (operation == NULL)
        return;
    FOR_EACH_CHUNK(chunk, operation)
        if (chunk->link == link)
            flight_settle(flight, chunk, CHUNK_DROPPED);
}

void flight_end(struct flight *flight, uint64_t sequence)
{
    struct operation *operation = flight_find(flight, sequence);
    if (operation == NULL)
        return;
    FOR_EACH_CHUNK(chunk, operation)
        flight_settle(flight, chunk, CHUNK_DROPPED);
    flight_release(flight, operation);
    flight_retire(flight, operation);
    free(operation);
}

/* -- a link that is lost ----------------------------------------------------------------------- */

void flight_shut(struct flight *flight, uint32_t link)
{
    flight->links[link].open = false;
    for (uint64_t sequence = flight->watermark; sequence < flight->next; sequence++) {
        struct operation *operation = flight_find(flight, sequence);
        if (operation == NULL)
            continue;
        FOR_EACH_CHUNK(chunk, operation)
            if (chunk->link == link && chunk->state != CHUNK_DROPPED)
                flight_settle(flight, chunk, CHUNK_STRANDED);
    }
}

/* The operation after the one at hand: first those in progress, then those that have all results and
 * of which the session has not heard, then those whose results are kept. */
static struct operation *following(const struct flight *flight, struct walk *walk)
{
    struct operation *operation = walk->operation;
    if (walk->place == WALK_RING) {
        if (walk->sequence < flight->watermark)
            walk->sequence = flight->watermark;
        while (walk->sequence < flight->next)
            if ((operation = flight_find(flight, walk->sequence++)) != NULL)
                return operation;
        walk->place = WALK_COMPLETED;
        if (flight->completed != NULL)
            return flight->completed;
    } else if (operation != NULL && operation->following != NULL) {
        return operation->following;
    }
    if (walk->place == WALK_ENDED)
        return NULL;
    walk->place = WALK_ENDED;
    return flight->ended;
}

struct chunk *flight_walk(const struct flight *flight, struct walk *walk, uint32_t link)
{
    for (;;) {
        while (walk->operation != NULL && walk->shard < walk->operation->shard_count) {
            struct shard *shard = &walk->operation->shards[walk->shard];
            while (walk->chunk < shard->chunk_count) {
                struct chunk *chunk = &shard->chunks[walk->chunk++];
                if (chunk->link == link && chunk->state != CHUNK_DROPPED)
                    return chunk;
            }
            walk->shard++;
            walk->chunk = 0;
        }
        walk->shard = 0;
        walk->chunk = 0;
        walk->operation = following(flight, walk);
        if (walk->operation == NULL)
            return NULL;
    }
}

void flight_move(struct flight *flight, struct chunk *chunk, uint32_t link)
{
    flight_settle(flight, chunk, CHUNK_STRANDED);
    chunk->link = link;
    if (chunk->state != CHUNK_DONE)
        flight_enqueue(flight, chunk);
}
