/* malloc's settings for processes that receive many large messages. */
#ifndef REDUCER_MALLOC_TUNING_H
#define REDUCER_MALLOC_TUNING_H

#include <malloc.h>

/* libzmq receives each large frame into a block of its own. By default glibc maps such a block from
 * the kernel, and every page of it faults when it is first written. Both limits are needed: with one
 * alone, freed blocks at the heap's end go back to the kernel again and again. */
static inline void keep_large_blocks(void)
{
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 512 << 20);
#endif
}

#endif
