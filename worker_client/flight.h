/* What a worker has in flight, for the compiled loop: the twin of flight.py.
 *
 * Everything belongs to one thread, but for an operation's `uses`. Only what is healthy is handled
 * here; the rest is left to the session. No function does any I/O or reads a clock.
 */
#ifndef WORKER_FLIGHT_H
#define WORKER_FLIGHT_H

#include <stdatomic.h>

#include "wire/header.h"

/* One part of a buffer, which travels over one link in chunks. */
struct part {
    struct operation *of;
    struct part *before, *after; /* in its link's queue, while a chunk is still to be sent */
    uint64_t start, end;
    uint64_t chunks; /* at least one: an empty buffer travels as an empty chunk */
    uint64_t next;   /* the first chunk that was not sent */
    uint64_t waiting;
    uint64_t *sent_ns; /* per chunk: when it was sent if it is in flight, else 0 */
    uint32_t link;
};

/* One all-reduce. */
struct operation {
    /* One for the flight, and one for each message in libzmq that lies in `data`. The last one to
     * go frees the struct: libzmq's threads drop theirs at any time. */
    atomic_size_t uses;
    struct operation *following; /* in the list `completed` or `lingering` */
    uint64_t sequence;
    uint64_t total_bytes;
    uint64_t chunk_bytes; /* size of every chunk but the last of each part */
    uint64_t tag;
    uint64_t remaining; /* chunks whose result has not come */
    unsigned char *data;
    size_t part_count;
    struct part *parts; /* in the order of their offsets */
    uint8_t dtype, op;
};

struct flight_link {
    struct part *first, *last; /* the queue: parts with chunks to send, in order */
    bool open;                 /* contributions may be sent */
    uint64_t window, in_flight;
    uint64_t bytes_sent, bytes_received, results;
    uint64_t rtt_ns, min_rtt_ns; /* from sending a contribution to its result; 0: unknown */
};

struct flight {
    struct flight_link *links;
    uint32_t link_count;
    uint64_t max_chunk_bytes;
    struct header identity; /* of every contribution */
    /* Operations in progress, at sequence & mask; those from watermark to next may be there. */
    struct operation **ring;
    uint64_t mask, watermark, next;
    struct operation *completed; /* that the session has not heard of, latest first */
    struct operation *lingering; /* that failed while libzmq still read their memory */
};

struct range {
    uint32_t link;
    uint64_t start, end;
};

struct contribution {
    struct header header;
    struct operation *of;
    uint32_t link;
};

/* Where a refill of all links is; starts as zero. */
struct turn {
    uint32_t step, idle;
};

/* False: out of memory. `identity` is a header of 96 bytes. */
bool flight_init(struct flight *flight, const void *identity, uint64_t max_chunk_bytes);
/* Adds a link, which is shut. False: out of memory. */
bool flight_add_link(struct flight *flight, uint64_t window);
void flight_free(struct flight *flight);

/* Starts an all-reduce over ranges that are ascending, disjoint and together the whole buffer.
 * NULL: out of memory. */
struct operation *flight_submit(struct flight *flight, void *data, uint64_t total_bytes,
                                uint8_t dtype, uint8_t op, uint64_t tag,
                                uint64_t chunk_bytes, const struct range *ranges, size_t count);

/* Takes the next chunk of a link, if its window has room. */
bool flight_next(struct flight *flight, uint32_t link, uint64_t now_ns, struct contribution *next);

/* Takes the next chunk of any link whose window has room. Every link gives one before any gives
 * another, so that all reducers have work early; every rank begins with another link, so that no
 * reducer is hit by all of them at once. */
bool flight_next_in_turn(struct flight *flight, struct turn *turn, uint64_t now_ns,
                         struct contribution *next);

/* Takes a message if it is a healthy result; false: nothing was changed, the session knows why. */
bool flight_take(struct flight *flight, uint32_t link, const void *frame, size_t frame_bytes,
                 const void *payload, size_t payload_bytes, uint64_t now_ns);

/* The operation in progress with this number, or NULL. */
struct operation *flight_find(const struct flight *flight, uint64_t sequence);
/* Whether this chunk is in flight on this link. */
bool flight_expects(const struct flight *flight, uint32_t link, uint64_t sequence, uint64_t offset);
/* Whether any chunk of an all-reduce is in flight on this link. */
bool flight_waits_for(const struct flight *flight, uint32_t link, uint64_t sequence);
/* Whether a chunk of an operation is in flight or to be sent on this link. */
bool operation_needs(const struct operation *operation, uint32_t link);

/* Expects and sends nothing more of an all-reduce on this link. */
void flight_forget(struct flight *flight, uint32_t link, uint64_t sequence);
/* Ends an all-reduce that has failed. True: libzmq still reads its memory. */
bool flight_end(struct flight *flight, uint64_t sequence);
/* Whether libzmq still reads the memory of an all-reduce that has failed. */
bool flight_reads(struct flight *flight, uint64_t sequence);
/* Shuts a link and forgets all that was queued or in flight there. */
void flight_reset(struct flight *flight, uint32_t link);

/* The next operation that has ended well, to be dropped with operation_drop; NULL: no more. */
struct operation *flight_completed(struct flight *flight);

static inline void operation_use(struct operation *operation)
{
    atomic_fetch_add_explicit(&operation->uses, 1, memory_order_relaxed);
}

void operation_drop(struct operation *operation);

#endif
