#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include "failpoints.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

enum action { NOTHING, KILL, STOP, DELAY, DROP }; /* the values of `Action` in failpoints.py */

bool failpoints_armed;

static struct {
    enum action action;
    uint64_t delay_ns, at;
    atomic_uint_fast64_t passes; /* of all threads */
} table[FAILPOINTS];

void failpoints_disarm(void)
{
    failpoints_armed = false;
    for (int place = 0; place < FAILPOINTS; place++)
        table[place].action = NOTHING;
}

void failpoint_arm(enum failpoint place, int action, uint64_t delay_ns, uint64_t at)
{
    table[place].action = (enum action)action;
    table[place].delay_ns = delay_ns;
    table[place].at = at;
    atomic_store(&table[place].passes, 0);
    failpoints_armed = true;
}

static void rest(uint64_t delay_ns)
{
    struct timespec left = {.tv_sec = (time_t)(delay_ns / 1000000000),
                            .tv_nsec = (long)(delay_ns % 1000000000)};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

bool failpoint_pass(enum failpoint place)
{
    if (table[place].action == NOTHING)
        return false;
    uint64_t pass = atomic_fetch_add(&table[place].passes, 1) + 1;
    if (table[place].at != 0 && table[place].at != pass)
        return false;
    if (table[place].delay_ns > 0)
        rest(table[place].delay_ns);
    /* To this thread: one that is sent to the process may let it run on before it stops. */
    if (table[place].action == KILL)
        raise(SIGKILL);
    if (table[place].action == STOP)
        raise(SIGSTOP);
    return table[place].action == DROP;
}

bool failpoint_pass_message(enum failpoint place, const void *frame, size_t nbytes, uint8_t type)
{
    struct header said;
    return header_read(&said, frame, nbytes) && said.type == type && failpoint_pass(place);
}
