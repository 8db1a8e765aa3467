#include "pulse.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

static const uint64_t SECOND_NS = 1000 * 1000 * 1000;
static const uint64_t PAUSE_NS = 100 * 1000; /* at least, for those who wait for the lock */

static void *run(void *argument)
{
    struct pulse *pulse = argument;
    pthread_mutex_lock(&pulse->lock);
    while (!pulse->stopping) {
        uint64_t now = now_ns();
        uint64_t due = pulse->beat(pulse->of, now);
        if (due < now + PAUSE_NS)
            due = now + PAUSE_NS;
        struct timespec at = {(time_t)(due / SECOND_NS), (long)(due % SECOND_NS)};
        pthread_cond_timedwait(&pulse->stop, &pulse->lock, &at);
    }
    pthread_mutex_unlock(&pulse->lock);
    return NULL;
}

bool pulse_start(struct pulse *pulse, uint64_t (*beat)(void *of, uint64_t now_ns), void *of)
{
    *pulse = (struct pulse){.beat = beat, .of = of, .process = getpid()};
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&pulse->stop, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&pulse->lock, NULL);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for threads that run Python */
    errno = pthread_create(&pulse->thread, NULL, run, pulse);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pulse->runs = errno == 0;
    return pulse->runs;
}

bool pulse_stop(struct pulse *pulse)
{
    if (!pulse->runs || pulse->process != getpid())
        return false;
    pthread_mutex_lock(&pulse->lock);
    pulse->stopping = true;
    pthread_cond_signal(&pulse->stop);
    pthread_mutex_unlock(&pulse->lock);
    pthread_join(pulse->thread, NULL);
    pulse->runs = false;
    pthread_cond_destroy(&pulse->stop);
    pthread_mutex_destroy(&pulse->lock);
    return true;
}
