#include "connection.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    GATHERED = 16,               /* messages that one system call sends */
    LARGE = CONNECTION_IN_BYTES, /* after such a payload only the next header is read ahead */
    ASKED = 16 << 10,            /* bytes at least, from one look at what was acknowledged to the next */
    SEALED_BYTES = 33,           /* that CURVE adds to a frame */
    PENDING_BYTES = 1 << 10,     /* a peer that asks on without reading is answered no more */
    FRAMES = 16,                 /* of a message; what is behind the second is dropped */
    READS = 16,                  /* without an event: a flood of PINGs has none, nor has an end */
    UNREAD = 256                 /* reads at the end, so that no peer goes on for ever */
};

/* What may happen to a connection. */
enum occurrence {
    CONNECTED, /* TCP's handshake is done */
    READY,     /* ZMTP's is */
    DETACHED,  /* the socket of a resumable one has come to its end */
    RESUMED,   /* it has another socket */
    BROKEN,    /* nothing can be sent any more, or is to be */
    ENDED,     /* nothing is read any more */
    OCCURRENCES
};

/* The states that follow. What says nothing of a state leaves it as it is. */
static const enum connection_state transitions[CLOSED + 1][OCCURRENCES] = {
    /*             CONNECTED  READY      DETACHED    RESUMED     BROKEN   ENDED */
    [CONNECTING] = {HANDSHAKE, OPEN,      CONNECTING, CONNECTING, CLOSING, CLOSED},
    [HANDSHAKE]  = {HANDSHAKE, OPEN,      HANDSHAKE,  HANDSHAKE,  CLOSING, CLOSED},
    [OPEN]       = {OPEN,      OPEN,      SUSPENDED,  OPEN,       CLOSING, CLOSED},
    [SUSPENDED]  = {SUSPENDED, SUSPENDED, SUSPENDED,  OPEN,       CLOSING, CLOSED},
    [CLOSING]    = {CLOSING,   CLOSING,   CLOSING,    CLOSING,    CLOSING, CLOSED},
    [CLOSED]     = {CLOSED,    CLOSED,    CLOSED,     CLOSED,     CLOSED,  CLOSED},
};

static void occur(struct connection *connection, enum occurrence occurrence)
{
    connection->state = transitions[connection->state][occurrence];
    if (connection->state <= OPEN)
        connection->reached = connection->state;
}

/* Whether what is queued can be sent now. */
static bool can_send(const struct connection *connection)
{
    return connection->state == HANDSHAKE || connection->state == OPEN;
}

bool connection_init(struct connection *connection, int fd, bool server,
                     const struct curve_keys *keys, uint64_t max_frame_bytes,
                     struct block_pool *pool)
{
    memset(connection, 0, sizeof *connection);
    connection->fd = fd;
    connection->pool = pool;
    connection->most_bytes = max_frame_bytes;
    connection->mask = 15;
    connection->queue = calloc(connection->mask + 1, sizeof *connection->queue);
    if (connection->queue == NULL)
        return false;
    if (server)
        occur(connection, CONNECTED);
    if (zmtp_init(&connection->zmtp, server, keys, max_frame_bytes))
        return true;
    free(connection->queue);
    connection->queue = NULL;
    return false;
}

static struct outgoing *first(struct connection *connection)
{
    return &connection->queue[connection->first & connection->mask];
}

static size_t whole_bytes(const struct outgoing *outgoing)
{
    return outgoing->head_bytes + outgoing->body_bytes;
}

static void drop_first(struct connection *connection)
{
    struct outgoing *sent = first(connection);
    size_t nbytes = whole_bytes(sent);
    connection->bytes_queued -= nbytes;
    connection->sent = connection->sent > nbytes ? connection->sent - nbytes : 0;
    if (connection->sent_whole > 0)
        connection->sent_whole--;
    else
        connection->sent_part = 0;
    if (sent->block != NULL)
        block_drop(connection->pool, sent->block);
    connection->first++;
    connection->count--;
}

uint64_t connection_unsent(const struct connection *connection)
{
    return connection->bytes_queued - connection->sent;
}

void connection_next(struct connection *connection)
{
    if (connection->message.payload != NULL)
        block_drop(connection->pool, connection->message.payload);
    connection_hand_over(connection);
}

