/* Casts between float32 and the narrower types that travel: what every variant provides.
 *
 * A value is rounded to nearest, ties to even; one beyond the type's range becomes infinite. A NaN
 * becomes the positive quiet NaN without payload, as in a fold (reducer/kernels/fold.h). Blocks
 * have 252 values and one scale (docs/protocol.md, section 4); the last one is filled up with
 * zeros. The bits are the same in every variant and on every CPU.
 */
#ifndef WORKER_CLIENT_CAST_H
#define WORKER_CLIENT_CAST_H

#include <fenv.h>
#include <stddef.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the casts are for little-endian CPUs, as the wire is"
#endif

enum cast_type { CAST_FLOAT16, CAST_BFLOAT16, CAST_BLOCK8, CAST_BLOCK8_E4M3, CAST_TYPES };
enum { CAST_BLOCK_VALUES = 252, CAST_BLOCK_BYTES = 256 };

/* The casts with one instruction set. Buffers may lie at any alignment, and do not overlap. */
struct cast_table {
    const char *name;
    /* Rounds `count` floats. */
    void (*narrow[CAST_TYPES])(void *out, const void *in, size_t count);
    /* Rounds in + residual, and leaves in `residual` what rounding took away; 0 where that is not
     * finite, so that one overflow does not spoil all later sums. */
    void (*narrow_keeping[CAST_TYPES])(void *out, const void *in, void *residual, size_t count);
    /* Back to `count` floats: exactly, but for the multiplication by a block's scale. */
    void (*widen[CAST_TYPES])(void *out, const void *in, size_t count);
    /* Divides `count` floats, or doubles, in place. */
    void (*divide_f32)(void *values, float by, size_t count);
    void (*divide_f64)(void *values, double by, size_t count);
};

extern const struct cast_table cast_generic;
#if defined(__x86_64__)
extern const struct cast_table cast_avx2;
extern const struct cast_table cast_avx512;
#elif defined(__aarch64__)
extern const struct cast_table cast_neon;
#endif

enum { CAST_TABLES = 3 };

/* A table's `widen`, which writes a long result past the caches. */
void cast_widen(const struct cast_table *table, enum cast_type of, void *out, const void *in,
                size_t count);

/* Fills in the tables that this CPU and operating system can run, best first; returns how many. */
size_t cast_usable(const struct cast_table *usable[CAST_TABLES]);

/* Make the default floating-point environment this thread's, and put back the one before: a library
 * may have made it flush subnormal numbers to zero, and ranks' bits would differ. */
static inline void cast_begin(fenv_t *callers) {
    fegetenv(callers);
    fesetenv(FE_DFL_ENV);
}
static inline void cast_end(const fenv_t *callers) { fesetenv(callers); }

#endif
