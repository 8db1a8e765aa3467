/* Casts for x86 CPUs with AVX2 and F16C. */
#include "cast.h"

#if defined(__x86_64__)
#include "reducer/kernels/isa_avx2.h"

#define CAST_TABLE cast_avx2
#include "cast_template.h"
#else
typedef int cast_avx2_is_for_x86_only; /* C wants a declaration in every file */
#endif
