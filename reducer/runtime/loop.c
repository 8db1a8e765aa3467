#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "loop.h"

#include <errno.h>
#include <poll.h>
#include <time.h>

#include "reducer/failpoints/failpoints.h"

enum { MESSAGES_PER_LOOK = 64 }; /* at the clock, so that a flood cannot stop it */

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* What a header and a payload take on the wire (transport.py, `wire_bytes`). */
static uint64_t wire_bytes(const struct loop *loop, uint64_t payload)
{
    uint64_t header = HEADER_BYTES + loop->frame_extra;
    payload += loop->frame_extra;
    return header + (header > 255 ? 9 : 2) + payload + (payload > 255 ? 9 : 2);
}

/* -- sum ------------------------------------------------------------------------------------- */

/* Chooses where the result goes: over the latest contribution, which the cache still holds, unless
 * its memory is also somebody else's. */
static bool take_result_buffer(struct loop *loop, struct slot *slot, uint32_t latest,
                               uint32_t world_size, zmq_msg_t *result)
{
    zmq_msg_t *messages = slot->payloads->messages;
    for (uint32_t step = 0; step < world_size; step++) {
        uint32_t rank = (latest + step) % world_size;
        if (!loop->zmq->msg_get(&messages[rank], ZMQ_SHARED)) {
            loop->zmq->msg_init(result);
            return loop->zmq->msg_copy(result, &messages[rank]) == 0;
        }
    }
    return loop->zmq->msg_init_size(result, slot->nbytes) == 0;
}

/* Folds a complete slot and frees it. */
static bool reduce(struct loop *loop, struct rounds *rounds, struct round *round, struct slot *slot,
                   const struct header *header, zmq_msg_t *result)
{
    failpoint(REDUCER_BEFORE_SUM);
    uint32_t n = rounds->world_size;
    if (loop->inputs_room < n) {
        const void **inputs = realloc(loop->inputs, n * sizeof *inputs);
        if (inputs == NULL)
            return false;
        loop->inputs = inputs;
        loop->inputs_room = n;
    }
    for (uint32_t rank = 0; rank < n; rank++)
        loop->inputs[rank] = loop->zmq->msg_data(&slot->payloads->messages[rank]);
    if (!take_result_buffer(loop, slot, header->rank, n, result))
        return false;
    fold_fn fold = loop->kernels->fold[header->dtype][header->op];
    fold_run(fold, loop->zmq->msg_data(result), loop->inputs, n,
             slot->nbytes / dtype_itemsize(header->dtype));
    for (uint32_t rank = 0; rank < n; rank++)
        rounds->members[rank]->held -= window_charge(slot->nbytes);
    loop->results += n;
    loop->bytes_out += (uint64_t)n * slot->nbytes;
    round_finish(rounds, round, slot);
    return true;
}

enum verdict loop_offer(struct loop *loop, uint64_t peer, const void *frame, size_t frame_bytes,
                        zmq_msg_t *payload, struct header *header, zmq_msg_t *result,
                        struct rounds **rounds)
{
    struct member *member = map_get(&loop->members, peer);
    if (member == NULL || !header_read(header, frame, frame_bytes) ||
        header->type != TYPE_CONTRIBUTION)
        return IRREGULAR;
    *rounds = map_get(&loop->rounds, peer);
    struct round *round;
    struct slot *slot;
    enum verdict verdict = rounds_offer(*rounds, member, header, payload, &round, &slot);
    if (verdict == IRREGULAR)
        return IRREGULAR;
    failpoint(REDUCER_PLACED);
    loop->contributions++;
    loop->bytes_in += header->nbytes;
    member->read += wire_bytes(loop, header->nbytes);
    if (verdict == COMPLETE) {
        if (!reduce(loop, *rounds, round, slot, header, result))
            return OUT_OF_MEMORY;
        header->type = TYPE_RESULT;
        header->watermark = (*rounds)->reached;
        header->rank = 0;
        header->set_aside = 0;
        header->since = 0;
        header->history = 0;
    }
    return verdict;
}

/* -- send ------------------------------------------------------------------------------------ */

static void note_lost(struct loop *loop, struct member *member)
{
    if (loop->lost_count == loop->lost_room) {
        size_t room = 2 * loop->lost_room + 16;
        struct member **lost = realloc(loop->lost, room * sizeof *lost);
        if (lost == NULL)
            return; /* a later send, or a PING, will notice as well */
        loop->lost = lost;
        loop->lost_room = room;
    }
    loop->lost[loop->lost_count++] = member;
}

static bool send_frame(struct loop *loop, zmq_msg_t *message, int flags)
{
    if (loop->zmq->msg_send(message, loop->socket, flags | ZMQ_DONTWAIT) >= 0)
        return true;
    loop->zmq->msg_close(message);
    return false;
}

static bool send_shared(struct loop *loop, zmq_msg_t *shared, int flags)
{
    zmq_msg_t message;
    loop->zmq->msg_init(&message);
    loop->zmq->msg_copy(&message, shared);
    return send_frame(loop, &message, flags);
}

