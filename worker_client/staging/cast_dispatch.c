/* Which casts this machine can run, and how the long ones are written. */
#include "cast.h"

#include "reducer/kernels/stream.h"

enum {
    LONG_BYTES = STREAM_BYTES / 8, /* a long buffer comes in 8 pieces (casting.py) */
    BATCH = 16 * CAST_BLOCK_VALUES /* floats that are cast at a time, and stay in the first cache */
};

static size_t bytes_of_batch(enum cast_type of) {
    int in_blocks = of == CAST_BLOCK8 || of == CAST_BLOCK8_E4M3;
    return in_blocks ? BATCH / CAST_BLOCK_VALUES * CAST_BLOCK_BYTES : BATCH * sizeof(uint16_t);
}

void cast_widen(const struct cast_table *table, enum cast_type of, void *out, const void *in,
                size_t count) {
    _Alignas(64) float batch[BATCH];
    unsigned char *to = out;
    const unsigned char *from = in;
    if (count * sizeof(float) >= LONG_BYTES) {
        for (; count >= BATCH; count -= BATCH) {
            table->widen[of](batch, from, BATCH);
            stream(to, (const unsigned char *)batch, sizeof batch);
            from += bytes_of_batch(of);
            to += sizeof batch;
        }
        stream_end();
    }
    table->widen[of](to, from, count);
}

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
