/* The compiled loop of a worker: poll, receive, copy into the buffer, refill, without the GIL.
 *
 * It takes healthy results by itself; whatever else comes makes it return. One thread runs it and
 * owns the sockets; any thread may wake it.
 */
#ifndef WORKER_LOOP_H
#define WORKER_LOOP_H

#include <poll.h>

#include "worker_client/protocol/flight.h"
#include "reducer/libzmq.h"

enum loop_event {
    LOOP_QUIET,   /* the time is up, it was woken, or operations have completed */
    LOOP_MESSAGE, /* `frames` hold a message of `link` for the session */
    LOOP_CHANGE,  /* a monitor has something to say */
    LOOP_FAILED   /* libzmq refused; last_errno says why */
};

struct loop {
    struct libzmq zmq;
    struct flight *flight;
    uint32_t links;
    void **sockets; /* one DEALER per link */
    /* Per link: whether it may hold a message of which its descriptor tells nothing. Whatever is
     * done with a socket may take in the news that made the descriptor readable. */
    bool *ready;
    bool added; /* a link, whose monitor has to be looked at once before its descriptor tells */
    struct pollfd *items; /* the waker's pipe, then per link its socket's and its monitor's */
    int pipe_read, pipe_write;
    atomic_bool woken;
    uint64_t polled_ns; /* when the descriptors were last looked at */
    uint32_t turn;      /* the link that is next to be received from */
    uint32_t link;
    int received; /* frames of the message at hand, at most 3 */
    zmq_msg_t frames[2];
};

/* False, with errno: out of files. */
bool loop_init(struct loop *loop, const struct libzmq *zmq, struct flight *flight);
/* Gives the next link of the flight its socket and the descriptors (ZMQ_FD) of that and of its
 * monitor. False: out of memory. */
bool loop_add(struct loop *loop, void *socket, int socket_fd, int monitor_fd);
/* Gives a link another socket. */
void loop_replace(struct loop *loop, uint32_t link, void *socket, int socket_fd, int monitor_fd);
void loop_free(struct loop *loop);

enum loop_event loop_run(struct loop *loop, long timeout_ms);
/* Frees the message that LOOP_MESSAGE has left. */
void loop_close_message(struct loop *loop);
/* Sends what all windows have room for. */
void loop_refill(struct loop *loop);
/* Says that somebody else has sent over a link: libzmq may have taken note then of messages that its
 * descriptor tells no more. */
void loop_touch(struct loop *loop, uint32_t link);
void loop_wake(struct loop *loop);

#endif
