/* Kernels for 64-bit Arm CPUs. */
#include "fold.h"

#if defined(__aarch64__)
#include "isa_neon.h"

#define FOLD_HALF_BLOCK 8
#define FOLD_TABLE fold_neon
#include "fold_template.h"
#else
typedef int fold_neon_is_for_arm_only; /* C wants a declaration in every file */
#endif
