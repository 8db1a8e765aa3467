#include "worker_client/nccl/point_to_point.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "worker_client/nccl/interfaces.h"
#include "worker_client/nccl/plugin.h"

enum {
    STREAMS = 4,           /* of a connection: one alone is bound to one core's kernel work */
    SPLIT_BYTES = 1 << 16, /* from here on a message is in parts */
    MOST_BYTES = 1 << 20,  /* that a stream moves in one call */
    NEWCOMERS = 64,        /* sockets of a listener that have not said all */
    PATIENCE_S = 10,       /* with a newcomer */
};

static const uint64_t MAGIC = 0x72656475632d7032; /* "reduc-p2": what a handle begins with */

struct hello {
    uint8_t nonce[16];   /* the handle's */
    uint64_t connection; /* the same of all its streams */
    uint32_t stream, streams;
};

struct header {
    uint64_t nbytes;
    int64_t tag;
};

struct request {
    struct connection *of;
    uint64_t number; /* of the connection's */
    bool taken;
    uint8_t *data;
    struct header header; /* a receiver's: what has come */
    uint64_t room;        /* bytes of a receiver's buffer */
    int tag;              /* that a receiver waits for */
};

struct stream {
    int fd;
    uint64_t at;    /* the request that it is at: all before have passed */
    uint64_t moved; /* bytes of that, the header's among them on the first stream */
};

struct connection {
    bool sends, failed;
    unsigned joined; /* streams that are connected */
    struct hello hello;
    struct stream streams[STREAMS];
    uint64_t begun; /* requests */
    struct request requests[NCCL_REQUESTS];
};

struct newcomer {
    int fd;
    time_t since;
    size_t got;
    struct hello hello;
};

struct listener {
    int fd;
    uint8_t nonce[16];
    unsigned count;
    struct newcomer newcomers[NEWCOMERS];
};

/* What is in NCCL's handle; `connecting` is the connecting side's own, and NULL at first. */
struct handle {
    uint64_t magic;
    uint8_t nonce[16];
    struct connection *connecting;
    socklen_t address_bytes;
    union address address;
};
_Static_assert(sizeof(struct handle) <= NCCL_HANDLE_BYTES, "a handle is too long for NCCL");

static int failure(const char *what)
{
    PLUGIN_WARN("%s: %s", what, strerror(errno));
    return NCCL_SYSTEM_ERROR;
}

static time_t now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

/* A peer's machine that is gone is noticed in half a minute; a process that is gone, at once. */
static void tune(int fd)
{
    static const int ON = 1, IDLE_S = 15, INTERVAL_S = 5, PROBES = 3;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &ON, sizeof ON);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &ON, sizeof ON);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &IDLE_S, sizeof IDLE_S);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &INTERVAL_S, sizeof INTERVAL_S);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &PROBES, sizeof PROBES);
}

static struct connection *new_connection(bool sends)
{
    struct connection *made = calloc(1, sizeof *made);
    if (made == NULL)
        return NULL;
    made->sends = sends;
    for (unsigned at = 0; at < STREAMS; at++)
        made->streams[at].fd = -1;
    return made;
}

int point_to_point_close(void *connection)
{
    struct connection *closing = connection;
    for (unsigned at = 0; at < STREAMS; at++)
        if (closing->streams[at].fd >= 0)
            close(closing->streams[at].fd);
    free(closing);
    return NCCL_SUCCESS;
}

/* -- listening ------------------------------------------------------------------------------- */

