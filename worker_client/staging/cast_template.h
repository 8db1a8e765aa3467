/* The casts of one instruction set, as a table; the semantics are in cast.h.
 *
 * Each cast_<variant>.c includes this file once, after reducer/kernels/isa_<variant>.h and after
 * defining CAST_TABLE, the table's symbol. A vector or a block at a time; the last, partial one
 * runs the same arithmetic on one that is filled up with zeros.
 */
#include "reducer/kernels/block8.h"

enum { SIZE_f32 = sizeof(float), SIZE_f64 = sizeof(double) };
enum { LANES_f32 = ISA_VECTOR_BYTES / SIZE_f32, LANES_f64 = ISA_VECTOR_BYTES / SIZE_f64 };

typedef double v_f64 VECTOR(ISA_VECTOR_BYTES);
typedef uint64_t v_u64 VECTOR(ISA_VECTOR_BYTES);

#define DEFINE_LOAD_STORE(T)                                                                    \
    INLINE v_##T load_##T(const unsigned char *from, size_t lanes) {                            \
        v_##T x = {0};                                                                          \
        memcpy(&x, from, lanes * SIZE_##T);                                                     \
        return x;                                                                               \
    }                                                                                           \
    INLINE void store_##T(unsigned char *to, v_##T x, size_t lanes) {                           \
        memcpy(to, &x, lanes * SIZE_##T);                                                       \
    }

DEFINE_LOAD_STORE(f32)
DEFINE_LOAD_STORE(f64)

INLINE v_f32 one_nan(v_f32 x) {
    return (v_f32)select_u32((v_u32)(x != x), 0x7fc00000 + (v_u32){0}, (v_u32)x);
}

INLINE v_f32 finite_or_zero(v_f32 x) {
    return (v_f32)((v_u32)x & (v_u32)(((v_u32)x & 0x7f800000) != 0x7f800000));
}

