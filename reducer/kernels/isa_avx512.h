/* 512-bit vectors, for x86 CPUs that have them. */
#ifndef REDUCER_KERNELS_ISA_AVX512_H
#define REDUCER_KERNELS_ISA_AVX512_H

#include <immintrin.h>

#define ISA_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define ISA_VECTOR_BYTES 64
#define ISA_NAME "avx512"
#define ISA_CONVERTS_HALVES
#define widen_half(x) ((v_f32)_mm512_cvtph_ps((__m256i)(x)))
#define narrow_half(x) ((v_half)_mm512_cvtps_ph((__m512)(x), _MM_FROUND_TO_NEAREST_INT))
#define widen_u16(x) ((v_u32)_mm512_cvtepu16_epi32((__m256i)(x)))
#define narrow_u32(x) ((v_half)_mm512_cvtepi32_epi16((__m512i)(x)))
#define load_bytes(from) ((v_i32)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from))))
#define load_words(from) ((v_i16)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(from))))
#define store_bytes(to, x) \
    _mm_storeu_si128((__m128i *)(to), _mm512_cvtepi32_epi8((__m512i)(x)))
#include "halves.h"

#endif
