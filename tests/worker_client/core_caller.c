/* A program without Python: it asks a worker's core for all-reduces from a thread of its own. */
#include <pthread.h>
#include <stdlib.h>

#include "worker_client/runtime/core.h"

enum { AHEAD = 8 };

struct job {
    const struct core_calls *calls;
    float *data;
    uint64_t count, elements;
    int leads; /* it moves bytes itself; else it only looks */
    uint64_t done, failed;
};

static void *run(void *argument)
{
    struct job *job = argument;
    struct all_reduce *asked = calloc(job->count, sizeof *asked);
    for (uint64_t at = 0; at < job->count; at++) {
        asked[at] = (struct all_reduce){
            .data = job->data + at * job->elements,
            .nbytes = job->elements * sizeof(float),
            .timeout_s = 20,
            .dtype = 1,
            .op = 1,
        };
        enum core_submitted how = job->calls->submit(job->calls->core, &asked[at]);
        if (how == CORE_CLOSED || how == CORE_REFUSED) {
            job->failed += job->count - at;
            job->count = at;
            break;
        }
        while (at >= AHEAD && job->calls->test(&asked[at - AHEAD]) == ALL_REDUCE_PENDING)
            if (job->leads)
                job->calls->lead(job->calls->core, &asked[at - AHEAD], (double)now_ns() / 1e9);
    }
    for (uint64_t at = 0; at < job->count; at++) {
        enum all_reduce_state state;
        while ((state = job->calls->test(&asked[at])) == ALL_REDUCE_PENDING)
            if (job->leads)
                job->calls->lead(job->calls->core, &asked[at], (double)now_ns() / 1e9 + 0.01);
        job->done += state == ALL_REDUCE_DONE;
        job->failed += state == ALL_REDUCE_FAILED;
    }
    free(asked);
    return NULL;
}

/* Sums so many arrays in turn in a new thread, and returns how many were, or -1: some failed. */
long reduce(const struct core_calls *calls, float *data, uint64_t count, uint64_t elements, int leads)
{
    struct job job = {calls, data, count, elements, leads, 0, 0};
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, &job) != 0)
        return -2;
    pthread_join(thread, NULL);
    return job.failed > 0 ? -1 : (long)job.done;
}
