/* Casts for x86 CPUs with 512-bit vectors. */
#include "cast.h"

#if defined(__x86_64__)
#include "reducer/kernels/isa_avx512.h"

#define CAST_TABLE cast_avx512
#include "cast_template.h"
#else
typedef int cast_avx512_is_for_x86_only; /* C wants a declaration in every file */
#endif
