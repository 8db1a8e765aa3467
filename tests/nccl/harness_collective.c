/* What NCCL's proxy does with a collective network, in a thread that no interpreter knows.
 *
 * It is a program, or a library for one that has Python. It tells lines on standard output and is told
 * lines on standard input: in each life it tells the handles of its communicators and is told those of
 * all ranks, makes its calls, tells what came of them, is told to go on, and closes. All ranks draw the
 * same calls. Call i adds up, or the like, a part of the ranks' inputs of its dtype, and each bit of the
 * result is compared with that part of what the test's oracle has made of them.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HANDLE_BYTES = 128, MOST_RANKS = 64, MOST_AHEAD = 256, MOST_COMMUNICATORS = 4, DTYPES = 10 };
enum { OPS = 4, TOLD_EVERY = 50 };
static const size_t SIZES[DTYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

struct table {
    int (*devices)(int *);
    int (*listen)(int, void *, void **);
    int (*connect)(void *[], int, int, void *, void **);
    int (*supports)(int, int, int *);
    int (*all_reduce)(void *, const void *, void *, size_t, int, int, void **);
    int (*test)(void *, int *, int *);
    int (*close)(void *);
    int (*close_listener)(void *);
};

/* What is told on the command line. */
struct plan {
    const char *library, *folder;
    int rank, ranks, communicators, lives;
    long calls;
    int ahead;            /* most in flight */
    size_t most_bytes;    /* of a call; `fixed`: of each call */
    bool fixed;
    int dtype;            /* of each call; -1: any */
    uint64_t seed;
};

struct part {
    const unsigned char *data;
    size_t nbytes;
};

struct slot {
    void *request;
    unsigned char *sent, *received;
    const unsigned char *expected;
    size_t nbytes;
};

struct outcome {
    long done, blocked, wrong;
    int error;
};

