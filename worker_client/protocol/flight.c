#include "flight.h"

#include <math.h>
#include <stdlib.h>

#include "reducer/kernels/stream.h"

enum { SPARE_BYTES = 80 << 20 }; /* of memory that results have had: a bucket and a quarter */

void flight_release(struct flight *flight, struct operation *operation)
{
    if (operation->retained == 0)
        return;
    FOR_EACH_CHUNK(chunk, operation) {
        if (chunk->result == NULL)
            continue;
        flight->retained_bytes -= chunk_nbytes(chunk);
        block_drop(&flight->pool, chunk->result);
        chunk->result = NULL;
    }
    operation->retained = 0;
}

void flight_enqueue(struct flight *flight, struct chunk *chunk)
{
    chunk->state = CHUNK_QUEUED;
    chunk_list_put(&flight->links[chunk->link].queue, chunk);
}

/* Counts what one thread alone counts and others look at: no bus is locked for that. */
static void count(atomic_uint_least64_t *counter, uint64_t more)
{
    uint64_t before = atomic_load_explicit(counter, memory_order_relaxed);
    atomic_store_explicit(counter, before + more, memory_order_relaxed);
}

void flight_settle(struct flight *flight, struct chunk *chunk, enum chunk_state state)
{
    struct flight_link *link = &flight->links[chunk->link];
    if (chunk->state == CHUNK_DONE)
        return;
    if (chunk->state == CHUNK_QUEUED)
        chunk_list_take_out(&link->queue, chunk);
    if (chunk->state == CHUNK_SENT) {
        chunk_list_take_out(&link->sent, chunk);
        link->in_flight -= window_cost(chunk_contribution(chunk));
    }
    chunk->state = state;
}

/* -- all links and operations ---------------------------------------------------------------- */

bool flight_init(struct flight *flight, const void *identity, uint64_t max_chunk_bytes,
                 uint64_t large_bytes)
{
    *flight = (struct flight){.mask = 63, .earliest = INFINITY};
    flight->max_chunk_bytes = max_chunk_bytes;
    flight->large_bytes = large_bytes;
    numbering_init(&flight->numbering);
    flight->pool.most_spare_bytes = SPARE_BYTES;
    memcpy(&flight->identity, identity, HEADER_BYTES);
    flight->ring = calloc(flight->mask + 1, sizeof(struct operation *));
    return flight->ring != NULL;
}

bool flight_add_link(struct flight *flight, uint64_t window, bool retain, bool in_place)
{
    size_t count = flight->link_count;
    struct flight_link *links = realloc(flight->links, (count + 1) * sizeof *links);
    if (links == NULL)
        return false;
    links[count] = (struct flight_link){.window = window, .retain = retain, .in_place = in_place};
    flight->links = links;
    flight->link_count++;
    return true;
}

static void drop_list(struct flight *flight, struct operation *operation)
{
    while (operation != NULL) {
        struct operation *following = operation->following;
        flight_release(flight, operation);
        free(operation);
        operation = following;
    }
}

void flight_free(struct flight *flight)
{
    for (uint64_t at = 0; flight->ring != NULL && at <= flight->mask; at++)
        if (flight->ring[at] != NULL) {
            flight->ring[at]->following = NULL;
            drop_list(flight, flight->ring[at]);
        }
    drop_list(flight, flight->completed);
    drop_list(flight, flight->ended);
    cuts_forget(&flight->cuts, 0);
    free(flight->ring);
    free(flight->links);
    block_pool_free(&flight->pool);
    *flight = (struct flight){0};
}

struct operation *flight_find(const struct flight *flight, uint64_t sequence)
{
    if (sequence < flight->watermark || sequence >= flight->next)
        return NULL;
    return flight->ring[sequence & flight->mask];
}

struct chunk *flight_chunk(const struct flight *flight, uint64_t sequence, uint64_t offset)
{
    struct operation *operation = flight_find(flight, sequence);
    const struct operation *lists[] = {flight->completed, flight->ended};
    for (int list = 0; operation == NULL && list < 2; list++) {
        operation = (struct operation *)lists[list];
        while (operation != NULL && operation->header.sequence != sequence)
            operation = operation->following;
    }
    return operation == NULL ? NULL : operation_chunk(operation, offset);
}

