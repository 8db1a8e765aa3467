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

#define NCCL_PROPERTIES(most_merged)                                                               \
    const char *name, *pci_path;                                                                   \
    uint64_t guid;                                                                                 \
    int pointers, registration_is_global, force_flush, speed_mbit, port;                           \
    float latency_us;                                                                              \
    int max_connections, max_receives, offload, offload_version;                                   \
    struct {                                                                                       \
        int count, devices[most_merged];                                                           \
    } merged;                                                                                      \
    size_t max_message, max_collective;

struct nccl_properties_v9 { /* and version 10 */
    NCCL_PROPERTIES(4)
};

struct nccl_properties_v11 {
    NCCL_PROPERTIES(4)
    int max_requests_of_one;
};

struct nccl_properties_v12 {
    NCCL_PROPERTIES(8)
    int max_requests_of_one;
    int16_t rail, plane;
};

/* All versions have the same functions in the same places; some take other arguments since a version.
 * An older version's table ends earlier. Functions that we have not are of no type. */
#define NCCL_REGISTER                                                                              \
    int (*register_memory)(void *connection, void *data, size_t nbytes, int kind, void **memory);  \
    void *register_dma_buffer;                                                                     \
    int (*deregister_memory)(void *connection, void *memory);

#define NCCL_LISTEN                                                                                \
    union {                                                                                        \
        int (*v8)(int device, void *handle, void **listener);                                      \
        int (*v11)(void *context, int device, void *handle, void **listener);                      \
    } listen;

struct nccl_net {
    const char *name;
    union {
        int (*v8)(nccl_log log);
        int (*v10)(nccl_log log, void *profiler);
        int (*v11)(void **context, uint64_t communicator, void *config, nccl_log log,
                   void *profiler);
    } init;
    int (*devices)(int *count);
    int (*properties)(int device, void *properties);
    NCCL_LISTEN
    union {
        int (*v8)(int device, void *handle, void **sender, void **offloaded);
        int (*v10)(int device, void *config, void *handle, void **sender, void **offloaded);
        int (*v11)(void *context, int device, void *handle, void **sender, void **offloaded);
    } connect;
    int (*accept)(void *listener, void **receiver, void **offloaded);
    NCCL_REGISTER
    union {
        int (*v8)(void *sender, void *data, int nbytes, int tag, void *memory, void **request);
        int (*v9)(void *sender, void *data, size_t nbytes, int tag, void *memory, void **request);
        int (*v10)(void *sender, void *data, size_t nbytes, int tag, void *memory, void *profiled,
                   void **request);
    } send;
    union {
        int (*v8)(void *receiver, int count, void **data, int *nbytes, int *tags, void **memory,
                  void **request);
        int (*v9)(void *receiver, int count, void **data, size_t *nbytes, int *tags,
                  void **memory, void **request);
        int (*v10)(void *receiver, int count, void **data, size_t *nbytes, int *tags,
                   void **memory, void **profiled, void **request);
    } receive;
    void *flush;
    int (*test)(void *request, int *done, int *nbytes);
    int (*close_sender)(void *sender);
    int (*close_receiver)(void *receiver);
    int (*close_listener)(void *listener);
    void *get_device_memory, *receive_consumed;
    void *merge_devices;            /* since version 9 */
    int (*finalize)(void *context); /* since version 11 */
    void *set_attributes;
};

struct nccl_collective {
    const char *name;
    union {
        int (*v8)(nccl_log log);
        int (*v11)(void **context, uint64_t communicator, nccl_log log);
    } init;
    int (*devices)(int *count);
    int (*properties)(int device, void *properties);
    NCCL_LISTEN
    int (*connect)(void *handles[], int ranks, int rank, void *listener, void **communicator);
    int (*supports)(int dtype, int op, int *supported);
    NCCL_REGISTER
    union {
        int (*v8)(void *communicator, void *sent, void *received, int count, int dtype, int op,
                  void *sent_memory, void *received_memory, void **request);
        int (*v9)(void *communicator, void *sent, void *received, size_t count, int dtype, int op,
                  void *sent_memory, void *received_memory, void **request);
    } all_reduce;
    void *all_gather, *reduce_scatter, *flush;
    int (*test)(void *request, int *done, int *nbytes);
    int (*close)(void *communicator);
    int (*close_listener)(void *listener);
    void *merge_devices;            /* since version 9 */
    int (*finalize)(void *context); /* since version 11 */
};

#endif
