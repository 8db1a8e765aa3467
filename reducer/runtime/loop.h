/* The compiled loop of a reducer thread: accept, receive, place, sum, send, without the GIL.
 *
 * The twin of loop.py for what is healthy; the rest comes out as events for the engine. One thread
 * uses it. A thread of its own sends heartbeats, so that workers hear of this reducer whatever holds
 * the GIL.
 */
#ifndef REDUCER_LOOP_H
#define REDUCER_LOOP_H

#include "reducer/engine/slots.h"
#include "reducer/kernels/fold.h"
#include "reducer/zmtp/connection.h"
#include "reducer/zmtp/heartbeat.h"

enum { UNJOINED_BYTES = 16 << 10 }; /* the largest payload of a peer that has not been welcomed */

enum loop_event {
    LOOP_TIMEOUT,
    LOOP_MESSAGE,     /* `peer` has a message for the engine: see loop_next */
    LOOP_ADMIT,       /* `peer` has shown its key: see loop_admit */
    LOOP_ENDED,       /* the connection of `peer` has ended: see loop_forget */
    LOOP_UNREACHABLE, /* `lost` holds a peer that could not be sent to */
    LOOP_FAILED,      /* the kernel refused to poll; `error` says why */
    LOOP_OUT_OF_MEMORY
};

/* Connections that are served alike: those of members, before those of strangers. */
struct group {
    int epoll;
    struct peer *oldest, *latest; /* of all */
    struct peer *first, *last;    /* that may have something to receive, in turn */
};

/* One connection. */
struct peer {
    uint64_t key;               /* as of peer_key */
    uint64_t number;            /* from 1, in the order in which they came */
    uint64_t since_ns;          /* when it was accepted */
    struct group *group;
    struct peer *before, *after; /* in it, the oldest first */
    struct peer *next_stream;   /* another stream of the same link, around */
    struct peer *picked;        /* of these, the latest that a result was sent over */
    bool further;               /* it is not the link's first connection */
    struct peer *previous, *next; /* in the list of those to receive from; `next`: or to free */
    bool waits;                 /* it is in that list */
    bool announced;             /* the engine knows of it, and is to hear when it has ended */
    bool ended;                 /* it has, and is to be forgotten */
    uint64_t resume_ns;         /* for so long it may be suspended */
    uint64_t until_ns;          /* it is: until then, or given up; 0: it is not */
    uint64_t successor;         /* key of the peer whose socket it is to have; 0: there is none */
    uint64_t peer_read;         /* bytes that the worker has read of what it was sent */
    struct connection connection;
};

/* A connection that has come or gone. */
struct change {
    uint64_t number;
    int fd;
    bool came;
};

/* What has come over a connection, and what its peer makes this reducer hold; see transport.py. */
struct load {
    uint64_t read, unread, unsent; /* bytes */
    bool waits;                    /* there may be more to read */
};

struct loop {
    int listener;
    struct group joined, unjoined; /* peers are unjoined until they are marked or attached */
    const struct fold_table *kernels;
    struct map members; /* by peer key: those of jobs where every rank is here */
    struct map rounds;  /* of the same members */
    struct map peers;   /* all connections, by peer key */
    struct peer *forgotten;    /* to be freed when nothing speaks of them any more */
    struct peer *peer;         /* of the event at hand */
    uint64_t accepted;
    uint64_t accept_again_ns;  /* for want of room none is accepted before; 0: there is no want */
    size_t max_first, max_open; /* connections that are no further streams, and all */
    size_t further, suspended; /* peers that are */
    struct change *changes;    /* that nobody has been told of */
    size_t change_count, change_room;
    const struct curve_keys *keys; /* the reducer's, if peers must have some */
    uint64_t max_frame_bytes, handshake_ns;
    struct peer *next_heartbeat; /* whose heartbeat is next; NULL: that of the oldest */
    uint64_t heartbeat_every_ns, heartbeat_due_ns; /* for all, and when the next are due */
    uint64_t expired_ns; /* when handshakes that take too long were looked for */
    uint64_t *lost;      /* peer keys: a member may be gone before anybody looks */
    size_t lost_count, lost_room;
    const void **inputs; /* scratch: of a fold */
    uint8_t *depths;     /* likewise, of leaves */
    size_t inputs_room;
    uint64_t contributions, results, bytes_in, bytes_out;
    uint64_t unfinished; /* handshakes that took too long, and were ended */
    uint64_t crowded_out; /* strangers that had to make way for others */
    int error;
    struct block_pool pool; /* of payloads */
    struct heartbeat_timer heartbeat; /* held while connections are used, but not while the loop waits */
    struct header resumed; /* what a worker is told whose connection goes on, but for the bytes */
};

