#include "loop.h"

#include <errno.h>
#include <malloc.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "reducer/failpoints.h"

enum {
    EVENTS = 256,           /* that one look at the sockets brings */
    UNJOINED_PER_LOOK = 16, /* that are accepted, noted or served before members have their turn */
    MESSAGES_PER_TURN = 16,   /* so that no peer starves the others */
    MESSAGES_PER_LOOK = 64,   /* at the clock, so that a flood cannot stop it */
    TIMED_BYTES = 64 << 10,   /* of a sum: it takes a hundred times as long as to read the clock */
    HEARTBEATS_PER_LOOK = 16, /* at the sockets, who have data to move: a heartbeat takes 3 to 5 us */
    LINGER_LOOK_MS = 2        /* at what has been sent, at the end: no poll tells of that in a channel */
};

static const uint64_t LOOK_NS = 1000 * 1000; /* at the sockets, while messages pour in */
static const uint64_t REST_NS = 100 * 1000 * 1000; /* from what need not be done all the time */

/* -- sum ------------------------------------------------------------------------------------- */

/* Makes room for the inputs of a fold. */
static bool make_fold_room(struct loop *loop, size_t n)
{
    if (n <= loop->inputs_room)
        return true;
    const void **inputs = realloc(loop->inputs, n * sizeof *inputs);
    uint8_t *depths = realloc(loop->depths, n);
    loop->inputs = inputs == NULL ? loop->inputs : inputs;
    loop->depths = depths == NULL ? loop->depths : depths;
    if (inputs == NULL || depths == NULL)
        return false;
    loop->inputs_room = n;
    return true;
}

/* Sums a slot of leaves: contributions are one or several subtrees of them, one after another. */
static bool reduce_leaves(struct loop *loop, uint32_t n, const struct slot *slot,
                          const struct header *header, unsigned char *out, size_t count)
{
    uint32_t leaves = (uint32_t)header->window, first = 0, input = 0, parts = 0;
    for (uint32_t rank = 0; rank < n; rank++)
        parts += leaves_parts(header, n, rank);
    if (!make_fold_room(loop, parts))
        return false;
    for (uint32_t rank = 0; rank < n; rank++) {
        const unsigned char *subtree = slot->payloads->blocks[rank]->data;
        uint32_t last = leaves_first(leaves, n, rank + 1);
        for (; first < last; subtree += slot->nbytes) {
            first = leaves_subtree_end(leaves, first, last);
            loop->inputs[input] = subtree;
            loop->depths[input++] = leaves_depth(leaves, first);
        }
    }
    fold_leaves_run(loop->kernels->leaves[header->dtype][header->op], out, loop->inputs,
                    loop->depths, parts, leaves, count);
    return true;
}

/* Folds a complete slot and frees it. The result goes over the latest contribution, which the cache
 * still holds. */
static bool reduce(struct loop *loop, struct rounds *rounds, struct round *round, struct slot *slot,
                   const struct header *header, struct block **result)
{
    failpoint(REDUCER_BEFORE_SUM);
    uint32_t n = rounds->world_size;
    struct block *latest = slot->payloads->blocks[header->rank];
    size_t count = slot->nbytes / dtype_itemsize(header->dtype);
    for (uint32_t rank = 0; rank < n; rank++)
        rounds->members[rank]->held -= window_cost(slot->payloads->blocks[rank]->nbytes);
    if (header->window != 0) {
        if (!reduce_leaves(loop, n, slot, header, latest->data, count))
            return false;
    } else {
        if (!make_fold_room(loop, n))
            return false;
        for (uint32_t rank = 0; rank < n; rank++)
            loop->inputs[rank] = slot->payloads->blocks[rank]->data;
        fold_fn fold = loop->kernels->fold[header->dtype][header->op];
        fold_run(fold, latest->data, loop->inputs, n, count);
    }
    *result = block_share(latest);
    latest->nbytes = slot->nbytes;
    loop->results += n;
    loop->bytes_out += (uint64_t)n * slot->nbytes;
    rounds->traffic.bytes_out += (uint64_t)n * slot->nbytes;
    round_finish(rounds, round, slot);
    bool timed = rounds->ended_room > 0 || (uint64_t)n * slot->nbytes >= TIMED_BYTES;
    round->timestamps.done_us = timed ? now_ns() / 1000 : rounds->now_us;
    return true;
}

