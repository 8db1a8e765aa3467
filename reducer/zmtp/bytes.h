/* Numbers, in network byte order, and names of commands, as both the codec and CURVE write them. */
#ifndef REDUCER_BYTES_H
#define REDUCER_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t get_u64(const uint8_t *at)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value = value << 8 | at[i];
    return value;
}

static inline void put_u64(uint8_t *at, uint64_t value)
{
    for (int i = 7; i >= 0; i--, value >>= 8)
        at[i] = (uint8_t)value;
}

/* Whether a command has this name; the length comes first in both. */
static inline bool is_named(const uint8_t *body, size_t nbytes, const char *name)
{
    size_t name_bytes = 1 + (size_t)name[0];
    return nbytes >= name_bytes && memcmp(body, name, name_bytes) == 0;
}

#endif
