#include "flight.h"

#include <stdlib.h>

/* -- operations ------------------------------------------------------------------------------ */

void operation_drop(struct operation *operation)
{
    if (atomic_fetch_sub_explicit(&operation->uses, 1, memory_order_acq_rel) == 1)
        free(operation);
}

static uint64_t count_chunks(const struct range *range, uint64_t chunk_bytes)
{
    uint64_t nbytes = range->end - range->start;
    return nbytes == 0 ? 1 : (nbytes - 1) / chunk_bytes + 1;
}

/* One block of memory holds the operation, its parts, and their times of sending. */
static struct operation *allocate(uint64_t chunk_bytes, const struct range *ranges, size_t count)
{
    uint64_t chunks = 0;
    for (size_t at = 0; at < count; at++)
        chunks += count_chunks(&ranges[at], chunk_bytes);
    struct operation *operation = calloc(1, sizeof(struct operation) + count * sizeof(struct part) +
                                                chunks * sizeof(uint64_t));
    if (operation == NULL)
        return NULL;
    operation->parts = (struct part *)(operation + 1);
    operation->part_count = count;
    operation->chunk_bytes = chunk_bytes;
    operation->remaining = chunks;
    uint64_t *sent_ns = (uint64_t *)(operation->parts + count);
    for (size_t at = 0; at < count; at++) {
        struct part *part = &operation->parts[at];
        part->of = operation;
        part->start = ranges[at].start;
        part->end = ranges[at].end;
        part->link = ranges[at].link;
        part->chunks = count_chunks(&ranges[at], chunk_bytes);
        part->sent_ns = sent_ns;
        sent_ns += part->chunks;
    }
    return operation;
}

static uint64_t chunk_offset(const struct part *part, uint64_t chunk)
{
    return part->start + chunk * part->of->chunk_bytes;
}

static uint32_t chunk_nbytes(const struct part *part, uint64_t chunk)
{
    uint64_t left = part->end - chunk_offset(part, chunk);
    return (uint32_t)(left < part->of->chunk_bytes ? left : part->of->chunk_bytes);
}

/* The part that holds an offset, or would if it reached that far. */
static struct part *find_part(const struct operation *operation, uint64_t offset)
{
    size_t low = 0, high = operation->part_count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (operation->parts[middle].start <= offset)
            low = middle;
        else
            high = middle;
    }
    return &operation->parts[low];
}

/* Whether a chunk that starts at `offset` is in flight on this link; says which it is. */
static bool find_chunk(const struct operation *operation, uint32_t link, uint64_t offset,
                       struct part **part, uint64_t *chunk)
{
    *part = find_part(operation, offset);
    if ((*part)->link != link || offset < (*part)->start)
        return false;
    *chunk = (offset - (*part)->start) / operation->chunk_bytes;
    return *chunk < (*part)->next && chunk_offset(*part, *chunk) == offset &&
           (*part)->sent_ns[*chunk] != 0;
}

bool operation_needs(const struct operation *operation, uint32_t link)
{
    for (size_t at = 0; at < operation->part_count; at++) {
        const struct part *part = &operation->parts[at];
        if (part->link == link && (part->waiting > 0 || part->next < part->chunks))
            return true;
    }
    return false;
}

/* -- a link's queue -------------------------------------------------------------------------- */

static void enqueue(struct flight_link *link, struct part *part)
{
    part->before = link->last;
    if (link->last == NULL)
        link->first = part;
    else
        link->last->after = part;
    link->last = part;
}

static void dequeue(struct flight_link *link, struct part *part)
{
    if (part->before == NULL)
        link->first = part->after;
    else
        part->before->after = part->after;
    if (part->after == NULL)
        link->last = part->before;
    else
        part->after->before = part->before;
    part->before = part->after = NULL;
}

static void settle(struct flight_link *link, struct part *part, uint64_t chunk)
{
    part->sent_ns[chunk] = 0;
    part->waiting--;
    link->in_flight -= window_charge(chunk_nbytes(part, chunk));
}

/* Neither expects nor sends anything more of a part. */
static void abandon(struct flight_link *link, struct part *part)
{
    for (uint64_t chunk = 0; part->waiting > 0; chunk++)
        if (part->sent_ns[chunk] != 0)
            settle(link, part, chunk);
    if (part->next < part->chunks)
        dequeue(link, part);
    part->next = part->chunks;
}

