/* Kernels for x86 CPUs with 512-bit vectors. */
#include "fold.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define FOLD_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define FOLD_VECTOR_BYTES 64
#define FOLD_HALF_BLOCK 16
#define FOLD_TABLE fold_avx512
#define FOLD_NAME "avx512"
#define FOLD_HAS_F16C
#define widen_half(x) ((v_f32)_mm512_cvtph_ps((__m256i)(x)))
#define narrow_half(x) ((v_half)_mm512_cvtps_ph((__m512)(x), _MM_FROUND_TO_NEAREST_INT))
#define widen_u16(x) ((v_u32)_mm512_cvtepu16_epi32((__m256i)(x)))
#define narrow_u32(x) ((v_half)_mm512_cvtepi32_epi16((__m512i)(x)))
#include "fold_template.h"
#else
typedef int fold_avx512_is_for_x86_only; /* C wants a declaration in every file */
#endif
