/* What a worker has in flight: it begins and ends every all-reduce.
 *
 * Everything belongs to one thread. Only what is healthy is handled here; the rest is left to the
 * session. No function does any I/O or reads a clock.
 */
#ifndef WORKER_FLIGHT_H
#define WORKER_FLIGHT_H

#include "cuts.h"
#include "durations.h"

/* Reducers are asked whom an all-reduce waits for after STRAGGLER_S, again twice as late, and LAST_S
 * before its deadline, or halfway if that is later. */
static const double STRAGGLER_S = 10.0, LAST_S = 1.0;

struct flight_link {
    struct chunk_list queue; /* chunks to send */
    struct chunk_list sent;  /* chunks in flight */
    bool open;               /* contributions may be sent */
    bool retain;             /* results that come here are kept */
    bool in_place;           /* what needs this link ends with it: results may be read in place */
    bool pings_suppressed;   /* the reducer's latest PING had no body: another such is no news */
    uint64_t window, in_flight;
    atomic_uint_least64_t bytes_sent, bytes_received; /* which any thread may look at */
    uint64_t results;
    uint64_t bytes_before; /* received when it was measured last */
    uint64_t rtt_ns, min_rtt_ns; /* from sending a contribution to its result; 0: unknown */
};

struct flight {
    struct block_pool pool; /* of results */
    struct flight_link *links;
    uint32_t link_count;
    uint64_t max_chunk_bytes;
    struct header identity; /* of every contribution */
    /* Operations in progress, at sequence & mask, from watermark to next; not every number is used. */
    struct operation **ring;
    uint64_t mask, watermark, next;
    uint64_t reached;            /* every operation below is finished at every rank */
    uint64_t retained_bytes;
    atomic_size_t active; /* operations in progress */
    atomic_uint_least64_t busy_ns; /* while any was, up to the end of the latest stretch that ended
                                      well; any thread may look at it */
    uint64_t busy_since_ns; /* the present one */
    struct durations unowned; /* of C's own that ended well, from their calls to their ends */
    double earliest; /* no deadline is before this time */
    uint64_t large_bytes; /* from this size on all-reduces say what a link can carry: */
    size_t large;         /* operations in progress that do, */
    double measured_since; /* when links were measured anew last, for these */
    double large_ended; /* when one has that the session was not told of; 0: it has looked */
    struct numbering numbering;
    struct cuts cuts;
    /* Nothing stands in the way of all-reduces below this number, in this version of the shard map,
     * unless something happens: then the session sets 0. */
    double fast_path_limit;
    uint32_t epoch;
    bool lacks_leaves; /* a reducer has welcomed us that cannot sum leaves */
    struct operation *completed; /* that the session has not heard of, latest first */
    struct operation *ended;     /* whose results are kept, latest first */
};

struct contribution {
    struct header header;
    struct chunk *chunk;
};

/* Where a refill of all links is; starts as zero. */
struct turn {
    uint32_t step, idle;
};

/* Where a walk over chunks is; starts as zero. */
struct walk {
    struct operation *operation;
    uint64_t sequence; /* where the search for the next one in progress begins */
    size_t shard;
    uint64_t chunk;
    enum { WALK_RING, WALK_COMPLETED, WALK_ENDED } place;
};

/* False: out of memory. `identity` is a header of 96 bytes. */
bool flight_init(struct flight *flight, const void *identity, uint64_t max_chunk_bytes,
                 uint64_t large_bytes);
/* Adds a link, which is shut. False: out of memory. */
bool flight_add_link(struct flight *flight, uint64_t window, bool retain, bool in_place);
void flight_free(struct flight *flight);

/* Starts an all-reduce over ranges that are ascending, disjoint and together the whole buffer; its
 * number is above all before. If it was begun before, its deadline counts from that time. False: out
 * of memory. */
bool flight_submit(struct flight *flight, struct all_reduce *asked, uint64_t chunk_bytes,
                   uint32_t epoch, const struct range *ranges, size_t count, double now);
/* Gives an all-reduce its number and starts it. False: nothing was done, the session knows why. */
bool flight_begin(struct flight *flight, struct all_reduce *asked, double now);
/* Measures a link anew: its shortest round trip, and what comes over it. */
void flight_measure(struct flight *flight, uint32_t link);

/* Takes the next chunk of a link, if its window has room. */
bool flight_next(struct flight *flight, uint32_t link, uint64_t now_ns, struct contribution *next);

/* Takes the next chunk of any link whose window has room. Every link gives one before any gives
 * another, so that all reducers have work early; every rank begins with another link, so that no
 * reducer is hit by all of them at once. */
bool flight_next_in_turn(struct flight *flight, struct turn *turn, uint64_t now_ns,
                         struct contribution *next);

/* Size of the smallest chunk in flight on a link; 0: there are fewer than two. */
uint32_t flight_least(const struct flight *flight, uint32_t link);

/* Where the payload of a healthy result may be read to, whose header has come: its place in the
 * buffer. NULL: into a block, as another reducer may need the contribution that is there. */
unsigned char *flight_place(const struct flight *flight, uint32_t link, const void *frame,
                            size_t frame_bytes, size_t payload_bytes);
/* Takes a message if it is a healthy result, and perhaps a share of its payload, or a PING without
 * news; false: nothing was changed, the session knows why. Without a payload, `placed_bytes` of it are
 * in their place. */
bool flight_take(struct flight *flight, uint32_t link, const void *frame, size_t frame_bytes,
                 struct block *payload, size_t placed_bytes, uint64_t now_ns);

/* The operation in progress with this number, or NULL. */
struct operation *flight_find(const struct flight *flight, uint64_t sequence);
/* The chunk at this offset of an operation that is in progress or whose results are kept. */
struct chunk *flight_chunk(const struct flight *flight, uint64_t sequence, uint64_t offset);
/* Whether this chunk is in flight on this link. */
bool flight_expects(const struct flight *flight, uint32_t link, uint64_t sequence, uint64_t offset);
/* Whether any chunk of an all-reduce is in flight on this link. */
bool flight_waits_for(const struct flight *flight, uint32_t link, uint64_t sequence);

/* Expects and sends nothing more of an all-reduce on this link. */
void flight_forget(struct flight *flight, uint32_t link, uint64_t sequence);
/* Ends an all-reduce that has failed. */
void flight_end(struct flight *flight, uint64_t sequence);

/* Shuts a link; its chunks are stranded until they are moved to another one. */
void flight_shut(struct flight *flight, uint32_t link);
/* The next chunk that is assigned to a link, done or not, or NULL. */
struct chunk *flight_walk(const struct flight *flight, struct walk *walk, uint32_t link);
void flight_move(struct flight *flight, struct chunk *chunk, uint32_t link);
/* Drops what is kept of operations below a number. */
void flight_confirm(struct flight *flight, uint64_t reached);

/* The next all-reduce that has ended well, to be told of once; NULL: no more. */
struct all_reduce *flight_completed(struct flight *flight);
/* Ends those that have ended well and are nobody's in Python. False: others are left. */
bool flight_end_unowned(struct flight *flight, double now);

/* The rest is for the flight's own files. */

void flight_enqueue(struct flight *flight, struct chunk *chunk);
/* Takes a chunk out of flight or off its queue, unless it is done. */
void flight_settle(struct flight *flight, struct chunk *chunk, enum chunk_state state);
/* Drops the results that are kept. */
void flight_release(struct flight *flight, struct operation *operation);
/* It is over, well or badly; the caller puts it on a list or drops it. */
void flight_retire(struct flight *flight, struct operation *operation);

#endif
