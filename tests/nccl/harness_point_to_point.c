/* What NCCL's proxies do with a point-to-point network, each a thread of one process.
 *
 * For each pair of ranks one thread sends and another receives: messages of 0 bytes to 1 MiB, as often
 * 16 to 31 bytes as 1 to 2 KiB, now and then one of the largest size, 8 of them in flight, asked for in
 * any order. Then one side closes its connection, in every other pair the sender, and the other side
 * must hear of it. Every byte is compared. Exits 0 if all was well.
 */
#include "tests/nccl/harness.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <string.h>

enum { AHEAD = 8, MOST_PAIRS = 16, MOST_BYTES = 1 << 20, PLACES = 4096, LARGEST_EVERY = 2500 };
static const double SET_UP_S = 30, NOTICED_S = 10; /* at most; a sanitizer is slow */

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            _Exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static const struct net_table *table;
static int version;
static long messages;
static size_t largest;
static uint64_t seed;
static const unsigned char *values; /* parts of which messages are */

struct pair {
    uint64_t number;
    unsigned char handle[HANDLE_BYTES];
    pthread_barrier_t listens, exchanged, closed;
};

struct message {
    size_t nbytes, place;
    int tag;
};

/* -- what differs between versions ------------------------------------------------------------ */

static int init(void **context)
{
    *context = NULL;
    return version < 10   ? table->init.v8(log_line)
           : version < 11 ? table->init.v10(log_line, NULL)
                          : table->init.v11(context, 7, NULL, log_line, NULL);
}

static int listen_there(void *context, void *handle, void **listener)
{
    return version < 11 ? table->listen.v8(0, handle, listener)
                        : table->listen.v11(context, 0, handle, listener);
}

static int connect_there(void *context, void *handle, void **sender)
{
    void *offloaded = NULL;
    return version < 10   ? table->connect.v8(0, handle, sender, &offloaded)
           : version < 11 ? table->connect.v10(0, NULL, handle, sender, &offloaded)
                          : table->connect.v11(context, 0, handle, sender, &offloaded);
}

static int begin_send(void *sender, const struct message *message, void **request)
{
    void *data = (void *)(values + message->place);
    size_t nbytes = message->nbytes;
    int tag = message->tag;
    return version < 9    ? table->send.v8(sender, data, (int)nbytes, tag, NULL, request)
           : version < 10 ? table->send.v9(sender, data, nbytes, tag, NULL, request)
                          : table->send.v10(sender, data, nbytes, tag, NULL, NULL, request);
}

static int begin_receive(void *receiver, void *data, size_t nbytes, int tag, void **request)
{
    int narrow = (int)nbytes;
    void *memory = NULL, *profiled = NULL;
    return version < 9 ? table->receive.v8(receiver, 1, &data, &narrow, &tag, &memory, request)
           : version < 10
               ? table->receive.v9(receiver, 1, &data, &nbytes, &tag, &memory, request)
               : table->receive.v10(receiver, 1, &data, &nbytes, &tag, &memory, &profiled, request);
}

static void finalize(void *context)
{
    CHECK(version < 11 || table->finalize(context) == SUCCESS);
}

/* -- messages -------------------------------------------------------------------------------- */

static struct message draw_message(long number, uint64_t *state)
{
    bool is_largest = number % LARGEST_EVERY == LARGEST_EVERY - 1;
    size_t nbytes = draw_count(MOST_BYTES, state) - 1;
    return (struct message){is_largest ? largest : nbytes, draw(state) % PLACES,
                            (int)(draw(state) % 100)};
}

struct slot {
    void *request;
    struct message message;
    unsigned char *received; /* NULL: it is sent */
};

/* Whether a request has ended, well. */
static bool ends(struct slot *slot)
{
    int done = 0, nbytes = -1;
    const struct message *message = &slot->message;
    CHECK(table->test(slot->request, &done, &nbytes) == SUCCESS);
    if (!done)
        return false;
    CHECK((size_t)nbytes == message->nbytes);
    if (slot->received != NULL) {
        CHECK(memcmp(slot->received, values + message->place, message->nbytes) == 0);
        CHECK(slot->received[message->nbytes] == 42); /* what is behind it is not written */
        free(slot->received);
    }
    slot->request = NULL;
    return true;
}

/* Sends or receives all messages, and looks at what is in flight in any order. */
static void exchange(const struct pair *pair, void *connection, bool sends)
{
    struct slot slots[AHEAD] = {{NULL}};
    uint64_t drawn = seed + pair->number, looks = ~drawn - sends;
    struct message next = draw_message(0, &drawn);
    for (long begun = 0, done = 0; done < messages;) {
        struct slot *slot = &slots[draw(&looks) % AHEAD];
        if (slot->request != NULL) {
            done += ends(slot);
            sched_yield();
            continue;
        }
        if (begun == messages)
            continue;
        *slot = (struct slot){.message = next};
        size_t room = next.nbytes + draw(&looks) % 100; /* a receiver may have more than comes */
        if (!sends) {
            CHECK((slot->received = malloc(room + 1)) != NULL);
            slot->received[next.nbytes] = 42;
        }
        CHECK((sends ? begin_send(connection, &next, &slot->request)
                     : begin_receive(connection, slot->received, room, next.tag,
                                     &slot->request)) == SUCCESS);
        if (slot->request == NULL) {
            free(slot->received); /* the same message again, later */
            continue;
        }
        next = draw_message(++begun, &drawn);
    }
}