enum verdict loop_offer(struct loop *loop, uint64_t peer, const void *frame, size_t frame_bytes,
                        struct block *payload, uint64_t now_us, struct header *header,
                        struct block **result, struct rounds **rounds)
{
    struct member *member = map_get(&loop->members, peer);
    if (member == NULL || !header_read(header, frame, frame_bytes) ||
        header->type != TYPE_CONTRIBUTION)
        return IRREGULAR;
    *rounds = map_get(&loop->rounds, peer);
    struct round *round;
    struct slot *slot;
    (*rounds)->now_us = now_us;
    size_t nbytes = payload->nbytes;
    enum verdict verdict = rounds_offer(*rounds, member, header, payload, &round, &slot);
    if (verdict == IRREGULAR)
        return IRREGULAR;
    failpoint(REDUCER_PLACED);
    loop->contributions++;
    loop->bytes_in += nbytes;
    if (verdict == COMPLETE) {
        if (!reduce(loop, *rounds, round, slot, header, result))
            return OUT_OF_MEMORY;
        header->type = TYPE_RESULT;
        header->watermark = (*rounds)->reached;
        header->rank = 0;
        header->reserved = 0;
        header->since = 0;
        header->history = 0;
    }
    return verdict;
}

/* -- send ------------------------------------------------------------------------------------ */

static void note_lost(struct loop *loop, uint64_t peer)
{
    if (loop->lost_count == loop->lost_room) {
        size_t room = 2 * loop->lost_room + 16;
        uint64_t *lost = realloc(loop->lost, room * sizeof *lost);
        if (lost == NULL)
            return; /* the end of its connection, or a PING, will tell as well */
        loop->lost = lost;
        loop->lost_room = room;
    }
    loop->lost[loop->lost_count++] = peer;
}

/* Of the streams of a link, that with the least on its way, in turn. */
static struct peer *pick(struct peer *peer)
{
    uint64_t least = UINT64_MAX;
    struct peer *after = peer->picked, *other = after;
    do {
        other = other->next_stream;
        uint64_t backlog = connection_backlog(&other->connection);
        if (backlog < least) {
            least = backlog;
            peer->picked = other;
        }
    } while (other != after);
    return peer->picked;
}

static bool send_block(struct loop *loop, uint64_t key, const void *header, struct block *payload)
{
    struct peer *peer = map_get(&loop->peers, key);
    uint8_t type = ((const uint8_t *)header)[offsetof(struct header, type)];
    if (peer != NULL && peer->next_stream != peer && type == TYPE_RESULT)
        peer = pick(peer);
    if (peer == NULL || peer->ended ||
        !connection_send(&peer->connection, header, payload == NULL ? NULL : payload->data,
                         payload == NULL ? 0 : payload->nbytes, payload, NO_SEQUENCE))
        return false;
    /* A PING leaves with the peer's next heartbeat, or what is sent before: those of thousands, one
     * after another, would hold up data. */
    if (type != TYPE_PING || peer->connection.channel != NULL)
        connection_flush(&peer->connection);
    return true;
}

bool loop_send(struct loop *loop, uint64_t peer, const void *header, const void *payload,
               size_t nbytes)
{
    heartbeat_lock(&loop->heartbeat);
    struct block *copy = payload == NULL ? NULL : block_copy(&loop->pool, payload, nbytes);
    bool sent = payload == NULL || copy != NULL;
    sent = sent && send_block(loop, peer, header, copy);
    if (copy != NULL)
        block_drop(&loop->pool, copy);
    heartbeat_unlock(&loop->heartbeat);
    return sent;
}

static void send_results(struct loop *loop, struct rounds *rounds, const struct header *header,
                         struct block *result)
{
    /* Each rank's machine gets a fair share of first places. */
    uint32_t n = failpoint(REDUCER_AFTER_SUM) ? 0 : rounds->world_size;
    uint64_t turn = header->nbytes == 0 ? 0 : header->offset / header->nbytes;
    for (uint32_t step = 0; step < n; step++) {
        struct member *member = rounds->members[(turn + step) % n];
        if (step == 1 && failpoint(REDUCER_BETWEEN_RESULTS))
            continue;
        if (!send_block(loop, member->peer, header, result))
            note_lost(loop, member->peer);
    }
    if (n > 0)
        failpoint(REDUCER_AFTER_RESULTS);
    block_drop(&loop->pool, result);
}

/* -- connections ----------------------------------------------------------------------------- */

static bool note_change(struct loop *loop, const struct peer *peer, bool came)
{
    if (loop->change_count == loop->change_room) {
        size_t room = 2 * loop->change_room + 16;
        struct change *changes = realloc(loop->changes, room * sizeof *changes);
        if (changes == NULL)
            return false;
        loop->changes = changes;
        loop->change_room = room;
    }
    loop->changes[loop->change_count++] =
        (struct change){.number = peer->number, .fd = peer->connection.fd, .came = came};
    return true;
}

