#define _POSIX_C_SOURCE 200809L /* clock_gettime, pipe */

#include "loop.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "reducer/failpoints/failpoints.h"
#include "reducer/runtime/malloc_tuning.h"

enum {
    RECEIVES_PER_TURN = 64,      /* so that no link starves the others */
    COPY_BELOW = 16 << 10,       /* sharing a smaller payload costs more than copying it */
    LOOK_NS = 1000 * 1000,       /* while messages pour in, descriptors are looked at this often */
    PATIENCE_NS = 20 * 1000      /* for more results, once an operation has completed */
};

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* -- set-up ---------------------------------------------------------------------------------- */

static bool make_pipe(struct loop *loop)
{
    int ends[2];
    if (pipe(ends) != 0)
        return false;
    loop->pipe_read = ends[0];
    loop->pipe_write = ends[1];
    for (int end = 0; end < 2; end++)
        if (fcntl(ends[end], F_SETFL, O_NONBLOCK) != 0 ||
            fcntl(ends[end], F_SETFD, FD_CLOEXEC) != 0)
            return false;
    return true;
}

bool loop_init(struct loop *loop, const struct libzmq *zmq, struct flight *flight)
{
    keep_large_blocks();
    *loop = (struct loop){.zmq = *zmq, .flight = flight, .pipe_read = -1, .pipe_write = -1};
    loop->items = calloc(1, sizeof *loop->items);
    if (loop->items == NULL || !make_pipe(loop))
        return false;
    loop->items[0] = (struct pollfd){.fd = loop->pipe_read, .events = POLLIN};
    return true;
}

bool loop_add(struct loop *loop, void *socket, int socket_fd, int monitor_fd)
{
    size_t links = loop->links;
    void **sockets = realloc(loop->sockets, (links + 1) * sizeof *sockets);
    if (sockets == NULL)
        return false;
    loop->sockets = sockets;
    bool *ready = realloc(loop->ready, (links + 1) * sizeof *ready);
    if (ready == NULL)
        return false;
    loop->ready = ready;
    struct pollfd *items = realloc(loop->items, (2 * links + 3) * sizeof *items);
    if (items == NULL)
        return false;
    loop->items = items;
    sockets[links] = socket;
    ready[links] = true;
    items[1 + 2 * links] = (struct pollfd){.fd = socket_fd, .events = POLLIN};
    items[2 + 2 * links] = (struct pollfd){.fd = monitor_fd, .events = POLLIN};
    loop->links++;
    loop->added = true;
    return true;
}

void loop_replace(struct loop *loop, uint32_t link, void *socket, int socket_fd, int monitor_fd)
{
    loop->sockets[link] = socket;
    loop->ready[link] = true;
    loop->items[1 + 2 * link].fd = socket_fd;
    loop->items[2 + 2 * link].fd = monitor_fd;
    loop->added = true;
}

void loop_free(struct loop *loop)
{
    loop_close_message(loop);
    if (loop->pipe_read >= 0)
        close(loop->pipe_read);
    if (loop->pipe_write >= 0)
        close(loop->pipe_write);
    loop->pipe_read = loop->pipe_write = -1;
    free(loop->sockets);
    free(loop->ready);
    free(loop->items);
    loop->sockets = NULL;
    loop->ready = NULL;
    loop->items = NULL;
}

void loop_wake(struct loop *loop)
{
    if (!atomic_exchange(&loop->woken, true))
        while (write(loop->pipe_write, "", 1) < 0 && errno == EINTR)
            ;
}

static void drain(struct loop *loop)
{
    char bytes[16];
    while (read(loop->pipe_read, bytes, sizeof bytes) < 0 && errno == EINTR)
        ;
}

/* Whether it was woken since the last time; asked before every wait. */
static bool heed(struct loop *loop)
{
    if (!atomic_load(&loop->woken))
        return false;
    /* In this order: who wakes it from here on sets the flag anew, whatever becomes of the byte. */
    atomic_store(&loop->woken, false);
    drain(loop);
    return true;
}

/* -- send ------------------------------------------------------------------------------------ */

