/* The plug-in's tables as NCCL reads them, for programs that do as NCCL's proxy does.
 *
 * Written from NCCL's headers, apart from the library's own declarations. All versions have the same
 * functions in the same places, of which some take other arguments since a certain version.
 */
#ifndef TESTS_NCCL_TABLES_H
#define TESTS_NCCL_TABLES_H

#include <dlfcn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { SUCCESS = 0, REMOTE_ERROR = 6, HANDLE_BYTES = 128, HOST = 1, CUDA = 2 };

typedef void (*logger)(int, unsigned long, const char *, int, const char *, ...);

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
    int (*register_memory)(void *, void *, size_t, int, void **);
    int (*register_dma_buffer)(void *, void *, size_t, int, uint64_t, int, void **);
    int (*deregister_memory)(void *, void *);
    union {
        int (*v8)(void *, void *, void *, int, int, int, void *, void *, void **);
        int (*v9)(void *, void *, void *, size_t, int, int, void *, void *, void **);
    } all_reduce;
    void *all_gather, *reduce_scatter, *flush;
    int (*test)(void *, int *, int *);
    int (*close)(void *);
    int (*close_listener)(void *);
    void *merge_devices;      /* since version 9 */
    int (*finalize)(void *); /* since version 11 */
};

/* How the properties of a device begin, in all versions. */
struct properties {
    const char *name, *pci_path;
    uint64_t guid;
    int pointers;
    unsigned char rest[488];
};

static void log_line(int level, unsigned long about, const char *file, int line,
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
static const void *open_table(const char *library, const char *kind, int version)
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

#endif
