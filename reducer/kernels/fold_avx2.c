/* Kernels for x86 CPUs with AVX2 and F16C (2013 and later). */
#include "fold.h"

#if defined(__x86_64__)
#include "isa_avx2.h"

#define FOLD_HALF_BLOCK 8
#define FOLD_TABLE fold_avx2
#include "fold_template.h"
#else
typedef int fold_avx2_is_for_x86_only; /* C wants a declaration in every file */
#endif
