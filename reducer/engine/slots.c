#include "slots.h"

uint64_t peer_key(const void *id, size_t nbytes)
{
    uint64_t key = 0;
    if (nbytes == 0 || nbytes > 7) /* libzmq's have five, the loop's seven */
        return 0;
    memcpy(&key, id, nbytes);
    return key | (uint64_t)nbytes << 56;
}

/* -- payloads ---------------------------------------------------------------------------------- */

static struct payloads *payloads_take(struct rounds *rounds)
{
    struct payloads *taken = rounds->spare;
    if (taken != NULL) {
        rounds->spare = taken->next;
        rounds->spares--;
        return taken;
    }
    size_t n = rounds->world_size;
    /* At once: the record, then the blocks (their alignment divides the record's), then flags. */
    taken = calloc(1, sizeof *taken + n * sizeof *taken->blocks + n);
    if (taken != NULL) {
        taken->blocks = (struct block **)(taken + 1);
        taken->present = (uint8_t *)(taken->blocks + n);
    }
    return taken;
}

static void payloads_release(struct rounds *rounds, struct payloads *payloads)
{
    for (uint32_t rank = 0; rank < rounds->world_size; rank++)
        if (payloads->present[rank] == PRESENT)
            block_drop(rounds->pool, payloads->blocks[rank]);
    memset(payloads->present, 0, rounds->world_size);
    payloads->next = rounds->spare;
    rounds->spare = payloads;
    rounds->spares++;
}

/* -- rounds ------------------------------------------------------------------------------------ */

void round_settle(struct rounds *rounds, struct round *round)
{
    if (!round->live)
        return;
    if (round->before != NULL)
        round->before->after = round->after;
    if (round->after != NULL)
        round->after->before = round->before;
    else
        rounds->latest = round->before;
    round->before = round->after = NULL;
    round->live = false;
}

void round_touch(struct rounds *rounds, struct round *round)
{
    round_settle(rounds, round);
    round->before = rounds->latest;
    if (rounds->latest != NULL)
        rounds->latest->after = round;
    rounds->latest = round;
    round->live = true;
    round->touched = ++rounds->touches;
}

struct round *rounds_open(struct rounds *rounds, uint64_t sequence, const struct header *first)
{
    if (!lateness_begin(&rounds->lateness, rounds->world_size))
        return NULL;
    struct round *round = calloc(1, sizeof *round + rounds->world_size);
    if (round == NULL)
        return NULL;
    round->spoke = (uint8_t *)(round + 1);
    round->sequence = sequence;
    round->has_first = first != NULL;
    if (first != NULL)
        round->first = *first;
    if (!map_put(&rounds->by_sequence, sequence, round)) {
        free(round);
        return NULL;
    }
    if (!heap_put(&rounds->order, sequence)) {
        map_remove(&rounds->by_sequence, sequence);
        free(round);
        return NULL;
    }
    round->slots.multiplier = rounds->by_sequence.multiplier; /* to draw one takes a system call */
    round->born = rounds->exits;
    round_touch(rounds, round);
    return round;
}

/* Takes note of a contribution that may be the last of its chunk; the slot knows of it already. */
static void note_timestamps(struct rounds *rounds, struct round *round, const struct slot *slot,
                            uint32_t rank)
{
    struct timestamps *timestamps = &round->timestamps;
    uint64_t now_us = rounds->now_us;
    if (slot->missing > 0 || slot->claims > 0)
        return;
    timestamps->chunks++;
    timestamps->bytes += slot->nbytes;
    uint64_t alone_us = slot->alone_us == 0 ? now_us : slot->alone_us;
    if (timestamps->complete_us == 0 ||
        now_us - alone_us > timestamps->complete_us - timestamps->alone_us) {
        timestamps->alone_us = alone_us;
        timestamps->complete_us = now_us;
        timestamps->last_rank = rank;
    }
}

/* Counts how long a round took that is over, and keeps what became of it if there is room. */
static void keep_times(struct rounds *rounds, const struct round *round)
{
    uint64_t begun_us = round->timestamps.begun_us, done_us = round->timestamps.done_us;
    if (round->live && done_us != 0 && done_us >= begun_us && round->sequence % PLACES != 0)
        traffic_add(&rounds->traffic, done_us - begun_us);
    if (rounds->ended_count < rounds->ended_room && begun_us != 0)
        rounds->ended[rounds->ended_count++] =
            (struct round_times){.sequence = round->sequence, .timestamps = round->timestamps};
}