/* -- all links and operations ---------------------------------------------------------------- */

bool flight_init(struct flight *flight, const void *identity, uint64_t max_chunk_bytes)
{
    *flight = (struct flight){.mask = 63, .max_chunk_bytes = max_chunk_bytes};
    memcpy(&flight->identity, identity, HEADER_BYTES);
    flight->ring = calloc(flight->mask + 1, sizeof(struct operation *));
    return flight->ring != NULL;
}

bool flight_add_link(struct flight *flight, uint64_t window)
{
    size_t count = flight->link_count;
    struct flight_link *links = realloc(flight->links, (count + 1) * sizeof *links);
    if (links == NULL)
        return false;
    links[count] = (struct flight_link){.window = window};
    flight->links = links;
    flight->link_count++;
    return true;
}

static void drop_list(struct operation *operation)
{
    while (operation != NULL) {
        struct operation *following = operation->following;
        operation_drop(operation);
        operation = following;
    }
}

void flight_free(struct flight *flight)
{
    for (uint64_t at = 0; flight->ring != NULL && at <= flight->mask; at++)
        if (flight->ring[at] != NULL)
            operation_drop(flight->ring[at]);
    drop_list(flight->completed);
    drop_list(flight->lingering);
    free(flight->ring);
    free(flight->links);
    *flight = (struct flight){0};
}

struct operation *flight_find(const struct flight *flight, uint64_t sequence)
{
    if (sequence < flight->watermark || sequence >= flight->next)
        return NULL;
    return flight->ring[sequence & flight->mask];
}

