/* Kernels for x86 CPUs with AVX2 and F16C (2013 and later). */
#include "fold.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define FOLD_TARGET __attribute__((target("avx2,f16c")))
#define FOLD_VECTOR_BYTES 32
#define FOLD_TABLE fold_avx2
#define FOLD_NAME "avx2"
#define FOLD_HAS_F16C
#define widen_half(x) ((v_f32)_mm256_cvtph_ps((__m128i)(x)))
#define narrow_half(x) ((v_half)_mm256_cvtps_ph((__m256)(x), _MM_FROUND_TO_NEAREST_INT))
#include "fold_template.h"
#else
typedef int fold_avx2_is_for_x86_only; /* C wants a declaration in every file */
#endif