/* Puts a peer into the list of those to receive from. */
static void enqueue(struct peer *peer)
{
    struct group *group = peer->group;
    if (peer->waits || peer->ended)
        return;
    peer->waits = true;
    peer->next = NULL;
    peer->previous = group->last;
    if (group->last == NULL)
        group->first = peer;
    else
        group->last->next = peer;
    group->last = peer;
}

static struct peer *dequeue(struct peer *peer)
{
    struct group *group = peer->group;
    if (peer->previous == NULL)
        group->first = peer->next;
    else
        peer->previous->next = peer->next;
    if (peer->next == NULL)
        group->last = peer->previous;
    else
        peer->next->previous = peer->previous;
    peer->waits = false;
    return peer;
}

/* Has the poll tell of a peer's socket; false: it cannot. */
static bool watch(struct peer *peer)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
                                .data.ptr = peer};
    return epoll_ctl(peer->group->epoll, EPOLL_CTL_ADD, peer->connection.fd, &event) == 0;
}

/* Puts a peer into its group, as the latest. */
static void enter(struct peer *peer)
{
    struct group *group = peer->group;
    peer->after = NULL;
    peer->before = group->latest;
    if (group->latest == NULL)
        group->oldest = peer;
    else
        group->latest->after = peer;
    group->latest = peer;
}

/* The peer behind another one, all around; NULL: there is no other. */
static struct peer *following(const struct loop *loop, const struct peer *peer)
{
    struct peer *next = peer->after;
    if (next == NULL && peer->group == &loop->joined)
        next = loop->unjoined.oldest;
    if (next == NULL)
        next = loop->joined.oldest != NULL ? loop->joined.oldest : loop->unjoined.oldest;
    return next == peer ? NULL : next;
}

/* Takes a peer out of its group. */
static void quit(struct loop *loop, struct peer *peer)
{
    struct group *group = peer->group;
    if (loop->next_heartbeat == peer)
        loop->next_heartbeat = following(loop, peer);
    if (peer->before == NULL)
        group->oldest = peer->after;
    else
        peer->before->after = peer->after;
    if (peer->after == NULL)
        group->latest = peer->before;
    else
        peer->after->before = peer->before;
    if (peer->waits)
        dequeue(peer);
    /* A forked child may have the socket open still, and then closing it would not do that. */
    epoll_ctl(group->epoll, EPOLL_CTL_DEL, peer->connection.fd, NULL);
}

/* Makes a peer of a socket, which it then owns, or of the server's end of a channel. False: out of memory
 * or files. */
static bool welcome(struct loop *loop, int fd, struct channel *channel, uint64_t now)
{
    struct peer *peer = calloc(1, sizeof *peer);
    if (peer == NULL)
        return false;
    if (!connection_init(&peer->connection, fd, true, channel == NULL ? loop->keys : NULL,
                         loop->max_frame_bytes, &loop->pool)) {
        free(peer);
        return false;
    }
    connection_limit(&peer->connection, UNJOINED_BYTES);
    peer->group = &loop->unjoined;
    peer->next_stream = peer->picked = peer;
    peer->number = ++loop->accepted;
    peer->key = peer_key(&peer->number, 7); /* the wire is little-endian, and so is this CPU */
    peer->since_ns = now;
    bool known = map_put(&loop->peers, peer->key, peer);
    bool watched = known && watch(peer);
    if (!watched || (channel == NULL && !note_change(loop, peer, true))) {
        if (watched)
            epoll_ctl(loop->unjoined.epoll, EPOLL_CTL_DEL, fd, NULL);
        if (known)
            map_remove(&loop->peers, peer->key);
        connection_free(&peer->connection);
        free(peer);
        return false;
    }
    if (channel != NULL) {
        connection_attach(&peer->connection, channel, 0);
        peer->announced = true; /* `changes` tell nobody that it has gone */
    }
    enter(peer);
    return true;
}

struct channel *loop_connect_inproc(struct loop *loop)
{
    struct channel *channel = channel_make();
    if (channel == NULL)
        return NULL;
    heartbeat_lock(&loop->heartbeat);
    bool welcomed = welcome(loop, channel->end[0].fd, channel, now_ns());
    heartbeat_unlock(&loop->heartbeat);
    if (welcomed)
        return channel;
    channel_close(channel, 0);
    channel_close(channel, 1);
    errno = ENOMEM;
    return NULL;
}

/* Has the poll tell of connections that may be accepted, or not. */
static void heed_listener(struct loop *loop, bool heeds)
{
    struct epoll_event event = {.events = heeds ? EPOLLIN : 0, .data.ptr = NULL};
    epoll_ctl(loop->unjoined.epoll, EPOLL_CTL_MOD, loop->listener, &event);
    loop->accept_again_ns = heeds ? 0 : now_ns() + REST_NS;
}

