/* What programs share that do as NCCL's proxy does: tables, NCCL's log, random numbers and a clock.
 *
 * The tables are written from NCCL's headers, apart from the library's own declarations. All versions
 * have the same functions in the same places, of which some take other arguments since a certain
 * version.
 */
#ifndef TESTS_NCCL_HARNESS_H
#define TESTS_NCCL_HARNESS_H

#include <dlfcn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { SUCCESS = 0, REMOTE_ERROR = 6, HANDLE_BYTES = 128, HOST = 1, CUDA = 2 };

typedef void (*logger)(int, unsigned long, const char *, int, const char *, ...);

#define REGISTER                                                                                   \
    int (*register_memory)(void *, void *, size_t, int, void **);                                  \
    int (*register_dma_buffer)(void *, void *, size_t, int, uint64_t, int, void **);               \
    int (*deregister_memory)(void *, void *);

struct net_table {
    const char *name;
    union {
        int (*v8)(logger);
        int (*v10)(logger, void *);
        int (*v11)(void **, uint64_t, void *, logger, void *);
    } init;
    int (*devices)(int *);
    int (*properties)(int, void *);
    union {
        int (*v8)(int, void *, void **);
        int (*v11)(void *, int, void *, void **);
    } listen;
    union {
        int (*v8)(int, void *, void **, void **);
        int (*v10)(int, void *, void *, void **, void **);
        int (*v11)(void *, int, void *, void **, void **);
    } connect;
    int (*accept)(void *, void **, void **);
    REGISTER
    union {
        int (*v8)(void *, void *, int, int, void *, void **);
        int (*v9)(void *, void *, size_t, int, void *, void **);
        int (*v10)(void *, void *, size_t, int, void *, void *, void **);
    } send;
    union {
        int (*v8)(void *, int, void **, int *, int *, void **, void **);
        int (*v9)(void *, int, void **, size_t *, int *, void **, void **);
        int (*v10)(void *, int, void **, size_t *, int *, void **, void **, void **);
    } receive;
    void *flush;
    int (*test)(void *, int *, int *);
    int (*close_sender)(void *);
    int (*close_receiver)(void *);
    int (*close_listener)(void *);
    void *get_device_memory, *receive_consumed;
    void *merge_devices;     /* since version 9 */
    int (*finalize)(void *); /* since version 11, as what follows */
    void *set_attributes;
};

struct collective_table {
    const char *name;
    union {
        int (*v8)(logger);
        int (*v11)(void **, uint64_t, logger);
    } init;
    int (*devices)(int *);
    int (*properties)(int, void *);
    union {
        int (*v8)(int, void *, void **);
        int (*v11)(void *, int, void *, void **);
    } listen;
    int (*connect)(void *[], int, int, void *, void **);
    int (*supports)(int, int, int *);
    REGISTER
    union {
        int (*v8)(void *, void *, void *, int, int, int, void *, void *, void **);
        int (*v9)(void *, void *, void *, size_t, int, int, void *, void *, void **);
    } all_reduce;
    void *all_gather, *reduce_scatter, *flush;
    int (*test)(void *, int *, int *);
    int (*close)(void *);
    int (*close_listener)(void *);
    void *merge_devices;     /* since version 9 */
    int (*finalize)(void *); /* since version 11 */
};

/* How the properties of a device begin, in all versions. */
struct properties {
    const char *name, *pci_path;
    uint64_t guid;
    int pointers;
    unsigned char rest[488];
};

static inline void log_line(int level, unsigned long about, const char *file, int line,
                            const char *format, ...)
{
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "NCCL %d %lx %s:%d %s\n", level, about, file, line, text);
}

/* A table, such as `ncclCollNetPlugin`, of a version. */
static inline const void *open_table(const char *library, const char *kind, int version)
{
    char name[64];
    snprintf(name, sizeof name, "%s_v%d", kind, version);
    void *opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    const void *table = opened == NULL ? NULL : dlsym(opened, name);
    if (table == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    return table;
}

static inline uint64_t draw(uint64_t *state) /* splitmix64 */
{
    uint64_t drawn = *state += UINT64_C(0x9E3779B97F4A7C15);
    drawn = (drawn ^ drawn >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    drawn = (drawn ^ drawn >> 27) * UINT64_C(0x94D049BB133111EB);
    return drawn ^ drawn >> 31;
}

/* From 1 to the most; as often from 16 to 31 as from 1024 to 2047. */
static inline size_t draw_count(size_t most, uint64_t *state)
{
    unsigned doublings = 0;
    while (most >> (doublings + 1) > 0)
        doublings++;
    size_t least = (size_t)1 << draw(state) % (doublings + 1), others = most - least + 1;
    return least + draw(state) % (others < least ? others : least);
}

static inline double seconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

#endif
