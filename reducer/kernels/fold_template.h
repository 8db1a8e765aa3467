/* All kernels of one instruction set, as a table; the semantics are in fold.h.
 *
 * Each fold_<variant>.c includes this file once, after isa_<variant>.h and after defining
 *     FOLD_TABLE          the table's symbol
 *     FOLD_HALF_BLOCK     accumulators at a time of 16-bit types and blocks (FOLD_BLOCK of others)
 *
 * A fold advances through all inputs together, FOLD_BLOCK vectors at a time, with the accumulators
 * in registers: every input is read once and the output is written once. Vectors are GCC's, so the
 * same source serves every CPU.
 *
 * Measured, with inputs in memory and not in a cache: pieces of 512 bytes per input are best where
 * there are registers for them. Widening fills the CPU's window with more instructions per byte, so
 * the loads of 16-bit types reach less far ahead, and prefetching gains a half for chunks up to
 * 4 MiB (it loses a fifth from 16 MiB on, which no chunk is); the others gain nothing by it. Stores
 * past the cache lose a quarter where the output fits in it, as a chunk does that is sent next.
 */
#include "block8.h"

enum { FOLD_BLOCK = 8, CACHE_LINE = 64, PREFETCH_AHEAD = 1024 };

typedef double v_f64 VECTOR(ISA_VECTOR_BYTES);
typedef int8_t v_i8 VECTOR(ISA_VECTOR_BYTES);
typedef int64_t v_i64 VECTOR(ISA_VECTOR_BYTES);
typedef uint8_t v_u8 VECTOR(ISA_VECTOR_BYTES);
typedef uint64_t v_u64 VECTOR(ISA_VECTOR_BYTES);

/* Per element type: the vector it accumulates in, the bytes of an element, and those that a vector
 * takes up in memory, and the vectors in a block. */
typedef v_f32 acc_f32, acc_f16, acc_bf16;
typedef v_f64 acc_f64;
typedef v_i8 acc_i8;
typedef v_i32 acc_i32;
typedef v_i64 acc_i64;
typedef v_u8 acc_u8;
enum {
    SIZE_f32 = 4,
    SIZE_f64 = 8,
    SIZE_f16 = 2,
    SIZE_bf16 = 2,
    SIZE_i8 = 1,
    SIZE_i32 = 4,
    SIZE_i64 = 8,
    SIZE_u8 = 1
};
enum {
    BYTES_f32 = ISA_VECTOR_BYTES,
    BYTES_f64 = ISA_VECTOR_BYTES,
    BYTES_f16 = ISA_VECTOR_BYTES / 2,
    BYTES_bf16 = ISA_VECTOR_BYTES / 2,
    BYTES_i8 = ISA_VECTOR_BYTES,
    BYTES_i32 = ISA_VECTOR_BYTES,
    BYTES_i64 = ISA_VECTOR_BYTES,
    BYTES_u8 = ISA_VECTOR_BYTES
};

enum {
    BLOCK_f32 = FOLD_BLOCK,
    BLOCK_f64 = FOLD_BLOCK,
    BLOCK_f16 = FOLD_HALF_BLOCK,
    BLOCK_bf16 = FOLD_HALF_BLOCK,
    BLOCK_i8 = FOLD_BLOCK,
    BLOCK_i32 = FOLD_BLOCK,
    BLOCK_i64 = FOLD_BLOCK,
    BLOCK_u8 = FOLD_BLOCK
};

/* ---- load and store: `bytes` is less than a vector's at the very end of a buffer only ---- */

#define DEFINE_LOAD_STORE(T)                                                                    \
    INLINE acc_##T load_##T(const unsigned char *from, size_t bytes) {                          \
        acc_##T x = {0};                                                                        \
        memcpy(&x, from, bytes);                                                                \
        return x;                                                                               \
    }                                                                                           \
    INLINE void store_##T(unsigned char *to, acc_##T x, size_t bytes) { memcpy(to, &x, bytes); }

