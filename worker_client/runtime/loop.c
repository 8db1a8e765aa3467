#include "loop.h"

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "reducer/failpoints.h"

enum {
    EVENTS = 64,            /* that one look at the sockets brings */
    FLUSH_BYTES = 32 << 10, /* so much is sent at once; less may gather while results come in */
    MESSAGES_PER_TURN = 64, /* so that no line starves the others */
    LINGER_LOOK_MS = 2,     /* at what has been sent, at the end: no poll tells of that in a channel */
    LARGE_BYTES = 16 << 10, /* a result that is worth waiting for as a whole */
    LOW_WATER_NS = 50 * 1000 * 1000, /* so long a short message may wait for results, which may be
                                      settled elsewhere meanwhile */
    LOOK_NS = 1000 * 1000,  /* while messages pour in, sockets are looked at this often */
    GATHER_NS = 20 * 1000   /* for more results, once an operation has completed */
};

static const uint64_t PAUSED_NS = 300 * 1000 * 1000; /* that heartbeats are overdue after a pause */
static const uint64_t RECENT_NS = 1000 * 1000 * 1000;

static const uint32_t WAKER = UINT32_MAX; /* in the place of a line's number */

/* -- heartbeats ------------------------------------------------------------------------------ */

/* Notes that the process has not run since the last heartbeats, if they are overdue. */
static void note_pause(struct loop *loop, uint64_t now)
{
    uint64_t since = now - loop->heartbeat_sent_ns;
    if (loop->heartbeat_sent_ns != 0 && since > PAUSED_NS + loop->heartbeat_every_ns) {
        loop->paused_ns = since;
        loop->resumed_ns = now;
    }
    loop->heartbeat_sent_ns = now;
}

uint64_t loop_paused_ns(struct loop *loop)
{
    heartbeat_lock(&loop->heartbeat);
    uint64_t now = now_ns();
    note_pause(loop, now); /* this thread may run again before that of the heartbeats does */
    uint64_t paused = now - loop->resumed_ns < RECENT_NS ? loop->paused_ns : 0;
    heartbeat_unlock(&loop->heartbeat);
    return paused;
}

static uint64_t ping_all(void *argument, uint64_t now)
{
    struct loop *loop = argument;
    note_pause(loop, now);
    for (uint32_t line = 0; line < loop->lines; line++)
        if (loop->line[line].connection != NULL)
            connection_send_heartbeat(loop->line[line].connection);
    return now + loop->heartbeat_every_ns;
}

/* -- low water marks ------------------------------------------------------------------------- */

/* What is awaited on a link may come later than something shorter, over any of its streams. */
static void reset_low_water(struct loop *loop, uint32_t main)
{
    uint32_t line = main;
    do {
        if (loop->line[line].connection != NULL)
            connection_await(loop->line[line].connection, 0);
        line = loop->line[line].next;
    } while (line != main);
}

/* What is awaited may not come any more, or be longer than what comes instead. */
static void reset_low_waters(struct loop *loop)
{
    for (uint32_t link = 0; link < loop->links; link++)
        reset_low_water(loop, loop->main[link]);
}

/* -- set-up ---------------------------------------------------------------------------------- */

