/* Which kernels this machine can run. */
#include "fold.h"

size_t fold_usable(const struct fold_table *usable[FOLD_TABLES]) {
    size_t found = 0;
#if defined(__x86_64__)
    /* The builtin also asks whether the operating system saves the wide registers. */
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        usable[found++] = &fold_avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
        usable[found++] = &fold_avx2;
    }
#elif defined(__aarch64__)
    usable[found++] = &fold_neon;
#endif
    usable[found++] = &fold_generic;
    return found;
}