void connection_hand_over(struct connection *connection)
{
    connection->message.payload = NULL;
    connection->message.frames = 0;
    connection->message.placed_bytes = 0;
    connection->message.foreign = false;
}

void connection_attach(struct connection *connection, struct channel *channel, unsigned side)
{
    connection->channel = channel;
    connection->side = side;
    connection->writable = true;
    occur(connection, CONNECTED);
}

void connection_place(struct connection *connection,
                      unsigned char *(*place)(void *owner, uint32_t number,
                                              const unsigned char *header, size_t nbytes),
                      void *owner, uint32_t number)
{
    connection->place = place;
    connection->owner = owner;
    connection->number = number;
}

void connection_limit(struct connection *connection, uint64_t most_bytes)
{
    connection->most_bytes = most_bytes;
}

void connection_free(struct connection *connection)
{
    if (connection->queue == NULL)
        return;
    if (connection->channel != NULL)
        channel_close(connection->channel, connection->side);
    connection_next(connection);
    while (connection->count > 0)
        drop_first(connection);
    if (connection->body != NULL)
        block_drop(connection->pool, connection->body);
    connection->body = NULL;
    free(connection->queue);
    connection->queue = NULL;
    zmtp_free(&connection->zmtp);
}

/* -- send ------------------------------------------------------------------------------------ */

/* Finds the first message that is not sent as a whole, from `sent_part` bytes behind the others on. */
static void pass_whole(struct connection *connection)
{
    for (; connection->sent_whole < connection->count; connection->sent_whole++) {
        size_t at = connection->first + connection->sent_whole;
        size_t nbytes = whole_bytes(&connection->queue[at & connection->mask]);
        if (connection->sent_part < nbytes)
            return;
        connection->sent_part -= nbytes;
    }
}

static void count_sent(struct connection *connection, size_t nbytes)
{
    connection->bytes_written += nbytes;
    connection->sent += nbytes;
    connection->sent_part += nbytes;
    pass_whole(connection);
}

/* Has nobody else read from the queue, of which the other end of a channel may have read some. */
static void withdraw(struct connection *connection)
{
    if (connection->channel != NULL)
        count_sent(connection, channel_withdraw(connection->channel, connection->side));
}

static struct outgoing *append(struct connection *connection)
{
    if (connection->count > connection->mask) {
        withdraw(connection);
        size_t mask = 2 * connection->mask + 1;
        struct outgoing *larger = calloc(mask + 1, sizeof *larger);
        if (larger == NULL)
            return NULL;
        for (size_t at = connection->first; at != connection->first + connection->count; at++)
            larger[at & mask] = connection->queue[at & connection->mask];
        free(connection->queue);
        connection->queue = larger;
        connection->mask = mask;
    }
    struct outgoing *added =
        &connection->queue[(connection->first + connection->count) & connection->mask];
    *added = (struct outgoing){.sequence = NO_SEQUENCE};
    return added;
}

static void commit(struct connection *connection, const struct outgoing *added)
{
    connection->count++;
    connection->bytes_queued += whole_bytes(added);
}

/* Queues a whole message as its encrypted frames. */
static bool send_sealed(struct connection *connection, struct outgoing *added, const void *header,
                        const void *payload, size_t nbytes)
{
    struct zmtp *zmtp = &connection->zmtp;
    uint64_t room = zmtp_wire_bytes(zmtp, HEADER_BYTES);
    room += payload == NULL ? 0 : zmtp_wire_bytes(zmtp, nbytes);
    struct block *block = block_take(connection->pool, room);
    if (block == NULL)
        return false;
    size_t used = zmtp_seal(zmtp, block->data, header, HEADER_BYTES, payload != NULL);
    if (payload != NULL)
        used += zmtp_seal(zmtp, block->data + used, payload, nbytes, false);
    added->block = block;
    added->body = block->data;
    added->body_bytes = used;
    return true;
}

bool connection_send(struct connection *connection, const void *header, const void *payload,
                     size_t nbytes, struct block *block, uint64_t sequence)
{
    struct outgoing *added = connection->state >= CLOSING ? NULL : append(connection);
    if (added == NULL)
        return false;
    if (connection->zmtp.sealed) {
        if (!send_sealed(connection, added, header, payload, nbytes))
            return false;
        commit(connection, added);
        return true;
    }
    size_t used = zmtp_frame_header(added->head, HEADER_BYTES, payload != NULL);
    memcpy(added->head + used, header, HEADER_BYTES);
    used += HEADER_BYTES;
    if (payload != NULL)
        used += zmtp_frame_header(added->head + used, nbytes, false);
    added->head_bytes = used;
    added->body = payload;
    added->body_bytes = payload == NULL ? 0 : nbytes;
    added->sequence = sequence;
    added->block = block == NULL ? NULL : block_share(block);
    commit(connection, added);
    return true;
}

