#include "slots.h"

uint64_t peer_key(const void *id, size_t nbytes)
{
    uint64_t key = 0;
    if (nbytes == 0 || nbytes > 7) /* libzmq's own have five bytes */
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
        return taken;
    }
    size_t n = rounds->world_size;
    /* One block: the record, then messages (their alignment divides the record's), then flags. */
    taken = calloc(1, sizeof *taken + n * sizeof(zmq_msg_t) + n);
    if (taken != NULL) {
        taken->messages = (zmq_msg_t *)(taken + 1);
        taken->present = (uint8_t *)(taken->messages + n);
    }
    return taken;
}

static void payloads_release(struct rounds *rounds, struct payloads *payloads)
{
    for (uint32_t rank = 0; rank < rounds->world_size; rank++)
        if (payloads->present[rank] == PRESENT)
            rounds->zmq->msg_close(&payloads->messages[rank]);
    memset(payloads->present, 0, rounds->world_size);
    payloads->next = rounds->spare;
    rounds->spare = payloads;
}

/* -- rounds ------------------------------------------------------------------------------------ */

struct round *rounds_open(struct rounds *rounds, uint64_t sequence, const struct header *first)
{
    struct round *round = calloc(1, sizeof *round + rounds->world_size);
    if (round == NULL)
        return NULL;
    round->spoke = (uint8_t *)(round + 1);
    round->sequence = sequence;
    round->has_first = first != NULL;
    if (first != NULL)
        round->first = *first;
    if (rounds->by_sequence.count == 0 || sequence < rounds->oldest)
        rounds->oldest = sequence;
    if (!map_put(&rounds->by_sequence, sequence, round)) {
        free(round);
        return NULL;
    }
    return round;
}

