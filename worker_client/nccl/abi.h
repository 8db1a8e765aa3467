/* What NCCL and a network plug-in exchange: the tables of functions of versions 8 to 12.
 *
 * NCCL 2.20 to 2.30 look for them by these versions, and newer ones load older tables. Sizes, order
 * and numbers are NCCL's (`src/include/plugin/net/` there); the names are ours.
 */
#ifndef WORKER_NCCL_ABI_H
#define WORKER_NCCL_ABI_H

#include <stddef.h>
#include <stdint.h>

enum { NCCL_HANDLE_BYTES = 128, NCCL_REQUESTS = 32 }; /* of a connection, at a time */
enum { NCCL_HOST_POINTERS = 1 };

enum nccl_result {
    NCCL_SUCCESS = 0,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INTERNAL_ERROR = 3,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_REMOTE_ERROR = 6,
};

enum nccl_level { NCCL_WARN = 2, NCCL_INFO = 3 };
enum { NCCL_NETWORK = 0x10 }; /* what a line of the log is about: NCCL_DEBUG_SUBSYS */

typedef void (*nccl_log)(int level, unsigned long about, const char *file, int line,
                         const char *format, ...);

struct nccl_properties_v8 {
    const char *name, *pci_path;
    uint64_t guid;
    int pointers, registration_is_global, speed_mbit, port;
    float latency_us;
    int max_connections, max_receives, offload, offload_version;
};

/* Version 11 begins with those of 9 and 10, with the same devices. */
struct nccl_properties_v11 {
    const char *name, *pci_path;
    uint64_t guid;
    int pointers, registration_is_global, force_flush, speed_mbit, port;
    float latency_us;
    int max_connections, max_receives, offload, offload_version;
    struct {
        int count, devices[4];
    } merged;
    size_t max_message, max_collective;
    int max_requests_of_one; /* since version 11 */
};

struct nccl_properties_v12 {
    const char *name, *pci_path;
    uint64_t guid;
    int pointers, registration_is_global, force_flush, speed_mbit, port;
    float latency_us;
    int max_connections, max_receives, offload, offload_version;
    struct {
        int count, devices[8];
    } merged;
    size_t max_message, max_collective;
    int max_requests_of_one;
    int16_t rail, plane;
};

/* How a table begins, how it sets up and sends, and how it ends, which differ between versions; the
 * rest does not. Functions that we have not are of no type. */
#define NCCL_REGISTER                                                                              \
    int (*register_memory)(void *connection, void *data, size_t nbytes, int kind, void **memory);  \
    void *register_dma_buffer;                                                                     \
    int (*deregister_memory)(void *connection, void *memory);

#define NCCL_NET_END                                                                               \
    void *flush;                                                                                   \
    int (*test)(void *request, int *done, int *sizes);                                             \
    int (*close_sender)(void *sender);                                                             \
    int (*close_receiver)(void *receiver);                                                         \
    int (*close_listener)(void *listener);                                                         \
    void *get_device_memory, *receive_consumed;

#define NCCL_REDUCE(count_type)                                                                    \
    int (*connect)(void *handles[], int ranks, int rank, void *listener, void **communicator);     \
    int (*supports)(int dtype, int op, int *supported);                                            \
    NCCL_REGISTER                                                                                  \
    int (*all_reduce)(void *communicator, void *sent, void *received, count_type count, int dtype, \
                      int op, void *sent_memory, void *received_memory, void **request);           \
    void *all_gather, *reduce_scatter, *flush;                                                     \
    int (*test)(void *request, int *done, int *nbytes);                                            \
    int (*close)(void *communicator);                                                              \
    int (*close_listener)(void *listener);

#define NCCL_ACCEPT int (*accept)(void *listener, void **receiver, void **offloaded);

struct nccl_net_v8 {
    const char *name;
    int (*init)(nccl_log log);
    int (*devices)(int *count);
    int (*properties)(int device, struct nccl_properties_v8 *properties);
    int (*listen)(int device, void *handle, void **listener);
    int (*connect)(int device, void *handle, void **sender, void **offloaded);
    NCCL_ACCEPT
    NCCL_REGISTER
    int (*send)(void *sender, void *data, int nbytes, int tag, void *memory, void **request);
    int (*receive)(void *receiver, int count, void **data, int *nbytes, int *tags, void **memory,
                   void **request);
    NCCL_NET_END
};

struct nccl_net_v9 {
    const char *name;
    int (*init)(nccl_log log);
    int (*devices)(int *count);
    int (*properties)(int device, void *properties);
    int (*listen)(int device, void *handle, void **listener);
    int (*connect)(int device, void *handle, void **sender, void **offloaded);
    NCCL_ACCEPT
    NCCL_REGISTER
    int (*send)(void *sender, void *data, size_t nbytes, int tag, void *memory, void **request);
    int (*receive)(void *receiver, int count, void **data, size_t *nbytes, int *tags,
                   void **memory, void **request);
    NCCL_NET_END
    void *merge_devices;
};

/* Since version 10 NCCL hands over what a profiler knows a request by. */
#define NCCL_PROFILED_TRANSFERS                                                                    \
    int (*send)(void *sender, void *data, size_t nbytes, int tag, void *memory, void *profiled,    \
                void **request);                                                                   \
    int (*receive)(void *receiver, int count, void **data, size_t *nbytes, int *tags,              \
                   void **memory, void **profiled, void **request);

struct nccl_net_v10 {
    const char *name;
    int (*init)(nccl_log log, void *profiler);
    int (*devices)(int *count);
    int (*properties)(int device, void *properties);
    int (*listen)(int device, void *handle, void **listener);
    int (*connect)(int device, void *config, void *handle, void **sender, void **offloaded);
    NCCL_ACCEPT
    NCCL_REGISTER
    NCCL_PROFILED_TRANSFERS
    NCCL_NET_END
    void *merge_devices;
};

/* And version 12. */
struct nccl_net_v11 {
    const char *name;
    int (*init)(void **context, uint64_t communicator, void *config, nccl_log log, void *profiler);
    int (*devices)(int *count);
    int (*properties)(int device, void *properties);
    int (*listen)(void *context, int device, void *handle, void **listener);
    int (*connect)(void *context, int device, void *handle, void **sender, void **offloaded);
    NCCL_ACCEPT
    NCCL_REGISTER
    NCCL_PROFILED_TRANSFERS
    NCCL_NET_END
    void *merge_devices;
    int (*finalize)(void *context);
    void *set_attributes;
};

struct nccl_collective_v8 {
    const char *name;
    int (*init)(nccl_log log);
    int (*devices)(int *count);
    int (*properties)(int device, struct nccl_properties_v8 *properties);
    int (*listen)(int device, void *handle, void **listener);
    NCCL_REDUCE(int)
};

/* And version 10. */
struct nccl_collective_v9 {
    const char *name;
    int (*init)(nccl_log log);
    int (*devices)(int *count);
    int (*properties)(int device, void *properties);
    int (*listen)(int device, void *handle, void **listener);
    NCCL_REDUCE(size_t)
    void *merge_devices;
};

/* And version 12. */
struct nccl_collective_v11 {
    const char *name;
    int (*init)(void **context, uint64_t communicator, nccl_log log);
    int (*devices)(int *count);
    int (*properties)(int device, void *properties);
    int (*listen)(void *context, int device, void *handle, void **listener);
    NCCL_REDUCE(size_t)
    void *merge_devices;
    int (*finalize)(void *context);
};

#endif
