/* The compiled loop of a worker: poll, receive, copy into the buffer, refill, without the GIL.
 *
 * It takes healthy results by itself; whatever else comes makes it return. One thread at a time runs
 * it and uses its connections. Any thread may wake it. A thread of its own sends heartbeats, so that
 * reducers hear of this worker whatever holds the GIL.
 */
#ifndef WORKER_LOOP_H
#define WORKER_LOOP_H

#include "reducer/zmtp/connection.h"
#include "reducer/zmtp/heartbeat.h"
#include "worker_client/protocol/flight.h"

enum loop_event {
    LOOP_IDLE,    /* the time is up, it was woken, or operations have completed */
    LOOP_MESSAGE, /* the line `from` has a message for the session: see loop_next */
    LOOP_CHANGE,  /* a connection was made or has ended: see `changed` of the lines */
    LOOP_FAILED   /* the kernel refused to poll; `error` says why */
};

/* One connection to a reducer, or none: the main one of a link, or one of its further streams. */
struct loop_line {
    uint32_t link;                 /* of the flight */
    uint32_t next;                 /* line of the same link, around */
    struct connection *connection; /* NULL: there is none */
    bool carries; /* contributions may be sent over it */
    uint32_t picked; /* of a main line: over which the latest one was */
    bool changed; /* it became ready, or has ended, and nobody has been told */
    uint64_t awaited_ns; /* since when */
    bool late;     /* they did not come in time: until the next message, any count */
};

struct loop {
    struct flight *flight;
    uint32_t lines, links;
    struct loop_line *line;
    uint32_t *main; /* of every link, its first line */
    int epoll, waker, resumer; /* eventfds but for the first */
    atomic_bool woken;
    atomic_bool running; /* a thread is in loop_run */
    atomic_uint turns;   /* how often one has come there or left */
    atomic_bool resumed; /* loop_rest is to return at once */
    uint32_t turn;    /* the line that is next to be received from */
    uint32_t from;    /* the line of the message at hand */
    bool changes;     /* some line has changed */
    bool interrupted; /* by a signal, while it waited: Python is to handle it */
    int error;
    uint64_t polled_ns; /* when the sockets were last looked at */
    uint64_t low_water_due_ns; /* when low water marks are looked at next; 0: there are none */
    struct heartbeat_timer heartbeat; /* held while connections are used, but not while the loop waits */
    uint64_t heartbeat_every_ns;
    uint64_t heartbeat_sent_ns;      /* when heartbeats were last sent */
    uint64_t paused_ns, resumed_ns;  /* the latest pause of the process, and when it ended */
};

/* False, with errno: out of files, memory or threads. */
bool loop_init(struct loop *loop, struct flight *flight, uint64_t every_ns);
/* Gives what has yet to be sent so much time, then ends everything. May be called again; meanwhile and
 * afterwards others may wake it, which does nothing. */
void loop_end(struct loop *loop, long linger_ms);
/* Ends it, when nobody has it any more. */
void loop_free(struct loop *loop);

/* Adds a line, without a connection: that of the next link of the flight, or a further stream of an
 * earlier link, or one apart, over which another one is to go on. False: out of memory. */
bool loop_add(struct loop *loop, uint32_t link, bool apart);
/* Begins to speak over a socket, which the caller closes after loop_close. False, with errno. */
bool loop_open(struct loop *loop, uint32_t line, int fd, const struct curve_keys *keys);
/* Begins to speak over a channel, whose other end is a reducer's of this process. False, with errno: the
 * channel was left. */
bool loop_attach(struct loop *loop, uint32_t line, struct channel *channel);
/* Has a further stream carry contributions, as the reducer agrees to. */
void loop_carry(struct loop *loop, uint32_t line);
/* Keeps a line's connection when its socket breaks. */
void loop_make_resumable(struct loop *loop, uint32_t line);
/* Has a line's connection go on over the socket of the line `successor`, which is closed; the reducer has
 * read `from` bytes. False: that is not possible. */
bool loop_resume_over(struct loop *loop, uint32_t line, uint32_t successor, uint64_t from);
/* Has a line's connection end, if it has one, when all that came over it is read. */
void loop_break(struct loop *loop, uint32_t line);
/* For how long the process did not run before it ran again, within the last second; 0 if it did. A
 * thread that waits for the GIL is none of this: heartbeats go on meanwhile. */
uint64_t loop_paused_ns(struct loop *loop);
/* What a line's connection, which there is, has come to, and errno if it has broken: a heartbeat may
 * break it at any time. */
enum connection_state loop_state(struct loop *loop, uint32_t line, int *error);
/* Drops a line's connection, if it has one, with all that it has not sent. */
void loop_close(struct loop *loop, uint32_t line);

enum loop_event loop_run(struct loop *loop, long timeout_ms);
/* Lets go of the message that LOOP_MESSAGE has told of. */
void loop_next(struct loop *loop);
/* Sends a message; the payload is copied. False: there is no connection, or no memory. */
bool loop_send(struct loop *loop, uint32_t line, const void *header, const void *payload,
               size_t nbytes);
/* Sends what all windows have room for. */
void loop_refill(struct loop *loop);
/* Reads the buffer of an all-reduce no more. False: out of memory. */
bool loop_detach(struct loop *loop, uint64_t sequence);
void loop_wake(struct loop *loop);

/* Returns when no thread has run the loop for a while, and after loop_resume: without the GIL, which
 * those that run it in turn would have to give up. It looks after the first time, then after times
 * twice as long each, up to the longest between runs, and up to that of one run while it lasts; and
 * again after the first, if none runs it just then. */
void loop_rest(struct loop *loop, int first_ms, int longest_ms, int longest_of_one_ms);
/* At once, or once it has looked again after the first time. */
void loop_resume(struct loop *loop, bool at_once);

#endif
