/* Casts for 64-bit Arm CPUs. */
#include "cast.h"

#if defined(__aarch64__)
#include "reducer/kernels/isa_neon.h"

#define CAST_TABLE cast_neon
#include "cast_template.h"
#else
typedef int cast_neon_is_for_arm_only; /* C wants a declaration in every file */
#endif
