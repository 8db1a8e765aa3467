#include "core.h"

#include <math.h>

static const double IDLE_S = 0.1; /* who leads looks at the clock this often */

static double seconds(void)
{
    return (double)now_ns() / 1e9;
}

static uint64_t this_thread(void)
{
    return (uint64_t)pthread_self();
}

bool core_init(struct core *core, struct flight *flight, struct loop *loop)
{
    *core = (struct core){.flight = flight, .loop = loop, .due = INFINITY};
    pthread_condattr_t monotonic;
    if (pthread_condattr_init(&monotonic) != 0)
        return false;
    bool made = pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC) == 0 &&
                pthread_cond_init(&core->free, &monotonic) == 0;
    pthread_condattr_destroy(&monotonic);
    return made && pthread_mutex_init(&core->gate, NULL) == 0;
}

void core_free(struct core *core)
{
    pthread_cond_destroy(&core->free);
    pthread_mutex_destroy(&core->gate);
}

/* -- the lead -------------------------------------------------------------------------------- */

uint64_t core_leader(struct core *core)
{
    return atomic_load(&core->leader); /* without the gate, which a forked child may find closed */
}

bool core_take_lead(struct core *core, double until)
{
    uint64_t me = this_thread();
    struct timespec end = {0};
    if (isfinite(until)) {
        end.tv_sec = (time_t)until;
        end.tv_nsec = (long)((until - (double)end.tv_sec) * 1e9);
    }
    pthread_mutex_lock(&core->gate);
    bool may_wait = until > 0 && core->leader != me;
    core->waiting += may_wait;
    for (bool waits = may_wait; core->leader != 0 && waits;) {
        if (isfinite(until))
            waits = pthread_cond_timedwait(&core->free, &core->gate, &end) == 0;
        else
            pthread_cond_wait(&core->free, &core->gate);
    }
    core->waiting -= may_wait;
    bool taken = core->leader == 0;
    if (taken)
        core->leader = me;
    pthread_mutex_unlock(&core->gate);
    return taken;
}

bool core_leave_lead(struct core *core)
{
    pthread_mutex_lock(&core->gate);
    core->leader = 0;
    bool asked = core->first != NULL && core->first != core->put_off;
    pthread_cond_signal(&core->free);
    pthread_mutex_unlock(&core->gate);
    return asked;
}

/* -- what was asked for ---------------------------------------------------------------------- */

struct all_reduce *core_first(struct core *core)
{
    pthread_mutex_lock(&core->gate);
    struct all_reduce *first = core->first;
    pthread_mutex_unlock(&core->gate);
    return first;
}

void core_drop_first(struct core *core)
{
    pthread_mutex_lock(&core->gate);
    core->first = core->first->next;
    core->put_off = NULL;
    pthread_mutex_unlock(&core->gate);
}

void core_put_off(struct core *core)
{
    core->put_off = core_first(core);
}

bool core_start(struct core *core)
{
    struct all_reduce *asked;
    bool begun = true;
    while (begun && (asked = core_first(core)) != NULL) {
        begun = flight_begin(core->flight, asked, seconds());
        if (begun)
            core_drop_first(core);
    }
    loop_refill(core->loop);
    return begun;
}

/* Has what is new in a struct that may have been used before say so. False: it asks for nothing that
 * a reducer knows. */
static bool prepare(struct all_reduce *asked)
{
    asked->next = NULL;
    asked->sequence = -1;
    if (asked->owner != NULL)
        return true; /* Python has checked it */
    asked->call = 0; /* others would be taken for Python's */
    asked->begun = seconds();
    asked->unready = false;
    atomic_store(&asked->state, ALL_REDUCE_PENDING);
    return asked->dtype >= 1 && asked->dtype <= DTYPE_LAST && asked->op >= 1 &&
           asked->op <= OP_LAST && dtype_defines(asked->dtype, asked->op) &&
           asked->nbytes % dtype_itemsize(asked->dtype) == 0;
}

enum core_submitted core_submit(struct core *core, struct all_reduce *asked)
{
    if (!prepare(asked))
        return CORE_REFUSED;
    pthread_mutex_lock(&core->gate);
    bool closed = atomic_load(&core->closed), alone = core->first == NULL;
    bool leads = !closed && core->leader == 0;
    if (!closed && alone)
        core->first = core->last = asked;
    else if (!closed)
        core->last = core->last->next = asked;
    if (leads)
        core->leader = this_thread();
    pthread_mutex_unlock(&core->gate);
    if (closed)
        return CORE_CLOSED;
    if (!leads) {
        if (alone) /* otherwise whoever leads was woken already */
            loop_wake(core->loop);
        return CORE_BEGUN;
    }
    bool begun, more;
    do {
        begun = core_start(core);
        more = core_leave_lead(core); /* who has asked since then has left it to this thread */
    } while (begun && more && core_take_lead(core, 0));
    if (begun)
        return CORE_BEGUN;
    loop_resume(core->loop, true);
    return CORE_ASKED;
}

enum all_reduce_state core_test(const struct all_reduce *asked)
{
    return (enum all_reduce_state)atomic_load(&asked->state);
}

void core_call(struct core *core)
{
    atomic_store(&core->called, true);
    loop_wake(core->loop);
}

void core_close(struct core *core)
{
    pthread_mutex_lock(&core->gate);
    atomic_store(&core->closed, true);
    pthread_mutex_unlock(&core->gate);
}

/* -- whoever has the lead -------------------------------------------------------------------- */

bool core_run(struct core *core, const struct all_reduce *asked, double until)
{
    struct flight *flight = core->flight;
    if (core->event != LOOP_IDLE || flight->completed != NULL)
        return true; /* the session has yet to hear of that */
    while (!atomic_exchange(&core->called, false)) {
        const struct all_reduce *first = core_first(core);
        if (first != NULL && first != core->put_off && !core_start(core))
            return true;
        double wakes_at = fmin(until, fmin(core->due, flight->earliest));
        double left_s = fmin(wakes_at - seconds(), IDLE_S);
        core->event = loop_run(core->loop, left_s > 0 ? (long)ceil(left_s * 1000) : 0);
        bool interrupted = core->loop->interrupted, ended = flight_end_unowned(flight, seconds());
        core->loop->interrupted = false;
        if (core->event != LOOP_IDLE || core->loop->changes || !ended || interrupted)
            return true;
        double now = seconds();
        if (now >= fmin(core->due, flight->earliest))
            return true;
        if (now >= until || (asked != NULL && core_test(asked) != ALL_REDUCE_PENDING))
            return false;
    }
    return true;
}

void core_lead(struct core *core, const struct all_reduce *asked, double until)
{
    pthread_mutex_lock(&core->gate);
    bool wanted = core->waiting > 0 || atomic_load(&core->closed); /* by who does what is unusual */
    pthread_mutex_unlock(&core->gate);
    if (wanted || core_test(asked) != ALL_REDUCE_PENDING || !core_take_lead(core, 0))
        return;
    bool needed = core_run(core, asked, until);
    if (core_leave_lead(core) || needed || core->flight->active > 0)
        loop_resume(core->loop, true); /* the driver's thread does what is left */
}
