/* The tables by which NCCL finds the plug-in: versions 8 to 12 of what differs little. */
#include "worker_client/nccl/plugin.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "worker_client/nccl/collective.h"
#include "worker_client/nccl/interfaces.h"
#include "worker_client/nccl/point_to_point.h"

#define EXPORTED __attribute__((visibility("default")))
#define NAME "reduction"

static _Atomic(nccl_log) log_line;

void plugin_log(int level, const char *file, int line, const char *format, ...)
{
    nccl_log log = atomic_load(&log_line);
    if (log == NULL)
        return;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    log(level, NCCL_NETWORK, file, line, NAME ": %s", text);
}

/* -- what all versions share ----------------------------------------------------------------- */

static int init(nccl_log log)
{
    atomic_store(&log_line, log);
    if (interfaces_count() > 0)
        return NCCL_SUCCESS;
    PLUGIN_WARN("no network interface: REDUCTION_INTERFACE or NCCL_SOCKET_IFNAME names none that is "
                "up and has an address");
    return NCCL_SYSTEM_ERROR;
}

static int devices(int *count)
{
    *count = interfaces_count();
    return NCCL_SUCCESS;
}

static int register_memory(void *connection, void *data, size_t nbytes, int kind, void **memory)
{
    (void)connection, (void)data, (void)nbytes;
    *memory = NULL;
    return kind == NCCL_HOST_POINTERS ? NCCL_SUCCESS : NCCL_INVALID_ARGUMENT;
}

static int deregister_memory(void *connection, void *memory)
{
    (void)connection, (void)memory;
    return NCCL_SUCCESS;
}

static int accept_any(void *listener, void **receiver, void **offloaded)
{
    *offloaded = NULL;
    return point_to_point_accept(listener, receiver);
}

/* The system knows the way to an address, whatever the device. */
static int connect_any(void *handle, void **sender, void **offloaded)
{
    *offloaded = NULL;
    return point_to_point_connect(handle, sender);
}

static int receive_one(void *receiver, int count, void *data, size_t nbytes, int tag,
                       void **request)
{
    if (count != 1) /* as `max_receives` says */
        return NCCL_INVALID_ARGUMENT;
    return point_to_point_receive(receiver, data, nbytes, tag, request);
}

/* -- what a version fills, or takes ---------------------------------------------------------- */

