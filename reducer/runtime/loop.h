/* The compiled loop of a reducer thread: receive, place, sum, send, without the GIL.
 *
 * The twin of loop.py for what is healthy; the rest comes out as events for the engine.
 */
#ifndef REDUCER_LOOP_H
#define REDUCER_LOOP_H

#include "reducer/kernels/fold.h"
#include "reducer/engine/slots.h"

enum { LOOP_FRAMES = 3 }; /* of a whole message: routing id, header, payload */

enum loop_event {
    LOOP_TIMEOUT,
    LOOP_MESSAGE,     /* `frames` hold a message for the engine */
    LOOP_UNREACHABLE, /* `lost` holds a member that could not be sent to */
    LOOP_FAILED,      /* libzmq refused; last_errno says why */
    LOOP_OUT_OF_MEMORY
};

struct loop {
    const struct libzmq *zmq;
    void *socket; /* ROUTER, with ROUTER_MANDATORY */
    int fd;       /* its descriptor, ZMQ_FD */
    const struct fold_table *kernels;
    struct map members; /* by peer key: those of jobs where every rank is here */
    struct map rounds;  /* of the same members */
    zmq_msg_t frames[LOOP_FRAMES];
    int received; /* frames of the message at hand; one more than LOOP_FRAMES if there were more */
    struct member **lost;
    size_t lost_count, lost_room;
    const void **inputs; /* scratch, world_size places */
    uint32_t inputs_room;
    size_t frame_extra; /* what encryption adds to each frame */
    uint64_t contributions, results, bytes_in, bytes_out;
};

/* Serves for `timeout_ms` or until something is for the engine. */
enum loop_event loop_run(struct loop *loop, long timeout_ms);

/* Closes the frames of the message at hand. */
void loop_close_message(struct loop *loop);

/* One contribution, as loop_run takes it. On COMPLETE, `result` is the reduction, `header` its
 * header, and the caller sends them to every member of the returned rounds. */
enum verdict loop_offer(struct loop *loop, uint64_t peer, const void *frame, size_t frame_bytes,
                        zmq_msg_t *payload, struct header *header, zmq_msg_t *result,
                        struct rounds **rounds);

#endif