static bool make_room(struct flight *flight, uint64_t number)
{
    if (number - flight->watermark <= flight->mask)
        return true;
    uint64_t mask = flight->mask;
    while (number - flight->watermark > mask)
        mask = 2 * mask + 1;
    struct operation **ring = calloc(mask + 1, sizeof *ring);
    if (ring == NULL)
        return false;
    for (uint64_t sequence = flight->watermark; sequence < flight->next; sequence++)
        ring[sequence & mask] = flight->ring[sequence & flight->mask];
    free(flight->ring);
    flight->ring = ring;
    flight->mask = mask;
    return true;
}

void flight_measure(struct flight *flight, uint32_t link)
{
    flight->links[link].min_rtt_ns = 0;
    flight->links[link].bytes_before = flight->links[link].bytes_received;
}

/* Notes one more that says what a link can carry. */
static void begin_large(struct flight *flight, double now)
{
    if (flight->large++ > 0)
        return;
    flight->measured_since = now;
    flight->large_ended = 0;
    for (uint32_t link = 0; link < flight->link_count; link++)
        flight_measure(flight, link);
}

static void set_times(struct flight *flight, struct all_reduce *asked, double now)
{
    double timeout_s = asked->timeout_s;
    if (asked->begun == 0)
        asked->begun = now;
    asked->ask_at = asked->begun + STRAGGLER_S;
    asked->deadline = asked->begun + timeout_s;
    asked->ask_last_at = asked->deadline - (timeout_s > 2 * LAST_S ? LAST_S : timeout_s / 2);
    if (asked->deadline < flight->earliest)
        flight->earliest = asked->deadline;
}

bool flight_submit(struct flight *flight, struct all_reduce *asked, uint64_t chunk_bytes,
                   uint32_t epoch, const struct range *ranges, size_t count, double now)
{
    uint64_t sequence = (uint64_t)asked->sequence;
    if (flight->watermark == flight->next) /* nothing is in progress, below it nothing will be */
        flight->watermark = flight->next = sequence;
    struct operation *operation =
        make_room(flight, sequence) ? operation_allocate(chunk_bytes, ranges, count) : NULL;
    if (operation == NULL)
        return false;
    operation->asked = asked;
    operation->data = asked->data;
    operation->source = asked->source == NULL ? asked->data : asked->source;
    operation->parts = asked->leaves == 0 ? 1 : asked->parts;
    struct header *said = &operation->header;
    *said = flight->identity;
    said->sequence = sequence;
    said->epoch = epoch;
    said->total_bytes = asked->nbytes;
    said->dtype = said->wire_dtype = asked->dtype;
    said->op = asked->op;
    said->tag = asked->tag;
    said->window = asked->leaves; /* their field in a contribution */
    said->since = (uint32_t)asked->since;
    said->history = asked->history;
    flight->ring[sequence & flight->mask] = operation;
    flight->next = sequence + 1;
    if (flight->active++ == 0)
        flight->busy_since_ns = (uint64_t)(now * 1e9);
    set_times(flight, asked, now);
    if (asked->nbytes >= flight->large_bytes)
        begin_large(flight, now);
    FOR_EACH_CHUNK(chunk, operation)
        flight_enqueue(flight, chunk);
    return true;
}

bool flight_begin(struct flight *flight, struct all_reduce *asked, double now)
{
    uint64_t sequence = numbering_next(&flight->numbering, asked);
    if (asked->leaves != 0 && flight->lacks_leaves)
        return false;
    if (asked->unready || sequence == NO_SEQUENCE || (double)sequence >= flight->fast_path_limit)
        return false;
    const struct cut *cut = cuts_find(&flight->cuts, asked->nbytes, sequence, asked->dtype);
    if (cut == NULL)
        return false;
    struct numbering before = flight->numbering;
    if (numbering_give(&flight->numbering, asked) &&
        flight_submit(flight, asked, cut->chunk_bytes, flight->epoch, cut->ranges, cut->count, now))
        return true;
    flight->numbering = before;
    asked->sequence = -1;
    return false;
}

void flight_retire(struct flight *flight, struct operation *operation)
{
    flight->ring[operation->header.sequence & flight->mask] = NULL;
    flight->active--;
    if (operation->header.total_bytes >= flight->large_bytes)
        flight->large--;
    while (flight->watermark < flight->next &&
           flight->ring[flight->watermark & flight->mask] == NULL)
        flight->watermark++;
}