/* Called when libzmq reads a payload no more, perhaps by one of its own threads. */
static void release(void *data, void *hint)
{
    (void)data;
    struct chunk *chunk = hint;
    struct operation *operation = chunk->of->of;
    atomic_fetch_sub_explicit(&chunk->reads, 1, memory_order_release);
    operation_drop(operation);
}

static bool make_payload(struct loop *loop, zmq_msg_t *message, const struct contribution *next)
{
    const struct libzmq *zmq = &loop->zmq;
    struct operation *operation = next->chunk->of->of;
    unsigned char *data = operation->data + next->header.offset;
    size_t nbytes = next->header.nbytes;
    if (nbytes < COPY_BELOW) {
        if (zmq->msg_init_size(message, nbytes) != 0)
            return false;
        if (nbytes > 0)
            memcpy(zmq->msg_data(message), data, nbytes);
        return true;
    }
    zmq_msg_t original;
    operation_use(operation);
    atomic_fetch_add_explicit(&next->chunk->reads, 1, memory_order_relaxed);
    if (zmq->msg_init_data(&original, data, nbytes, release, next->chunk) != 0) {
        release(data, next->chunk);
        return false;
    }
    /* A reducer in this process gets this very memory. Only a copy is marked as shared, and that
     * tells it not to write there. */
    zmq->msg_init(message);
    zmq->msg_copy(message, &original);
    zmq->msg_close(&original);
    return true;
}

static bool send_frame(struct loop *loop, uint32_t link, zmq_msg_t *frame, int flags)
{
    if (loop->zmq.msg_send(frame, loop->sockets[link], flags | ZMQ_DONTWAIT) >= 0)
        return true;
    loop->zmq.msg_close(frame);
    return false;
}

/* One to a reducer that is not connected, or for which there is no memory, is dropped: the monitor
 * tells, or the deadline. */
static void send_contribution(struct loop *loop, const struct contribution *next)
{
    if (failpoint(WORKER_BEFORE_SEND))
        return;
    zmq_msg_t header, payload;
    if (!make_payload(loop, &payload, next))
        return;
    if (loop->zmq.msg_init_size(&header, HEADER_BYTES) != 0) {
        loop->zmq.msg_close(&payload);
        return;
    }
    memcpy(loop->zmq.msg_data(&header), &next->header, HEADER_BYTES);
    uint32_t link = next->chunk->link;
    loop_touch(loop, link);
    if (send_frame(loop, link, &header, ZMQ_SNDMORE))
        send_frame(loop, link, &payload, 0);
    else
        loop->zmq.msg_close(&payload);
    failpoint(WORKER_AFTER_SEND);
}

void loop_touch(struct loop *loop, uint32_t link)
{
    loop->ready[link] = true;
}

void loop_refill(struct loop *loop)
{
    struct turn turn = {0};
    struct contribution next;
    uint64_t now = now_ns();
    while (flight_next_in_turn(loop->flight, &turn, now, &next))
        send_contribution(loop, &next);
}

/* -- receive --------------------------------------------------------------------------------- */

void loop_close_message(struct loop *loop)
{
    for (int frame = 0; frame < loop->received && frame < 2; frame++)
        loop->zmq.msg_close(&loop->frames[frame]);
    loop->received = 0;
}

/* Receives one whole message; its frames come together. False if there is none. */
static bool receive(struct loop *loop, uint32_t link)
{
    const struct libzmq *zmq = &loop->zmq;
    for (bool more = true; more;) {
        zmq_msg_t surplus;
        zmq_msg_t *frame = loop->received < 2 ? &loop->frames[loop->received] : &surplus;
        zmq->msg_init(frame);
        if (zmq->msg_recv(frame, loop->sockets[link], ZMQ_DONTWAIT) < 0) {
            zmq->msg_close(frame);
            return false;
        }
        more = zmq->msg_more(frame);
        if (frame == &surplus)
            zmq->msg_close(frame);
        if (loop->received < 3)
            loop->received++;
    }
    return true;
}