static bool watch(struct loop *loop, int fd, uint32_t number, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u32 = number};
    return epoll_ctl(loop->epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

bool loop_init(struct loop *loop, struct flight *flight, uint64_t every_ns)
{
    *loop = (struct loop){.flight = flight, .epoll = -1, .waker = -1, .resumer = -1};
    loop->epoll = epoll_create1(EPOLL_CLOEXEC);
    loop->heartbeat_every_ns = every_ns / 2;
    loop->waker = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    loop->resumer = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return loop->epoll >= 0 && loop->waker >= 0 && loop->resumer >= 0 &&
           watch(loop, loop->waker, WAKER, EPOLLIN) &&
           heartbeat_start(&loop->heartbeat, ping_all, loop);
}

/* Takes note of what the poll says of a line's socket. */
static void note(struct loop *loop, const struct epoll_event *event)
{
    uint32_t line = event->data.u32;
    if (line < loop->lines && loop->line[line].connection != NULL)
        connection_note(loop->line[line].connection, event->events);
}

/* Waits until everything is with the kernel. */
static void linger(struct loop *loop, long timeout_ms)
{
    uint64_t until = now_ns() + (uint64_t)timeout_ms * 1000 * 1000;
    for (bool unsent = true; unsent && now_ns() < until;) {
        unsent = false;
        for (uint32_t line = 0; line < loop->lines; line++)
            if (loop->line[line].connection != NULL)
                unsent |= connection_drain(loop->line[line].connection);
        struct epoll_event events[EVENTS];
        int found = unsent ? epoll_wait(loop->epoll, events, EVENTS, LINGER_LOOK_MS) : 0;
        for (int at = 0; at < found; at++)
            note(loop, &events[at]);
    }
}

void loop_end(struct loop *loop, long linger_ms)
{
    if (heartbeat_stop(&loop->heartbeat)) {
        epoll_ctl(loop->epoll, EPOLL_CTL_DEL, loop->waker, NULL); /* it would end each wait at once */
        linger(loop, linger_ms);
        for (uint32_t line = 0; line < loop->lines; line++)
            loop_close(loop, line);
    }
    if (loop->heartbeat.runs)
        return; /* this is a child of a fork, and all of it the parent's */
    if (loop->epoll >= 0)
        close(loop->epoll);
    loop->epoll = -1;
    free(loop->line);
    free(loop->main);
    loop->line = NULL;
    loop->main = NULL;
    loop->lines = loop->links = 0;
}

void loop_free(struct loop *loop)
{
    loop_end(loop, 0);
    if (loop->heartbeat.runs)
        return;
    if (loop->waker >= 0)
        close(loop->waker);
    if (loop->resumer >= 0)
        close(loop->resumer);
}

static bool add(struct loop *loop, uint32_t link, bool apart)
{
    struct loop_line *lines = realloc(loop->line, (loop->lines + 1) * sizeof *lines);
    if (lines == NULL)
        return false;
    loop->line = lines;
    uint32_t line = loop->lines, next = line;
    if (link == loop->links) {
        uint32_t *mains = realloc(loop->main, (link + 1) * sizeof *mains);
        if (mains == NULL)
            return false;
        loop->main = mains;
        mains[loop->links++] = line;
    } else if (!apart) {
        next = lines[loop->main[link]].next;
        lines[loop->main[link]].next = line;
    }
    lines[loop->lines++] = (struct loop_line){.link = link, .next = next, .picked = line};
    return true;
}

bool loop_add(struct loop *loop, uint32_t link, bool apart)
{
    heartbeat_lock(&loop->heartbeat);
    bool added = add(loop, link, apart);
    heartbeat_unlock(&loop->heartbeat);
    return added;
}

static unsigned char *place(void *owner, uint32_t line, const unsigned char *header, size_t nbytes)
{
    const struct loop *loop = owner;
    if (failpoints_armed) /* which may drop it */
        return NULL;
    return flight_place(loop->flight, loop->line[line].link, header, HEADER_BYTES, nbytes);
}

/* Begins to speak; `channel` is NULL if that is over a socket. False, with errno. */
static bool open_connection(struct loop *loop, uint32_t line, int fd, struct channel *channel,
                            const struct curve_keys *keys)
{
    loop_close(loop, line);
    struct connection *opened = malloc(sizeof *opened);
    uint64_t most = loop->flight->max_chunk_bytes + HEADER_BYTES;
    if (opened == NULL || !connection_init(opened, fd, false, keys, most, &loop->flight->pool)) {
        free(opened);
        errno = ENOMEM;
        return false;
    }
    connection_place(opened, place, loop, line);
    heartbeat_lock(&loop->heartbeat);
    bool watched = watch(loop, fd, line, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    if (watched && channel != NULL)
        connection_attach(opened, channel, 1);
    if (watched) {
        loop->line[line].connection = opened;
        loop->line[line].carries = line == loop->main[loop->line[line].link];
    }
    heartbeat_unlock(&loop->heartbeat);
    if (!watched) {
        int error = errno;
        connection_free(opened);
        free(opened);
        errno = error;
    }
    return watched;
}

bool loop_open(struct loop *loop, uint32_t line, int fd, const struct curve_keys *keys)
{
    return open_connection(loop, line, fd, NULL, keys);
}

bool loop_attach(struct loop *loop, uint32_t line, struct channel *channel)
{
    if (open_connection(loop, line, channel->end[1].fd, channel, NULL))
        return true;
    int error = errno;
    channel_close(channel, 1);
    errno = error;
    return false;
}

void loop_carry(struct loop *loop, uint32_t line)
{
    heartbeat_lock(&loop->heartbeat);
    loop->line[line].carries = loop->line[line].connection != NULL;
    heartbeat_unlock(&loop->heartbeat);
}

void loop_make_resumable(struct loop *loop, uint32_t line)
{
    heartbeat_lock(&loop->heartbeat);
    if (loop->line[line].connection != NULL)
        connection_make_resumable(loop->line[line].connection);
    heartbeat_unlock(&loop->heartbeat);
}

static bool resume_over(struct loop *loop, uint32_t line, uint32_t successor, uint64_t from)
{
    struct connection *connection = loop->line[line].connection;
    if (connection == NULL || loop->line[successor].connection == NULL || connection->state != SUSPENDED)
        return false;
    epoll_ctl(loop->epoll, EPOLL_CTL_DEL, connection->fd, NULL);
    if (!connection_resume(connection, loop->line[successor].connection, from) ||
        !watch(loop, connection->fd, line, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET))
        return false;
    connection_flush(connection);
    return true;
}

bool loop_resume_over(struct loop *loop, uint32_t line, uint32_t successor, uint64_t from)
{
    heartbeat_lock(&loop->heartbeat);
    bool resumed = resume_over(loop, line, successor, from);
    heartbeat_unlock(&loop->heartbeat);
    loop_close(loop, successor);
    return resumed;
}

void loop_break(struct loop *loop, uint32_t line)
{
    heartbeat_lock(&loop->heartbeat);
    if (loop->line[line].connection != NULL)
        connection_break(loop->line[line].connection, ECONNRESET);
    heartbeat_unlock(&loop->heartbeat);
}

enum connection_state loop_state(struct loop *loop, uint32_t line, int *error)
{
    heartbeat_lock(&loop->heartbeat);
    const struct connection *connection = loop->line[line].connection;
    enum connection_state state = connection->state;
    *error = connection->error;
    heartbeat_unlock(&loop->heartbeat);
    return state;
}

void loop_close(struct loop *loop, uint32_t line)
{
    heartbeat_lock(&loop->heartbeat);
    struct loop_line *self = &loop->line[line];
    struct connection *connection = self->connection;
    *self = (struct loop_line){.link = self->link, .next = self->next, .picked = line};
    if (connection != NULL) {
        epoll_ctl(loop->epoll, EPOLL_CTL_DEL, connection->fd, NULL);
        connection_free(connection);
        free(connection);
        reset_low_waters(loop);
    }
    heartbeat_unlock(&loop->heartbeat);
}

void loop_wake(struct loop *loop)
{
    if (!atomic_exchange(&loop->woken, true))
        eventfd_write(loop->waker, 1);
}

/* Whether it was woken since the last time; asked before every wait. */
static bool heed(struct loop *loop)
{
    if (!atomic_load(&loop->woken))
        return false;
    /* In this order: who wakes it from here on sets the flag anew, whatever becomes of the count. */
    atomic_store(&loop->woken, false);
    eventfd_t count;
    eventfd_read(loop->waker, &count);
    return true;
}

/* -- send ------------------------------------------------------------------------------------ */

/* Queues a message, of which nothing is read from the caller's memory after this. */
static bool send_copy(struct loop *loop, struct connection *connection, const void *header,
                      const void *payload, size_t nbytes)
{
    struct block *copy = block_copy(&loop->flight->pool, payload, nbytes);
    if (copy == NULL)
        return false;
    bool sent = connection_send(connection, header, copy->data, nbytes, copy, NO_SEQUENCE);
    block_drop(&loop->flight->pool, copy);
    return sent;
}

/* The connection of a link over which the next contribution goes, by the main line: of several
 * streams, that with the least on its way, in turn. NULL: there is none. */
static struct connection *pick(const struct loop *loop, uint32_t main)
{
    struct loop_line *self = &loop->line[main];
    if (self->connection == NULL || !self->connection->zmtp.ready)
        return NULL;
    if (self->next == main)
        return self->connection;
    uint64_t least = UINT64_MAX;
    uint32_t after = self->picked, line = after;
    do {
        line = loop->line[line].next;
        uint64_t backlog =
            loop->line[line].carries ? connection_backlog(loop->line[line].connection) : UINT64_MAX;
        if (backlog < least) {
            least = backlog;
            self->picked = line;
        }
    } while (line != after);
    return loop->line[self->picked].connection;
}

/* Queues a contribution of several subtrees of leaves, which lie apart. */
static bool send_subtrees(struct loop *loop, struct connection *connection,
                          const struct contribution *next)
{
    const struct operation *operation = next->chunk->of->of;
    size_t nbytes = next->header.nbytes;
    struct block *block = block_take(&loop->flight->pool, operation->parts * nbytes);
    if (block == NULL)
        return false;
    const unsigned char *subtree = operation->source + next->header.offset;
    for (uint32_t part = 0; part < operation->parts; part++)
        memcpy(block->data + part * nbytes, subtree + part * operation->header.total_bytes, nbytes);
    bool sent = connection_send(connection, &next->header, block->data, block->nbytes, block,
                                NO_SEQUENCE);
    block_drop(&loop->flight->pool, block);
    return sent;
}

/* Queues a contribution, and returns where. One to a reducer that is not connected is dropped: the
 * session hears of that, or the deadline comes. */
static struct connection *queue_contribution(struct loop *loop, const struct contribution *next)
{
    if (failpoint(WORKER_BEFORE_SEND))
        return NULL;
    uint32_t main = loop->main[next->chunk->link];
    struct connection *connection = pick(loop, main);
    if (connection == NULL)
        return NULL;
    const unsigned char *data = next->chunk->of->of->source + next->header.offset;
    if (next->header.sequence % PLACES == 0) { /* the ranks' own question: nobody says when its
                                                  buffer is let go */
        if (!send_copy(loop, connection, &next->header, data, next->header.nbytes))
            connection_break(connection, ENOMEM);
    } else if (next->chunk->of->of->parts > 1) {
        if (!send_subtrees(loop, connection, next))
            connection_break(connection, ENOMEM);
    } else if (!connection_send(connection, &next->header, data, next->header.nbytes, NULL,
                                next->header.sequence)) {
        connection_break(connection, ENOMEM);
    }
    if (next->header.nbytes < LARGE_BYTES) /* its result may come before large ones */
        reset_low_water(loop, main);
    /* Of several streams, the caller flushes one; and a place for failures is behind that. */
    if (failpoints_armed || loop->line[main].next != main)
        connection_flush(connection);
    failpoint(WORKER_AFTER_SEND);
    return connection;
}

/* Has it told that a connection was made, or has ended. */
static void note_change(struct loop *loop, uint32_t line)
{
    loop->line[line].changed = true;
    loop->changes = true;
}

static void flush(struct loop *loop, uint32_t line)
{
    struct connection *connection = loop->line[line].connection;
    if (connection != NULL)
        connection_flush(connection);
}

static void refill_all(struct loop *loop)
{
    struct turn turn = {0};
    struct contribution next;
    uint64_t now = now_ns();
    bool any = false;
    /* Every rank begins with another reducer. What is large enough is sent in this order too, not
     * link by link: the first chunks of all shards are summed while the others are on their way. */
    while (flight_next_in_turn(loop->flight, &turn, now, &next)) {
        struct connection *connection = queue_contribution(loop, &next);
        if (connection != NULL && connection_unsent(connection) >= FLUSH_BYTES)
            connection_flush(connection);
        any = true;
    }
    for (uint32_t step = 0; any && step < loop->lines; step++)
        flush(loop, (loop->flight->identity.rank + step) % loop->lines);
}

void loop_refill(struct loop *loop)
{
    heartbeat_lock(&loop->heartbeat);
    refill_all(loop);
    heartbeat_unlock(&loop->heartbeat);
}

bool loop_send(struct loop *loop, uint32_t line, const void *header, const void *payload,
               size_t nbytes)
{
    heartbeat_lock(&loop->heartbeat);
    struct connection *connection = loop->line[line].connection;
    bool sent = connection != NULL && connection->zmtp.ready;
    if (payload == NULL)
        sent = sent && connection_send(connection, header, NULL, 0, NULL, NO_SEQUENCE);
    else
        sent = sent && send_copy(loop, connection, header, payload, nbytes);
    if (sent)
        flush(loop, line);
    /* What is sent over the same socket after this is another connection's. */
    if (sent && ((const uint8_t *)header)[offsetof(struct header, type)] == TYPE_RESUME)
        connection_lend(connection);
    heartbeat_unlock(&loop->heartbeat);
    return sent;
}

bool loop_detach(struct loop *loop, uint64_t sequence)
{
    bool detached = true;
    heartbeat_lock(&loop->heartbeat);
    for (uint32_t line = 0; line < loop->lines; line++)
        if (loop->line[line].connection != NULL)
            detached &= connection_detach(loop->line[line].connection, sequence);
    reset_low_waters(loop);
    heartbeat_unlock(&loop->heartbeat);
    return detached;
}

/* -- receive --------------------------------------------------------------------------------- */

void loop_next(struct loop *loop)
{
    heartbeat_lock(&loop->heartbeat);
    struct connection *connection = loop->line[loop->from].connection;
    if (connection != NULL)
        connection_next(connection);
    heartbeat_unlock(&loop->heartbeat);
}

/* Reads the buffer of an all-reduce no more, though a reducer has had its results before all of its
 * contributions: the caller has it again. */
static void give_back(struct loop *loop, uint64_t sequence)
{
    for (uint32_t line = 0; line < loop->lines; line++) {
        struct connection *connection = loop->line[line].connection;
        if (connection != NULL && !connection_detach(connection, sequence))
            connection_break(connection, ENOMEM);
    }
}

/* Takes the message at hand, if it is a healthy result or a PING without news, and refills that
 * link. */
static bool take(struct loop *loop, uint32_t line, uint64_t now)
{
    uint32_t link = loop->line[line].link;
    struct connection *connection = loop->line[line].connection;
    struct message *message = &connection->message;
    bool ping = message->header[offsetof(struct header, type)] == TYPE_PING;
    if (message->foreign || (message->frames != 2 && !(ping && message->frames == 1)))
        return false;
    if (failpoint_message(WORKER_RECEIVED, message->header, HEADER_BYTES, TYPE_RESULT)) {
        connection_next(connection);
        return true;
    }
    const struct operation *completed = loop->flight->completed;
    if (!flight_take(loop->flight, link, message->header, HEADER_BYTES, message->payload,
                     message->placed_bytes, now))
        return false;
    if (!ping)
        failpoint(WORKER_COPIED);
    connection_next(connection);
    if (loop->flight->completed != completed) {
        failpoint(WORKER_COMPLETED);
        give_back(loop, loop->flight->completed->header.sequence);
    }
    struct contribution next;
    while (flight_next(loop->flight, link, now, &next))
        queue_contribution(loop, &next);
    return true;
}

/* How many results are worth waiting for, of two or more in flight: half of them, so that the others
 * keep the link busy until the next contributions are sent; and few while not many are to be sent, as
 * a short buffer, and the end of a long one, take as long as each chunk does. One, if they are of
 * several all-reduces: other ranks may not have begun the later ones. */
static size_t together(const struct loop *loop, uint32_t link)
{
    const struct flight_link *self = &loop->flight->links[link];
    size_t half = self->sent.count / 2, spared = 1 + self->queue.count / 8;
    for (const struct chunk *sent = self->sent.first; sent != NULL; sent = sent->after)
        if (sent->of->of != self->sent.first->of->of)
            return 1;
    return half < spared ? half : spared;
}

/* Has the poll tell of a line when several results have come as a whole: fewer wake-ups. */
static void await_results(struct loop *loop, uint32_t line)
{
    struct loop_line *self = &loop->line[line];
    if (!self->carries)
        return; /* no result comes over it */
    bool any = self->late || self->connection->state != OPEN;
    uint32_t least = any ? 0 : flight_least(loop->flight, self->link);
    size_t several = self->next == line ? together(loop, self->link) : 1; /* streams share them */
    size_t bytes = 0;
    if (least >= LARGE_BYTES)
        bytes = connection_wants(self->connection, least) +
                (several - 1) * (HEADER_BYTES + (size_t)least);
    connection_await(self->connection, bytes);
    self->awaited_ns = loop->polled_ns;
    if (self->connection->low_water > 0 && loop->low_water_due_ns == 0)
        loop->low_water_due_ns = loop->polled_ns + LOW_WATER_NS;
}

/* Reads whatever has come, when a result has kept the others waiting for too long. */
static void expire_low_water(struct loop *loop)
{
    loop->low_water_due_ns = 0;
    for (uint32_t line = 0; line < loop->lines; line++) {
        struct loop_line *self = &loop->line[line];
        if (self->connection == NULL || self->connection->low_water == 0)
            continue;
        uint64_t until = self->awaited_ns + LOW_WATER_NS;
        if (loop->polled_ns >= until) {
            connection_await(self->connection, 0);
            connection_look(self->connection);
            self->late = true;
        } else if (loop->low_water_due_ns == 0 || until < loop->low_water_due_ns) {
            loop->low_water_due_ns = until;
        }
    }
}

/* Receives from one line until it has nothing more, or others have waited long enough. */
static enum loop_event serve(struct loop *loop, uint32_t line, uint64_t *completed_ns)
{
    struct connection *connection = loop->line[line].connection;
    for (int messages = 0; messages < MESSAGES_PER_TURN; messages++) {
        enum connection_event event = connection_read(connection);
        if (event == CONNECTION_ENDED || event == CONNECTION_READY || event == CONNECTION_SUSPENDED)
            note_change(loop, line);
        if (event == CONNECTION_ENDED || event == CONNECTION_SUSPENDED)
            return LOOP_CHANGE;
        if (connection->zmtp.reply_bytes > 0 || event == CONNECTION_READY)
            flush(loop, line);
        if (event == CONNECTION_READY)
            return LOOP_CHANGE;
        if (event == CONNECTION_IDLE || event == CONNECTION_BUSY)
            break;
        uint64_t now = now_ns();
        loop->line[line].late = false;
        if (!take(loop, line, now)) {
            flush(loop, line);
            connection_await(connection, 0);
            loop->from = line;
            return LOOP_MESSAGE;
        }
        if (connection_unsent(connection) >= FLUSH_BYTES)
            flush(loop, line);
        if (loop->flight->completed == NULL)
            continue;
        if (*completed_ns == 0)
            *completed_ns = now;
        if (now - *completed_ns > GATHER_NS)
            break;
    }
    flush(loop, line);
    if (connection->readable == INPUT_NONE && loop->line[line].connection == connection)
        await_results(loop, line);
    return LOOP_IDLE;
}

/* Whether a line may have something to receive. */
static bool may_receive(const struct loop *loop, uint32_t line)
{
    const struct connection *connection = loop->line[line].connection;
    return connection != NULL && !loop->line[line].changed &&
           (connection->readable != INPUT_NONE || connection->state >= CLOSING ||
            connection->at < connection->end);
}

/* Waits until a socket has news, or it is woken. */
static enum loop_event wait(struct loop *loop, int timeout_ms)
{
    struct epoll_event events[EVENTS];
    if (loop->low_water_due_ns != 0 && timeout_ms > 0) {
        uint64_t now = now_ns(), due = loop->low_water_due_ns;
        long left_ms = now < due ? (long)((due - now + 999999) / 1000000) : 0;
        timeout_ms = left_ms < timeout_ms ? (int)left_ms : timeout_ms;
    }
    if (timeout_ms > 0)
        heartbeat_unlock(&loop->heartbeat);
    int found = epoll_wait(loop->epoll, events, EVENTS, timeout_ms);
    int error = errno;
    if (timeout_ms > 0)
        heartbeat_lock(&loop->heartbeat);
    loop->polled_ns = now_ns();
    if (loop->low_water_due_ns != 0 && loop->polled_ns >= loop->low_water_due_ns)
        expire_low_water(loop);
    if (found < 0 && error == EINTR) {
        atomic_store(&loop->woken, true); /* so that it returns at once */
        loop->interrupted = true;
    }
    if (found < 0) {
        loop->error = error;
        return error == EINTR ? LOOP_IDLE : LOOP_FAILED;
    }
    for (int at = 0; at < found; at++) {
        if (events[at].data.u32 == WAKER)
            atomic_store(&loop->woken, true);
        else
            note(loop, &events[at]);
    }
    return LOOP_IDLE;
}

static enum loop_event run(struct loop *loop, long timeout_ms)
{
    uint32_t lines = loop->lines;
    uint64_t until = now_ns() + (uint64_t)timeout_ms * 1000 * 1000;
    uint64_t completed_ns = 0;
    if (loop->changes)
        return LOOP_CHANGE;
    if (now_ns() - loop->polled_ns >= LOOK_NS) { /* it may have returned before it waited */
        enum loop_event event = wait(loop, 0);
        if (event != LOOP_IDLE)
            return event;
    }
    for (;;) {
        bool more = false;
        for (uint32_t step = 0; step < lines; step++) {
            uint32_t line = loop->turn;
            loop->turn = (line + 1) % lines;
            if (!may_receive(loop, line))
                continue;
            enum loop_event event = serve(loop, line, &completed_ns);
            if (event != LOOP_IDLE)
                return event;
            more |= may_receive(loop, line);
        }
        if (heed(loop) || loop->flight->completed != NULL)
            return LOOP_IDLE;
        uint64_t now = now_ns();
        if (more && now < until && now - loop->polled_ns < LOOK_NS)
            continue;
        long left_ms = more || now >= until ? 0 : (long)((until - now + 999999) / 1000000);
        enum loop_event event = wait(loop, (int)left_ms);
        if (event != LOOP_IDLE || heed(loop) || loop->polled_ns >= until)
            return event;
    }
}

enum loop_event loop_run(struct loop *loop, long timeout_ms)
{
    atomic_store(&loop->running, true);
    atomic_fetch_add(&loop->turns, 1);
    heartbeat_lock(&loop->heartbeat);
    enum loop_event event = run(loop, timeout_ms);
    heartbeat_unlock(&loop->heartbeat);
    atomic_fetch_add(&loop->turns, 1);
    atomic_store(&loop->running, false);
    return event;
}

void loop_rest(struct loop *loop, int first_ms, int longest_ms, int longest_of_one_ms)
{
    struct pollfd resumed = {.fd = loop->resumer, .events = POLLIN};
    int rest_ms = first_ms;
    bool looks = false, runs = false, turned;
    do {
        unsigned turns = atomic_load(&loop->turns);
        if (poll(&resumed, 1, looks ? first_ms : rest_ms) > 0) {
            eventfd_t count;
            bool closed = eventfd_read(loop->resumer, &count) != 0; /* by somebody else's mistake */
            if (closed || atomic_exchange(&loop->resumed, false))
                return;
            rest_ms = first_ms;
            looks = false;
            turned = true;
            continue;
        }
        runs = atomic_load(&loop->running);
        turned = turns != atomic_load(&loop->turns);
        looks = !looks && !runs; /* perhaps nobody waits for what is in flight */
        int most_ms = turned ? longest_ms : longest_of_one_ms;
        if (!looks)
            rest_ms = 2 * rest_ms < most_ms ? 2 * rest_ms : most_ms;
    } while (runs || turned);
}

void loop_resume(struct loop *loop, bool at_once)
{
    if (at_once)
        atomic_store(&loop->resumed, true);
    eventfd_write(loop->resumer, 1);
}