bool flight_next(struct flight *flight, uint32_t link_index, uint64_t now_ns,
                 struct contribution *next)
{
    struct flight_link *link = &flight->links[link_index];
    struct chunk *chunk = link->queue.first, *sent = link->sent.first;
    if (!link->open || chunk == NULL)
        return false;
    const struct header *common = &chunk->of->of->header;
    if (common->sequence >= flight->watermark + MAX_ROUNDS_AHEAD)
        return false;
    uint32_t nbytes = chunk_contribution(chunk);
    /* What was moved here may precede all in flight; that must not wait for them, as at another
     * rank they may wait for it. */
    if (link->in_flight + window_cost(nbytes) > link->window && sent != NULL &&
        !chunk_precedes(chunk, sent))
        return false;
    chunk_list_take_out(&link->queue, chunk);
    chunk_list_put(&link->sent, chunk);
    chunk->state = CHUNK_SENT;
    chunk->sent_ns = now_ns;
    if (chunk->of->of->answered_ns == 0)
        chunk->of->of->sent_ns = now_ns;
    link->in_flight += window_cost(nbytes);
    count(&link->bytes_sent, nbytes);
    next->chunk = chunk;
    next->header = *common;
    next->header.watermark = flight->watermark;
    next->header.offset = chunk_offset(chunk);
    next->header.nbytes = chunk_nbytes(chunk);
    return true;
}

bool flight_next_in_turn(struct flight *flight, struct turn *turn, uint64_t now_ns,
                         struct contribution *next)
{
    while (turn->idle < flight->link_count) {
        uint32_t link = (flight->identity.rank + turn->step++) % flight->link_count;
        if (flight_next(flight, link, now_ns, next)) {
            turn->idle = 0;
            return true;
        }
        turn->idle++;
    }
    return false;
}

uint32_t flight_least(const struct flight *flight, uint32_t link)
{
    const struct chunk_list *sent = &flight->links[link].sent;
    uint32_t least = sent->first == sent->last ? 0 : chunk_nbytes(sent->first);
    for (const struct chunk *chunk = sent->first; chunk != NULL; chunk = chunk->after)
        if (chunk_nbytes(chunk) < least)
            least = chunk_nbytes(chunk);
    return least;
}

static void measure(struct flight_link *link, uint64_t sent_ns, uint64_t now_ns)
{
    uint64_t sample = now_ns > sent_ns ? now_ns - sent_ns : 1;
    if (link->min_rtt_ns == 0 || sample < link->min_rtt_ns)
        link->min_rtt_ns = sample;
    /* As TCP smooths its own (RFC 6298). */
    link->rtt_ns = link->rtt_ns == 0 ? sample : link->rtt_ns - link->rtt_ns / 8 + sample / 8;
}

/* The chunk that is in flight on a link, or NULL. */
static struct chunk *find_sent(const struct flight *flight, uint32_t link, uint64_t sequence,
                               uint64_t offset)
{
    const struct operation *operation = flight_find(flight, sequence);
    struct chunk *chunk = operation == NULL ? NULL : operation_chunk(operation, offset);
    bool found = chunk != NULL && chunk->link == link && chunk->state == CHUNK_SENT;
    return found ? chunk : NULL;
}

/* The chunk in flight that a healthy result is for; NULL: it is none. */
static struct chunk *match(const struct flight *flight, uint32_t link, const void *frame,
                           size_t frame_bytes, size_t payload_bytes, struct header *header)
{
    if (!header_read(header, frame, frame_bytes) || header->type != TYPE_RESULT)
        return NULL;
    if (!header_chunk_is_sound(header, payload_bytes, flight->max_chunk_bytes))
        return NULL;
    struct chunk *chunk = find_sent(flight, link, header->sequence, header->offset);
    if (chunk == NULL)
        return NULL;
    const struct header *common = &chunk->of->of->header;
    bool fits = header->total_bytes == common->total_bytes && header->dtype == common->dtype &&
                header->op == common->op && header->nbytes == chunk_nbytes(chunk);
    return fits ? chunk : NULL;
}

unsigned char *flight_place(const struct flight *flight, uint32_t link, const void *frame,
                            size_t frame_bytes, size_t payload_bytes)
{
    struct header header;
    if (!flight->links[link].in_place)
        return NULL;
    const struct chunk *chunk = match(flight, link, frame, frame_bytes, payload_bytes, &header);
    if (chunk == NULL || header.sequence % PLACES == 0) /* of the ranks' own question: nobody says
                                                           when its buffer is let go */
        return NULL;
    return chunk->of->of->data + header.offset;
}

