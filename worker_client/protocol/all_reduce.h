/* An all-reduce as it is asked for, and how it is numbered: the same at every rank. */
#ifndef WORKER_ALL_REDUCE_H
#define WORKER_ALL_REDUCE_H

#include <stdatomic.h>

#include "reducer/wire/header.h"

enum all_reduce_state { ALL_REDUCE_PENDING, ALL_REDUCE_DONE, ALL_REDUCE_FAILED };

/* Memory of whoever asks, until it has ended. Times are in seconds of CLOCK_MONOTONIC. */
struct all_reduce {
    /* What is asked for. */
    void *data; /* the result replaces it, chunk by chunk */
    const void *source; /* what is summed, if that is to stay as it is; NULL: what `data` has */
    uint64_t nbytes;
    uint64_t call; /* what all of one call have in common; 0: it is a call of its own */
    uint64_t tag;  /* of its name, 0 without one */
    double timeout_s;
    uint32_t leaves; /* 0: none; else `data` has subtrees of `nbytes` each, in place of one buffer, */
    uint32_t parts;  /* so many; the result replaces the first */
    uint8_t dtype, op;
    bool unready; /* the session is to begin it: it has a name, is yet to be filled, or is refused */
    void *owner;  /* the Python object that is told of its end; NULL: none is */
    char *why;    /* where the words of its failure go; NULL: nowhere */
    uint64_t why_bytes; /* room for these, and for a 0 */
    /* What becomes of it. */
    atomic_int state; /* of enum all_reduce_state */
    int64_t sequence; /* its number; -1: it has none yet */
    uint64_t since, history; /* of the calls before it, as in a contribution */
    double begun, deadline;
    double ask_at, ask_last_at; /* when reducers are asked whom it waits for */
    double sent, answered; /* the latest chunk that was sent before the first result came, and that */
    struct all_reduce *next; /* in the core's queue */
};

/* What the next call's number follows from. */
struct numbering {
    uint64_t call;  /* the latest */
    int64_t number; /* its number; -1: there was none */
    uint32_t place; /* of the latest all-reduce in it */
    bool failed;    /* another one of it has */
    uint64_t since, history; /* what the next all-reduce's are to be */
};

void numbering_init(struct numbering *numbering);
/* What is asked for next would have this number; NO_SEQUENCE: its call is full, or has failed. */
uint64_t numbering_next(const struct numbering *numbering, const struct all_reduce *asked);
/* Gives it its number. False: a call has at most PLACES - 1 all-reduces. */
bool numbering_give(struct numbering *numbering, struct all_reduce *asked);
/* Compares later calls by what follows them: other ranks may know less of a failure. */
void numbering_forget(struct numbering *numbering, const struct all_reduce *failed);
/* How many places on, among reducers, the first shard belongs (layout.py, `turn_of`). */
uint64_t turn_of(uint64_t sequence);

#endif