struct slot *round_place(struct rounds *rounds, struct round *round, const struct header *header,
                         zmq_msg_t *payload)
{
    struct slot *slot = map_get(&round->slots, header->offset);
    if (slot == NULL) {
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
    }
    slot->missing--;
    rounds->missing--;
    if (payload == NULL) {
        slot->payloads->present[header->rank] = CLAIMED;
        slot->claims++;
        return slot;
    }
    zmq_msg_t *place = &slot->payloads->messages[header->rank];
    rounds->zmq->msg_init(place);
    rounds->zmq->msg_move(place, payload);
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

void rounds_discard(struct rounds *rounds, struct round *round)
{
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
    struct map *map = &rounds->by_sequence;
    for (size_t place = 0; map->count > 0; place = (place + 1) & map->mask)
        if (map->entries[place].value != NULL)
            rounds_discard(rounds, map->entries[place].value);
    map_free(map);
    while (rounds->spare != NULL) {
        struct payloads *spare = rounds->spare;
        rounds->spare = spare->next;
        free(spare);
    }
    free(rounds->members);
    rounds->members = NULL;
}

/* -- the healthy way --------------------------------------------------------------------------- */

/* Whether a worker may pass on to `watermark` without failing or keeping a round. */
static bool may_advance(const struct rounds *rounds, const struct member *member, uint64_t watermark)
{
    if (rounds->viewed > 0 || watermark - member->watermark > MAX_ROUNDS_AHEAD)
        return false;
    const struct map *map = &rounds->by_sequence;
    if (watermark - member->watermark <= map->mask) { /* calls leave most of their numbers unused */
        for (uint64_t sequence = member->watermark; sequence < watermark; sequence++) {
            const struct round *round = map_get(map, sequence);
            if (round != NULL && round->open > 0)
                return false;
        }
        return true;
    }
    for (size_t place = 0; place <= map->mask && map->count > 0; place++) {
        const struct round *round = map->entries[place].value;
        if (round != NULL && round->open > 0 && round->sequence >= member->watermark &&
            round->sequence < watermark)
            return false;
    }
    return true;
}

static void discard_if_there(struct rounds *rounds, uint64_t sequence)
{
    struct round *round = map_get(&rounds->by_sequence, sequence);
    if (round != NULL)
        rounds_discard(rounds, round);
}

static void discard_all_below(struct rounds *rounds, uint64_t reached)
{
    struct map *map = &rounds->by_sequence;
    for (size_t place = 0; place <= map->mask && map->count > 0;) {
        struct round *round = map->entries[place].value;
        if (round != NULL && round->sequence < reached)
            rounds_discard(rounds, round); /* another one may have moved to this place */
        else
            place++;
    }
}

static void advance(struct rounds *rounds, struct member *member, uint64_t watermark)
{
    member->watermark = watermark;
    uint64_t reached = watermark;
    for (uint32_t rank = 0; rank < rounds->world_size; rank++)
        if (rounds->members[rank]->watermark < reached)
            reached = rounds->members[rank]->watermark;
    rounds->reached = reached;
    if (rounds->oldest >= reached)
        return;
    if (reached - rounds->oldest > rounds->by_sequence.mask)
        discard_all_below(rounds, reached); /* the engine has let watermarks leap */
    else
        for (uint64_t sequence = rounds->oldest; sequence < reached; sequence++)
            discard_if_there(rounds, sequence);
    rounds->oldest = reached;
}

/* Bytes that a worker may have in flight. */
static uint64_t window_limit(const struct member *member, const struct rounds *rounds)
{
    return member->window + SPARE_CHUNKS * window_charge(rounds->max_chunk_bytes);
}

uint64_t rounds_taken(const struct rounds *rounds)
{
    return rounds->by_sequence.count * (ROUND_BYTES + (uint64_t)rounds->world_size) +
           rounds->open * SLOT_BYTES + rounds->missing * PLACE_BYTES + rounds->done * DONE_BYTES;
}

/* Whether the records of one more slot fit into what is reserved for the job. */
static bool may_open(const struct rounds *rounds, uint64_t charge)
{
    uint64_t held = charge;
    for (uint32_t rank = 0; rank < rounds->world_size; rank++)
        held += rounds->members[rank]->held;
    uint64_t more = ROUND_BYTES + SLOT_BYTES + (uint64_t)rounds->world_size * (PLACE_BYTES + 1);
    return held + rounds_taken(rounds) + more <= rounds->reserved;
}

static bool agrees(const struct header *first, const struct header *header)
{
    return header->total_bytes == first->total_bytes && header->dtype == first->dtype &&
           header->op == first->op && header->tag == first->tag && header->epoch == first->epoch &&
           (header->since != first->since || header->history == first->history);
}

enum verdict rounds_offer(struct rounds *rounds, struct member *member, const struct header *header,
                          zmq_msg_t *payload, struct round **round, struct slot **slot)
{
    if (rounds->members == NULL || !member->regular || header->job != rounds->job ||
        header->generation != rounds->generation || header->rank != member->rank)
        return IRREGULAR;
    if (!header_chunk_is_sound(header, rounds->zmq->msg_size(payload), rounds->max_chunk_bytes))
        return IRREGULAR;
    uint64_t watermark =
        header->watermark > member->watermark ? header->watermark : member->watermark;
    if (header->sequence < watermark || header->sequence - watermark >= MAX_ROUNDS_AHEAD)
        return IRREGULAR;
    uint64_t place = header->sequence % PLACES; /* 0: a question, which the call after it may end */
    if (place == 0 || (place == 1 && map_get(&rounds->by_sequence, header->sequence - 1) != NULL))
        return IRREGULAR;
    if (member->held + window_charge(header->nbytes) > window_limit(member, rounds))
        return IRREGULAR;
    struct round *in = map_get(&rounds->by_sequence, header->sequence);
    struct slot *at = NULL;
    if (in != NULL) {
        if (in->viewed || !in->has_first || !agrees(&in->first, header))
            return IRREGULAR;
        at = map_get(&in->slots, header->offset);
    }
    if (at != NULL) {
        if (at->done || at->claims > 0 || at->payloads->present[header->rank] != ABSENT ||
            at->nbytes != header->nbytes)
            return IRREGULAR;
    }
    if (at == NULL && !may_open(rounds, window_charge(header->nbytes)))
        return IRREGULAR;
    if (watermark > member->watermark && !may_advance(rounds, member, watermark))
        return IRREGULAR;
    if (in == NULL && (in = rounds_open(rounds, header->sequence, header)) == NULL)
        return IRREGULAR;
    if (watermark > member->watermark)
        advance(rounds, member, watermark); /* the round is above, so it stays */
    in->spoke[header->rank] = 1;
    at = round_place(rounds, in, header, payload);
    if (at == NULL)
        return IRREGULAR;
    member->held += window_charge(header->nbytes);
    *round = in;
    *slot = at;
    return at->missing == 0 ? COMPLETE : PLACED;
}
