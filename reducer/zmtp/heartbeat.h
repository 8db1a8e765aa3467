/* A thread that does a small thing when it is due, whatever holds Python's GIL: heartbeats. */
#ifndef REDUCER_HEARTBEAT_H
#define REDUCER_HEARTBEAT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

/* Of the clock by which everything here is due. */
static inline uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

struct heartbeat_timer {
    pthread_mutex_t lock; /* held during a heartbeat, and by whoever uses what it uses */
    pthread_cond_t stop;
    pthread_t thread;
    bool runs, stopping;
    uint64_t (*send)(void *of, uint64_t now_ns); /* returns when it is due next, as CLOCK_MONOTONIC */
    void *of;
    pid_t process; /* that started it: a forked child has no such thread */
};

/* False, with errno: there are too many threads. */
bool heartbeat_start(struct heartbeat_timer *timer, uint64_t (*send)(void *of, uint64_t now_ns),
                     void *of);
/* Ends it; the lock is gone then. May be called again, and in a forked child, where it does nothing.
 * Returns whether it ran. */
bool heartbeat_stop(struct heartbeat_timer *timer);

static inline void heartbeat_lock(struct heartbeat_timer *timer)
{
    if (timer->runs)
        pthread_mutex_lock(&timer->lock);
}

static inline void heartbeat_unlock(struct heartbeat_timer *timer)
{
    if (timer->runs)
        pthread_mutex_unlock(&timer->lock);
}

#endif
