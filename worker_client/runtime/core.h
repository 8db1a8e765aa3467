/* The core of a worker: any thread begins all-reduces, and one at a time moves them on.
 *
 * Whoever has the lead uses the flight and the loop. What is healthy needs no interpreter: it is
 * begun, moved and ended here. What is unusual is left to the session, which whoever leads from
 * Python asks.
 */
#ifndef WORKER_CORE_H
#define WORKER_CORE_H

#include <pthread.h>

#include "worker_client/runtime/loop.h"

enum core_submitted {
    CORE_BEGUN,  /* it is on its way, or will be as soon as whoever leads gets to it */
    CORE_ASKED,  /* it waits for the session, which the driver's thread asks: it rests no more */
    CORE_CLOSED, /* nothing may be submitted any more; it does not end */
    CORE_REFUSED, /* no reducer knows its type or reduction; it does not end */
};

struct core {
    struct flight *flight;
    struct loop *loop;
    pthread_mutex_t gate;    /* held for a few instructions: guards what follows */
    pthread_cond_t free;     /* the lead is */
    atomic_uint_least64_t leader; /* the thread that has the lead; 0: none */
    struct all_reduce *first, *last; /* asked for, and not begun, in the order of calls */
    unsigned waiting;        /* threads that wait for the lead */
    /* The leader's own. */
    enum loop_event event; /* that the session has not heard of */
    double due; /* when Python is needed if nothing happens before, in seconds */
    const struct all_reduce *put_off; /* the first, if it is too early for the session to begin it */
    /* Anybody's. */
    atomic_bool closed;
    atomic_bool called; /* whoever leads is to return to Python */
};

/* What C that is not linked with this has of a core (`Core.calls`). */
struct core_calls {
    struct core *core;
    enum core_submitted (*submit)(struct core *core, struct all_reduce *asked);
    enum all_reduce_state (*test)(const struct all_reduce *asked);
    void (*lead)(struct core *core, const struct all_reduce *asked, double until);
};

/* False: out of resources. */
bool core_init(struct core *core, struct flight *flight, struct loop *loop);
void core_free(struct core *core);

/* -- any thread, no interpreter -------------------------------------------------------------- */

/* Begins an all-reduce, and perhaps sends it; waits for nobody. Its memory, and its buffers, stay until
 * it has ended; `data`, `nbytes`, `dtype`, `op` and `timeout_s` are filled, perhaps `source` and `why`;
 * the rest is zero, or what it was when an earlier one had ended. Fallback and elastic jobs do not know
 * it: there it fails where a call of Python's goes on. */
enum core_submitted core_submit(struct core *core, struct all_reduce *asked);
/* What has become of it; its memory is the caller's again once that is not ALL_REDUCE_PENDING. */
enum all_reduce_state core_test(const struct all_reduce *asked);
/* Moves all-reduces on until this one has ended, the clock (CLOCK_MONOTONIC) says `until` (seconds), or
 * Python is needed, unless another thread leads or waits to. */
void core_lead(struct core *core, const struct all_reduce *asked, double until);
/* Has whoever leads return to Python; may be called in a signal handler. */
void core_call(struct core *core);
/* Accepts nothing any more; may be called again. */
void core_close(struct core *core);

/* -- the lead -------------------------------------------------------------------------------- */

uint64_t core_leader(struct core *core);
/* Takes the lead; false: another thread, or this one, has it, also at `until` (seconds). */
bool core_take_lead(struct core *core, double until);
/* True: something was asked for meanwhile, which nobody has begun. */
bool core_leave_lead(struct core *core);

/* -- whoever has the lead -------------------------------------------------------------------- */

/* Begins what was asked for, as far as it needs no session, and sends it. False: it needs one. */
bool core_start(struct core *core);
/* What was asked for first and not begun, or NULL. */
struct all_reduce *core_first(struct core *core);
/* Takes that off the queue: the session begins it. */
void core_drop_first(struct core *core);
/* Leaves that where it is until the session asks for it again. */
void core_put_off(struct core *core);
/* Moves all-reduces on until `asked` (or NULL) has ended, or `until`. True: before that, Python is
 * needed: for a message, a change, an all-reduce of its own that has ended, one that the session is to
 * begin, what is due, or a call. */
bool core_run(struct core *core, const struct all_reduce *asked, double until);

#endif