DEFINE_LOAD_STORE(f32)
DEFINE_LOAD_STORE(f64)
DEFINE_LOAD_STORE(i8)
DEFINE_LOAD_STORE(i32)
DEFINE_LOAD_STORE(i64)
DEFINE_LOAD_STORE(u8)

/* A value as it is after a store and a load. */
#define rounded_f32(x) (x)
#define rounded_f64(x) (x)
#define rounded_i8(x) (x)
#define rounded_i32(x) (x)
#define rounded_i64(x) (x)
#define rounded_u8(x) (x)
#define rounded_f16(x) widen_half(narrow_half(x))
#define rounded_bf16(x) ((v_f32)round_bf16(x))

/* ---- steps: acc = acc (op) x; finals: from the accumulator to the value that is rounded ---- */

#define IS_NAN(x) ((x) != (x)) /* of an integer: false, which costs nothing */

/* U is the unsigned type of A's width: comparisons give masks in it, and its arithmetic wraps. */
#define DEFINE_MIN_MAX(A, U)                                                                    \
    INLINE v_##A min_##A(v_##A acc, v_##A x) {                                                  \
        v_##U take = (v_##U)((x < acc) | IS_NAN(x));                                            \
        return (v_##A)(((v_##U)x & take) | ((v_##U)acc & ~take));                               \
    }                                                                                           \
    INLINE v_##A max_##A(v_##A acc, v_##A x) {                                                  \
        v_##U take = (v_##U)((x > acc) | IS_NAN(x));                                            \
        return (v_##A)(((v_##U)x & take) | ((v_##U)acc & ~take));                               \
    }

#define DEFINE_FLOATING(A, U, scalar, quiet_nan)                                                \
    INLINE v_##A sum_##A(v_##A acc, v_##A x) { return acc + x; }                                \
    INLINE v_##A product_##A(v_##A acc, v_##A x) { return acc * x; }                            \
    DEFINE_MIN_MAX(A, U)                                                                        \
    INLINE v_##A final_##A(v_##A acc, size_t n) {                                               \
        (void)n;                                                                                \
        v_##U nan = (v_##U)IS_NAN(acc);                                                         \
        return (v_##A)((nan & quiet_nan) | ((v_##U)acc & ~nan));                                \
    }                                                                                           \
    INLINE v_##A mean_##A(v_##A acc, size_t n) { return final_##A(acc / (scalar)n, n); }

#define DEFINE_INTEGER(A, U)                                                                    \
    INLINE v_##A sum_##A(v_##A acc, v_##A x) { return (v_##A)((v_##U)acc + (v_##U)x); }         \
    INLINE v_##A product_##A(v_##A acc, v_##A x) { return (v_##A)((v_##U)acc * (v_##U)x); }     \
    DEFINE_MIN_MAX(A, U)                                                                        \
    INLINE v_##A final_##A(v_##A acc, size_t n) {                                               \
        (void)n;                                                                                \
        return acc;                                                                             \
    }

DEFINE_FLOATING(f32, u32, float, 0x7fc00000u)
DEFINE_FLOATING(f64, u64, double, 0x7ff8000000000000u)
DEFINE_INTEGER(i8, u8)
DEFINE_INTEGER(i32, u32)
DEFINE_INTEGER(i64, u64)
DEFINE_INTEGER(u8, u8)

/* ---- the folds ---- */

/* Prefetches what a later block reads; an address past the end does no harm. */
INLINE void prefetch(const unsigned char *from, size_t bytes) {
    for (size_t line = 0; line < bytes; line += CACHE_LINE) {
        __builtin_prefetch((const void *)((uintptr_t)from + PREFETCH_AHEAD + line));
    }
}

/* T: element type; A: type that it accumulates in. The piece's sizes are constants once inlined,
 * except in the last, partial vector, which runs the same arithmetic on zero-filled vectors. */
