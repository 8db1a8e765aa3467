/* Vectors in instructions that every CPU of the architecture has; halves convert in software. */
#ifndef REDUCER_KERNELS_ISA_GENERIC_H
#define REDUCER_KERNELS_ISA_GENERIC_H

#define ISA_TARGET
#define ISA_VECTOR_BYTES 16
#define ISA_NAME "generic"
#define widen_u16(x) __builtin_convertvector(x, v_u32)
#define narrow_u32(x) __builtin_convertvector(x, v_half)
#include "halves.h"

#endif