/* Queues bytes as they are. */
static bool send_bytes(struct connection *connection, const uint8_t *bytes, size_t nbytes)
{
    while (nbytes > 0) {
        struct outgoing *added = append(connection);
        if (added == NULL)
            return false;
        size_t part = nbytes < sizeof added->head ? nbytes : sizeof added->head;
        memcpy(added->head, bytes, part);
        added->head_bytes = part;
        commit(connection, added);
        bytes += part;
        nbytes -= part;
    }
    return true;
}

/* Queues what the codec has to say. */
static bool send_reply(struct connection *connection)
{
    struct zmtp *zmtp = &connection->zmtp;
    size_t nbytes = zmtp->reply_bytes;
    zmtp->reply_bytes = 0;
    /* PONGs, which a peer that reads none may ask for without end; what waits is heard as well. */
    if (zmtp->ready &&
        (connection->bond == LENDING || connection_unsent(connection) > PENDING_BYTES))
        return true;
    return send_bytes(connection, zmtp->reply, nbytes);
}

static void gather(struct iovec *places, int *count, const unsigned char *from, size_t nbytes,
                   size_t *skip)
{
    if (*skip >= nbytes) {
        *skip -= nbytes;
        return;
    }
    places[(*count)++] = (struct iovec){(void *)(from + *skip), nbytes - *skip};
    *skip = 0;
}

void connection_look(struct connection *connection)
{
    if (connection->readable == INPUT_NONE)
        connection->readable = INPUT_SOME;
}

/* As connection_break, but for the queue, whose blocks are of the connection's own thread. */
static void break_off(struct connection *connection, int error)
{
    occur(connection, BROKEN);
    connection_look(connection);
    connection->error = error;
}

void connection_break(struct connection *connection, int error)
{
    if (connection->state >= CLOSING)
        return;
    break_off(connection, error);
    withdraw(connection);
    while (connection->count > 0)
        drop_first(connection);
}

void connection_refuse(struct connection *connection)
{
    occur(connection, ENDED);
}

/* Bytes that were sent, and that the peer's kernel has not acknowledged. */
static uint64_t unacknowledged(const struct connection *connection)
{
    int nbytes = 0;
    if (ioctl(connection->fd, SIOCOUTQ, &nbytes) < 0 || nbytes < 0)
        return 0;
    return (uint64_t)nbytes;
}

/* Whether the socket takes nothing more, and tells nothing of what it has taken. */
static bool has_lost_its_socket(const struct connection *connection)
{
    return connection->state >= SUSPENDED ||
           (connection->bond == RESUMABLE && connection->readable == INPUT_TO_END);
}

/* Drops what was sent; of a resumable connection, what the peer's kernel has. That is asked when twice as
 * much was sent as it had left: so the cost of asking does not grow with what is on its way. */
static void drop_sent(struct connection *connection)
{
    size_t kept = 0;
    if (connection->bond == RESUMABLE && connection->count > 0) {
        if (has_lost_its_socket(connection) || connection->sent < connection->ask_bytes)
            return;
        kept = (size_t)unacknowledged(connection);
    }
    while (connection->count > 0 && connection->sent >= whole_bytes(first(connection)) + kept)
        drop_first(connection);
    connection->ask_bytes = 2 * connection->sent > ASKED ? 2 * connection->sent : ASKED;
}

/* Takes note that the kernel sends nothing more; what has come may still be read. */
static void lose(struct connection *connection, int error)
{
    if (connection->bond != RESUMABLE) {
        connection_break(connection, error);
        return;
    }
    shutdown(connection->fd, SHUT_RDWR); /* if it is there still, reading comes to its end */
    connection->writable = false;
    connection->readable = INPUT_TO_END;
}

