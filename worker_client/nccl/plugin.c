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

const char *plugin_address(int device)
{
    const struct interface *interface = interfaces_get(device);
    return interface == NULL ? "" : interface->text;
}

/* -- what all versions share ----------------------------------------------------------------- */

static int init(nccl_log log)
{
    atomic_store(&log_line, log);
    if (interfaces_count() > 0)
        return NCCL_SUCCESS;
    plugin_log(PLUGIN_WARN, __FILE__, __LINE__,
               "no network interface: REDUCTION_INTERFACE or NCCL_SOCKET_IFNAME names none that "
               "is up and has an address");
    return NCCL_SYSTEM_ERROR;
}

static int init_profiled(nccl_log log, void *profiler)
{
    (void)profiler;
    return init(log);
}

/* A context is one of NCCL's communicators: we need none, and NCCL wants something to keep. */
static int init_context(void **context, uint64_t communicator, void *config, nccl_log log,
                        void *profiler)
{
    (void)communicator, (void)config, (void)profiler;
    *context = &log_line;
    return init(log);
}

static int init_collective_context(void **context, uint64_t communicator, nccl_log log)
{
    return init_context(context, communicator, NULL, log, NULL);
}

static int finalize(void *context)
{
    (void)context;
    return NCCL_SUCCESS;
}

static int devices(int *count)
{
    *count = interfaces_count();
    return NCCL_SUCCESS;
}

static int properties_v12(int device, void *properties)
{
    const struct interface *interface = interfaces_get(device);
    if (interface == NULL)
        return NCCL_INVALID_ARGUMENT;
    *(struct nccl_properties_v12 *)properties = (struct nccl_properties_v12){
        .name = interface->name,
        .pci_path = interface->pci_path[0] == '\0' ? NULL : interface->pci_path,
        .guid = (uint64_t)device,
        .pointers = NCCL_HOST_POINTERS,
        .speed_mbit = interface->speed_mbit,
        .max_connections = 1 << 16,
        .max_receives = 1,
        .merged = {.count = 1, .devices = {device}},
        .max_message = (size_t)1 << 40,
        .max_collective = (size_t)512 << 20,
        .rail = -1,
        .plane = -1,
    };
    return NCCL_SUCCESS;
}

static int fill_v11(int device, void *properties, size_t nbytes)
{
    struct nccl_properties_v12 newest;
    int result = properties_v12(device, &newest);
    if (result != NCCL_SUCCESS)
        return result;
    struct nccl_properties_v11 older = {.max_message = newest.max_message,
                                        .max_collective = newest.max_collective,
                                        .merged = {.count = 1, .devices = {device}}};
    memcpy(&older, &newest, offsetof(struct nccl_properties_v11, merged));
    memcpy(properties, &older, nbytes);
    return result;
}

static int properties_v11(int device, void *properties)
{
    return fill_v11(device, properties, sizeof(struct nccl_properties_v11));
}

static int properties_v9(int device, void *properties)
{
    return fill_v11(device, properties, offsetof(struct nccl_properties_v11, max_requests_of_one));
}

