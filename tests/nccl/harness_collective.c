/* What NCCL's proxy does with a collective network, in a thread that no interpreter knows.
 *
 * It calls the functions of the plug-in's table of one version, in NCCL's order. It is a program, or a
 * library for one that has Python. It tells lines on standard output and is told lines on standard
 * input: in each life it tells the handles of its communicators and is told those of all ranks, makes
 * its calls, tells what came of them, is told to go on, and closes. All ranks draw the same calls. Call
 * i adds up, or the like, a part of the ranks' inputs of its dtype, and each bit of the result is
 * compared with that part of what the test's oracle has made of them.
 */
#include "tests/nccl/harness.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_RANKS = 64, MOST_COMMUNICATORS = 4, DTYPES = 10, OPS = 4, TOLD_EVERY = 50 };
static const size_t SIZES[DTYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

/* One of NCCL's communicators, as its proxy has it. */
struct network {
    void *context; /* since version 11 */
    void *listener, *communicator;
};

/* What is told on the command line. */
struct plan {
    const char *library, *folder;
    int version; /* of the table */
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
    void *request, *sent_memory, *received_memory;
    unsigned char *sent, *received;
    const unsigned char *expected; /* in `received` */
    const unsigned char *kept;     /* in `sent`, from begin to end; NULL: nobody looks */
    size_t nbytes;
};

/* The plug-in's, of one version. */
static const struct collective_table *table;

struct outcome {
    long done, blocked, wrong;
    int error;
};

/* -- what differs between versions ------------------------------------------------------------ */

static int init(const struct plan *plan, struct network *network)
{
    if (plan->version < 11)
        return table->init.v8(log_line);
    return table->init.v11(&network->context, 7, log_line);
}

static int listen_there(const struct plan *plan, struct network *network, void *handle)
{
    if (plan->version < 11)
        return table->listen.v8(0, handle, &network->listener);
    return table->listen.v11(network->context, 0, handle, &network->listener);
}

static int all_reduce(const struct plan *plan, const struct network *network, struct slot *slot,
                      void *from, size_t count, int dtype, int op)
{
    void *in = slot->sent_memory, *out = slot->received_memory;
    if (plan->version < 9)
        return table->all_reduce.v8(network->communicator, from, slot->received, (int)count, dtype,
                                    op, in, out, &slot->request);
    return table->all_reduce.v9(network->communicator, from, slot->received, count, dtype, op, in,
                                out, &slot->request);
}

static int finalize(const struct plan *plan, const struct network *network)
{
    return plan->version < 11 ? SUCCESS : table->finalize(network->context);
}

/* -------------------------------------------------------------------------------------------- */

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
static int connect_all(const struct plan *plan, struct network networks[])
{
    static unsigned char own[MOST_COMMUNICATORS * HANDLE_BYTES];
    static unsigned char all[MOST_RANKS * HANDLE_BYTES];
    static char line[2 * sizeof all + 2];
    void *handles[MOST_RANKS];
    int error = SUCCESS;
    for (int at = 0; at < plan->communicators && error == SUCCESS; at++)
        if ((error = init(plan, &networks[at])) == SUCCESS)
            error = listen_there(plan, &networks[at], own + at * HANDLE_BYTES);
    if (error != SUCCESS)
        return error;
    tell_handles(own, plan->communicators);
    for (int at = 0; at < plan->communicators; at++) {
        struct network *network = &networks[at];
        if (!hear(line, sizeof line))
            return -1;
        for (int byte = 0; byte < plan->ranks * HANDLE_BYTES; byte++)
            sscanf(line + 2 * byte, "%2hhx", &all[byte]);
        for (int rank = 0; rank < plan->ranks; rank++)
            handles[rank] = all + rank * HANDLE_BYTES;
        error = table->connect(handles, plan->ranks, plan->rank, network->listener,
                               &network->communicator);
        if (error == SUCCESS)
            error = table->close_listener(network->listener);
        if (error != SUCCESS)
            return error;
    }
    return SUCCESS;
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
    call.count = plan->fixed ? most : draw_count(most, state);
    call.offset = draw(state) % (room - call.count + 1);
    call.in_place = !plan->fixed && draw(state) % 4 == 0;
    return call;
}

/* Whether a request has ended, well or badly. */
static bool ends(struct slot *slot, struct outcome *outcome)
{
    int done = 0, nbytes = -1;
    int error = table->test(slot->request, &done, &nbytes);
    if (error != SUCCESS) {
        outcome->error = error;
        return true;
    }
    if (!done)
        return false;
    outcome->done++;
    outcome->wrong += (size_t)nbytes != slot->nbytes ||
                      memcmp(slot->received, slot->expected, slot->nbytes) != 0 ||
                      (slot->kept != NULL && memcmp(slot->sent, slot->kept, slot->nbytes) != 0);
    slot->request = NULL;
    if (outcome->done % TOLD_EVERY == 0) {
        printf("at %ld\n", outcome->done);
        fflush(stdout);
    }
    return true;
}

/* Makes the buffers of all that is in flight, which communicators have in turn. */
static struct slot *make_slots(const struct plan *plan, const struct network networks[])
{
    struct slot *slots = calloc((size_t)plan->ahead, sizeof *slots);
    for (int at = 0; at < plan->ahead; at++) {
        struct slot *slot = &slots[at];
        void *communicator = networks[at % plan->communicators].communicator, *of_device;
        slot->sent = malloc(plan->most_bytes);
        slot->received = malloc(plan->most_bytes);
        if (table->register_memory(communicator, slot->sent, plan->most_bytes, HOST,
                                   &slot->sent_memory) != SUCCESS ||
            table->register_memory(communicator, slot->received, plan->most_bytes, HOST,
                                   &slot->received_memory) != SUCCESS ||
            table->register_memory(communicator, slot->sent, plan->most_bytes, CUDA,
                                   &of_device) == SUCCESS)
            exit(4);
    }
    return slots;
}

static void free_slots(const struct plan *plan, const struct network networks[],
                       struct slot *slots)
{
    for (int at = 0; at < plan->ahead; at++) {
        void *communicator = networks[at % plan->communicators].communicator;
        if (table->deregister_memory(communicator, slots[at].sent_memory) != SUCCESS ||
            table->deregister_memory(communicator, slots[at].received_memory) != SUCCESS)
            exit(4);
        free(slots[at].sent);
        free(slots[at].received);
    }
    free(slots);
}

/* NCCL's proxy yields its core when nothing moves, and takes all of it where nobody else wants it. That
 * is NCCL's, not the plug-in's, and on two cores nothing would be left for the plug-in. */
static void rest(const struct plan *plan)
{
    long us = plan->fixed ? 500 : 50; /* what is measured is not to be the looks */
    nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
}

/* Makes all calls, and looks at what is in flight in any order. */
static struct outcome make_calls(const struct plan *plan, const struct inputs *inputs,
                                 const struct network networks[], struct slot slots[])
{
    struct outcome outcome = {0};
    uint64_t calls = plan->seed, looks = plan->seed + (uint64_t)plan->rank + 1;
    long begun = 0;
    int idle = 0; /* looks that began and ended nothing */
    struct call call = draw_call(plan, inputs, &calls);
    while (outcome.done < plan->calls && outcome.error == SUCCESS) {
        if (idle++ > 2 * plan->ahead) {
            rest(plan);
            idle = 0;
        }
        uint64_t at = draw(&looks) % (uint64_t)plan->ahead;
        const struct network *network = &networks[begun % plan->communicators];
        struct slot *slot = &slots[at];
        if (slot->request != NULL) {
            if (ends(slot, &outcome))
                idle = 0;
            continue;
        }
        if (begun == plan->calls || network != &networks[at % (uint64_t)plan->communicators])
            continue;
        size_t start = call.offset * SIZES[call.dtype];
        unsigned char *from = call.in_place ? slot->received : slot->sent;
        slot->nbytes = call.count * SIZES[call.dtype];
        slot->expected = inputs->expected[call.dtype][call.op].data + start;
        slot->kept = call.in_place || plan->fixed ? NULL : inputs->sent[call.dtype].data + start;
        memcpy(from, inputs->sent[call.dtype].data + start, slot->nbytes);
        outcome.error =
            all_reduce(plan, network, slot, from, call.count, call.dtype, call.op);
        if (slot->request == NULL) {
            outcome.blocked++;
            continue; /* the same call again, later */
        }
        begun++;
        idle = 0;
        call = draw_call(plan, inputs, &calls);
    }
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

static bool live(const struct plan *plan, const struct inputs *inputs)
{
    struct network networks[MOST_COMMUNICATORS] = {{NULL}};
    char line[64];
    int refused = connect_all(plan, networks);
    if (refused != SUCCESS) {
        printf("refused %d\n", refused);
        fflush(stdout);
        return false;
    }
    struct slot *slots = make_slots(plan, networks);
    double since = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    struct outcome outcome = make_calls(plan, inputs, networks, slots);
    printf("done %ld %ld %ld %d %.6f %.6f\n", outcome.done, outcome.blocked, outcome.wrong,
           outcome.error, seconds(CLOCK_MONOTONIC) - since,
           seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu);
    fflush(stdout);
    bool told = hear(line, sizeof line);
    if (outcome.error == SUCCESS) /* else reducers may still write to them until the end */
        free_slots(plan, networks, slots);
    for (int at = 0; at < plan->communicators; at++)
        if (table->close(networks[at].communicator) != SUCCESS ||
            finalize(plan, &networks[at]) != SUCCESS)
            exit(4);
    printf("closed %ld %ld\n", open_files(), resident_pages());
    fflush(stdout);
    return told && outcome.error == SUCCESS;
}

/* What NCCL asks before it has a collective network of the table. */
static bool is_usable(void)
{
    struct properties properties;
    int devices = 0, supported = 1;
    return table->devices(&devices) == SUCCESS && devices == 1 &&
           table->properties(0, &properties) == SUCCESS && strcmp(properties.name, getenv("NCCL_SOCKET_IFNAME")) == 0 &&
           properties.pointers == HOST && table->supports(3, 0, &supported) == SUCCESS &&
           !supported && table->supports(7, 0, &supported) == SUCCESS && supported;
}

int main(int count, char *arguments[])
{
    if (count != 14)
        return 2;
    struct plan plan = {
        .library = arguments[1],
        .version = atoi(arguments[2]),
        .folder = arguments[3],
        .rank = atoi(arguments[4]),
        .ranks = atoi(arguments[5]),
        .communicators = atoi(arguments[6]),
        .lives = atoi(arguments[7]),
        .calls = atol(arguments[8]),
        .ahead = atoi(arguments[9]),
        .most_bytes = (size_t)atol(arguments[10]),
        .fixed = atoi(arguments[11]),
        .dtype = atoi(arguments[12]),
        .seed = (uint64_t)atol(arguments[13]),
    };
    struct inputs inputs;
    table = open_table(plan.library, "ncclCollNetPlugin", plan.version);
    read_inputs(&inputs, &plan);
    if (!is_usable())
        return 3;
    for (int life = 0; life < plan.lives; life++)
        if (!live(&plan, &inputs))
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
