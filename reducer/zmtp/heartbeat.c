#include "heartbeat.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

static const uint64_t SECOND_NS = 1000 * 1000 * 1000;
static const uint64_t PAUSE_NS = 100 * 1000; /* at least, for those who wait for the lock */

static void *run(void *argument)
{
    struct heartbeat_timer *timer = argument;
    pthread_mutex_lock(&timer->lock);
    while (!timer->stopping) {
        uint64_t now = now_ns();
        uint64_t due = timer->send(timer->of, now);
        if (due < now + PAUSE_NS)
            due = now + PAUSE_NS;
        struct timespec at = {(time_t)(due / SECOND_NS), (long)(due % SECOND_NS)};
        pthread_cond_timedwait(&timer->stop, &timer->lock, &at);
    }
    pthread_mutex_unlock(&timer->lock);
    return NULL;
}

bool heartbeat_start(struct heartbeat_timer *timer, uint64_t (*send)(void *of, uint64_t now_ns),
                     void *of)
{
    *timer = (struct heartbeat_timer){.send = send, .of = of, .process = getpid()};
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&timer->stop, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&timer->lock, NULL);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for threads that run Python */
    errno = pthread_create(&timer->thread, NULL, run, timer);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    timer->runs = errno == 0;
    return timer->runs;
}

bool heartbeat_stop(struct heartbeat_timer *timer)
{
    if (!timer->runs || timer->process != getpid())
        return false;
    pthread_mutex_lock(&timer->lock);
    timer->stopping = true;
    pthread_cond_signal(&timer->stop);
    pthread_mutex_unlock(&timer->lock);
    pthread_join(timer->thread, NULL);
    timer->runs = false;
    pthread_cond_destroy(&timer->stop);
    pthread_mutex_destroy(&timer->lock);
    return true;
}