static bool make_room(struct flight *flight)
{
    if (flight->next - flight->watermark <= flight->mask)
        return true;
    uint64_t mask = 2 * flight->mask + 1;
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

struct operation *flight_submit(struct flight *flight, void *data, uint64_t total_bytes,
                                uint8_t dtype, uint8_t op, uint64_t tag,
                                uint64_t chunk_bytes, const struct range *ranges, size_t count)
{
    struct operation *operation =
        make_room(flight) ? allocate(chunk_bytes, ranges, count) : NULL;
    if (operation == NULL)
        return NULL;
    atomic_init(&operation->uses, 1);
    operation->sequence = flight->next++;
    operation->total_bytes = total_bytes;
    operation->tag = tag;
    operation->data = data;
    operation->dtype = dtype;
    operation->op = op;
    flight->ring[operation->sequence & flight->mask] = operation;
    for (size_t at = 0; at < count; at++)
        enqueue(&flight->links[ranges[at].link], &operation->parts[at]);
    return operation;
}

/* It is over, well or badly; the caller puts it on a list or drops it. */
static void retire(struct flight *flight, struct operation *operation)
{
    flight->ring[operation->sequence & flight->mask] = NULL;
    while (flight->watermark < flight->next &&
           flight->ring[flight->watermark & flight->mask] == NULL)
        flight->watermark++;
}

bool flight_next(struct flight *flight, uint32_t link_index, uint64_t now_ns,
                 struct contribution *next)
{
    struct flight_link *link = &flight->links[link_index];
    struct part *part = link->first;
    if (!link->open || part == NULL)
        return false;
    struct operation *operation = part->of;
    if (operation->sequence >= flight->watermark + MAX_ROUNDS_AHEAD)
        return false;
    uint64_t chunk = part->next;
    uint32_t nbytes = chunk_nbytes(part, chunk);
    if (link->in_flight > 0 && link->in_flight + window_charge(nbytes) > link->window)
        return false;
    if (++part->next == part->chunks)
        dequeue(link, part);
    part->sent_ns[chunk] = now_ns | 1; /* never 0; a nanosecond does not matter */
    part->waiting++;
    link->in_flight += window_charge(nbytes);
    link->bytes_sent += nbytes;
    next->of = operation;
    next->link = link_index;
    struct header *header = &next->header;
    *header = flight->identity;
    header->watermark = flight->watermark;
    header->sequence = operation->sequence;
    header->total_bytes = operation->total_bytes;
    header->offset = chunk_offset(part, chunk);
    header->nbytes = nbytes;
    header->dtype = header->wire_dtype = operation->dtype;
    header->op = operation->op;
    header->tag = operation->tag;
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

static void measure(struct flight_link *link, uint64_t sent_ns, uint64_t now_ns)
{
    uint64_t sample = now_ns > sent_ns ? now_ns - sent_ns : 1;
    if (link->min_rtt_ns == 0 || sample < link->min_rtt_ns)
        link->min_rtt_ns = sample;
    /* As TCP smooths its own (RFC 6298). */
    link->rtt_ns = link->rtt_ns == 0 ? sample : link->rtt_ns - link->rtt_ns / 8 + sample / 8;
}

bool flight_take(struct flight *flight, uint32_t link_index, const void *frame, size_t frame_bytes,
                 const void *payload, size_t payload_bytes, uint64_t now_ns)
{
    struct flight_link *link = &flight->links[link_index];
    struct header header;
    if (!header_read(&header, frame, frame_bytes) || header.type != TYPE_RESULT)
        return false;
    if (!header_chunk_is_sound(&header, payload_bytes, flight->max_chunk_bytes))
        return false;
    struct operation *operation = flight_find(flight, header.sequence);
    struct part *part;
    uint64_t chunk;
    if (operation == NULL || !find_chunk(operation, link_index, header.offset, &part, &chunk))
        return false;
    if (header.total_bytes != operation->total_bytes || header.dtype != operation->dtype ||
        header.op != operation->op || header.nbytes != chunk_nbytes(part, chunk))
        return false;
    if (payload_bytes > 0) /* an empty buffer may have no address */
        memcpy(operation->data + header.offset, payload, payload_bytes);
    measure(link, part->sent_ns[chunk], now_ns);
    settle(link, part, chunk);
    link->bytes_received += header.nbytes;
    link->results++;
    if (--operation->remaining == 0) {
        retire(flight, operation);
        operation->following = flight->completed;
        flight->completed = operation;
    }
    return true;
}

bool flight_expects(const struct flight *flight, uint32_t link, uint64_t sequence, uint64_t offset)
{
    const struct operation *operation = flight_find(flight, sequence);
    struct part *part;
    uint64_t chunk;
    return operation != NULL && find_chunk(operation, link, offset, &part, &chunk);
}

bool flight_waits_for(const struct flight *flight, uint32_t link, uint64_t sequence)
{
    const struct operation *operation = flight_find(flight, sequence);
    for (size_t at = 0; operation != NULL && at < operation->part_count; at++)
        if (operation->parts[at].link == link && operation->parts[at].waiting > 0)
            return true;
    return false;
}

void flight_forget(struct flight *flight, uint32_t link, uint64_t sequence)
{
    struct operation *operation = flight_find(flight, sequence);
    for (size_t at = 0; operation != NULL && at < operation->part_count; at++)
        if (operation->parts[at].link == link)
            abandon(&flight->links[link], &operation->parts[at]);
}

bool flight_end(struct flight *flight, uint64_t sequence)
{
    struct operation *operation = flight_find(flight, sequence);
    if (operation == NULL)
        return false;
    for (size_t at = 0; at < operation->part_count; at++)
        abandon(&flight->links[operation->parts[at].link], &operation->parts[at]);
    retire(flight, operation);
    operation->following = flight->lingering;
    flight->lingering = operation;
    return flight_reads(flight, sequence);
}

bool flight_reads(struct flight *flight, uint64_t sequence)
{
    struct operation **place = &flight->lingering;
    while (*place != NULL && (*place)->sequence != sequence)
        place = &(*place)->following;
    struct operation *operation = *place;
    if (operation == NULL)
        return false;
    if (atomic_load_explicit(&operation->uses, memory_order_acquire) > 1)
        return true;
    *place = operation->following;
    operation_drop(operation);
    return false;
}

void flight_reset(struct flight *flight, uint32_t link)
{
    flight->links[link].open = false;
    for (uint64_t sequence = flight->watermark; sequence < flight->next; sequence++)
        flight_forget(flight, link, sequence);
}

struct operation *flight_completed(struct flight *flight)
{
    struct operation *operation = flight->completed;
    if (operation != NULL)
        flight->completed = operation->following;
    return operation;
}