/* Whether one more would be too many. Who goes on over another connection needs two for a moment. */
static bool is_full(const struct loop *loop)
{
    size_t open = loop->peers.count - loop->suspended;
    return open >= loop->max_open || open >= loop->max_first + loop->further;
}

/* Has the oldest stranger end, when those have been heard that wait: who has just come may be about
 * to say who it is. */
static void make_room(struct loop *loop)
{
    struct peer *oldest = loop->unjoined.oldest;
    if (oldest == NULL) {
        heed_listener(loop, false);
    } else if (oldest->connection.state != CLOSED) {
        connection_refuse(&oldest->connection);
        loop->crowded_out++;
        enqueue(oldest);
    }
}

static void accept_some(struct loop *loop)
{
    uint64_t now = now_ns();
    for (int tried = 0; tried < UNJOINED_PER_LOOK && loop->accept_again_ns == 0; tried++) {
        if (is_full(loop)) {
            if (tried == 0) /* else the poll tells whether there is another one */
                make_room(loop);
            return;
        }
        int fd = accept4(loop->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && errno == EAGAIN)
            return;
        if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS))
            heed_listener(loop, false);
        if (fd < 0)
            continue; /* that one has gone again */
        int at_once = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
        if (!welcome(loop, fd, NULL, now)) {
            close(fd);
            heed_listener(loop, false);
        }
    }
}

static void leave(struct loop *loop, struct peer *peer)
{
    map_remove(&loop->peers, peer->key);
    struct peer *last = peer;
    for (; last->next_stream != peer; last = last->next_stream)
        last->next_stream->picked = last->next_stream;
    last->next_stream = peer->next_stream;
    loop->further -= peer->further;
    loop->suspended -= peer->until_ns != 0;
    quit(loop, peer);
    if (peer->connection.channel == NULL) {
        note_change(loop, peer, false); /* else the guard finds that it is gone */
        close(peer->connection.fd);
    }
    connection_free(&peer->connection);
    peer->next = loop->forgotten;
    loop->forgotten = peer;
}

void loop_forget(struct loop *loop)
{
    heartbeat_lock(&loop->heartbeat);
    leave(loop, loop->peer);
    loop->peer = NULL;
    heartbeat_unlock(&loop->heartbeat);
}

/* Gives up a peer whose socket has broken. */
static void give_up(struct peer *peer)
{
    connection_break(&peer->connection, ECONNRESET);
    enqueue(peer);
}

/* Closes a connection over which another one was to go on. */
static void reject(struct peer *successor)
{
    if (successor == NULL || successor->ended)
        return;
    connection_refuse(&successor->connection);
    enqueue(successor);
}

/* Has a peer go on over the socket of a fresh one, which ends. If that has broken meanwhile there may
 * be another one. */
static void resume(struct loop *loop, struct peer *peer)
{
    struct peer *successor = map_get(&loop->peers, peer->successor);
    peer->successor = 0;
    if (successor == NULL || successor->ended)
        return;
    struct connection *connection = &peer->connection;
    bool can = connection_can_resume(connection, peer->peer_read);
    struct header answer = loop->resumed;
    answer.offset = connection->bytes_read;
    if (can && connection_send(&successor->connection, &answer, NULL, 0, NULL, NO_SEQUENCE))
        connection_flush(&successor->connection);
    if (can && !connection_is_between(&successor->connection)) {
        reject(successor);
        return;
    }
    epoll_ctl(peer->group->epoll, EPOLL_CTL_DEL, connection->fd, NULL);
    can = can && connection_resume(connection, &successor->connection, peer->peer_read);
    reject(successor); /* the other one has its socket now */
    if (can) {
        loop->suspended -= peer->until_ns != 0;
        peer->until_ns = 0;
    }
    if (can && note_change(loop, peer, true) && watch(peer)) {
        connection_flush(connection);
        enqueue(peer);
    } else {
        give_up(peer);
    }
}

void loop_resume_over(struct loop *loop, uint64_t key, uint64_t successor, uint64_t peer_read,
                      const struct header *header)
{
    heartbeat_lock(&loop->heartbeat);
    struct peer *peer = map_get(&loop->peers, key);
    loop->resumed = *header;
    if (peer == NULL || peer->ended) {
        reject(map_get(&loop->peers, successor));
    } else {
        reject(map_get(&loop->peers, peer->successor)); /* an earlier one, if there is one */
        peer->successor = successor;
        peer->peer_read = peer_read;
        if (peer->connection.state == SUSPENDED)
            resume(loop, peer);
        else
            connection_look(&peer->connection); /* at what came, and perhaps that it has broken */
        enqueue(peer);
    }
    heartbeat_unlock(&loop->heartbeat);
}

