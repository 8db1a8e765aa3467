/* One connection that speaks ZMTP, over TCP or within this process: the thin edge around the codec.
 *
 * It reads messages of one or two frames, the header of the wire protocol and a payload, and sends
 * such messages from the caller's memory. The socket does not block; who owns the connection polls
 * it, and says when it may be read or written.
 *
 * Within a process there is a channel in place of the sockets; the bytes are the same.
 *
 * A resumable connection outlives its socket: when that breaks, both ends go on over another one,
 * each from the byte that the other has read last.
 *
 * Only the functions below write to the struct.
 */
#ifndef REDUCER_CONNECTION_H
#define REDUCER_CONNECTION_H

#include "block.h"
#include "channel.h"
#include "reducer/wire/header.h"
#include "zmtp.h"

enum {
    CONNECTION_IN_BYTES = 8 << 10, /* read at once while messages are small */
    CONNECTION_SMALL_BYTES = ZMTP_COMMAND_BYTES + 64, /* commands, and frames before a payload */
    CONNECTION_HEAD_BYTES = 2 * ZMTP_HEADER_BYTES + HEADER_BYTES,
    LOW_WATER_BYTES = 256 << 10 /* at most: more would leave the caches before it is read */
};

/* connection.c has the table of what follows what. */
enum connection_state {
    CONNECTING, /* TCP's handshake is not done */
    HANDSHAKE,  /* ZMTP's is not */
    OPEN,
    SUSPENDED,  /* its socket has broken, and there may be another one */
    CLOSING,    /* nothing is sent any more; what has come is still read */
    CLOSED      /* nor is anything read */
};

/* What there may be to read, as far as the poll and earlier reads tell. */
enum connection_input {
    INPUT_NONE,
    INPUT_SOME,
    INPUT_TO_END /* the peer sends no more: there is an end to be read */
};

/* What a connection and its socket are to each other. */
enum connection_bond {
    BOUND,     /* it ends with its socket */
    RESUMABLE, /* what the peer's kernel has not acknowledged stays in the queue, for another socket */
    LENDING    /* what follows in its socket is another connection's: it says nothing by itself */
};

enum connection_event {
    CONNECTION_IDLE,    /* there is nothing more for now */
    CONNECTION_BUSY,    /* much has come that is no event; there may be more: others first */
    CONNECTION_ADMIT,   /* a peer shows its key: connection_admit, then read on */
    CONNECTION_READY,   /* the handshake is done */
    CONNECTION_MESSAGE, /* `message` holds one, until connection_next */
    CONNECTION_SUSPENDED, /* the socket of a resumable one has broken: connection_resume, or it must end */
    CONNECTION_ENDED    /* `error` and zmtp.fault say why; neither: the peer has closed it */
};

/* What has come. A message that cannot be one of ours has no header. */
struct message {
    unsigned frames;
    bool foreign;           /* more than two frames, or a first one that is not a header's size */
    unsigned char header[HEADER_BYTES];
    struct block *payload;  /* NULL: there is no second frame, or */
    size_t placed_bytes;    /* so much of one was read to where `place` has said */
};

/* What is to be sent: the first bytes, and then a payload that lies elsewhere. */
struct outgoing {
    unsigned char head[CONNECTION_HEAD_BYTES];
    size_t head_bytes;
    const unsigned char *body;
    size_t body_bytes;
    struct block *block; /* that holds the body; NULL: it is in the caller's memory */
    uint64_t sequence;   /* the all-reduce whose buffer that is */
};

struct connection {
    int fd;
    struct channel *channel; /* NULL: fd is a socket */
    unsigned side;           /* of the channel */
    int error;               /* errno of a call that has failed, 0 if none has */
    enum connection_state state;
    enum connection_state reached; /* the furthest of the first three states */
    enum connection_bond bond;
    enum connection_input readable;
    bool writable;
    int low_water;          /* bytes that must have come before the poll tells of them; 0: any */
    struct zmtp zmtp;
    struct block_pool *pool; /* of payloads */
    /* Where a payload of this size goes, whose message's header has come; NULL: into a block. Asked
     * only where payloads are not encrypted; NULL itself: they all go into blocks. */
    unsigned char *(*place)(void *owner, uint32_t number, const unsigned char *header, size_t nbytes);
    void *owner;
    uint32_t number;
    uint64_t most_bytes;     /* that a payload's frame may have; less than the codec's limit, perhaps */
    struct message message;

    /* Input: what was read ahead, and the frame at hand. */
    size_t at, end;         /* within `in` */
    size_t left;            /* of the body at hand, that has not come */
    bool in_frame;
    bool large;             /* the latest payload was */
    unsigned char *into;    /* where the rest of the body goes */
    struct block *body;     /* that this is in; NULL: it is in `small` */
    uint64_t bytes_read;

    /* Output, in the order of sending; of a resumable connection also what was sent last. */
    struct outgoing *queue;
    size_t first, count, mask; /* mask: places - 1 */
    size_t sent;               /* bytes from the first one on: */
    size_t sent_whole, sent_part; /* so many whole ones, and bytes of the one behind them */
    size_t ask_bytes;          /* a resumable one asks what was acknowledged when so many were sent */
    uint64_t bytes_written, bytes_queued;
    uint64_t written_at_heartbeat; /* of bytes_written: at the latest heartbeat */

