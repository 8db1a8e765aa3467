/* Vectors for x86 CPUs with AVX2 and F16C (2013 and later). */
#ifndef REDUCER_KERNELS_ISA_AVX2_H
#define REDUCER_KERNELS_ISA_AVX2_H

#include <immintrin.h>

#define ISA_TARGET __attribute__((target("avx2,f16c")))
#define ISA_VECTOR_BYTES 32
#define ISA_NAME "avx2"
#define ISA_CONVERTS_HALVES
#define widen_half(x) ((v_f32)_mm256_cvtph_ps((__m128i)(x)))
#define narrow_half(x) ((v_half)_mm256_cvtps_ph((__m256)(x), _MM_FROUND_TO_NEAREST_INT))
#define widen_u16(x) ((v_u32)_mm256_cvtepu16_epi32((__m128i)(x)))
#define narrow_u32(x) \
    ((v_half)_mm256_castsi256_si128(_mm256_permute4x64_epi64( \
        _mm256_packus_epi32((__m256i)(x), _mm256_setzero_si256()), 0x08)))
#define load_bytes(from) ((v_i32)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from))))
#define load_words(from) ((v_i16)_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(from))))
#define low_bytes(x) /* of each 32-bit lane: to the front of each half */ \
    _mm256_shuffle_epi8((__m256i)(x), _mm256_set1_epi32(0x0c080400))
#define store_bytes(to, x) \
    _mm_storel_epi64((__m128i *)(to), \
                     _mm_unpacklo_epi32(_mm256_castsi256_si128(low_bytes(x)), \
                                        _mm256_extracti128_si256(low_bytes(x), 1)))
#include "halves.h"

#endif