void loop_make_resumable(struct loop *loop, uint64_t key, uint64_t resume_ns)
{
    heartbeat_lock(&loop->heartbeat);
    struct peer *peer = map_get(&loop->peers, key);
    if (peer != NULL) {
        peer->resume_ns = resume_ns;
        connection_make_resumable(&peer->connection);
    }
    heartbeat_unlock(&loop->heartbeat);
}

bool loop_is_suspended(struct loop *loop, uint64_t key)
{
    heartbeat_lock(&loop->heartbeat); /* loop_connect_inproc may put a peer beside it meanwhile */
    const struct peer *peer = map_get(&loop->peers, key);
    bool suspended = peer != NULL && peer->connection.state == SUSPENDED;
    heartbeat_unlock(&loop->heartbeat);
    return suspended;
}

int loop_socket(struct loop *loop, uint64_t key)
{
    heartbeat_lock(&loop->heartbeat);
    const struct peer *peer = map_get(&loop->peers, key);
    int fd = peer == NULL || peer->connection.channel != NULL ? -1 : peer->connection.fd;
    heartbeat_unlock(&loop->heartbeat);
    return fd;
}

void loop_give_up(struct loop *loop, uint64_t key)
{
    heartbeat_lock(&loop->heartbeat);
    struct peer *peer = map_get(&loop->peers, key);
    if (peer != NULL && peer->connection.state == SUSPENDED)
        give_up(peer);
    heartbeat_unlock(&loop->heartbeat);
}

/* Frees peers that events of the latest look may have spoken of. */
static void free_forgotten(struct loop *loop)
{
    while (loop->forgotten != NULL) {
        struct peer *peer = loop->forgotten;
        loop->forgotten = peer->next;
        free(peer);
    }
}

/* Ends handshakes that take too long; the oldest peers are first. */
static void expire(struct loop *loop, uint64_t now)
{
    if (now - loop->expired_ns < REST_NS)
        return;
    loop->expired_ns = now;
    struct peer *joined = loop->suspended > 0 ? loop->joined.oldest : NULL;
    for (struct peer *peer = joined; peer != NULL; peer = peer->after)
        if (peer->connection.state == SUSPENDED && now >= peer->until_ns)
            give_up(peer);
    for (struct peer *peer = loop->unjoined.oldest; peer != NULL; peer = peer->after) {
        if (now - peer->since_ns < loop->handshake_ns)
            return;
        if (peer->connection.state >= OPEN)
            continue;
        loop->unfinished++;
        connection_break(&peer->connection, ETIMEDOUT);
        enqueue(peer);
    }
}

/* Sends the heartbeats that are due, a few at a time. Returns when the next are due. */
static uint64_t send_some_heartbeats(struct loop *loop, uint64_t now)
{
    if (now < loop->heartbeat_due_ns)
        return loop->heartbeat_due_ns;
    size_t count = loop->peers.count, some = count < HEARTBEATS_PER_LOOK ? count : HEARTBEATS_PER_LOOK;
    for (size_t sent = 0; sent < some; sent++) {
        struct peer *peer = loop->next_heartbeat;
        if (peer == NULL)
            peer = loop->joined.oldest != NULL ? loop->joined.oldest : loop->unjoined.oldest;
        if (!peer->ended)
            connection_send_heartbeat(&peer->connection);
        loop->next_heartbeat = following(loop, peer);
    }
    uint64_t pause_ns = count == 0 ? loop->heartbeat_every_ns : loop->heartbeat_every_ns * some / count;
    loop->heartbeat_due_ns += pause_ns;
    if (loop->heartbeat_due_ns + loop->heartbeat_every_ns < now)
        loop->heartbeat_due_ns = now; /* what was missed has no use any more */
    return loop->heartbeat_due_ns;
}

/* Sends those that the loop's own thread has not, as it runs something else. A thread that is preempted
 * in here holds the loop for as long as others have the processor, so it is not the usual one. */
static uint64_t send_overdue_heartbeats(void *argument, uint64_t now)
{
    struct loop *loop = argument;
    uint64_t overdue_ns = loop->heartbeat_due_ns + loop->heartbeat_every_ns / 2;
    return now < overdue_ns ? overdue_ns : send_some_heartbeats(loop, now);
}

static void close_polls(struct loop *loop)
{
    if (loop->joined.epoll >= 0)
        close(loop->joined.epoll);
    if (loop->unjoined.epoll >= 0)
        close(loop->unjoined.epoll);
    loop->joined.epoll = loop->unjoined.epoll = -1;
}

