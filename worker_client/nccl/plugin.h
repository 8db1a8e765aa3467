/* What the plug-in's parts share: NCCL's log. */
#ifndef WORKER_NCCL_PLUGIN_H
#define WORKER_NCCL_PLUGIN_H

#include "worker_client/nccl/abi.h"

void plugin_log(int level, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
#define PLUGIN_WARN(...) plugin_log(NCCL_WARN, __FILE__, __LINE__, __VA_ARGS__)
#define PLUGIN_INFO(...) plugin_log(NCCL_INFO, __FILE__, __LINE__, __VA_ARGS__)

#endif