/* Takes the message at hand, if it is a healthy result, and refills that link. */
static bool take(struct loop *loop, uint32_t link, uint64_t now)
{
    const struct libzmq *zmq = &loop->zmq;
    if (loop->received == 2 &&
        failpoint_message(WORKER_RECEIVED, zmq, &loop->frames[0], TYPE_RESULT)) {
        loop_close_message(loop);
        return true;
    }
    if (loop->received != 2 ||
        !flight_take(loop->flight, link, zmq->msg_data(&loop->frames[0]),
                     zmq->msg_size(&loop->frames[0]), &loop->frames[1], now))
        return false;
    failpoint(WORKER_COPIED);
    loop_close_message(loop);
    struct contribution next;
    while (flight_next(loop->flight, link, now, &next))
        send_contribution(loop, &next);
    return true;
}

/* Receives from one link until it has nothing more, or others have waited long enough. */
static enum loop_event serve(struct loop *loop, uint32_t link, uint64_t *completed_ns)
{
    for (int receives = 0; receives < RECEIVES_PER_TURN; receives++) {
        if (!receive(loop, link)) {
            int reason = loop->zmq.last_errno();
            loop->ready[link] = reason == EINTR;
            return reason == EINTR || reason == EAGAIN ? LOOP_QUIET : LOOP_FAILED;
        }
        uint64_t now = now_ns();
        if (!take(loop, link, now)) {
            loop->link = link;
            return LOOP_MESSAGE;
        }
        if (loop->flight->completed == NULL)
            continue;
        if (*completed_ns == 0)
            *completed_ns = now;
        if (now - *completed_ns > PATIENCE_NS)
            return LOOP_QUIET;
    }
    return LOOP_QUIET;
}

/* Waits until a socket or a monitor has news, or it is woken. libzmq's own poll asks every socket
 * with several system calls each time; their descriptors tell as much with one for all. */
static enum loop_event wait(struct loop *loop, long timeout_ms)
{
    nfds_t items = 1 + 2 * (nfds_t)loop->links;
    int found = poll(loop->items, items, (int)timeout_ms);
    loop->polled_ns = now_ns();
    if (found < 0 && errno == EINTR)
        atomic_store(&loop->woken, true); /* so that Python handles the signal at once */
    if (found < 0)
        return errno == EINTR ? LOOP_QUIET : LOOP_FAILED;
    if (found == 0)
        return LOOP_QUIET;
    if (loop->items[0].revents != 0)
        drain(loop);
    enum loop_event event = LOOP_QUIET;
    for (uint32_t link = 0; link < loop->links; link++) {
        if (loop->items[1 + 2 * link].revents != 0)
            loop->ready[link] = true;
        if (loop->items[2 + 2 * link].revents != 0)
            event = LOOP_CHANGE;
    }
    return event;
}

enum loop_event loop_run(struct loop *loop, long timeout_ms)
{
    uint32_t links = loop->links;
    uint64_t until = now_ns() + (uint64_t)timeout_ms * 1000 * 1000;
    uint64_t completed_ns = 0;
    if (loop->added) {
        loop->added = false;
        return LOOP_CHANGE;
    }
    if (now_ns() - loop->polled_ns >= LOOK_NS) { /* it may have returned before it waited */
        enum loop_event event = wait(loop, 0);
        if (event != LOOP_QUIET)
            return event;
    }
    for (;;) {
        bool more = false;
        for (uint32_t step = 0; step < links; step++) {
            uint32_t link = loop->turn;
            loop->turn = (link + 1) % links;
            enum loop_event event = loop->ready[link] ? serve(loop, link, &completed_ns) : LOOP_QUIET;
            if (event != LOOP_QUIET)
                return event;
            more |= loop->ready[link];
        }
        if (heed(loop) || loop->flight->completed != NULL)
            return LOOP_QUIET;
        uint64_t now = now_ns();
        if (more && now < until && now - loop->polled_ns < LOOK_NS)
            continue;
        long left_ms = more || now >= until ? 0 : (long)((until - now + 999999) / 1000000);
        enum loop_event event = wait(loop, left_ms);
        if (event != LOOP_QUIET || heed(loop) || loop->polled_ns >= until)
            return event;
    }
}