#define PROPERTIES(version, ...)                                                                   \
    static int properties_##version(int device, void *properties)                                  \
    {                                                                                              \
        const struct interface *interface = interfaces_get(device);                                \
        if (interface == NULL)                                                                     \
            return NCCL_INVALID_ARGUMENT;                                                          \
        *(struct nccl_properties_##version *)properties =                                          \
            (struct nccl_properties_##version){__VA_ARGS__};                                       \
        return NCCL_SUCCESS;                                                                       \
    }
#define DESCRIBED                                                                                  \
    .name = interface->name,                                                                       \
    .pci_path = interface->pci_path[0] == '\0' ? NULL : interface->pci_path,                       \
    .guid = (uint64_t)device, .pointers = NCCL_HOST_POINTERS, .speed_mbit = interface->speed_mbit, \
    .max_connections = 1 << 16, .max_receives = 1
#define DESCRIBED_SINCE_V9                                                                         \
    DESCRIBED, .merged = {.count = 1, .devices = {device}}, .max_message = (size_t)1 << 40,        \
               .max_collective = (size_t)512 << 20

PROPERTIES(v8, DESCRIBED)
PROPERTIES(v9, DESCRIBED_SINCE_V9)
PROPERTIES(v11, DESCRIBED_SINCE_V9, .max_requests_of_one = 1)
PROPERTIES(v12, DESCRIBED_SINCE_V9, .max_requests_of_one = 1, .rail = -1, .plane = -1)

/* Of what a version hands over some is of no use here; a context is one of NCCL's communicators, and
 * NCCL wants something to keep. */
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define AS(name, takes, call) static int name takes { return call; }

AS(init_v10, (nccl_log log, void *profiler), init(log))
AS(init_v11, (void **context, uint64_t number, void *config, nccl_log log, void *profiler),
   (*context = &log_line, init(log)))
AS(init_collective_v11, (void **context, uint64_t number, nccl_log log),
   (*context = &log_line, init(log)))
AS(finalize, (void *context), NCCL_SUCCESS)

AS(listen_v11, (void *context, int device, void *handle, void **listener),
   point_to_point_listen(device, handle, listener))
AS(listen_collective_v11, (void *context, int device, void *handle, void **listener),
   collective_listen(device, handle, listener))

AS(connect_v8, (int device, void *handle, void **sender, void **offloaded),
   connect_any(handle, sender, offloaded))
AS(connect_v10, (int device, void *config, void *handle, void **sender, void **offloaded),
   connect_any(handle, sender, offloaded))
AS(connect_v11, (void *context, int device, void *handle, void **sender, void **offloaded),
   connect_any(handle, sender, offloaded))

AS(send_v8, (void *to, void *data, int nbytes, int tag, void *memory, void **request),
   point_to_point_send(to, data, (size_t)nbytes, tag, request))
AS(send_v9, (void *to, void *data, size_t nbytes, int tag, void *memory, void **request),
   point_to_point_send(to, data, nbytes, tag, request))
AS(send_v10,
   (void *to, void *data, size_t nbytes, int tag, void *memory, void *profiled, void **request),
   point_to_point_send(to, data, nbytes, tag, request))

AS(receive_v8,
   (void *from, int count, void **data, int *nbytes, int *tags, void **memory, void **request),
   receive_one(from, count, data[0], (size_t)nbytes[0], tags[0], request))
AS(receive_v9,
   (void *from, int count, void **data, size_t *nbytes, int *tags, void **memory, void **request),
   receive_one(from, count, data[0], nbytes[0], tags[0], request))
AS(receive_v10,
   (void *from, int count, void **data, size_t *nbytes, int *tags, void **memory, void **profiled,
    void **request),
   receive_one(from, count, data[0], nbytes[0], tags[0], request))

AS(all_reduce_v8,
   (void *among, void *sent, void *received, int count, int dtype, int op, void *sent_memory,
    void *received_memory, void **request),
   collective_all_reduce(among, sent, received, (size_t)count, dtype, op, request))
AS(all_reduce_v9,
   (void *among, void *sent, void *received, size_t count, int dtype, int op, void *sent_memory,
    void *received_memory, void **request),
   collective_all_reduce(among, sent, received, count, dtype, op, request))

/* -- the tables ------------------------------------------------------------------------------ */

#define MEMORY .register_memory = register_memory, .deregister_memory = deregister_memory
#define NET                                                                                        \
    .name = NAME, .devices = devices, .accept = accept_any, MEMORY, .test = point_to_point_test,   \
    .close_sender = point_to_point_close, .close_receiver = point_to_point_close,                  \
    .close_listener = point_to_point_close_listener
#define NET_V8                                                                                     \
    NET, .init.v8 = init, .listen.v8 = point_to_point_listen, .connect.v8 = connect_v8
#define NET_V11                                                                                    \
    NET, .init.v11 = init_v11, .listen.v11 = listen_v11, .connect.v11 = connect_v11,               \
         .send.v10 = send_v10, .receive.v10 = receive_v10, .finalize = finalize

EXPORTED const struct nccl_net ncclNetPlugin_v8 = {
    NET_V8, .properties = properties_v8, .send.v8 = send_v8, .receive.v8 = receive_v8};
EXPORTED const struct nccl_net ncclNetPlugin_v9 = {
    NET_V8, .properties = properties_v9, .send.v9 = send_v9, .receive.v9 = receive_v9};
EXPORTED const struct nccl_net ncclNetPlugin_v10 = {
    NET,
    .init.v10 = init_v10,
    .properties = properties_v9,
    .listen.v8 = point_to_point_listen,
    .connect.v10 = connect_v10,
    .send.v10 = send_v10,
    .receive.v10 = receive_v10,
};
EXPORTED const struct nccl_net ncclNetPlugin_v11 = {NET_V11, .properties = properties_v11};
EXPORTED const struct nccl_net ncclNetPlugin_v12 = {NET_V11, .properties = properties_v12};

#define COLLECTIVE                                                                                 \
    .name = NAME, .devices = collective_devices, .connect = collective_connect,                    \
    .supports = collective_supports, MEMORY, .test = collective_test, .close = collective_close,   \
    .close_listener = collective_close_listener
#define COLLECTIVE_V8 COLLECTIVE, .init.v8 = init, .listen.v8 = collective_listen
#define COLLECTIVE_V9                                                                              \
    COLLECTIVE_V8, .properties = properties_v9, .all_reduce.v9 = all_reduce_v9
#define COLLECTIVE_V11                                                                             \
    COLLECTIVE, .init.v11 = init_collective_v11, .listen.v11 = listen_collective_v11,              \
                .all_reduce.v9 = all_reduce_v9, .finalize = finalize

EXPORTED const struct nccl_collective ncclCollNetPlugin_v8 = {
    COLLECTIVE_V8, .properties = properties_v8, .all_reduce.v8 = all_reduce_v8};
EXPORTED const struct nccl_collective ncclCollNetPlugin_v9 = {COLLECTIVE_V9};
EXPORTED const struct nccl_collective ncclCollNetPlugin_v10 = {COLLECTIVE_V9};
EXPORTED const struct nccl_collective ncclCollNetPlugin_v11 = {COLLECTIVE_V11,
                                                               .properties = properties_v11};
EXPORTED const struct nccl_collective ncclCollNetPlugin_v12 = {COLLECTIVE_V11,
                                                               .properties = properties_v12};