static void put_result(const struct operation *operation, uint64_t offset,
                       const struct block *payload)
{
    if (operation->header.total_bytes < STREAM_BYTES) {
        memcpy(operation->data + offset, payload->data, payload->nbytes);
        return;
    }
    stream(operation->data + offset, payload->data, payload->nbytes);
    stream_end();
}

bool flight_take(struct flight *flight, uint32_t link_index, const void *frame, size_t frame_bytes,
                 struct block *payload, size_t placed_bytes, uint64_t now_ns)
{
    struct flight_link *link = &flight->links[link_index];
    struct header header;
    size_t payload_bytes = payload == NULL ? placed_bytes : payload->nbytes;
    if (payload_bytes == 0 && link->open && link->pings_suppressed &&
        header_read(&header, frame, frame_bytes) && header.type == TYPE_PING) {
        flight_confirm(flight, header.watermark);
        return true;
    }
    struct chunk *chunk =
        match(flight, link_index, frame, frame_bytes, payload_bytes, &header);
    if (chunk == NULL)
        return false;
    struct operation *operation = chunk->of->of;
    if (payload != NULL && payload_bytes > 0) /* an empty buffer may have no address */
        put_result(operation, header.offset, payload);
    measure(link, chunk->sent_ns, now_ns);
    if (operation->answered_ns == 0)
        operation->answered_ns = now_ns;
    flight_settle(flight, chunk, CHUNK_DONE);
    count(&link->bytes_received, header.nbytes);
    link->results++;
    if (link->retain && payload != NULL) {
        chunk->result = block_share(payload);
        operation->retained++;
        flight->retained_bytes += header.nbytes;
    }
    if (header.watermark > flight->reached)
        flight_confirm(flight, header.watermark);
    if (--operation->remaining == 0) {
        flight_retire(flight, operation);
        if (flight->active == 0 && now_ns > flight->busy_since_ns)
            count(&flight->busy_ns, now_ns - flight->busy_since_ns);
        operation->following = flight->completed;
        flight->completed = operation;
    }
    return true;
}

bool flight_expects(const struct flight *flight, uint32_t link, uint64_t sequence, uint64_t offset)
{
    return find_sent(flight, link, sequence, offset) != NULL;
}

/* Takes the operation at a place of the list of those that have completed off it. */
static struct all_reduce *take_completed(struct flight *flight, struct operation **place)
{
    struct operation *operation = *place;
    struct all_reduce *asked = operation->asked;
    *place = operation->following;
    asked->sent = (double)operation->sent_ns / 1e9;
    asked->answered = (double)operation->answered_ns / 1e9;
    operation->asked = NULL;
    operation->data = NULL; /* both are the caller's again */
    operation->source = NULL;
    if (operation->retained > 0 && operation->header.sequence >= flight->reached) {
        operation->following = flight->ended;
        flight->ended = operation;
    } else {
        flight_release(flight, operation);
        free(operation);
    }
    return asked;
}

struct all_reduce *flight_completed(struct flight *flight)
{
    return flight->completed == NULL ? NULL : take_completed(flight, &flight->completed);
}

bool flight_end_unowned(struct flight *flight, double now)
{
    struct operation **place = &flight->completed;
    while (*place != NULL) {
        if ((*place)->asked->owner != NULL) {
            place = &(*place)->following;
            continue;
        }
        if ((*place)->header.total_bytes >= flight->large_bytes)
            flight->large_ended = now;
        struct all_reduce *asked = take_completed(flight, place);
        durations_add(&flight->unowned, (uint64_t)(fmax(now - asked->begun, 0) * 1e9));
        atomic_store(&asked->state, ALL_REDUCE_DONE);
    }
    return flight->completed == NULL;
}

void flight_confirm(struct flight *flight, uint64_t reached)
{
    if (reached > flight->watermark)
        reached = flight->watermark; /* the rest is in progress here, whatever a reducer says */
    if (reached <= flight->reached)
        return;
    flight->reached = reached;
    for (struct operation **place = &flight->ended; *place != NULL;) {
        struct operation *operation = *place;
        if (operation->header.sequence >= reached) {
            place = &operation->following;
            continue;
        }
        *place = operation->following;
        flight_release(flight, operation);
        free(operation);
    }
}