bool loop_listen(struct loop *loop, int listener, uint64_t every_ns)
{
    loop->joined.epoll = epoll_create1(EPOLL_CLOEXEC);
    loop->unjoined.epoll = epoll_create1(EPOLL_CLOEXEC);
    loop->listener = listener;
    loop->heartbeat_every_ns = every_ns / 2;
    loop->heartbeat_due_ns = now_ns() + loop->heartbeat_every_ns;
    /* NULL is what lets peers come: a listener to strangers, and these to members. */
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (loop->joined.epoll >= 0 && loop->unjoined.epoll >= 0 &&
        epoll_ctl(loop->unjoined.epoll, EPOLL_CTL_ADD, listener, &event) == 0 &&
        epoll_ctl(loop->joined.epoll, EPOLL_CTL_ADD, loop->unjoined.epoll, &event) == 0 &&
        heartbeat_start(&loop->heartbeat, send_overdue_heartbeats, loop))
        return true;
    int error = errno;
    close_polls(loop);
    errno = error;
    return false;
}

/* Whether something is left to be sent. */
static bool drain_group(const struct group *group)
{
    bool unsent = false;
    for (struct peer *peer = group->oldest; peer != NULL; peer = peer->after)
        unsent |= connection_drain(&peer->connection);
    return unsent;
}

/* Takes note of which connections of a group can be written to. */
static void note_writable(struct group *group, int timeout_ms)
{
    struct epoll_event events[EVENTS];
    int found = epoll_wait(group->epoll, events, EVENTS, timeout_ms);
    for (int at = 0; at < found; at++) {
        struct peer *peer = events[at].data.ptr;
        if (peer != NULL)
            connection_note(&peer->connection, events[at].events);
    }
}

/* Waits until everything is with the kernel. */
static void linger(struct loop *loop, long timeout_ms)
{
    uint64_t until = now_ns() + (uint64_t)timeout_ms * 1000 * 1000;
    for (bool unsent = true; unsent && now_ns() < until;) {
        unsent = drain_group(&loop->joined) | drain_group(&loop->unjoined);
        if (unsent) {
            note_writable(&loop->joined, LINGER_LOOK_MS);
            note_writable(&loop->unjoined, 0); /* whose news would end each wait for members' */
        }
    }
}

void loop_end(struct loop *loop, long linger_ms)
{
    if (heartbeat_stop(&loop->heartbeat)) {
        epoll_ctl(loop->unjoined.epoll, EPOLL_CTL_DEL, loop->listener, NULL);
        linger(loop, linger_ms);
        while (loop->joined.oldest != NULL)
            leave(loop, loop->joined.oldest);
        while (loop->unjoined.oldest != NULL)
            leave(loop, loop->unjoined.oldest);
        free_forgotten(loop);
        close_polls(loop);
        loop->peer = NULL;
    }
    if (loop->heartbeat.runs)
        return; /* this is a child of a fork, and all of it the parent's */
    map_free(&loop->peers);
    map_free(&loop->members);
    map_free(&loop->rounds);
    free(loop->changes);
    free(loop->lost);
    free(loop->inputs);
    free(loop->depths);
    loop->changes = NULL;
    loop->lost = NULL;
    loop->inputs = NULL;
    loop->depths = NULL;
    loop->change_count = loop->change_room = loop->lost_count = loop->lost_room = 0;
    loop->inputs_room = 0;
    block_pool_free(&loop->pool);
}

