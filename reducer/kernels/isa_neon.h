/* Vectors for 64-bit Arm CPUs, all of which have them. */
#ifndef REDUCER_KERNELS_ISA_NEON_H
#define REDUCER_KERNELS_ISA_NEON_H

#include <arm_neon.h>

#define ISA_TARGET
#define ISA_VECTOR_BYTES 16
#define ISA_NAME "neon"
#define ISA_CONVERTS_HALVES
#define widen_half(x) ((v_f32)vcvt_f32_f16((float16x4_t)(x)))
#define narrow_half(x) ((v_half)vcvt_f16_f32((float32x4_t)(x)))
#define widen_u16(x) ((v_u32)vmovl_u16((uint16x4_t)(x)))
#define narrow_u32(x) ((v_half)vmovn_u32((uint32x4_t)(x)))
#include "halves.h"

INLINE v_i16 load_words(const void *from) {
    int32_t four;
    memcpy(&four, from, sizeof four);
    return (v_i16)vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))));
}

INLINE v_i32 load_bytes(const int8_t *from) {
    return (v_i32)vmovl_s16((int16x4_t)load_words(from));
}

INLINE void store_bytes(int8_t *to, v_i32 x) {
    int16x4_t words = vmovn_s32((int32x4_t)x);
    int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    int32_t four = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
    memcpy(to, &four, sizeof four);
}

#endif