/* Where the first messages are that have not been sent, in so many places at most. */
static int gather_all(const struct connection *connection, struct iovec *places, int most)
{
    int count = 0;
    size_t skip = connection->sent_part;
    for (size_t at = connection->sent_whole; at < connection->count && count < most - 1; at++) {
        struct outgoing *next = &connection->queue[(connection->first + at) & connection->mask];
        gather(places, &count, next->head, next->head_bytes, &skip);
        gather(places, &count, next->body, next->body_bytes, &skip);
    }
    return count;
}

/* Gives the kernel what it takes of the first messages, or offers them to the other end of a channel.
 * Returns whether more may be taken at once; sets errno to 0 unless nothing will be any more. */
static bool push(struct connection *connection)
{
    struct iovec places[CHANNEL_PARTS];
    int most = connection->channel == NULL ? 2 * GATHERED : CHANNEL_PARTS;
    withdraw(connection);
    int count = gather_all(connection, places, most);
    if (connection->channel != NULL) {
        bool more = count >= most - 1;
        errno = channel_offer(connection->channel, connection->side, places, count, more) ? 0 : EPIPE;
        return false;
    }
    size_t asked = 0;
    for (int at = 0; at < count; at++)
        asked += places[at].iov_len;
    struct msghdr message = {.msg_iov = places, .msg_iovlen = (size_t)count};
    ssize_t sent = 0;
    do {
        errno = 0;
        if (count > 0)
            sent = sendmsg(connection->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    if (sent < 0 && errno != EAGAIN)
        return false;
    errno = 0;
    if (sent < 0 || (size_t)sent < asked)
        connection->writable = false; /* until the poll tells */
    if (sent > 0)
        count_sent(connection, (size_t)sent);
    return connection->writable;
}

void connection_flush(struct connection *connection)
{
    if (!can_send(connection))
        return;
    drop_sent(connection); /* what a heartbeat has sent */
    if (connection->zmtp.reply_bytes > 0 && !send_reply(connection))
        connection_break(connection, ENOMEM);
    bool more = connection->writable;
    while (more && connection_unsent(connection) > 0) {
        more = push(connection);
        if (errno != 0) {
            lose(connection, errno);
            return;
        }
        drop_sent(connection);
    }
}

void connection_send_heartbeat(struct connection *connection)
{
    uint8_t bytes[64];
    if (connection->state != OPEN || connection->bond == LENDING || connection->channel != NULL)
        return; /* a channel has one process, and needs no sign of life */
    bool heard = connection->bytes_written != connection->written_at_heartbeat;
    connection->written_at_heartbeat = connection->bytes_written;
    /* What heartbeats have sent is in the queue until the next flush, which may be long after. */
    bool nothing_waits = connection_unsent(connection) == 0;
    if (heard && nothing_waits)
        return;
    if (nothing_waits)
        send_bytes(connection, bytes, zmtp_ping(&connection->zmtp, bytes, 0));
    push(connection); /* whatever `writable` says: perhaps nobody has polled for as long */
    if (errno != 0 && connection->bond == RESUMABLE)
        lose(connection, errno);
    else if (errno != 0)
        break_off(connection, errno);
}

static ssize_t read_some(struct connection *connection, struct iovec *places, int count)
{
    if (connection->channel != NULL)
        return channel_read(connection->channel, connection->side, places, count);
    return readv(connection->fd, places, count);
}

bool connection_drain(struct connection *connection)
{
    unsigned char unread[4096];
    if (connection->state == SUSPENDED)
        return false;
    if (connection->channel != NULL)
        channel_await(connection->channel, !connection->side, 0); /* little is enough now */
    connection_flush(connection);
    for (int reads = 0; reads < UNREAD; reads++) {
        struct iovec place = {unread, sizeof unread};
        if (read_some(connection, &place, 1) <= 0)
            break;
    }
    return connection->state == OPEN && !has_lost_its_socket(connection) &&
           connection_unsent(connection) > 0;
}

/* -- another socket -------------------------------------------------------------------------- */

void connection_make_resumable(struct connection *connection)
{
    if (connection->channel == NULL && connection->state == OPEN)
        connection->bond = RESUMABLE;
}

void connection_lend(struct connection *connection)
{
    connection->bond = LENDING;
}

bool connection_can_resume(const struct connection *connection, uint64_t from)
{
    uint64_t dropped = connection->bytes_written - connection->sent;
    return connection->bond == RESUMABLE && connection->state < CLOSING &&
           connection->at == connection->end && from >= dropped && from <= connection->bytes_written;
}

bool connection_is_between(const struct connection *connection)
{
    return connection->state == OPEN && connection->zmtp.buffered == 0 && !connection->in_frame &&
           connection->message.frames == 0 && connection->count == 0;
}

bool connection_resume(struct connection *connection, struct connection *successor, uint64_t from)
{
    if (!connection_is_between(successor) || !connection_can_resume(connection, from) ||
        dup3(successor->fd, connection->fd, O_CLOEXEC) < 0)
        return false;
    size_t ahead = successor->end - successor->at;
    memcpy(connection->in, successor->in + successor->at, ahead);
    connection->at = 0;
    connection->end = ahead;
    connection->bytes_read += ahead;
    connection->sent -= (size_t)(connection->bytes_written - from);
    connection->sent_part = connection->sent;
    connection->sent_whole = connection->ask_bytes = 0;
    pass_whole(connection);
    connection->bytes_written = connection->written_at_heartbeat = from;
    connection->readable = successor->readable == INPUT_TO_END ? INPUT_TO_END : INPUT_SOME;
    connection->writable = true;
    connection->low_water = 0;
    occur(connection, RESUMED);
    occur(successor, ENDED);
    return true;
}

/* Has the rest of a result go into a block: nobody takes the message any more. */
static bool displace(struct connection *connection, uint64_t sequence)
{
    struct message *message = &connection->message;
    struct header header;
    if (!connection->in_frame || message->placed_bytes == 0 ||
        !header_read(&header, message->header, HEADER_BYTES) || header.sequence != sequence)
        return true;
    connection->body = block_take(connection->pool, message->placed_bytes);
    if (connection->body == NULL) {
        occur(connection, ENDED);
        return false;
    }
    memset(connection->body->data, 0, message->placed_bytes);
    connection->into = connection->body->data + message->placed_bytes - connection->left;
    message->placed_bytes = 0;
    return true;
}

static bool detach_queued(struct connection *connection, uint64_t sequence)
{
    for (size_t at = 0; at < connection->count; at++) {
        struct outgoing *next = &connection->queue[(connection->first + at) & connection->mask];
        if (next->sequence != sequence || next->block != NULL || next->body_bytes == 0)
            continue;
        struct block *copy = block_copy(connection->pool, next->body, next->body_bytes);
        if (copy == NULL)
            return false;
        next->block = copy;
        next->body = copy->data;
    }
    return true;
}

bool connection_detach(struct connection *connection, uint64_t sequence)
{
    if (!displace(connection, sequence))
        return false;
    withdraw(connection);
    connection->ask_bytes = 0;
    drop_sent(connection);
    bool detached = detach_queued(connection, sequence);
    if (connection->channel != NULL)
        connection_flush(connection);
    return detached;
}

/* -- receive --------------------------------------------------------------------------------- */

static bool fail(struct connection *connection, enum zmtp_fault fault)
{
    connection->zmtp.fault = fault;
    return false;
}

/* Finds where the body of a frame goes. */
static bool begin_frame(struct connection *connection)
{
    const struct zmtp_frame *frame = &connection->zmtp.frame;
    connection->in_frame = true;
    connection->left = frame->wire_bytes;
    connection->into = connection->small;
    if (frame->wire_bytes <= sizeof connection->small &&
        (frame->command || connection->message.frames != 1 || connection->message.foreign))
        return true;
    if (frame->command || connection->message.frames != 1 || connection->message.foreign)
        return fail(connection, ZMTP_TOO_LARGE); /* only a payload is large */
    if (frame->nbytes > connection->most_bytes)
        return fail(connection, ZMTP_TOO_LARGE);
    connection->large = frame->wire_bytes >= LARGE;
    if (connection->place != NULL && !connection->zmtp.sealed && !frame->more)
        connection->into = connection->place(connection->owner, connection->number,
                                             connection->message.header, frame->nbytes);
    else
        connection->into = NULL;
    if (connection->into != NULL) {
        connection->message.placed_bytes = frame->nbytes;
        return true;
    }
    connection->body = block_take(connection->pool, frame->wire_bytes);
    if (connection->body == NULL) {
        connection->error = ENOMEM;
        return false;
    }
    connection->into = connection->body->data;
    return true;
}

/* Takes a frame that is whole. Sets whether the message is. */
static bool finish_frame(struct connection *connection, bool *whole)
{
    struct zmtp *zmtp = &connection->zmtp;
    struct message *message = &connection->message;
    struct block *body = connection->body;
    uint8_t *data = body == NULL ? connection->small : body->data;
    connection->in_frame = false;
    connection->body = NULL;
    *whole = false;
    if (zmtp->sealed) {
        data = zmtp_open(zmtp, data);
        if (data == NULL) {
            if (body != NULL)
                block_drop(connection->pool, body);
            return false;
        }
    }
    if (zmtp->frame.command) {
        enum zmtp_event event = zmtp_command(zmtp, data, zmtp->frame.nbytes);
        if (body != NULL)
            block_drop(connection->pool, body);
        return event != ZMTP_FAILED;
    }
    if (++message->frames > FRAMES) {
        if (body != NULL)
            block_drop(connection->pool, body);
        return fail(connection, ZMTP_MALFORMED);
    }
    if (message->frames == 1) {
        message->foreign = zmtp->frame.nbytes != HEADER_BYTES;
        if (!message->foreign)
            memcpy(message->header, data, HEADER_BYTES);
    } else if (message->frames == 2 && body != NULL) {
        body->data = data;
        body->nbytes = zmtp->frame.nbytes;
        message->payload = body;
    } else if (body != NULL) {
        block_drop(connection->pool, body);
    }
    if (message->frames > 2)
        message->foreign = true;
    *whole = !zmtp->frame.more;
    return true;
}

/* Takes what was read ahead, up to the next event; CONNECTION_IDLE: all was taken. */
static enum connection_event consume(struct connection *connection)
{
    while (connection->at < connection->end || (connection->in_frame && connection->left == 0)) {
        if (connection->in_frame) {
            size_t part = connection->end - connection->at;
            if (part > connection->left)
                part = connection->left;
            memcpy(connection->into, connection->in + connection->at, part);
            connection->into += part;
            connection->left -= part;
            connection->at += part;
            bool whole;
            if (connection->left > 0)
                continue;
            if (!finish_frame(connection, &whole))
                return CONNECTION_ENDED;
            if (whole)
                return CONNECTION_MESSAGE;
            continue;
        }
        const uint8_t *at = connection->in + connection->at;
        enum zmtp_event event = zmtp_take(&connection->zmtp, &at, connection->in + connection->end);
        connection->at = (size_t)(at - connection->in);
        if (event == ZMTP_ADMIT)
            return CONNECTION_ADMIT;
        if (event == ZMTP_READY) {
            occur(connection, READY);
            return CONNECTION_READY;
        }
        if (event == ZMTP_FAILED || (event == ZMTP_FRAME && !begin_frame(connection)))
            return CONNECTION_ENDED;
    }
    return CONNECTION_IDLE;
}

/* How much to read ahead: after a large payload no more than up to the next one, of which the first
 * bytes would have to be copied else. */
static size_t ahead(const struct connection *connection)
{
    if (!connection->large)
        return CONNECTION_IN_BYTES;
    return CONNECTION_HEAD_BYTES + (connection->zmtp.sealed ? 2 * SEALED_BYTES : 0);
}

void connection_note(struct connection *connection, uint32_t events)
{
    if (connection->state == SUSPENDED)
        return;
    /* The end of an attempt to connect, which has failed if there is an error, too. */
    if (events & EPOLLOUT && (connection->state != CONNECTING || !(events & EPOLLERR))) {
        occur(connection, CONNECTED);
        connection->writable = true;
        connection_flush(connection);
    }
    if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
        connection->readable = INPUT_TO_END;
    else if (events & ~(uint32_t)EPOLLOUT)
        connection_look(connection);
}

static enum connection_event end(struct connection *connection)
{
    occur(connection, ENDED);
    return CONNECTION_ENDED;
}

/* Waits for another socket. */
static enum connection_event suspend(struct connection *connection)
{
    occur(connection, DETACHED);
    connection->readable = INPUT_NONE;
    connection->writable = false;
    /* What is sealed from now on comes after what the codec has sealed to reply. */
    if (connection->zmtp.reply_bytes == 0 || send_reply(connection))
        return CONNECTION_SUSPENDED;
    connection_break(connection, ENOMEM);
    return end(connection);
}

enum connection_event connection_read(struct connection *connection)
{
    if (connection->state == CLOSED)
        return CONNECTION_ENDED;
    if (connection->state == SUSPENDED) {
        connection->readable = INPUT_NONE;
        return CONNECTION_IDLE;
    }
    for (int reads = 0;; reads++) {
        enum connection_event event = consume(connection);
        if (event == CONNECTION_ENDED) {
            connection_flush(connection); /* it may say why */
            return end(connection);
        }
        if (event != CONNECTION_IDLE)
            return event;
        connection->at = connection->end = 0;
        if (connection->readable == INPUT_NONE)
            return connection->state < CLOSING ? CONNECTION_IDLE : end(connection);
        if (reads >= READS)
            return CONNECTION_BUSY;
        struct iovec places[2] = {
            {connection->into, connection->left},
            {connection->in, ahead(connection)},
        };
        int from = connection->left == 0;
        size_t asked = places[1].iov_len + (from == 0 ? places[0].iov_len : 0);
        ssize_t got = read_some(connection, places + from, 2 - from);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EAGAIN) {
            connection->readable = INPUT_NONE;
            continue;
        }
        if (got <= 0 && connection->bond == RESUMABLE && connection->state == OPEN)
            return suspend(connection);
        if (got <= 0) {
            connection_break(connection, got < 0 ? errno : 0);
            return end(connection);
        }
        connection->bytes_read += (uint64_t)got;
        if ((size_t)got < asked && connection->readable == INPUT_SOME)
            connection->readable = INPUT_NONE; /* that was all; the poll tells of more */
        size_t part = (size_t)got < connection->left ? (size_t)got : connection->left;
        connection->into += part;
        connection->left -= part;
        connection->end = (size_t)got - part;
    }
}

void connection_admit(struct connection *connection, bool admitted)
{
    enum zmtp_event event = zmtp_admit(&connection->zmtp, admitted);
    if (event == ZMTP_READY)
        occur(connection, READY);
    connection_flush(connection); /* it may say why */
    if (event == ZMTP_FAILED)
        occur(connection, ENDED);
}

void connection_await_rest(struct connection *connection)
{
    connection_await(connection, connection->in_frame && connection->large ? connection->left : 0);
}

void connection_await(struct connection *connection, size_t nbytes)
{
    int bytes = (int)(nbytes < LOW_WATER_BYTES ? nbytes : LOW_WATER_BYTES);
    int least = bytes > 0 ? bytes : 1;
    if (connection->low_water == bytes)
        return;
    connection->low_water = bytes;
    if (connection->channel == NULL)
        setsockopt(connection->fd, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least);
    else if (channel_await(connection->channel, connection->side, (size_t)bytes))
        connection_look(connection);
}

/* Bytes that the kernel holds. */
static uint64_t unread(const struct connection *connection)
{
    int nbytes = 0;
    return ioctl(connection->fd, FIONREAD, &nbytes) < 0 ? 0 : (uint64_t)nbytes; /* a channel has none */
}

uint64_t connection_backlog(const struct connection *connection)
{
    if (has_lost_its_socket(connection))
        return UINT64_MAX;
    return connection_unsent(connection) + unacknowledged(connection);
}

uint64_t connection_came(const struct connection *connection)
{
    return connection->bytes_read + unread(connection);
}

bool connection_awaits(const struct connection *connection)
{
    uint64_t least = connection->low_water > 0 ? (uint64_t)connection->low_water : 1;
    return connection->state < CLOSING &&
           (connection->readable != INPUT_NONE || unread(connection) >= least);
}

size_t connection_partial(const struct connection *connection)
{
    size_t before = connection->message.frames > 0 ? HEADER_BYTES : 0;
    if (connection->message.payload != NULL) /* and another frame is to follow */
        before += connection->message.payload->nbytes;
    if (!connection->in_frame)
        return before;
    return before + connection->zmtp.frame.wire_bytes - connection->left;
}

size_t connection_wants(const struct connection *connection, size_t nbytes)
{
    bool in_payload = connection->body != NULL || connection->message.placed_bytes > 0;
    if (connection->in_frame)
        return connection->left + (in_payload ? 0 : nbytes);
    /* The codec may have some of a frame's header. */
    return connection->message.frames == 0 ? HEADER_BYTES + nbytes : nbytes;
}