#define FOR_ALL(T, piece, ...)                                                                  \
    size_t at = 0;                                                                              \
    for (; count - at >= LANES_##T; at += LANES_##T) {                                          \
        piece(__VA_ARGS__, at, LANES_##T);                                                      \
    }                                                                                           \
    if (count > at) {                                                                           \
        piece(__VA_ARGS__, at, count - at);                                                     \
    }

#define DEFINE_CASTS(T)                                                                         \
    INLINE void narrow_##T##_piece(unsigned char *out, const unsigned char *in, size_t at,      \
                                   size_t lanes) {                                              \
        store_##T(out + 2 * at, one_nan(load_f32(in + 4 * at, lanes)), 2 * lanes);              \
    }                                                                                           \
    INLINE void keep_##T##_piece(unsigned char *out, const unsigned char *in,                   \
                                 unsigned char *residual, size_t at, size_t lanes) {            \
        v_f32 x = load_f32(in + 4 * at, lanes) + load_f32(residual + 4 * at, lanes);            \
        store_##T(out + 2 * at, one_nan(x), 2 * lanes);                                         \
        v_f32 rest = x - load_##T(out + 2 * at, 2 * lanes);                                     \
        store_f32(residual + 4 * at, finite_or_zero(rest), lanes);                              \
    }                                                                                           \
    INLINE void widen_##T##_piece(unsigned char *out, const unsigned char *in, size_t at,       \
                                  size_t lanes) {                                               \
        store_f32(out + 4 * at, one_nan(load_##T(in + 2 * at, 2 * lanes)), lanes);              \
    }                                                                                           \
    ISA_TARGET static void narrow_##T(void *out, const void *in, size_t count) {                \
        FOR_ALL(f32, narrow_##T##_piece, out, in)                                               \
    }                                                                                           \
    ISA_TARGET static void keep_##T(void *out, const void *in, void *residual, size_t count) {  \
        FOR_ALL(f32, keep_##T##_piece, out, in, residual)                                       \
    }                                                                                           \
    ISA_TARGET static void widen_##T(void *out, const void *in, size_t count) {                 \
        FOR_ALL(f32, widen_##T##_piece, out, in)                                                \
    }

DEFINE_CASTS(f16)
DEFINE_CASTS(bf16)

/* ---- blocks, whose first lanes have no floats ---- */

_Static_assert((int)BLOCK8_VALUES == (int)CAST_BLOCK_VALUES, "of one specification");
_Static_assert((int)BLOCK8_BYTES == (int)CAST_BLOCK_BYTES, "of one specification");

enum {
    FIRST_LANES = BLOCK8_SCALE % BLOCK8_LANES, /* of the first vector with floats: those without */
    FIRST_VECTOR = BLOCK8_SCALE / BLOCK8_LANES,
    FIRST_BYTES = (BLOCK8_LANES - FIRST_LANES) * SIZE_f32,
    FLOATS_BYTES = BLOCK8_VALUES * SIZE_f32
};

INLINE const unsigned char *floats_at(const void *floats, size_t v) {
    return (const unsigned char *)floats + (v * BLOCK8_LANES - BLOCK8_SCALE) * SIZE_f32;
}

INLINE void load_block8(v_f32 x[BLOCK8_VECTORS], const void *floats) {
    UNROLL for (size_t v = 0; v <= FIRST_VECTOR; v++) {
        x[v] = (v_f32){0};
    }
    memcpy((unsigned char *)&x[FIRST_VECTOR] + FIRST_LANES * SIZE_f32, floats, FIRST_BYTES);
    UNROLL for (size_t v = FIRST_VECTOR + 1; v < BLOCK8_VECTORS; v++) {
        x[v] = load_f32(floats_at(floats, v), BLOCK8_LANES);
    }
}

INLINE void store_block8(void *floats, const v_f32 x[BLOCK8_VECTORS]) {
    memcpy(floats, (const unsigned char *)&x[FIRST_VECTOR] + FIRST_LANES * SIZE_f32, FIRST_BYTES);
    UNROLL for (size_t v = FIRST_VECTOR + 1; v < BLOCK8_VECTORS; v++) {
        store_f32((unsigned char *)floats_at(floats, v), x[v], BLOCK8_LANES);
    }
}

INLINE void narrow_block8_piece(unsigned char *out, const void *in, enum block8_q to) {
    v_f32 x[BLOCK8_VECTORS];
    load_block8(x, in);
    block8_round(out, x, to, 0);
}

INLINE void keep_block8_piece(unsigned char *out, const void *in, void *residual,
                              enum block8_q to) {
    v_f32 x[BLOCK8_VECTORS], rest[BLOCK8_VECTORS];
    load_block8(x, in);
    load_block8(rest, residual);
    UNROLL for (size_t v = 0; v < BLOCK8_VECTORS; v++) {
        x[v] += rest[v];
    }
    block8_round(out, x, to, 0);
    v_f32 scale = block8_scale(out);
    UNROLL for (size_t v = 0; v < BLOCK8_VECTORS; v++) {
        rest[v] = finite_or_zero(x[v] - block8_values(out, v, scale, to));
    }
    store_block8(residual, rest);
}

INLINE void widen_block8_piece(void *out, const unsigned char *in, enum block8_q of) {
    v_f32 x[BLOCK8_VECTORS];
    v_f32 scale = block8_scale(in);
    UNROLL for (size_t v = 0; v < BLOCK8_VECTORS; v++) {
        x[v] = one_nan(block8_values(in, v, scale, of));
    }
    store_block8(out, x);
}

INLINE void narrow_blocks(void *out, const void *in, size_t count, enum block8_q to_q) {
    unsigned char *to = out;
    const unsigned char *from = in;
    for (; count >= BLOCK8_VALUES; count -= BLOCK8_VALUES) {
        narrow_block8_piece(to, from, to_q);
        to += BLOCK8_BYTES;
        from += FLOATS_BYTES;
    }
    if (count > 0) {
        unsigned char filled[FLOATS_BYTES] = {0};
        memcpy(filled, from, count * SIZE_f32);
        narrow_block8_piece(to, filled, to_q);
    }
}

INLINE void keep_blocks(void *out, const void *in, void *residual, size_t count,
                        enum block8_q to_q) {
    unsigned char *to = out, *rest = residual;
    const unsigned char *from = in;
    for (; count >= BLOCK8_VALUES; count -= BLOCK8_VALUES) {
        keep_block8_piece(to, from, rest, to_q);
        to += BLOCK8_BYTES;
        from += FLOATS_BYTES;
        rest += FLOATS_BYTES;
    }
    if (count > 0) {
        unsigned char filled[FLOATS_BYTES] = {0}, kept[FLOATS_BYTES] = {0};
        memcpy(filled, from, count * SIZE_f32);
        memcpy(kept, rest, count * SIZE_f32);
        keep_block8_piece(to, filled, kept, to_q);
        memcpy(rest, kept, count * SIZE_f32);
    }
}

INLINE void widen_blocks(void *out, const void *in, size_t count, enum block8_q of) {
    unsigned char *to = out;
    const unsigned char *from = in;
    for (; count >= BLOCK8_VALUES; count -= BLOCK8_VALUES) {
        widen_block8_piece(to, from, of);
        to += FLOATS_BYTES;
        from += BLOCK8_BYTES;
    }
    if (count > 0) {
        unsigned char filled[FLOATS_BYTES];
        widen_block8_piece(filled, from, of);
        memcpy(to, filled, count * SIZE_f32);
    }
}

#define DEFINE_BLOCK_CASTS(T, q)                                                                \
    ISA_TARGET static void narrow_##T(void *out, const void *in, size_t count) {                \
        narrow_blocks(out, in, count, q);                                                       \
    }                                                                                           \
    ISA_TARGET static void keep_##T(void *out, const void *in, void *residual, size_t count) {  \
        keep_blocks(out, in, residual, count, q);                                               \
    }                                                                                           \
    ISA_TARGET static void widen_##T(void *out, const void *in, size_t count) {                 \
        widen_blocks(out, in, count, q);                                                        \
    }