struct slot *round_place(struct rounds *rounds, struct round *round, const struct header *header,
                         struct block *payload)
{
    struct slot *slot = map_get(&round->slots, header->offset);
    if (slot == NULL) {
        if (!round->waits && !heap_put(&rounds->waiting, round->sequence))
            return NULL;
        round->waits = true;
        slot = calloc(1, sizeof *slot);
        if (slot == NULL)
            return NULL;
        slot->offset = header->offset;
        slot->nbytes = header->nbytes;
        slot->missing = rounds->world_size;
        slot->first_rank = header->rank;
        slot->payloads = payloads_take(rounds);
        if (slot->payloads == NULL || !map_put(&round->slots, header->offset, slot)) {
            if (slot->payloads != NULL)
                payloads_release(rounds, slot->payloads);
            free(slot);
            return NULL;
        }
        round->open++;
        rounds->open++;
        rounds->missing += slot->missing;
        round_touch(rounds, round);
    }
    slot->missing--;
    rounds->missing--;
    if (payload == NULL) {
        slot->payloads->present[header->rank] = CLAIMED;
        slot->claims++;
        return slot;
    }
    lateness_record(&rounds->lateness, header->rank, round->sequence, rounds->now_us,
                    slot->missing == 0 && slot->claims == 0 ? slot->alone_us : 0);
    rounds->traffic.bytes_in += payload->nbytes;
    if (round->timestamps.begun_us == 0) {
        round->timestamps.begun_us = rounds->now_us;
        round->timestamps.first_rank = header->rank;
    }
    if (rounds->ended_room > 0)
        note_timestamps(rounds, round, slot, header->rank);
    if (slot->missing == 1)
        slot->alone_us = rounds->now_us;
    slot->payloads->blocks[header->rank] = payload;
    slot->payloads->present[header->rank] = PRESENT;
    return slot;
}

void round_finish(struct rounds *rounds, struct round *round, struct slot *slot)
{
    payloads_release(rounds, slot->payloads);
    slot->payloads = NULL;
    slot->done = true;
    round->open--;
    rounds->open--;
    rounds->missing -= slot->missing;
    rounds->done++;
}

void round_drop(struct rounds *rounds, struct round *round, struct slot *slot)
{
    if (!slot->done)
        round_finish(rounds, round, slot);
    map_remove(&round->slots, slot->offset);
    rounds->done--;
    free(slot);
}

void rounds_discard_oldest(struct rounds *rounds)
{
    struct round *round = map_get(&rounds->by_sequence, heap_least(&rounds->order));
    heap_take(&rounds->order);
    keep_times(rounds, round);
    round_settle(rounds, round);
    if (round->waits) /* there: no round is older */
        heap_take(&rounds->waiting);
    for (size_t place = 0; round->slots.count > 0 && place <= round->slots.mask; place++) {
        struct slot *slot = round->slots.entries[place].value;
        if (slot == NULL)
            continue;
        if (!slot->done)
            round_finish(rounds, round, slot);
        rounds->done--;
        free(slot);
    }
    map_free(&round->slots);
    map_remove(&rounds->by_sequence, round->sequence);
    free(round);
}

void rounds_free(struct rounds *rounds)
{
    while (rounds->order.count > 0)
        rounds_discard_oldest(rounds);
    map_free(&rounds->by_sequence);
    heap_free(&rounds->order);
    heap_free(&rounds->waiting);
    while (rounds->spare != NULL) {
        struct payloads *spare = rounds->spare;
        rounds->spare = spare->next;
        free(spare);
    }
    block_pool_free(&rounds->own);
    free(rounds->ended);
    free(rounds->lateness.ranks);
    free(rounds->members);
    rounds->members = NULL;
}

/* -- the healthy way --------------------------------------------------------------------------- */

/* Whether no round below `watermark` has open slots. */
static bool none_waits_below(struct rounds *rounds, uint64_t watermark)
{
    for (struct heap *waiting = &rounds->waiting; waiting->count > 0; heap_take(waiting)) {
        struct round *round = map_get(&rounds->by_sequence, heap_least(waiting));
        if (round->open > 0)
            return round->sequence >= watermark;
        round->waits = false;
    }
    return true;
}

/* Whether a worker may pass on to `watermark` without failing or keeping a round. */
static bool may_advance(struct rounds *rounds, const struct member *member, uint64_t watermark)
{
    return rounds->viewed == 0 && watermark - member->watermark <= MAX_ROUNDS_AHEAD &&
           none_waits_below(rounds, watermark);
}

static void advance(struct rounds *rounds, struct member *member, uint64_t watermark)
{
    member->watermark = watermark;
    uint64_t reached = watermark;
    for (uint32_t rank = 0; rank < rounds->world_size; rank++)
        if (rounds->members[rank]->watermark < reached)
            reached = rounds->members[rank]->watermark;
    rounds->reached = reached;
    while (rounds->order.count > 0 && heap_least(&rounds->order) < reached)
        rounds_discard_oldest(rounds);
}

