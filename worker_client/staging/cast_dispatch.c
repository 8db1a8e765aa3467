/* Which casts this machine can run. */
#include "cast.h"

size_t cast_usable(const struct cast_table *usable[CAST_TABLES]) {
    size_t found = 0;
#if defined(__x86_64__)
    /* The builtin also asks whether the operating system saves the wide registers. */
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        usable[found++] = &cast_avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
        usable[found++] = &cast_avx2;
    }
#elif defined(__aarch64__)
    usable[found++] = &cast_neon;
#endif
    usable[found++] = &cast_generic;
    return found;
}