DEFINE_BLOCK_CASTS(block8, Q_INT8)
DEFINE_BLOCK_CASTS(block8_e4m3, Q_E4M3)

#define DEFINE_DIVIDE(T, U, scalar, quiet_nan)                                                  \
    INLINE void divide_##T##_piece(unsigned char *values, scalar by, size_t at, size_t lanes) { \
        v_##T x = load_##T(values + SIZE_##T * at, lanes) / by;                                 \
        v_##U nan = (v_##U)(x != x);                                                            \
        x = (v_##T)((nan & quiet_nan) | ((v_##U)x & ~nan));                                     \
        store_##T(values + SIZE_##T * at, x, lanes);                                            \
    }                                                                                           \
    ISA_TARGET static void divide_##T(void *values, scalar by, size_t count) {                  \
        FOR_ALL(T, divide_##T##_piece, values, by)                                              \
    }

DEFINE_DIVIDE(f32, u32, float, 0x7fc00000u)
DEFINE_DIVIDE(f64, u64, double, 0x7ff8000000000000u)

const struct cast_table CAST_TABLE = {
    .name = ISA_NAME,
    .narrow = {[CAST_FLOAT16] = narrow_f16,
               [CAST_BFLOAT16] = narrow_bf16,
               [CAST_BLOCK8] = narrow_block8,
               [CAST_BLOCK8_E4M3] = narrow_block8_e4m3},
    .narrow_keeping = {[CAST_FLOAT16] = keep_f16,
                       [CAST_BFLOAT16] = keep_bf16,
                       [CAST_BLOCK8] = keep_block8,
                       [CAST_BLOCK8_E4M3] = keep_block8_e4m3},
    .widen = {[CAST_FLOAT16] = widen_f16,
              [CAST_BFLOAT16] = widen_bf16,
              [CAST_BLOCK8] = widen_block8,
              [CAST_BLOCK8_E4M3] = widen_block8_e4m3},
    .divide_f32 = divide_f32,
    .divide_f64 = divide_f64,
};
