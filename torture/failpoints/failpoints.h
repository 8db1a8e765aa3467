/* The table of failpoints of one extension module, which `arm_module` fills in.
 *
 * One source of each module includes this, through reducer/failpoints.h. Unset, a place costs one
 * branch on one flag.
 */
#ifndef TORTURE_FAILPOINTS_H
#define TORTURE_FAILPOINTS_H

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#include "reducer/wire/header.h"

/* In the order of `Place` in __init__.py. */
enum failpoint {
    REDUCER_RECEIVED,
    REDUCER_PLACED,
    REDUCER_BEFORE_SUM,
    REDUCER_AFTER_SUM,
    REDUCER_BETWEEN_RESULTS,
    REDUCER_AFTER_RESULTS,
    REDUCER_WELCOME,
    REDUCER_TICK,
    WORKER_BEFORE_SEND,
    WORKER_AFTER_SEND,
    WORKER_RECEIVED,
    WORKER_COPIED,
    WORKER_COMPLETED,
    WORKER_HELLO,
    FAILPOINTS
};

enum action { NOTHING, KILL, STOP, DELAY, DROP }; /* the values of `Action` in __init__.py */

static bool failpoints_armed;

static struct {
    enum action action;
    uint64_t delay_ns, at;
    atomic_uint_fast64_t passes; /* of all threads */
} failpoint_table[FAILPOINTS];

/* This and `failpoint_arm` go before the threads that pass any place start. */
void failpoints_disarm(void)
{
    failpoints_armed = false;
    for (int place = 0; place < FAILPOINTS; place++)
        failpoint_table[place].action = NOTHING;
}

/* `at`: the pass that counts, 0 for every one. */
void failpoint_arm(int place, int action, uint64_t delay_ns, uint64_t at)
{
    failpoint_table[place].action = (enum action)action;
    failpoint_table[place].delay_ns = delay_ns;
    failpoint_table[place].at = at;
    atomic_store(&failpoint_table[place].passes, 0);
    failpoints_armed = true;
}

/* Passes a place; whether what is about to be sent or handled there is to be dropped. */
bool failpoint_pass(int place)
{
    if (failpoint_table[place].action == NOTHING)
        return false;
    uint64_t pass = atomic_fetch_add(&failpoint_table[place].passes, 1) + 1;
    if (failpoint_table[place].at != 0 && failpoint_table[place].at != pass)
        return false;
    uint64_t delay_ns = failpoint_table[place].delay_ns;
    struct timespec left = {(time_t)(delay_ns / 1000000000), (long)(delay_ns % 1000000000)};
    while (delay_ns > 0 && nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
    /* To this thread: one that is sent to the process may let it run on before it stops. */
    if (failpoint_table[place].action == KILL)
        raise(SIGKILL);
    if (failpoint_table[place].action == STOP)
        raise(SIGSTOP);
    return failpoint_table[place].action == DROP;
}

static inline bool failpoint(enum failpoint place)
{
    return __builtin_expect(failpoints_armed, false) && failpoint_pass(place);
}

/* The same, if the message that this header begins is of that type. */
static inline bool failpoint_message(enum failpoint place, const void *frame, size_t nbytes,
                                     uint8_t type)
{
    struct header said;
    return __builtin_expect(failpoints_armed, false) && header_read(&said, frame, nbytes) &&
           said.type == type && failpoint_pass(place);
}

#endif