/* Begins to accept connections. False, with errno: out of files or threads. */
bool loop_listen(struct loop *loop, int listener, uint64_t every_ns);
/* Makes a peer of a worker of this process, without a socket. Returns the channel whose other end is the
 * worker's; NULL, with errno. Any thread may call this, but not at the same time as loop_end. */
struct channel *loop_connect_inproc(struct loop *loop);
/* Gives what has yet to be sent so much time, then ends all connections. May be called again. */
void loop_end(struct loop *loop, long linger_ms);

/* Serves for `timeout_ms` or until something is for the engine. */
enum loop_event loop_run(struct loop *loop, long timeout_ms);
/* Lets go of the message that LOOP_MESSAGE has told of. */
void loop_next(struct loop *loop);
/* The answer to LOOP_ADMIT. */
void loop_admit(struct loop *loop, bool admitted);
/* Lets a peer send payloads of any size that the reducer takes: it is welcome. */
void loop_mark_joined(struct loop *loop, uint64_t peer);
/* Has results for a peer also go over the connection of another one, which is welcome as well; when
 * the first one ends, the other does. */
void loop_attach_stream(struct loop *loop, uint64_t peer, uint64_t stream);
/* Keeps a peer, and its further streams, for so long when its socket breaks. */
void loop_make_resumable(struct loop *loop, uint64_t peer, uint64_t resume_ns);
/* Whether a kept peer waits for another socket. */
bool loop_is_suspended(struct loop *loop, uint64_t peer);
/* The number of a peer's socket; -1: it has none. */
int loop_socket(struct loop *loop, uint64_t peer);
/* Has a kept peer go on over the socket of another one, which ends, as soon as all is read that came
 * before its own broke. The worker has read `peer_read` bytes; it is told how many were read of its own,
 * with `header`. If that is not possible, both end. */
void loop_resume_over(struct loop *loop, uint64_t peer, uint64_t successor, uint64_t peer_read,
                      const struct header *header);
/* Has a peer end if it is suspended: it will not be back. */
void loop_give_up(struct loop *loop, uint64_t peer);
/* Drops the connection that LOOP_ENDED has told of. */
void loop_forget(struct loop *loop);
/* Gives spare blocks back to the system, from which a job has ended: glibc would keep what lies
 * below memory in use. */
void loop_release_memory(struct loop *loop);
/* Sends a message; the payload is copied. False: that peer has no connection. */
bool loop_send(struct loop *loop, uint64_t peer, const void *header, const void *payload,
               size_t nbytes);

/* Returns false if that peer has no connection any more. */
bool loop_load(struct loop *loop, uint64_t peer, struct load *load);
/* Has a connection end, and nothing more read from it. False: it has gone. */
bool loop_hang_up(struct loop *loop, uint64_t peer);

/* One contribution, as loop_run takes it, with the payload. On COMPLETE, `result` is the reduction,
 * `header` its header, and the caller sends them to every member of the returned rounds. */
enum verdict loop_offer(struct loop *loop, uint64_t peer, const void *frame, size_t frame_bytes,
                        struct block *payload, uint64_t now_us, struct header *header,
                        struct block **result, struct rounds **rounds);

#endif
