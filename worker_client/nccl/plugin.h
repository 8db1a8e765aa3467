/* What the plug-in's parts share: NCCL's log, and the interface. */
#ifndef WORKER_NCCL_PLUGIN_H
#define WORKER_NCCL_PLUGIN_H

enum { PLUGIN_WARN = 2, PLUGIN_INFO = 3 }; /* NCCL's levels of its log */

void plugin_log(int level, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* The address of a device's interface, as text. */
const char *plugin_address(int device);

#endif