static int properties_v8(int device, struct nccl_properties_v8 *properties)
{
    struct nccl_properties_v12 newest;
    int result = properties_v12(device, &newest);
    if (result == NCCL_SUCCESS)
        *properties = (struct nccl_properties_v8){
            .name = newest.name,
            .pci_path = newest.pci_path,
            .guid = newest.guid,
            .pointers = newest.pointers,
            .speed_mbit = newest.speed_mbit,
            .max_connections = newest.max_connections,
            .max_receives = newest.max_receives,
        };
    return result;
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

/* -- point to point -------------------------------------------------------------------------- */

static int connect_v8(int device, void *handle, void **sender, void **offloaded)
{
    *offloaded = NULL;
    return point_to_point_connect(device, handle, sender);
}

static int connect_v10(int device, void *config, void *handle, void **sender, void **offloaded)
{
    (void)config;
    return connect_v8(device, handle, sender, offloaded);
}

static int accept_any(void *listener, void **receiver, void **offloaded)
{
    *offloaded = NULL;
    return point_to_point_accept(listener, receiver);
}

static int listen_v11(void *context, int device, void *handle, void **listener)
{
    (void)context;
    return point_to_point_listen(device, handle, listener);
}

static int send_v9(void *sender, void *data, size_t nbytes, int tag, void *memory, void **request)
{
    (void)memory;
    return point_to_point_send(sender, data, nbytes, tag, request);
}

static int send_v8(void *sender, void *data, int nbytes, int tag, void *memory, void **request)
{
    return send_v9(sender, data, (size_t)nbytes, tag, memory, request);
}

static int send_v10(void *sender, void *data, size_t nbytes, int tag, void *memory, void *profiled,
                    void **request)
{
    (void)profiled;
    return send_v9(sender, data, nbytes, tag, memory, request);
}

static int receive_v9(void *receiver, int count, void **data, size_t *nbytes, int *tags,
                      void **memory, void **request)
{
    (void)memory;
    if (count != 1) /* as `max_receives` says */
        return NCCL_INVALID_ARGUMENT;
    return point_to_point_receive(receiver, data[0], nbytes[0], tags[0], request);
}

static int receive_v8(void *receiver, int count, void **data, int *nbytes, int *tags, void **memory,
                      void **request)
{
    size_t wide = (size_t)nbytes[0];
    return receive_v9(receiver, count, data, &wide, tags, memory, request);
}

static int receive_v10(void *receiver, int count, void **data, size_t *nbytes, int *tags,
                       void **memory, void **profiled, void **request)
{
    (void)profiled;
    return receive_v9(receiver, count, data, nbytes, tags, memory, request);
}

#define MEMORY .register_memory = register_memory, .deregister_memory = deregister_memory
#define NET                                                                                        \
    .name = NAME, .devices = devices, .accept = accept_any, MEMORY, .test = point_to_point_test,   \
    .close_sender = point_to_point_close, .close_receiver = point_to_point_close,                  \
    .close_listener = point_to_point_close_listener

EXPORTED const struct nccl_net_v8 ncclNetPlugin_v8 = {
    NET,
    .init = init,
    .properties = properties_v8,
    .listen = point_to_point_listen,
    .connect = connect_v8,
    .send = send_v8,
    .receive = receive_v8,
};

EXPORTED const struct nccl_net_v9 ncclNetPlugin_v9 = {
    NET,
    .init = init,
    .properties = properties_v9,
    .listen = point_to_point_listen,
    .connect = connect_v8,
    .send = send_v9,
    .receive = receive_v9,
};

EXPORTED const struct nccl_net_v10 ncclNetPlugin_v10 = {
    NET,
    .init = init_profiled,
    .properties = properties_v9,
    .listen = point_to_point_listen,
    .connect = connect_v10,
    .send = send_v10,
    .receive = receive_v10,
};

#define NET_SINCE_V11                                                                              \
    NET, .init = init_context, .listen = listen_v11, .connect = connect_v11, .send = send_v10,     \
         .receive = receive_v10, .finalize = finalize

static int connect_v11(void *context, int device, void *handle, void **sender, void **offloaded)
{
    (void)context;
    return connect_v8(device, handle, sender, offloaded);
}

EXPORTED const struct nccl_net_v11 ncclNetPlugin_v11 = {NET_SINCE_V11,
                                                        .properties = properties_v11};
EXPORTED const struct nccl_net_v11 ncclNetPlugin_v12 = {NET_SINCE_V11,
                                                        .properties = properties_v12};

/* -- collectives ----------------------------------------------------------------------------- */

static int collective_listen_v11(void *context, int device, void *handle, void **listener)
{
    (void)context;
    return collective_listen(device, handle, listener);
}

static int all_reduce_v9(void *communicator, void *sent, void *received, size_t count, int dtype,
                         int op, void *sent_memory, void *received_memory, void **request)
{
    (void)sent_memory, (void)received_memory;
    return collective_all_reduce(communicator, sent, received, count, dtype, op, request);
}

static int all_reduce_v8(void *communicator, void *sent, void *received, int count, int dtype,
                         int op, void *sent_memory, void *received_memory, void **request)
{
    return all_reduce_v9(communicator, sent, received, (size_t)count, dtype, op, sent_memory,
                         received_memory, request);
}

#define COLLECTIVE                                                                                 \
    .name = NAME, .devices = collective_devices, .connect = collective_connect,                    \
    .supports = collective_supports, MEMORY, .test = collective_test, .close = collective_close,   \
    .close_listener = collective_close_listener

EXPORTED const struct nccl_collective_v8 ncclCollNetPlugin_v8 = {
    COLLECTIVE,
    .init = init,
    .properties = properties_v8,
    .listen = collective_listen,
    .all_reduce = all_reduce_v8,
};

#define COLLECTIVE_V9                                                                              \
    COLLECTIVE, .init = init, .properties = properties_v9, .listen = collective_listen,            \
                .all_reduce = all_reduce_v9

EXPORTED const struct nccl_collective_v9 ncclCollNetPlugin_v9 = {COLLECTIVE_V9};
EXPORTED const struct nccl_collective_v9 ncclCollNetPlugin_v10 = {COLLECTIVE_V9};

#define COLLECTIVE_SINCE_V11                                                                       \
    COLLECTIVE, .init = init_collective_context, .listen = collective_listen_v11,                  \
                .all_reduce = all_reduce_v9, .finalize = finalize

EXPORTED const struct nccl_collective_v11 ncclCollNetPlugin_v11 = {COLLECTIVE_SINCE_V11,
                                                                   .properties = properties_v11};
EXPORTED const struct nccl_collective_v11 ncclCollNetPlugin_v12 = {COLLECTIVE_SINCE_V11,
                                                                   .properties = properties_v12};
