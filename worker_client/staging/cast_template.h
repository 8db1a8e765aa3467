/* The casts of one instruction set, as a table; the semantics are in cast.h.
 *
 * Each cast_<variant>.c includes this file once, after reducer/kernels/isa_<variant>.h and after
 * defining CAST_TABLE, the table's symbol. A vector at a time; the last, partial one runs the same
 * arithmetic on a zero-filled vector.
 */
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
    .narrow = {[CAST_FLOAT16] = narrow_f16, [CAST_BFLOAT16] = narrow_bf16},
    .narrow_keeping = {[CAST_FLOAT16] = keep_f16, [CAST_BFLOAT16] = keep_bf16},
    .widen = {[CAST_FLOAT16] = widen_f16, [CAST_BFLOAT16] = widen_bf16},
    .divide_f32 = divide_f32,
    .divide_f64 = divide_f64,
};