static bool send_result(struct loop *loop, uint64_t peer, zmq_msg_t *header, zmq_msg_t *result)
{
    zmq_msg_t id;
    loop->zmq->msg_init_size(&id, peer >> 56);
    memcpy(loop->zmq->msg_data(&id), &peer, peer >> 56);
    /* Only the first frame can fail, for want of that peer. */
    return send_frame(loop, &id, ZMQ_SNDMORE) && send_shared(loop, header, ZMQ_SNDMORE) &&
           send_shared(loop, result, 0);
}

static void send_results(struct loop *loop, struct rounds *rounds, const struct header *header,
                         zmq_msg_t *result)
{
    zmq_msg_t frame;
    loop->zmq->msg_init_size(&frame, HEADER_BYTES);
    memcpy(loop->zmq->msg_data(&frame), header, HEADER_BYTES);
    /* Each rank's machine gets a fair share of first places. */
    uint32_t n = failpoint(REDUCER_AFTER_SUM) ? 0 : rounds->world_size;
    uint64_t turn = header->nbytes == 0 ? 0 : header->offset / header->nbytes;
    for (uint32_t step = 0; step < n; step++) {
        struct member *member = rounds->members[(turn + step) % n];
        if (step == 1 && failpoint(REDUCER_BETWEEN_RESULTS))
            continue;
        if (send_result(loop, member->peer, &frame, result))
            member->written += wire_bytes(loop, header->nbytes);
        else
            note_lost(loop, member);
    }
    if (n > 0)
        failpoint(REDUCER_AFTER_RESULTS);
    loop->zmq->msg_close(&frame);
    loop->zmq->msg_close(result);
}

/* -- receive --------------------------------------------------------------------------------- */

void loop_close_message(struct loop *loop)
{
    for (int frame = 0; frame < loop->received && frame < LOOP_FRAMES; frame++)
        loop->zmq->msg_close(&loop->frames[frame]);
    loop->received = 0;
}

/* Receives one whole message; its frames arrive together. False if there is none. */
static bool receive(struct loop *loop)
{
    bool more = true;
    while (more) {
        zmq_msg_t surplus, *frame = &surplus;
        if (loop->received < LOOP_FRAMES)
            frame = &loop->frames[loop->received];
        loop->zmq->msg_init(frame);
        if (loop->zmq->msg_recv(frame, loop->socket, ZMQ_DONTWAIT) < 0) {
            loop->zmq->msg_close(frame);
            return false;
        }
        more = loop->zmq->msg_more(frame);
        if (frame == &surplus)
            loop->zmq->msg_close(frame);
        else
            loop->received++;
        if (frame == &surplus)
            loop->received = LOOP_FRAMES + 1;
    }
    return true;
}

/* Takes the message at hand, if it is a healthy contribution. */
static enum verdict take(struct loop *loop)
{
    if (loop->received != LOOP_FRAMES)
        return IRREGULAR;
    const struct libzmq *zmq = loop->zmq;
    if (failpoint_message(REDUCER_RECEIVED, zmq->msg_data(&loop->frames[1]),
                          zmq->msg_size(&loop->frames[1]), TYPE_CONTRIBUTION)) {
        loop_close_message(loop);
        return PLACED;
    }
    uint64_t peer = peer_key(zmq->msg_data(&loop->frames[0]), zmq->msg_size(&loop->frames[0]));
    struct header header;
    zmq_msg_t result;
    struct rounds *rounds;
    enum verdict verdict =
        loop_offer(loop, peer, zmq->msg_data(&loop->frames[1]), zmq->msg_size(&loop->frames[1]),
                   &loop->frames[2], &header, &result, &rounds);
    if (verdict != IRREGULAR)
        loop_close_message(loop);
    if (verdict == COMPLETE)
        send_results(loop, rounds, &header, &result);
    return verdict;
}

enum loop_event loop_run(struct loop *loop, long timeout_ms)
{
    uint64_t until = now_ms() + (uint64_t)timeout_ms;
    for (unsigned messages = 1;; messages++) {
        if (loop->lost_count > 0)
            return LOOP_UNREACHABLE;
        if (receive(loop)) {
            enum verdict verdict = take(loop);
            if (verdict == IRREGULAR)
                return LOOP_MESSAGE;
            if (verdict == OUT_OF_MEMORY)
                return LOOP_OUT_OF_MEMORY;
            if (messages % MESSAGES_PER_LOOK == 0 && now_ms() >= until)
                return LOOP_TIMEOUT;
            continue;
        }
        int reason = loop->zmq->last_errno();
        if (reason != EAGAIN && reason != EINTR)
            return LOOP_FAILED;
        uint64_t now = now_ms();
        if (now >= until)
            return LOOP_TIMEOUT;
        /* The descriptor tells of what comes after a receive that found nothing; libzmq's own poll
         * would take several system calls more. */
        struct pollfd item = {.fd = loop->fd, .events = POLLIN};
        if (poll(&item, 1, (int)(until - now)) < 0 && errno != EINTR)
            return LOOP_FAILED;
    }
}
