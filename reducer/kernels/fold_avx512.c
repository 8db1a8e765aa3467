/* Kernels for x86 CPUs with 512-bit vectors. */
#include "fold.h"

#if defined(__x86_64__)
#include "isa_avx512.h"

#define FOLD_HALF_BLOCK 16
#define FOLD_TABLE fold_avx512
#include "fold_template.h"
#else
typedef int fold_avx512_is_for_x86_only; /* C wants a declaration in every file */
#endif