int point_to_point_listen(int device, void *handle, void **listener)
{
    const struct interface *interface = interfaces_get(device);
    struct listener *made = interface == NULL ? NULL : calloc(1, sizeof *made);
    if (made == NULL)
        return interface == NULL ? NCCL_INVALID_ARGUMENT : failure("a listener");
    struct handle said = {.magic = MAGIC,
                          .address_bytes = interface_address_bytes(interface),
                          .address = interface->address};
    made->fd = socket(said.address.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (made->fd < 0 || getrandom(made->nonce, sizeof made->nonce, 0) != sizeof made->nonce ||
        bind(made->fd, &said.address.any, said.address_bytes) != 0 ||
        listen(made->fd, NEWCOMERS) != 0 ||
        getsockname(made->fd, &said.address.any, &said.address_bytes) != 0) {
        int result = failure("listening for other ranks");
        point_to_point_close_listener(made);
        return result;
    }
    memcpy(said.nonce, made->nonce, sizeof said.nonce);
    memset(handle, 0, NCCL_HANDLE_BYTES);
    memcpy(handle, &said, sizeof said);
    *listener = made;
    return NCCL_SUCCESS;
}

int point_to_point_close_listener(void *listener)
{
    struct listener *closing = listener;
    if (closing->fd >= 0)
        close(closing->fd);
    for (unsigned at = 0; at < closing->count; at++)
        close(closing->newcomers[at].fd);
    free(closing);
    return NCCL_SUCCESS;
}

static void drop_newcomer(struct listener *from, unsigned at)
{
    memmove(&from->newcomers[at], &from->newcomers[at + 1],
            (--from->count - at) * sizeof *from->newcomers);
}

/* Hears a newcomer. False: it is none of ours. */
static bool hear(const struct listener *here, struct newcomer *newcomer)
{
    ssize_t got = recv(newcomer->fd, (uint8_t *)&newcomer->hello + newcomer->got,
                       sizeof newcomer->hello - newcomer->got, 0);
    if (got <= 0)
        return got < 0 && (errno == EAGAIN || errno == EINTR) &&
               now_s() - newcomer->since < PATIENCE_S;
    newcomer->got += (size_t)got;
    size_t known = newcomer->got < sizeof here->nonce ? newcomer->got : sizeof here->nonce;
    return memcmp(newcomer->hello.nonce, here->nonce, known) == 0 &&
           (newcomer->got < sizeof newcomer->hello ||
            (newcomer->hello.streams == STREAMS && newcomer->hello.stream < STREAMS));
}

/* Takes the streams of a connection that has all of them, or does nothing. */
static struct connection *complete(struct listener *here, uint64_t connection)
{
    unsigned streams = 0;
    for (unsigned at = 0; at < here->count; at++) {
        const struct newcomer *newcomer = &here->newcomers[at];
        if (newcomer->got == sizeof newcomer->hello && newcomer->hello.connection == connection)
            streams |= 1u << newcomer->hello.stream;
    }
    struct connection *made = streams == (1u << STREAMS) - 1 ? new_connection(false) : NULL;
    for (unsigned at = here->count; made != NULL && at-- > 0;) {
        const struct newcomer *newcomer = &here->newcomers[at];
        if (newcomer->got < sizeof newcomer->hello || newcomer->hello.connection != connection)
            continue;
        struct stream *stream = &made->streams[newcomer->hello.stream];
        if (stream->fd >= 0)
            close(newcomer->fd); /* it said the same twice */
        else
            stream->fd = newcomer->fd;
        drop_newcomer(here, at);
    }
    return made;
}

int point_to_point_accept(void *listener, void **receiver)
{
    struct listener *here = listener;
    *receiver = NULL;
    for (int fd; (fd = accept4(here->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        if (here->count == NEWCOMERS) { /* strangers: whoever came first has had the most time */
            close(here->newcomers[0].fd);
            drop_newcomer(here, 0);
        }
        tune(fd);
        here->newcomers[here->count++] = (struct newcomer){.fd = fd, .since = now_s()};
    }
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
        return failure("accepting another rank");
    for (unsigned at = 0; *receiver == NULL && at < here->count; at++) {
        struct newcomer *newcomer = &here->newcomers[at];
        if (newcomer->got == sizeof newcomer->hello)
            continue; /* it waits for others of its connection */
        if (!hear(here, newcomer)) {
            close(newcomer->fd);
            drop_newcomer(here, at--);
        } else if (newcomer->got == sizeof newcomer->hello) {
            *receiver = complete(here, newcomer->hello.connection);
        }
    }
    return NCCL_SUCCESS;
}

/* -- connecting ------------------------------------------------------------------------------ */

static bool begin_streams(struct connection *made, const struct handle *to)
{
    for (unsigned at = 0; at < STREAMS; at++) {
        int fd = socket(to->address.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        made->streams[at].fd = fd;
        if (fd < 0)
            return false;
        tune(fd);
        if (connect(fd, &to->address.any, to->address_bytes) != 0 && errno != EINPROGRESS)
            return false;
    }
    memcpy(made->hello.nonce, to->nonce, sizeof to->nonce);
    made->hello.streams = STREAMS;
    return getrandom(&made->hello.connection, sizeof made->hello.connection, 0) ==
           sizeof made->hello.connection;
}

/* Greets on the streams that are there. False: one cannot be made. */
static bool greet(struct connection *made)
{
    for (; made->joined < STREAMS; made->joined++) {
        struct pollfd one = {.fd = made->streams[made->joined].fd, .events = POLLOUT};
        if (poll(&one, 1, 0) == 0)
            return true;
        int error = 0;
        socklen_t length = sizeof error;
        getsockopt(one.fd, SOL_SOCKET, SO_ERROR, &error, &length);
        made->hello.stream = made->joined;
        if (error == 0 && /* a new connection has room for all of it */
            send(one.fd, &made->hello, sizeof made->hello, MSG_NOSIGNAL) == sizeof made->hello)
            continue;
        errno = error != 0 ? error : errno;
        return false;
    }
    return true;
}

int point_to_point_connect(void *handle, void **sender)
{
    struct handle to;
    memcpy(&to, handle, sizeof to);
    *sender = NULL;
    if (to.magic != MAGIC) {
        PLUGIN_WARN("another rank has another network plug-in, or another version of this one");
        return NCCL_INVALID_ARGUMENT;
    }
    bool first = to.connecting == NULL;
    struct connection *made = first ? new_connection(true) : to.connecting;
    if (made == NULL)
        return failure("a connection");
    if ((first && !begin_streams(made, &to)) || !greet(made)) {
        failure("connecting to another rank");
        point_to_point_close(made);
        made = NULL;
    }
    bool joined = made != NULL && made->joined == STREAMS;
    to.connecting = joined ? NULL : made;
    memcpy(handle, &to, sizeof to);
    *sender = joined ? made : NULL;
    return made != NULL ? NCCL_SUCCESS : NCCL_REMOTE_ERROR;
}

/* -- messages -------------------------------------------------------------------------------- */

/* The part of a message that goes on a stream: where it begins, and its end. */
static uint64_t part(uint64_t nbytes, unsigned stream, uint64_t *end)
{
    if (nbytes < SPLIT_BYTES) {
        *end = stream == 0 ? nbytes : 0;
        return 0;
    }
    uint64_t step = (nbytes / STREAMS + 4095) & ~UINT64_C(4095), begin = step * stream;
    *end = stream == STREAMS - 1 || begin + step > nbytes ? nbytes : begin + step;
    return begin < nbytes ? begin : nbytes;
}

static bool give_up(struct connection *here, const char *why)
{
    PLUGIN_WARN("%s another rank: %s", here->sends ? "sending to" : "receiving from", why);
    here->failed = true;
    return false;
}

/* Whether a message's length is known where a stream is: its header comes on the first one. */
static bool sized(const struct connection *here, unsigned stream)
{
    const struct stream *first = &here->streams[0];
    uint64_t at = here->streams[stream].at; /* which may be before or behind that of the first */
    return here->sends || first->at > at ||
           (first->at == at && first->moved >= sizeof(struct header));
}

static bool fits(struct connection *here, const struct request *request)
{
    if (request->header.nbytes > request->room)
        return give_up(here, "its message is longer than the buffer for it");
    if (request->header.tag != request->tag)
        return give_up(here, "its message has another tag than the one that is waited for");
    return true;
}

/* Moves what a stream has of a request. True: that was all of it. */
static bool move_part(struct connection *here, unsigned number, struct request *request)
{
    struct stream *stream = &here->streams[number];
    const uint64_t head = number == 0 ? sizeof request->header : 0;
    while (stream->moved < head || sized(here, number)) {
        uint64_t end = 0, from = 0;
        if (sized(here, number))
            from = part(request->header.nbytes, number, &end);
        from += stream->moved > head ? stream->moved - head : 0;
        uint64_t length = end <= from ? 0 : end - from < MOST_BYTES ? end - from : MOST_BYTES;
        struct iovec pieces[2];
        size_t count = 0;
        if (stream->moved < head)
            pieces[count++] = (struct iovec){(uint8_t *)&request->header + stream->moved,
                                             head - stream->moved};
        if (length > 0)
            pieces[count++] = (struct iovec){request->data + from, length};
        if (count == 0)
            return true;
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = count};
        ssize_t moved = here->sends ? sendmsg(stream->fd, &message, MSG_NOSIGNAL)
                                    : recvmsg(stream->fd, &message, 0);
        if (moved < 0 && (errno == EAGAIN || errno == EINTR))
            return false;
        if (moved <= 0)
            return give_up(here, moved == 0 ? "it has closed the connection" : strerror(errno));
        bool headed = stream->moved < head && stream->moved + (uint64_t)moved >= head;
        stream->moved += (uint64_t)moved;
        if (headed && !here->sends && !fits(here, request))
            return false;
        if (length == MOST_BYTES) /* NCCL's thread has others to serve */
            return false;
    }
    return false;
}

/* Moves what can be moved now. Stream 0 is first: it tells the others what comes. */
static void move(struct connection *here)
{
    for (unsigned at = 0; at < STREAMS; at++) {
        struct stream *stream = &here->streams[at];
        while (!here->failed && stream->at < here->begun &&
               move_part(here, at, &here->requests[stream->at % NCCL_REQUESTS])) {
            stream->at++;
            stream->moved = 0;
        }
    }
}

static bool ended(const struct request *request)
{
    for (unsigned at = 0; at < STREAMS; at++)
        if (request->of->streams[at].at <= request->number)
            return false;
    return true;
}

static int begin(struct connection *here, struct request asked, void **request)
{
    struct request *made = &here->requests[here->begun % NCCL_REQUESTS];
    *request = NULL;
    if (here->failed)
        return NCCL_REMOTE_ERROR;
    if (made->taken)
        return NCCL_SUCCESS;
    *made = asked;
    made->of = here;
    made->number = here->begun++;
    made->taken = true;
    *request = made;
    move(here);
    return NCCL_SUCCESS;
}

int point_to_point_send(void *sender, const void *data, size_t nbytes, int tag, void **request)
{
    struct request asked = {.data = (void *)(uintptr_t)data, /* which is only read */
                            .header = {.nbytes = nbytes, .tag = tag}};
    return begin(sender, asked, request);
}

int point_to_point_receive(void *receiver, void *data, size_t nbytes, int tag, void **request)
{
    return begin(receiver, (struct request){.data = data, .room = nbytes, .tag = tag}, request);
}

int point_to_point_test(void *request, int *done, int *nbytes)
{
    struct request *asked = request;
    if (!ended(asked))
        move(asked->of);
    *done = ended(asked);
    if (!*done)
        return asked->of->failed ? NCCL_REMOTE_ERROR : NCCL_SUCCESS;
    asked->taken = false;
    if (nbytes != NULL)
        *nbytes = (int)asked->header.nbytes; /* as NCCL has it; it sends less than 2 GiB at a time */
    return NCCL_SUCCESS;
}