    unsigned char in[CONNECTION_IN_BYTES];
    unsigned char small[CONNECTION_SMALL_BYTES];
};

/* Begins the handshake over a socket, which need not be connected yet, and does not block.
 * False: out of memory. The caller closes the socket after connection_free. */
bool connection_init(struct connection *connection, int fd, bool server,
                     const struct curve_keys *keys, uint64_t max_frame_bytes,
                     struct block_pool *pool);
/* Makes this connection an end of a channel, which it leaves in connection_free. It must have no keys, and
 * its socket must be `fd` of that end. */
void connection_attach(struct connection *connection, struct channel *channel, unsigned side);
void connection_free(struct connection *connection);
/* Says where payloads go; see `place`. */
void connection_place(struct connection *connection,
                      unsigned char *(*place)(void *owner, uint32_t number,
                                              const unsigned char *header, size_t nbytes),
                      void *owner, uint32_t number);
/* Says how large a payload's frame may be. */
void connection_limit(struct connection *connection, uint64_t most_bytes);

/* Takes note of what epoll says of the socket, as an edge. */
void connection_note(struct connection *connection, uint32_t events);
/* Reads on to the next event. */
enum connection_event connection_read(struct connection *connection);
/* Has it read, whatever the poll has told: that may wait for more than has come. */
void connection_look(struct connection *connection);
/* The answer to CONNECTION_ADMIT. */
void connection_admit(struct connection *connection, bool admitted);
/* Lets go of the message at hand. */
void connection_next(struct connection *connection);
/* The same, but for its payload, which the caller has now. */
void connection_hand_over(struct connection *connection);

/* Queues a message. With a block, or encrypted, nothing is read from the caller's memory after this;
 * else `payload` must live until it is sent, and if the connection is resumable until the peer's kernel
 * has it, or connection_detach. NULL: one frame. False: out of memory, or nothing can be sent any more. */
bool connection_send(struct connection *connection, const void *header, const void *payload,
                     size_t nbytes, struct block *block, uint64_t sequence);
/* Sends a heartbeat, or some of what waits; nothing if the peer has been sent something since the
 * latest call: to be called twice in the time that may pass between two signs of life. Another thread
 * than that of the connection may call this, under one lock with it: blocks, and their pool, are left
 * alone. */
void connection_send_heartbeat(struct connection *connection);
/* Sends what the kernel takes now. That it cannot any more is told when all that came is read. */
void connection_flush(struct connection *connection);
/* Has it end, for the reason that errno would give, when all that came is read. */
void connection_break(struct connection *connection, int error);
/* Has it end at the next read: nothing more is heard from the peer. */
void connection_refuse(struct connection *connection);

/* Makes an open connection resumable. A channel, which cannot break, stays as it is. */
void connection_make_resumable(struct connection *connection);
/* Says nothing more over the socket by itself: what is sent there after this is another connection's. */
void connection_lend(struct connection *connection);
/* Whether a resumable connection can go on where the peer has read `from` bytes. */
bool connection_can_resume(const struct connection *connection, uint64_t from);
/* Whether a connection is between two messages, of which it has sent all: another one can have its
 * socket. */
bool connection_is_between(const struct connection *connection);
/* Goes on over the socket of a fresh connection, which is between two messages and closed afterwards;
 * the caller frees it. The peer has read `from` bytes. The socket's number in this process is that of
 * the former one, and the caller has it polled anew. False, with nothing done: one of them cannot do
 * that. */
bool connection_resume(struct connection *connection, struct connection *successor, uint64_t from);
/* Bytes that are queued and with no kernel yet. */
uint64_t connection_unsent(const struct connection *connection);

/* Sends what the kernel takes, at the end of everything, and drops what has come meanwhile: a socket
 * that is closed with something unread drops what it has to send. Whether something is left. */
bool connection_drain(struct connection *connection);

/* Copies what is queued of an all-reduce, and has not been sent (if resumable: acknowledged), and reads
 * no more of its results in their place. False: out of memory. */
bool connection_detach(struct connection *connection, uint64_t sequence);

/* Has the poll tell of input when so many bytes have come, or LOW_WATER_BYTES: fewer wake-ups. 0: when
 * any have. They must be on their way, or the owner must look by itself. */
void connection_await(struct connection *connection, size_t nbytes);
/* The same for the rest of a large payload that has come in part: nothing can be done with a part. */
void connection_await_rest(struct connection *connection);
/* Bytes that were queued, and that the peer's kernel has not acknowledged; UINT64_MAX if nothing is
 * sent before there is another socket. Not of a channel. */
uint64_t connection_backlog(const struct connection *connection);
/* Bytes that have come, read or not. */
uint64_t connection_came(const struct connection *connection);
/* Whether there may be more to read, as much as is waited for, which has not been. */
bool connection_awaits(const struct connection *connection);
/* Bytes that have come of a message that is not whole, but for those of frames' headers. */
size_t connection_partial(const struct connection *connection);
/* Bytes of the next message, if its payload has `nbytes`, that have not come, but for those of
 * frames' headers; to be asked when connection_read has found nothing more. */
size_t connection_wants(const struct connection *connection, size_t nbytes);

#endif