/* Bytes that a worker may have in flight. */
static uint64_t window_limit(const struct member *member, const struct rounds *rounds)
{
    return member->window + SPARE_CHUNKS * window_cost(rounds->max_chunk_bytes);
}

uint64_t rounds_used(const struct rounds *rounds)
{
    uint64_t n = rounds->world_size;
    return (rounds->lateness.ranks == NULL ? 0 : n * LATENESS_BYTES) +
           rounds->by_sequence.count * (ROUND_BYTES + n * RANK_BYTES) +
           rounds->open * SLOT_BYTES + rounds->missing * PLACE_BYTES + rounds->done * DONE_BYTES +
           rounds->spares * (SPARE_RECORD_BYTES + n * SPARE_RANK_BYTES);
}

/* Whether the records of one more slot fit into what is reserved for the job. */
static bool may_open(const struct rounds *rounds, uint64_t cost)
{
    uint64_t held = cost;
    for (uint32_t rank = 0; rank < rounds->world_size; rank++)
        held += rounds->members[rank]->held;
    uint64_t each = PLACE_BYTES + RANK_BYTES + (rounds->lateness.ranks == NULL ? LATENESS_BYTES : 0);
    uint64_t more = ROUND_BYTES + SLOT_BYTES + (uint64_t)rounds->world_size * each;
    return held + rounds_used(rounds) + more <= rounds->reserved;
}

static bool agrees(const struct header *first, const struct header *header)
{
    return header->total_bytes == first->total_bytes && header->dtype == first->dtype &&
           header->op == first->op && header->window == first->window &&
           header->tag == first->tag && header->epoch == first->epoch &&
           (header->since != first->since || header->history == first->history);
}

/* Whether a rank may have begun a call without the question before it, which ends that one badly. */
static bool may_end_agreement(const struct rounds *rounds, uint64_t sequence)
{
    uint64_t place = sequence % PLACES;
    if (place == 0)
        return map_get(&rounds->by_sequence, sequence + 1) != NULL;
    if (place > 1)
        return false;
    const struct round *agreement = map_get(&rounds->by_sequence, sequence - 1);
    return agreement != NULL && (agreement->open > 0 || agreement->slots.count == 0);
}

enum verdict rounds_offer(struct rounds *rounds, struct member *member, const struct header *header,
                          struct block *payload, struct round **round, struct slot **slot)
{
    if (rounds->members == NULL || !member->regular || header->job != rounds->job ||
        header->generation != rounds->generation || header->rank != member->rank)
        return IRREGULAR;
    uint32_t parts = leaves_parts(header, rounds->world_size, header->rank);
    uint64_t cost = window_cost(payload->nbytes);
    if (parts == 0 || payload->nbytes % parts != 0 || payload->nbytes > rounds->max_chunk_bytes ||
        !header_chunk_is_sound(header, payload->nbytes / parts, rounds->max_chunk_bytes))
        return IRREGULAR;
    uint64_t watermark =
        header->watermark > member->watermark ? header->watermark : member->watermark;
    if (header->sequence < watermark || header->sequence - watermark >= MAX_ROUNDS_AHEAD)
        return IRREGULAR;
    if (may_end_agreement(rounds, header->sequence))
        return IRREGULAR;
    if (member->held + cost > window_limit(member, rounds))
        return IRREGULAR;
    struct round *in = map_get(&rounds->by_sequence, header->sequence);
    struct slot *at = NULL;
    if (in != NULL) {
        if (in->viewed || in->born != rounds->exits || !in->has_first ||
            !agrees(&in->first, header))
            return IRREGULAR;
        at = map_get(&in->slots, header->offset);
    }
    if (at != NULL) {
        if (at->done || at->claims > 0 || at->payloads->present[header->rank] != ABSENT ||
            at->nbytes != header->nbytes)
            return IRREGULAR;
    }
    if (at == NULL && !may_open(rounds, cost))
        return IRREGULAR;
    if (in == NULL && rounds->by_sequence.count >= rounds->limit)
        return IRREGULAR;
    if (watermark > member->watermark && !may_advance(rounds, member, watermark))
        return IRREGULAR;
    if (in == NULL)
        in = rounds_open(rounds, header->sequence, header);
    at = in == NULL ? NULL : round_place(rounds, in, header, payload);
    if (at == NULL) {
        block_drop(rounds->pool, payload); /* no slot has it */
        return OUT_OF_MEMORY;
    }
    if (watermark > member->watermark)
        advance(rounds, member, watermark); /* the round is above, so it stays */
    in->spoke[header->rank] = 1;
    member->held += cost;
    *round = in;
    *slot = at;
    return at->missing == 0 ? COMPLETE : PLACED;
}