void loop_release_memory(struct loop *loop)
{
    block_pool_free(&loop->pool);
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

/* -- receive --------------------------------------------------------------------------------- */

void loop_next(struct loop *loop)
{
    heartbeat_lock(&loop->heartbeat);
    connection_next(&loop->peer->connection);
    heartbeat_unlock(&loop->heartbeat);
}

void loop_admit(struct loop *loop, bool admitted)
{
    heartbeat_lock(&loop->heartbeat);
    connection_admit(&loop->peer->connection, admitted);
    heartbeat_unlock(&loop->heartbeat);
}

bool loop_load(struct loop *loop, uint64_t key, struct load *load)
{
    heartbeat_lock(&loop->heartbeat); /* a heartbeat changes both ends of a difference */
    const struct peer *peer = map_get(&loop->peers, key);
    bool here = peer != NULL && !peer->ended;
    if (here) {
        const struct connection *connection = &peer->connection;
        load->read = connection_came(connection);
        /* While it is suspended nothing can come, and its time is limited by itself. */
        load->waits = connection_awaits(connection) || connection->state == SUSPENDED;
        load->unread = connection_partial(connection);
        load->unsent = connection_unsent(connection);
    }
    heartbeat_unlock(&loop->heartbeat);
    return here;
}

bool loop_hang_up(struct loop *loop, uint64_t key)
{
    heartbeat_lock(&loop->heartbeat);
    struct peer *peer = map_get(&loop->peers, key);
    bool here = peer != NULL && !peer->ended;
    if (here) {
        connection_refuse(&peer->connection);
        enqueue(peer);
    }
    heartbeat_unlock(&loop->heartbeat);
    return here;
}

/* Has a peer be served as members are, from now on. */
static void join(struct loop *loop, struct peer *peer)
{
    connection_limit(&peer->connection, loop->max_frame_bytes);
    if (peer->group == &loop->joined || peer->ended)
        return;
    bool waits = peer->waits;
    quit(loop, peer);
    peer->group = &loop->joined;
    enter(peer);
    if (waits)
        enqueue(peer);
    if (peer->connection.state != SUSPENDED && !watch(peer))
        give_up(peer);
}

void loop_mark_joined(struct loop *loop, uint64_t key)
{
    heartbeat_lock(&loop->heartbeat);
    struct peer *peer = map_get(&loop->peers, key);
    if (peer != NULL)
        join(loop, peer);
    heartbeat_unlock(&loop->heartbeat);
}

void loop_attach_stream(struct loop *loop, uint64_t key, uint64_t stream)
{
    heartbeat_lock(&loop->heartbeat);
    struct peer *peer = map_get(&loop->peers, key), *other = map_get(&loop->peers, stream);
    if (peer != NULL && other != NULL && other->next_stream == other && !peer->ended && !other->ended) {
        other->next_stream = peer->next_stream;
        peer->next_stream = other;
        other->further = true;
        loop->further++;
        join(loop, other);
        other->resume_ns = peer->resume_ns;
        if (peer->connection.bond == RESUMABLE)
            connection_make_resumable(&other->connection);
    }
    heartbeat_unlock(&loop->heartbeat);
}

/* Has further streams end as the first one of their link has. Not the other way round: a GOODBYE may
 * be on its way there. */
static void end_streams(struct peer *peer)
{
    for (struct peer *other = peer->next_stream; other != peer && !peer->further;
         other = other->next_stream) {
        connection_refuse(&other->connection);
        enqueue(other);
    }
}

/* Takes the message at hand, if it is a healthy contribution. */
static enum verdict take(struct loop *loop, struct peer *peer)
{
    struct message *message = &peer->connection.message;
    if (message->foreign || message->frames != 2)
        return IRREGULAR;
    if (failpoint_message(REDUCER_RECEIVED, message->header, HEADER_BYTES, TYPE_CONTRIBUTION)) {
        connection_next(&peer->connection);
        return PLACED;
    }
    struct header header;
    struct block *result;
    struct rounds *rounds;
    enum verdict verdict = loop_offer(loop, peer->key, message->header, HEADER_BYTES,
                                      message->payload, now_ns() / 1000, &header, &result, &rounds);
    if (verdict == IRREGULAR)
        return IRREGULAR;
    connection_hand_over(&peer->connection); /* the slot has the payload, or had */
    if (verdict == COMPLETE)
        send_results(loop, rounds, &header, result);
    return verdict;
}

/* Has the connection of a peer end. It is an event if anybody knows of the peer: of a stranger the
 * engine that has heard it, and who counts those without a key. */
static enum loop_event end(struct loop *loop, struct peer *peer)
{
    peer->ended = true;
    if (!peer->announced && (loop->keys == NULL || peer->connection.zmtp.ready)) {
        leave(loop, peer);
        return LOOP_TIMEOUT;
    }
    end_streams(peer);
    return LOOP_ENDED;
}

/* Receives from one peer until it has nothing more, or others have waited long enough. */
static enum loop_event serve(struct loop *loop, struct peer *peer)
{
    struct connection *connection = &peer->connection;
    for (int messages = 0; messages < MESSAGES_PER_TURN; messages++) {
        enum connection_event event = connection_read(connection);
        if (connection->zmtp.reply_bytes > 0)
            connection_flush(connection);
        if (event == CONNECTION_IDLE) {
            connection_await_rest(connection);
            if (peer->successor != 0)
                resume(loop, peer);
            if (connection->readable) /* the other end of a channel had queued as much already */
                enqueue(peer);
            return LOOP_TIMEOUT;
        }
        if (event == CONNECTION_BUSY)
            break;
        if (event == CONNECTION_SUSPENDED) {
            peer->until_ns = now_ns() + peer->resume_ns;
            loop->suspended++;
            if (peer->successor != 0)
                resume(loop, peer);
            return LOOP_TIMEOUT;
        }
        loop->peer = peer;
        if (event == CONNECTION_ENDED)
            return end(loop, peer);
        if (event == CONNECTION_READY)
            continue;
        if (event == CONNECTION_MESSAGE && connection->readable == INPUT_TO_END &&
            peer->group == &loop->unjoined) {
            connection_next(connection); /* nobody is there to hear the answer */
            continue;
        }
        enum verdict verdict = event == CONNECTION_MESSAGE ? take(loop, peer) : IRREGULAR;
        if (verdict == PLACED || verdict == COMPLETE)
            continue;
        enqueue(peer);
        if (verdict == OUT_OF_MEMORY)
            return LOOP_OUT_OF_MEMORY;
        if (event == CONNECTION_ADMIT)
            return LOOP_ADMIT;
        peer->announced = true;
        return LOOP_MESSAGE;
    }
    enqueue(peer);
    return LOOP_TIMEOUT;
}

/* Waits until sockets of a group have news, and records `most` at most. `knocks`: NULL was
 * among them. */
static enum loop_event look(struct loop *loop, struct group *group, int most, int timeout_ms,
                            bool *knocks)
{
    struct epoll_event events[EVENTS];
    int found = epoll_wait(group->epoll, events, most, timeout_ms);
    int error = errno;
    if (timeout_ms > 0)
        heartbeat_lock(&loop->heartbeat);
    *knocks = false;
    if (found < 0 && error != EINTR) {
        loop->error = error;
        return LOOP_FAILED;
    }
    for (int at = 0; at < found; at++) {
        struct peer *peer = events[at].data.ptr;
        if (peer == NULL) {
            *knocks = true;
            continue;
        }
        connection_note(&peer->connection, events[at].events);
        if (peer->connection.readable)
            enqueue(peer);
    }
    return LOOP_TIMEOUT;
}

/* Waits until a socket has news: those of all members, and then those of a few strangers. */
static enum loop_event wait(struct loop *loop, int timeout_ms)
{
    bool unjoined, knocks = false;
    free_forgotten(loop);
    if (timeout_ms > 0)
        heartbeat_unlock(&loop->heartbeat);
    enum loop_event event = look(loop, &loop->joined, EVENTS, timeout_ms, &unjoined);
    if (event == LOOP_TIMEOUT && unjoined)
        event = look(loop, &loop->unjoined, UNJOINED_PER_LOOK, 0, &knocks);
    if (knocks)
        accept_some(loop);
    return event;
}

/* Serves those of a group that have something, for so many turns at most, or for as long as the
 * sockets need no look. */
static enum loop_event serve_some(struct loop *loop, struct group *group, int most, uint64_t looked)
{
    for (int turns = 0; group->first != NULL && turns < most; turns++) {
        enum loop_event event = serve(loop, dequeue(group->first));
        if (event != LOOP_TIMEOUT)
            return event;
        if (loop->lost_count > 0)
            return LOOP_UNREACHABLE;
        if (now_ns() - looked >= LOOK_NS)
            break;
    }
    return LOOP_TIMEOUT;
}

static enum loop_event run(struct loop *loop, long timeout_ms)
{
    uint64_t until = now_ns() + (uint64_t)timeout_ms * 1000 * 1000, polled = 0;
    for (;;) {
        if (loop->lost_count > 0)
            return LOOP_UNREACHABLE;
        uint64_t now = now_ns();
        expire(loop, now);
        uint64_t due = send_some_heartbeats(loop, now), wake = until < due ? until : due;
        bool strange = loop->unjoined.first != NULL, rests = loop->joined.first == NULL && !strange;
        if (rests || strange || now - polled >= LOOK_NS) {
            long left_ms = rests && wake > now ? (long)((wake - now + 999999) / 1000000) : 0;
            if (loop->accept_again_ns != 0 && now >= loop->accept_again_ns)
                heed_listener(loop, true);
            enum loop_event event = wait(loop, (int)left_ms);
            if (event != LOOP_TIMEOUT)
                return event;
            polled = now_ns();
            if (polled >= until && loop->joined.first == NULL && loop->unjoined.first == NULL)
                return LOOP_TIMEOUT;
        }
        if (polled >= until && now >= until)
            return LOOP_TIMEOUT;
        enum loop_event event = serve_some(loop, &loop->joined, MESSAGES_PER_LOOK, polled);
        if (event == LOOP_TIMEOUT)
            event = serve_some(loop, &loop->unjoined, UNJOINED_PER_LOOK, now_ns());
        if (event != LOOP_TIMEOUT)
            return event;
    }
}

enum loop_event loop_run(struct loop *loop, long timeout_ms)
{
    heartbeat_lock(&loop->heartbeat);
    enum loop_event event = run(loop, timeout_ms);
    heartbeat_unlock(&loop->heartbeat);
    return event;
}
