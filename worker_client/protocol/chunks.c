#include "chunks.h"

#include <stdlib.h>

/* -- operations ------------------------------------------------------------------------------ */

static uint64_t count_chunks(const struct range *range, uint64_t chunk_bytes)
{
    uint64_t nbytes = range->end - range->start;
    return nbytes == 0 ? 1 : (nbytes - 1) / chunk_bytes + 1;
}

/* One block of memory holds the operation, its shards, and their chunks. */
struct operation *operation_allocate(uint64_t chunk_bytes, const struct range *ranges, size_t count)
{
    uint64_t chunks = 0;
    for (size_t at = 0; at < count; at++)
        chunks += count_chunks(&ranges[at], chunk_bytes);
    size_t bytes = sizeof(struct operation) + count * sizeof(struct shard);
    struct operation *operation = calloc(1, bytes + chunks * sizeof(struct chunk));
    if (operation == NULL)
        return NULL;
    operation->shards = (struct shard *)(operation + 1);
    operation->shard_count = count;
    operation->chunk_bytes = chunk_bytes;
    operation->remaining = chunks;
    struct chunk *next = (struct chunk *)(operation->shards + count);
    for (size_t at = 0; at < count; at++) {
        struct shard *shard = &operation->shards[at];
        shard->of = operation;
        shard->start = ranges[at].start;
        shard->end = ranges[at].end;
        shard->home = ranges[at].link;
        shard->chunk_count = count_chunks(&ranges[at], chunk_bytes);
        shard->chunks = next;
        for (uint64_t number = 0; number < shard->chunk_count; number++, next++) {
            next->of = shard;
            next->link = shard->home;
            next->state = CHUNK_DROPPED; /* until it is in a queue */
        }
    }
    return operation;
}

uint64_t chunk_offset(const struct chunk *chunk)
{
    return chunk->of->start + (uint64_t)(chunk - chunk->of->chunks) * chunk->of->of->chunk_bytes;
}

uint32_t chunk_nbytes(const struct chunk *chunk)
{
    uint64_t left = chunk->of->end - chunk_offset(chunk), most = chunk->of->of->chunk_bytes;
    return (uint32_t)(left < most ? left : most);
}

uint32_t chunk_contribution(const struct chunk *chunk)
{
    return chunk->of->of->parts * chunk_nbytes(chunk);
}

struct chunk *operation_chunk(const struct operation *operation, uint64_t offset)
{
    size_t low = 0, high = operation->shard_count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (operation->shards[middle].start <= offset)
            low = middle;
        else
            high = middle;
    }
    const struct shard *shard = &operation->shards[low];
    if (offset < shard->start || (offset - shard->start) % operation->chunk_bytes != 0)
        return NULL;
    uint64_t number = (offset - shard->start) / operation->chunk_bytes;
    return number < shard->chunk_count ? &shard->chunks[number] : NULL;
}

bool operation_needs(const struct operation *operation, uint32_t link)
{
    FOR_EACH_CHUNK(chunk, operation)
        if (chunk->link == link && chunk->state != CHUNK_DONE)
            return true;
    return false;
}

/* -- lists of chunks ------------------------------------------------------------------------- */

bool chunk_precedes(const struct chunk *one, const struct chunk *other)
{
    uint64_t mine = one->of->of->header.sequence, theirs = other->of->of->header.sequence;
    return mine != theirs ? mine < theirs : chunk_offset(one) < chunk_offset(other);
}

void chunk_list_put(struct chunk_list *list, struct chunk *chunk)
{
    /* Nearly always it is the last one; what was moved from a lost link comes in a row. */
    struct chunk *after = NULL;
    if (list->last != NULL && chunk_precedes(chunk, list->last)) {
        after = list->first;
        if (list->latest != NULL && chunk_precedes(list->latest, chunk))
            after = list->latest->after;
        while (chunk_precedes(after, chunk))
            after = after->after;
    }
    chunk->after = after;
    chunk->before = after == NULL ? list->last : after->before;
    if (chunk->before == NULL)
        list->first = chunk;
    else
        chunk->before->after = chunk;
    if (after == NULL)
        list->last = chunk;
    else
        after->before = chunk;
    list->latest = chunk;
    list->count++;
}

void chunk_list_take_out(struct chunk_list *list, struct chunk *chunk)
{
    if (chunk->before == NULL)
        list->first = chunk->after;
    else
        chunk->before->after = chunk->after;
    if (chunk->after == NULL)
        list->last = chunk->before;
    else
        chunk->after->before = chunk->before;
    if (list->latest == chunk)
        list->latest = NULL;
    list->count--;
}
