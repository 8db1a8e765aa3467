/* Failpoints: places at which a test makes this process die, stop or be slow; see failpoints.py.
 *
 * Each extension module has a table of its own. Unset, a place costs one branch on one flag.
 */
#ifndef REDUCER_FAILPOINTS_H
#define REDUCER_FAILPOINTS_H

#include "reducer/wire/header.h"

/* In the order of `Place` in failpoints.py. */
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

/* Hidden, so that it is read directly, and each module sees its own. */
extern bool failpoints_armed __attribute__((visibility("hidden")));

bool failpoint_pass(enum failpoint place);
bool failpoint_pass_message(enum failpoint place, const void *frame, size_t nbytes, uint8_t type);

/* Passes a place; whether what is about to be sent or handled there is to be dropped. */
static inline bool failpoint(enum failpoint place)
{
    return __builtin_expect(failpoints_armed, false) && failpoint_pass(place);
}

/* The same, if the message that this header begins is of that type. */
static inline bool failpoint_message(enum failpoint place, const void *frame, size_t nbytes,
                                     uint8_t type)
{
    return __builtin_expect(failpoints_armed, false) &&
           failpoint_pass_message(place, frame, nbytes, type);
}

/* Both before the threads that pass any place start. `action` as in `Action` of failpoints.py; `at`
 * is the pass that counts, 0 for every one. */
void failpoints_disarm(void);
void failpoint_arm(enum failpoint place, int action, uint64_t delay_ns, uint64_t at);

#endif
