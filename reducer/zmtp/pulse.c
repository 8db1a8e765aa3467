#include "pulse.h"

#include <errno.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

static void *run(void *argument)
{
    struct pulse *pulse = argument;
    pthread_mutex_lock(&pulse->lock);
    while (!pulse->stopping) {
        struct timespec at;
        clock_gettime(CLOCK_MONOTONIC, &at);
        uint64_t ns = (uint64_t)at.tv_nsec + pulse->every_ns;
        at.tv_sec += (time_t)(ns / UINT64_C(1000000000));
        at.tv_nsec = (long)(ns % UINT64_C(1000000000));
        if (pthread_cond_timedwait(&pulse->stop, &pulse->lock, &at) == ETIMEDOUT)
            pulse->beat(pulse->of);
    }
    pthread_mutex_unlock(&pulse->lock);
    return NULL;
}

bool pulse_start(struct pulse *pulse, uint64_t every_ns, void (*beat)(void *of), void *of)
{
    *pulse = (struct pulse){.every_ns = every_ns, .beat = beat, .of = of, .process = getpid()};
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