/* The other side has closed: it must be heard of by what is sent or received next. */
static void hear_of_the_end(void *connection, bool sends)
{
    static unsigned char room[1];
    const struct message message = {.nbytes = MOST_BYTES};
    void *request = NULL;
    int result = SUCCESS;
    double until = seconds(CLOCK_MONOTONIC) + NOTICED_S;
    while (result == SUCCESS) {
        int done = 1;
        CHECK(seconds(CLOCK_MONOTONIC) < until);
        if (request != NULL)
            result = table->test(request, &done, NULL);
        if (result == SUCCESS && done)
            result = sends ? begin_send(connection, &message, &request)
                           : begin_receive(connection, room, sizeof room, 0, &request);
        sched_yield();
    }
    CHECK(result == REMOTE_ERROR);
}

static void *send_all(void *argument)
{
    struct pair *pair = argument;
    void *context, *sender = NULL;
    CHECK(init(&context) == SUCCESS);
    pthread_barrier_wait(&pair->listens);
    for (double until = seconds(CLOCK_MONOTONIC) + SET_UP_S; sender == NULL; sched_yield())
        CHECK(connect_there(context, pair->handle, &sender) == SUCCESS &&
              seconds(CLOCK_MONOTONIC) < until);
    exchange(pair, sender, true);
    pthread_barrier_wait(&pair->exchanged);
    if (pair->number % 2 == 0) {
        pthread_barrier_wait(&pair->closed);
        hear_of_the_end(sender, true);
    }
    CHECK(table->close_sender(sender) == SUCCESS);
    if (pair->number % 2 == 1)
        pthread_barrier_wait(&pair->closed);
    finalize(context);
    return NULL;
}

static void *receive_all(void *argument)
{
    struct pair *pair = argument;
    void *context, *listener, *receiver = NULL, *offloaded = NULL;
    CHECK(init(&context) == SUCCESS);
    CHECK(listen_there(context, pair->handle, &listener) == SUCCESS);
    pthread_barrier_wait(&pair->listens);
    for (double until = seconds(CLOCK_MONOTONIC) + SET_UP_S; receiver == NULL; sched_yield())
        CHECK(table->accept(listener, &receiver, &offloaded) == SUCCESS &&
              seconds(CLOCK_MONOTONIC) < until);
    CHECK(table->close_listener(listener) == SUCCESS);
    exchange(pair, receiver, false);
    pthread_barrier_wait(&pair->exchanged);
    if (pair->number % 2 == 1) {
        pthread_barrier_wait(&pair->closed);
        hear_of_the_end(receiver, false);
    }
    CHECK(table->close_receiver(receiver) == SUCCESS);
    if (pair->number % 2 == 0)
        pthread_barrier_wait(&pair->closed);
    finalize(context);
    return NULL;
}

/* -------------------------------------------------------------------------------------------- */

static int open_files(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;
    CHECK(folder != NULL);
    while (readdir(folder) != NULL)
        count++;
    closedir(folder);
    return count;
}

int main(int count, char *arguments[])
{
    static struct pair pairs[MOST_PAIRS];
    pthread_t threads[2 * MOST_PAIRS];
    CHECK(count == 7);
    version = atoi(arguments[2]);
    size_t ranks = (size_t)atol(arguments[3]);
    messages = atol(arguments[4]);
    largest = (size_t)atol(arguments[5]);
    seed = (uint64_t)atol(arguments[6]);
    table = open_table(arguments[1], "ncclNetPlugin", version);
    uint64_t words = (largest > MOST_BYTES ? largest : MOST_BYTES) / 8 + PLACES, state = seed;
    uint64_t *drawn = malloc(words * sizeof *drawn);
    CHECK(ranks <= MOST_PAIRS && drawn != NULL);
    for (uint64_t at = 0; at < words; at++)
        drawn[at] = draw(&state);
    values = (const unsigned char *)drawn;
    int files = open_files();
    for (size_t at = 0; at < ranks; at++) {
        pairs[at].number = at;
        pthread_barrier_init(&pairs[at].listens, NULL, 2);
        pthread_barrier_init(&pairs[at].exchanged, NULL, 2);
        pthread_barrier_init(&pairs[at].closed, NULL, 2);
        CHECK(pthread_create(&threads[2 * at], NULL, send_all, &pairs[at]) == 0);
        CHECK(pthread_create(&threads[2 * at + 1], NULL, receive_all, &pairs[at]) == 0);
    }
    for (size_t at = 0; at < 2 * ranks; at++)
        pthread_join(threads[at], NULL);
    CHECK(open_files() == files);
    free(drawn);
    return 0;
}