static void load(struct table *table, const char *library)
{
    void *opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (opened == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    *(void **)&table->devices = dlsym(opened, "collective_devices");
    *(void **)&table->listen = dlsym(opened, "collective_listen");
    *(void **)&table->connect = dlsym(opened, "collective_connect");
    *(void **)&table->supports = dlsym(opened, "collective_supports");
    *(void **)&table->all_reduce = dlsym(opened, "collective_all_reduce");
    *(void **)&table->test = dlsym(opened, "collective_test");
    *(void **)&table->close = dlsym(opened, "collective_close");
    *(void **)&table->close_listener = dlsym(opened, "collective_close_listener");
}

static uint64_t draw(uint64_t *state) /* splitmix64 */
{
    uint64_t drawn = *state += UINT64_C(0x9E3779B97F4A7C15);
    drawn = (drawn ^ drawn >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    drawn = (drawn ^ drawn >> 27) * UINT64_C(0x94D049BB133111EB);
    return drawn ^ drawn >> 31;
}

static double seconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static struct part map(const char *folder, const char *name)
{
    char path[4096];
    struct stat found;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = open(path, O_RDONLY);
    if (file < 0 || fstat(file, &found) != 0)
        return (struct part){0};
    void *data = mmap(NULL, (size_t)found.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    return data == MAP_FAILED ? (struct part){0} : (struct part){data, (size_t)found.st_size};
}

static void tell_handles(const unsigned char *handles, int count)
{
    printf("handles ");
    for (int at = 0; at < count * HANDLE_BYTES; at++)
        printf("%02x", handles[at]);
    printf("\n");
    fflush(stdout);
}

/* False: nothing more is told. */
static bool hear(char *line, size_t room)
{
    return fgets(line, (int)room, stdin) != NULL;
}

/* Connects one communicator for each line of all ranks' handles that is told. */
static int connect_all(const struct table *table, const struct plan *plan, void *communicators[])
{
    static unsigned char own[MOST_COMMUNICATORS * HANDLE_BYTES];
    static unsigned char all[MOST_RANKS * HANDLE_BYTES];
    static char line[2 * sizeof all + 2];
    void *listeners[MOST_COMMUNICATORS], *handles[MOST_RANKS];
    for (int at = 0; at < plan->communicators; at++) {
        int error = table->listen(0, own + at * HANDLE_BYTES, &listeners[at]);
        if (error != 0)
            return error;
    }
    tell_handles(own, plan->communicators);
    for (int at = 0; at < plan->communicators; at++) {
        if (!hear(line, sizeof line))
            return -1;
        for (int byte = 0; byte < plan->ranks * HANDLE_BYTES; byte++)
            sscanf(line + 2 * byte, "%2hhx", &all[byte]);
        for (int rank = 0; rank < plan->ranks; rank++)
            handles[rank] = all + rank * HANDLE_BYTES;
        int error = table->connect(handles, plan->ranks, plan->rank, listeners[at],
                                   &communicators[at]);
        if (error != 0)
            return error;
        table->close_listener(listeners[at]);
    }
    return 0;
}

struct inputs {
    struct part sent[DTYPES], expected[DTYPES][OPS];
};

static void read_inputs(struct inputs *inputs, const struct plan *plan)
{
    char name[64];
    for (int dtype = 0; dtype < DTYPES; dtype++) {
        snprintf(name, sizeof name, "%d-rank%d", dtype, plan->rank);
        inputs->sent[dtype] = map(plan->folder, name);
        for (int op = 0; op < OPS; op++) {
            snprintf(name, sizeof name, "%d-op%d", dtype, op);
            inputs->expected[dtype][op] = map(plan->folder, name);
        }
    }
}

struct call {
    int dtype, op;
    size_t count, offset;
    bool in_place;
};

static struct call draw_call(const struct plan *plan, const struct inputs *inputs, uint64_t *state)
{
    struct call call;
    do {
        call.dtype = (int)(draw(state) % DTYPES);
        call.op = (int)(draw(state) % OPS);
        if (plan->dtype >= 0)
            call.dtype = plan->dtype;
    } while (inputs->expected[call.dtype][call.op].data == NULL);
    size_t size = SIZES[call.dtype], most = plan->most_bytes / size;
    size_t room = inputs->sent[call.dtype].nbytes / size;
    /* Most are small, as a sum of many tensors ends with a small rest. */
    size_t bound = draw(state) % 4 == 0 ? most : (most > 4096 ? 4096 : most);
    call.count = plan->fixed ? most : 1 + draw(state) % bound;
    call.offset = draw(state) % (room - call.count + 1);
    call.in_place = !plan->fixed && draw(state) % 4 == 0;
    return call;
}

/* Whether a request has ended, well or badly. */
static bool ends(const struct table *table, struct slot *slot, struct outcome *outcome)
{
    int done = 0, nbytes = -1;
    int error = table->test(slot->request, &done, &nbytes);
    if (error != 0) {
        outcome->error = error;
        return true;
    }
    if (!done)
        return false;
    outcome->done++;
    outcome->wrong += (size_t)nbytes != slot->nbytes ||
                      memcmp(slot->received, slot->expected, slot->nbytes) != 0;
    slot->request = NULL;
    if (outcome->done % TOLD_EVERY == 0) {
        printf("at %ld\n", outcome->done);
        fflush(stdout);
    }
    return true;
}

/* Makes all calls, and looks at what is in flight in any order. */
static struct outcome make_calls(const struct table *table, const struct plan *plan,
                                 const struct inputs *inputs, void *communicators[])
{
    struct outcome outcome = {0};
    struct slot *slots = calloc((size_t)plan->ahead, sizeof *slots);
    uint64_t calls = plan->seed, looks = plan->seed + (uint64_t)plan->rank + 1;
    for (int at = 0; at < plan->ahead; at++) {
        slots[at].sent = malloc(plan->most_bytes);
        slots[at].received = malloc(plan->most_bytes);
    }
    long begun = 0;
    struct call call = draw_call(plan, inputs, &calls);
    while (outcome.done < plan->calls && outcome.error == 0) {
        struct slot *slot = &slots[draw(&looks) % (uint64_t)plan->ahead];
        if (slot->request != NULL) {
            ends(table, slot, &outcome);
            continue;
        }
        if (begun == plan->calls)
            continue;
        size_t start = call.offset * SIZES[call.dtype];
        unsigned char *from = call.in_place ? slot->received : slot->sent;
        slot->nbytes = call.count * SIZES[call.dtype];
        slot->expected = inputs->expected[call.dtype][call.op].data + start;
        memcpy(from, inputs->sent[call.dtype].data + start, slot->nbytes);
        outcome.error = table->all_reduce(communicators[begun % plan->communicators], from,
                                          slot->received, call.count, call.dtype, call.op,
                                          &slot->request);
        if (slot->request == NULL) {
            outcome.blocked++;
            continue; /* the same call again, later */
        }
        begun++;
        call = draw_call(plan, inputs, &calls);
    }
    if (outcome.error == 0) /* else reducers may still write to them until the end */
        for (int at = 0; at < plan->ahead; at++) {
            free(slots[at].sent);
            free(slots[at].received);
        }
    free(slots);
    return outcome;
}

static long open_files(void)
{
    long count = 0;
    for (int file = 0; file < 4096; file++)
        count += fcntl(file, F_GETFD) != -1;
    return count;
}

static long resident_pages(void)
{
    long all = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file != NULL && fscanf(file, "%ld %ld", &all, &resident) != 2)
        resident = 0;
    if (file != NULL)
        fclose(file);
    return resident;
}

static bool live(const struct table *table, const struct plan *plan, const struct inputs *inputs)
{
    void *communicators[MOST_COMMUNICATORS] = {NULL};
    char line[64];
    int refused = connect_all(table, plan, communicators);
    if (refused != 0) {
        printf("refused %d\n", refused);
        fflush(stdout);
        return false;
    }
    double since = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    struct outcome outcome = make_calls(table, plan, inputs, communicators);
    printf("done %ld %ld %ld %d %.6f %.6f\n", outcome.done, outcome.blocked, outcome.wrong,
           outcome.error, seconds(CLOCK_MONOTONIC) - since,
           seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu);
    fflush(stdout);
    bool told = hear(line, sizeof line);
    for (int at = 0; at < plan->communicators; at++)
        table->close(communicators[at]);
    printf("closed %ld %ld\n", open_files(), resident_pages());
    fflush(stdout);
    return told && outcome.error == 0;
}

int main(int count, char *arguments[])
{
    if (count != 13)
        return 2;
    struct plan plan = {
        .library = arguments[1],
        .folder = arguments[2],
        .rank = atoi(arguments[3]),
        .ranks = atoi(arguments[4]),
        .communicators = atoi(arguments[5]),
        .lives = atoi(arguments[6]),
        .calls = atol(arguments[7]),
        .ahead = atoi(arguments[8]),
        .most_bytes = (size_t)atol(arguments[9]),
        .fixed = atoi(arguments[10]),
        .dtype = atoi(arguments[11]),
        .seed = (uint64_t)atol(arguments[12]),
    };
    struct table table = {0};
    struct inputs inputs;
    load(&table, plan.library);
    read_inputs(&inputs, &plan);
    int devices = 0, supported = 1;
    if (table.devices(&devices) != 0 || devices < 1 || table.supports(3, 0, &supported) != 0 ||
        supported || table.supports(7, 0, &supported) != 0 || !supported)
        return 3;
    for (int life = 0; life < plan.lives; life++)
        if (!live(&table, &plan, &inputs))
            return 1;
    return 0;
}

struct command {
    int count;
    char **arguments;
    int code;
};

static void *run(void *argument)
{
    struct command *command = argument;
    command->code = main(command->count, command->arguments);
    return NULL;
}

/* `main` in a new thread, for a program that has Python. */
int run_apart(int count, char *arguments[])
{
    struct command command = {count, arguments, 2};
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, &command) == 0)
        pthread_join(thread, NULL);
    return command.code;
}