#define DEFINE_FOLD(name, T, A, step, final)                                                    \
    INLINE void name##_piece(unsigned char *out, const void *const *in, size_t n, size_t at,    \
                             size_t vectors, size_t bytes) {                                    \
        const int is_widened = BYTES_##T < ISA_VECTOR_BYTES;                                   \
        const size_t ahead = is_widened && vectors > 1 ? vectors * BYTES_##T : 0;               \
        acc_##T acc[BLOCK_##T];                                                                 \
        const unsigned char *first = (const unsigned char *)in[0] + at;                         \
        prefetch(first, ahead);                                                                 \
        UNROLL for (size_t v = 0; v < vectors; v++) {                                           \
            acc[v] = load_##T(first + v * BYTES_##T, bytes);                                    \
        }                                                                                       \
        for (size_t rank = 1; rank < n; rank++) {                                               \
            const unsigned char *next = (const unsigned char *)in[rank] + at;                   \
            prefetch(next, ahead);                                                              \
            UNROLL for (size_t v = 0; v < vectors; v++) {                                       \
                acc[v] = step##_##A(acc[v], load_##T(next + v * BYTES_##T, bytes));             \
            }                                                                                   \
        }                                                                                       \
        UNROLL for (size_t v = 0; v < vectors; v++) {                                           \
            store_##T(out + at + v * BYTES_##T, final##_##A(acc[v], n), bytes);                 \
        }                                                                                       \
    }                                                                                           \
    ISA_TARGET static void name(void *out, const void *const *in, size_t n, size_t count) {    \
        const size_t block = (size_t)BLOCK_##T * BYTES_##T;                                     \
        const size_t end = count * SIZE_##T;                                                    \
        size_t at = 0;                                                                          \
        for (; end - at >= block; at += block) {                                                \
            name##_piece(out, in, n, at, BLOCK_##T, BYTES_##T);                                 \
        }                                                                                       \
        for (; end - at >= BYTES_##T; at += BYTES_##T) {                                        \
            name##_piece(out, in, n, at, 1, BYTES_##T);                                         \
        }                                                                                       \
        if (end > at) {                                                                         \
            name##_piece(out, in, n, at, 1, end - at);                                          \
        }                                                                                       \
    }

/* Combines a node on the left with the accumulators, a node each; a node of 16 bits is rounded, and
 * stays in its accumulator. It is a NaN then if it was one: low bits of those are 0, as they come from
 * 16 bits or are the processor's own. */
#define DEFINE_NODE(name, T, A, step)                                                           \
    INLINE acc_##T name##_node(acc_##T left, acc_##T right) {                                   \
        return rounded_##T(step##_##A(left, right));                                            \
    }

/* Whether the next four inputs are the leaves of a subtree, and perhaps complete larger ones. */
INLINE int is_quad(const uint8_t *depths, size_t left, size_t depth) {
    return left >= 4 && depths[0] == depth + 1 && depths[1] == depth + 1 &&
           depths[2] == depth + 2 && depths[3] <= depth + 1;
}

/* The stack has an input where it is, if that waits for its right neighbour, and other nodes in the
 * first cache, in memory that the next piece uses again. Four at a time stay in registers, and what
 * the last input completes is the root, which goes to the output. */
