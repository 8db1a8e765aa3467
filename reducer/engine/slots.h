/* Rounds and slots as the compiled loop keeps them: the twin of slots.py, without Python objects.
 *
 * Everything belongs to one thread. The rules are those of docs/protocol.md, section 5; here are only
 * those of healthy rounds. Whatever is out of the ordinary is left to the engine, which sees the
 * same structs through _slots.pyx.
 */
#ifndef REDUCER_SLOTS_H
#define REDUCER_SLOTS_H

#include "heap.h"
#include "lateness.h"
#include "map.h"
#include "traffic.h"
#include "reducer/wire/leaves.h"
#include "reducer/zmtp/block.h"

/* One rank of a job. */
struct member {
    uint64_t peer; /* the connection's routing id as a number, see peer_key */
    uint64_t window;
    uint64_t held;      /* bytes of the window taken by contributions in open slots */
    uint64_t watermark; /* every all-reduce below is finished at the worker */
    uint32_t rank;
    bool regular; /* the link's state is MEMBER */
};

/* Bytes that the records of an all-reduce take besides payloads, counted generously; slots.py says
 * the same. RANK_BYTES: of a round, for each rank; LATENESS_BYTES: of a job, for each rank. */
enum { ROUND_BYTES = 640, SLOT_BYTES = 256, PLACE_BYTES = 72, DONE_BYTES = 192 };
enum { RANK_BYTES = 1, LATENESS_BYTES = 1616 };
/* Of a record of payloads that waits for the next slot, and of it for each rank. */
enum { SPARE_RECORD_BYTES = 48, SPARE_RANK_BYTES = 9 };

enum { ABSENT, PRESENT, CLAIMED }; /* a rank's contribution; CLAIMED: it holds the result already */

/* One chunk. Its payloads live until the result is on its way; then only `done` is left. */
struct slot {
    uint64_t offset;
    uint64_t alone_us; /* since when it waits for one rank alone, 0 for not yet */
    uint32_t nbytes;
    uint32_t missing;
    uint32_t first_rank;
    uint32_t claims; /* ranks that hold the result; then the slot is the engine's */
    bool done;
    bool is_asked;
    uint32_t asked; /* the one that was asked for the result, if is_asked */
    struct payloads *payloads;
};

/* Contributions by rank. */
struct payloads {
    struct payloads *next; /* in the list of spare ones */
    struct block **blocks;
    uint8_t *present; /* ABSENT and so on */
};

/* When what happened to a round, us; see `slots.RoundTimes`. */
struct timestamps {
    uint64_t begun_us, alone_us, complete_us, done_us, bytes;
    uint32_t first_rank, last_rank, chunks;
};

/* A round that is over. */
struct round_times {
    uint64_t sequence;
    struct timestamps timestamps;
};

/* One all-reduce. */
struct round {
    uint64_t sequence;
    struct timestamps timestamps;
    struct header first; /* what its first contribution settled, if has_first */
    bool has_first;
    bool waits;    /* its number is in `waiting` of the rounds */
    bool live;     /* it has not failed, and is in the rounds' list of such */
    bool viewed;   /* the engine holds a view of it: it may have failed, or lack a rank for good */
    uint32_t open; /* slots that wait for contributions */
    struct map slots;
    uint8_t *spoke; /* per rank: whether it has said something about it, before it left if it has */
    struct round *before, *after; /* in that list */
    uint64_t touched; /* which change of a round was the latest that could make this one lack a rank */
    uint64_t born;    /* exits when it began */
};

/* The all-reduces in flight of one generation of a job. */
struct rounds {
    struct block_pool *pool; /* of payloads: the loop's while it serves these, else `own` */
    struct block_pool own;
    uint32_t world_size;
    struct map by_sequence;
    struct heap order;   /* sequence numbers of all rounds */
    struct heap waiting; /* of those with open slots, and of some that have none any more */
    uint64_t limit;      /* rounds that there may be */
    struct round *latest; /* of those that have not failed, the one that was touched last */
    uint64_t touches;
    uint64_t exits; /* how often a rank has left the job */
    uint64_t reached; /* every all-reduce below is finished at every rank, while `members` is set */
    uint32_t viewed;
    /* What the records take, see rounds_used. */
    uint64_t reserved; /* bytes that contributions and records of this job may take */
    uint64_t open;     /* slots that wait for contributions */
    uint64_t missing;  /* contributions that these wait for */
    uint64_t done;     /* slots whose result is on its way, until their round is forgotten */
    struct payloads *spare;
    uint64_t spares; /* how many these are */
    uint64_t now_us; /* when what is taken next has come */
    struct traffic traffic;
    struct lateness lateness;
    /* Rounds that are over and that nobody has asked for yet; there is no room while none are kept. */
    struct round_times *ended;
    size_t ended_count, ended_room;
    /* Set while every rank is here and has been since the start; else `members` is NULL. */
    struct member **members; /* by rank */
    uint64_t job;
    uint64_t max_chunk_bytes;
    uint32_t generation;
};

enum verdict {
    IRREGULAR, /* nothing was changed: this one is for the engine */
    PLACED,
    COMPLETE, /* its slot has every contribution */
    OUT_OF_MEMORY
};

/* Bytes that the records of all rounds take. */
uint64_t rounds_used(const struct rounds *rounds);

/* Takes a healthy contribution, and with it the payload, unless it is IRREGULAR. Sets where it was put,
 * if there was memory. */
enum verdict rounds_offer(struct rounds *rounds, struct member *member, const struct header *header,
                          struct block *payload, struct round **round, struct slot **slot);

/* For the engine, which has checked everything. NULL or false: out of memory. */
struct round *rounds_open(struct rounds *rounds, uint64_t sequence, const struct header *first);
/* Takes the payload. Without one the rank claims to hold the result. */
struct slot *round_place(struct rounds *rounds, struct round *round, const struct header *header,
                         struct block *payload);

/* Frees a slot's payloads and remembers that its result is on its way. */
void round_finish(struct rounds *rounds, struct round *round, struct slot *slot);
/* Forgets an open slot. */
void round_drop(struct rounds *rounds, struct round *round, struct slot *slot);
/* Takes note that a round may lack a rank from now on. */
void round_touch(struct rounds *rounds, struct round *round);
/* Takes note that a round has failed. */
void round_settle(struct rounds *rounds, struct round *round);
/* Forgets the round with the least sequence number; there must be one. */
void rounds_discard_oldest(struct rounds *rounds);
void rounds_free(struct rounds *rounds);

/* Turns a routing id into a key; 0, which no id gives, if it is too long. */
uint64_t peer_key(const void *id, size_t nbytes);

#endif
