/* What the plug-in's parts share: NCCL's log. */
#ifndef WORKER_NCCL_PLUGIN_H
#define WORKER_NCCL_PLUGIN_H

#include "worker_client/nccl/abi.h"

enum { PLUGIN_WARN = NCCL_WARN, PLUGIN_INFO = NCCL_INFO };

void plugin_log(int level, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* The address of a device's interface, as text; "" where there is no such device. */
const char *plugin_address(int device);

#endif
