/* Kernels in instructions that every CPU of the architecture has; halves convert in software. */
#include "fold.h"

#define FOLD_TARGET
#define FOLD_VECTOR_BYTES 16
#define FOLD_HALF_BLOCK 8
#define FOLD_TABLE fold_generic
#define FOLD_NAME "generic"
#define widen_u16(x) __builtin_convertvector(x, v_u32)
#define narrow_u32(x) __builtin_convertvector(x, v_half)
#include "fold_template.h"