#define DEFINE_LEAVES(name, T, A, step, final)                                                  \
    DEFINE_NODE(name, T, A, step)                                                               \
    INLINE void name##_leaves_piece(unsigned char *out, const void *const *in,                  \
                                    const uint8_t *depths, size_t n, size_t leaves, size_t at,  \
                                    size_t vectors, size_t bytes) {                             \
        const size_t ahead =                                                                    \
            BYTES_##T < ISA_VECTOR_BYTES && vectors > 1 ? vectors * BYTES_##T : 0;              \
        const unsigned char *waits[FOLD_DEPTH];                                                 \
        acc_##T made[FOLD_DEPTH][BLOCK_##T], acc[BLOCK_##T] = {{0}}, other[BLOCK_##T];          \
        size_t depth = 0;                                                                       \
        for (size_t input = 0; input < n; input++) {                                            \
            const unsigned char *next = (const unsigned char *)in[input] + at;                  \
            prefetch(next, ahead);                                                              \
            if (is_quad(depths + input, n - input, depth)) {                                    \
                const unsigned char *second = (const unsigned char *)in[input + 1] + at;        \
                const unsigned char *third = (const unsigned char *)in[input + 2] + at;         \
                const unsigned char *fourth = (const unsigned char *)in[input + 3] + at;        \
                prefetch(second, ahead);                                                        \
                prefetch(third, ahead);                                                         \
                prefetch(fourth, ahead);                                                        \
                UNROLL for (size_t v = 0; v < vectors; v++) {                                   \
                    acc[v] = name##_node(load_##T(next + v * BYTES_##T, bytes),                 \
                                         load_##T(second + v * BYTES_##T, bytes));              \
                }                                                                               \
                UNROLL for (size_t v = 0; v < vectors; v++) {                                   \
                    other[v] = name##_node(load_##T(third + v * BYTES_##T, bytes),              \
                                           load_##T(fourth + v * BYTES_##T, bytes));            \
                }                                                                               \
                UNROLL for (size_t v = 0; v < vectors; v++) {                                   \
                    acc[v] = name##_node(acc[v], other[v]);                                     \
                }                                                                               \
                input += 3;                                                                     \
            } else if (depth < depths[input] && n > 1) {                                        \
                waits[depth++] = next;                                                          \
                continue;                                                                       \
            } else {                                                                            \
                UNROLL for (size_t v = 0; v < vectors; v++) {                                   \
                    acc[v] = load_##T(next + v * BYTES_##T, bytes);                             \
                }                                                                               \
            }                                                                                   \
            for (; depth >= depths[input]; depth--) {                                           \
                const unsigned char *left = waits[depth - 1];                                   \
                if (left != NULL) {                                                             \
                    UNROLL for (size_t v = 0; v < vectors; v++) {                               \
                        acc[v] = name##_node(load_##T(left + v * BYTES_##T, bytes), acc[v]);    \
                    }                                                                           \
                } else {                                                                        \
                    UNROLL for (size_t v = 0; v < vectors; v++) {                               \
                        acc[v] = name##_node(made[depth - 1][v], acc[v]);                       \
                    }                                                                           \
                }                                                                               \
            }                                                                                   \
            if (input + 1 < n) {                                                                \
                waits[depth] = NULL;                                                            \
                UNROLL for (size_t v = 0; v < vectors; v++) {                                   \
                    made[depth][v] = acc[v];                                                    \
                }                                                                               \
                depth++;                                                                        \
            }                                                                                   \
        }                                                                                       \
        UNROLL for (size_t v = 0; v < vectors; v++) {                                           \
            store_##T(out + at + v * BYTES_##T, final##_##A(acc[v], leaves), bytes);            \
        }                                                                                       \
    }                                                                                           \
    ISA_TARGET static void name##_leaves(void *out, const void *const *in,                      \
                                         const uint8_t *depths, size_t n, size_t leaves,        \
                                         size_t count) {                                        \
        const size_t block = (size_t)BLOCK_##T * BYTES_##T;                                     \
        const size_t end = count * SIZE_##T;                                                    \
        size_t at = 0;                                                                          \
        for (; end - at >= block; at += block) {                                                \
            name##_leaves_piece(out, in, depths, n, leaves, at, BLOCK_##T, BYTES_##T);          \
        }                                                                                       \
        for (; end - at >= BYTES_##T; at += BYTES_##T) {                                        \
            name##_leaves_piece(out, in, depths, n, leaves, at, 1, BYTES_##T);                  \
        }                                                                                       \
        if (end > at) {                                                                         \
            name##_leaves_piece(out, in, depths, n, leaves, at, 1, end - at);                   \
        }                                                                                       \
    }

