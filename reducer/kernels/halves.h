/* Vectors of float, and of the narrower types that are converted to and from it.
 *
 * Included by isa_<variant>.h alone, after it has defined
 *     ISA_NAME            name of the instruction set
 *     ISA_TARGET          attribute that lets the compiler use it
 *     ISA_VECTOR_BYTES    width of its vectors
 *     widen_u16, narrow_u32  16-bit lanes to 32-bit ones and back, in which they fit
 *     load_bytes, store_bytes  signed 8-bit lanes of memory to 32-bit ones, and the lowest 8 bits
 *                         of these back; functions may follow this file
 *     ISA_CONVERTS_HALVES where the CPU converts float16; then widen_half and narrow_half as well,
 *                         and load_words, signed 8-bit lanes of memory to 16-bit ones
 *
 * Rounding is to nearest, ties to even. A NaN that is rounded must be 0x7fc00000.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE ISA_TARGET static inline __attribute__((always_inline))
#define VECTOR(bytes) __attribute__((vector_size(bytes)))
typedef float v_f32 VECTOR(ISA_VECTOR_BYTES);
typedef int32_t v_i32 VECTOR(ISA_VECTOR_BYTES);
typedef uint32_t v_u32 VECTOR(ISA_VECTOR_BYTES);
typedef uint16_t v_half VECTOR(ISA_VECTOR_BYTES / 2); /* as many 16-bit lanes as a v_f32 has */
typedef int16_t v_i16 VECTOR(ISA_VECTOR_BYTES / 2);

INLINE v_u32 select_u32(v_u32 mask, v_u32 yes, v_u32 no) { return (yes & mask) | (no & ~mask); }

INLINE v_f32 load_bf16(const unsigned char *from, size_t bytes) {
    v_half x = {0};
    memcpy(&x, from, bytes);
    return (v_f32)(widen_u16(x) << 16);
}

/* A NaN arrives here as 0x7fc00000 only, and stays one. AVX-512 makes the difference's term at once. */
INLINE v_u32 round_bf16(v_f32 x) {
    v_u32 bits = (v_u32)x;
    return (bits - (0xffff8000u | (~(bits >> 16) & 1))) & 0xffff0000u;
}

INLINE void store_bf16(unsigned char *to, v_f32 x, size_t bytes) {
    v_half rounded = narrow_u32(round_bf16(x) >> 16);
    memcpy(to, &rounded, bytes);
}

#ifndef ISA_CONVERTS_HALVES
INLINE v_f32 widen_half(v_half half) {
    v_u32 x = widen_u16(half);
    v_u32 sign = (x & 0x8000) << 16;
    v_u32 magnitude = x & 0x7fff;
    v_u32 bits = (magnitude << 13) + (112u << 23);            /* from exponent bias 15 to 127 */
    v_u32 is_special = (v_u32)(magnitude >= 0x7c00);          /* infinity and NaN: exponent 255 */
    bits += is_special & (112u << 23);
    v_u32 is_subnormal = (v_u32)(magnitude < 0x0400);         /* a multiple of 2^-24, zero too */
    v_f32 scaled = __builtin_convertvector((v_i32)magnitude, v_f32) * 0x1p-24f;
    return (v_f32)(select_u32(is_subnormal, (v_u32)scaled, bits) | sign);
}

/* Nearest, ties to even. A NaN arrives here as 0x7fc00000 only. */
INLINE v_half narrow_half(v_f32 x) {
    v_u32 sign = ((v_u32)x >> 16) & 0x8000;
    v_u32 magnitude = (v_u32)x & 0x7fffffff;
    /* Normal: a carry out of the mantissa rightly increments the exponent, up to infinity. */
    v_u32 half = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
    /* Below 2^-14: the mantissa's last bit in 0.5 + x is worth 2^-24, as a subnormal half's. */
    v_u32 subnormal = (v_u32)((v_f32)magnitude + 0.5f) - 0x3f000000;
    half = select_u32((v_u32)(magnitude < 0x38800000), subnormal, half);
    half = select_u32((v_u32)(magnitude >= 0x47800000), 0x7c00 + (v_u32){0}, half); /* >= 2^16 */
    half = select_u32((v_u32)(magnitude > 0x7f800000), 0x7e00 + (v_u32){0}, half);
    return narrow_u32(half | sign);
}
#endif

INLINE v_f32 load_f16(const unsigned char *from, size_t bytes) {
    v_half x = {0};
    memcpy(&x, from, bytes);
    return widen_half(x);
}

INLINE void store_f16(unsigned char *to, v_f32 x, size_t bytes) {
    v_half rounded = narrow_half(x);
    memcpy(to, &rounded, bytes);
}
