/* Vectors in instructions that every CPU of the architecture has; halves convert in software. */
#ifndef REDUCER_KERNELS_ISA_GENERIC_H
#define REDUCER_KERNELS_ISA_GENERIC_H

#define ISA_TARGET
#define ISA_VECTOR_BYTES 16
#define ISA_NAME "generic"
#define widen_u16(x) __builtin_convertvector(x, v_u32)
#define narrow_u32(x) __builtin_convertvector(x, v_half)
#include "halves.h"

/* Each byte four times, of which the shift leaves the highest with its sign. */
INLINE v_i32 load_bytes(const int8_t *from) {
    typedef int8_t bytes VECTOR(16);
    typedef int16_t words VECTOR(16);
    int32_t four;
    memcpy(&four, from, sizeof four);
    bytes x = (bytes)(v_i32){four};
    x = __builtin_shuffle(x, (bytes){0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7});
    words twice = (words)x;
    return (v_i32)__builtin_shuffle(twice, (words){0, 0, 1, 1, 2, 2, 3, 3}) >> 24;
}

INLINE void store_bytes(int8_t *to, v_i32 x) {
    typedef uint64_t pairs VECTOR(16);
    pairs low = (pairs)(x & 0xff);
    low |= low >> 24;
    uint16_t two[] = {(uint16_t)low[0], (uint16_t)low[1]};
    memcpy(to, two, sizeof two);
}

#endif