#define DEFINE_FOLDS(name, T, A, step, final)                                                   \
    DEFINE_FOLD(name, T, A, step, final)                                                        \
    DEFINE_LEAVES(name, T, A, step, final)
#define DEFINE_COMMON_FOLDS(T, A)                                                               \
    DEFINE_FOLDS(T##_sum, T, A, sum, final)                                                     \
    DEFINE_FOLDS(T##_min, T, A, min, final)                                                     \
    DEFINE_FOLDS(T##_max, T, A, max, final)                                                     \
    DEFINE_FOLDS(T##_product, T, A, product, final)
#define DEFINE_FLOATING_FOLDS(T, A)                                                             \
    DEFINE_COMMON_FOLDS(T, A)                                                                   \
    DEFINE_FOLDS(T##_mean, T, A, sum, mean)

DEFINE_FLOATING_FOLDS(f32, f32)
DEFINE_FLOATING_FOLDS(f64, f64)
DEFINE_FLOATING_FOLDS(f16, f32)
DEFINE_FLOATING_FOLDS(bf16, f32)
DEFINE_COMMON_FOLDS(i8, i8)
DEFINE_COMMON_FOLDS(i32, i32)
DEFINE_COMMON_FOLDS(i64, i64)
DEFINE_COMMON_FOLDS(u8, u8)

/* The piece's accumulators are in registers, those of the whole block in the first cache: all of
 * them count for its scale. */
INLINE void block8_fold_piece(v_f32 *acc, const void *const *in, size_t n, size_t at, size_t from,
                              enum block8_q of) {
    const unsigned char *block = (const unsigned char *)in[0] + at;
    v_f32 sum[FOLD_HALF_BLOCK];
    v_f32 scale = block8_scale(block);
    prefetch(block + from * BLOCK8_LANES, FOLD_HALF_BLOCK * BLOCK8_LANES);
    UNROLL for (size_t v = 0; v < FOLD_HALF_BLOCK; v++) {
        sum[v] = block8_values(block, from + v, scale, of);
    }
    for (size_t rank = 1; rank < n; rank++) {
        block = (const unsigned char *)in[rank] + at;
        scale = block8_scale(block);
        prefetch(block + from * BLOCK8_LANES, FOLD_HALF_BLOCK * BLOCK8_LANES);
        UNROLL for (size_t v = 0; v < FOLD_HALF_BLOCK; v++) {
            sum[v] += block8_values(block, from + v, scale, of);
        }
    }
    UNROLL for (size_t v = 0; v < FOLD_HALF_BLOCK; v++) {
        acc[from + v] = sum[v];
    }
}

INLINE void block8_fold(void *out, const void *const *in, size_t n, size_t count, enum block8_q of,
                        int is_mean) {
    for (size_t at = 0; at < count * BLOCK8_BYTES; at += BLOCK8_BYTES) {
        v_f32 acc[BLOCK8_VECTORS];
        for (size_t from = 0; from < BLOCK8_VECTORS; from += FOLD_HALF_BLOCK) {
            block8_fold_piece(acc, in, n, at, from, of);
        }
        if (is_mean) {
            UNROLL for (size_t v = 0; v < BLOCK8_VECTORS; v++) {
                acc[v] /= (float)n;
            }
        }
        block8_round((unsigned char *)out + at, acc, of, 1);
    }
}

#define DEFINE_BLOCK_FOLD(name, of, is_mean)                                                    \
    ISA_TARGET static void name(void *out, const void *const *in, size_t n, size_t count) {    \
        block8_fold(out, in, n, count, of, is_mean);                                            \
    }

DEFINE_BLOCK_FOLD(block8_sum, Q_INT8, 0)
DEFINE_BLOCK_FOLD(block8_mean, Q_INT8, 1)
DEFINE_BLOCK_FOLD(block8_e4m3_sum, Q_E4M3, 0)
DEFINE_BLOCK_FOLD(block8_e4m3_mean, Q_E4M3, 1)

ISA_TARGET static uint64_t read_all(const void *const *in, size_t n, size_t nbytes) {
    v_u64 acc[FOLD_BLOCK] = {{0}};
    const size_t block = sizeof(acc);
    size_t at = 0;
    for (; nbytes - at >= block; at += block) {
        for (size_t rank = 0; rank < n; rank++) {
            const unsigned char *next = (const unsigned char *)in[rank] + at;
            UNROLL for (size_t v = 0; v < FOLD_BLOCK; v++) {
                v_u64 x;
                memcpy(&x, next + v * sizeof(x), sizeof(x));
                acc[v] ^= x;
            }
        }
    }
    uint64_t all = 0;
    for (size_t v = 0; v < FOLD_BLOCK; v++) {
        for (size_t lane = 0; lane < sizeof(acc[v]) / sizeof(uint64_t); lane++) {
            all ^= acc[v][lane];
        }
    }
    for (size_t rank = 0; rank < n; rank++) {
        for (size_t rest = at; rest < nbytes; rest += sizeof(uint64_t)) {
            uint64_t word = 0;
            size_t left = nbytes - rest;
            memcpy(&word, (const unsigned char *)in[rank] + rest,
                   left < sizeof(word) ? left : sizeof(word));
            all ^= word;
        }
    }
    return all;
}

#define COMMON_ENTRIES(T)                                                                       \
    [FOLD_SUM] = T##_sum, [FOLD_MIN] = T##_min, [FOLD_MAX] = T##_max, [FOLD_PRODUCT] = T##_product
#define LEAVES_ENTRIES(T)                                                                       \
    [FOLD_SUM] = T##_sum_leaves, [FOLD_MIN] = T##_min_leaves, [FOLD_MAX] = T##_max_leaves,      \
    [FOLD_PRODUCT] = T##_product_leaves

const struct fold_table FOLD_TABLE = {
    .name = ISA_NAME,
    .read = read_all,
    .fold = {
        [FOLD_FLOAT32] = {COMMON_ENTRIES(f32), [FOLD_MEAN] = f32_mean},
        [FOLD_FLOAT64] = {COMMON_ENTRIES(f64), [FOLD_MEAN] = f64_mean},
        [FOLD_FLOAT16] = {COMMON_ENTRIES(f16), [FOLD_MEAN] = f16_mean},
        [FOLD_BFLOAT16] = {COMMON_ENTRIES(bf16), [FOLD_MEAN] = bf16_mean},
        [FOLD_INT8] = {COMMON_ENTRIES(i8)},
        [FOLD_INT32] = {COMMON_ENTRIES(i32)},
        [FOLD_INT64] = {COMMON_ENTRIES(i64)},
        [FOLD_UINT8] = {COMMON_ENTRIES(u8)},
        [FOLD_BLOCK8] = {[FOLD_SUM] = block8_sum, [FOLD_MEAN] = block8_mean},
        [FOLD_BLOCK8_E4M3] = {[FOLD_SUM] = block8_e4m3_sum, [FOLD_MEAN] = block8_e4m3_mean},
    },
    .leaves = {
        [FOLD_FLOAT32] = {LEAVES_ENTRIES(f32), [FOLD_MEAN] = f32_mean_leaves},
        [FOLD_FLOAT64] = {LEAVES_ENTRIES(f64), [FOLD_MEAN] = f64_mean_leaves},
        [FOLD_FLOAT16] = {LEAVES_ENTRIES(f16), [FOLD_MEAN] = f16_mean_leaves},
        [FOLD_BFLOAT16] = {LEAVES_ENTRIES(bf16), [FOLD_MEAN] = bf16_mean_leaves},
        [FOLD_INT8] = {LEAVES_ENTRIES(i8)},
        [FOLD_INT32] = {LEAVES_ENTRIES(i32)},
        [FOLD_INT64] = {LEAVES_ENTRIES(i64)},
        [FOLD_UINT8] = {LEAVES_ENTRIES(u8)},
    },
};
