/* A hash map from 64-bit numbers to pointers: open addressing, linear probing, no tombstones.
 *
 * Keys are numbers that strangers choose. Each map multiplies them by an odd number that nobody can
 * guess, and takes the high bits (multiply-shift): keys that were made to collide under one number do
 * not under another. It does so twice, with the high half folded onto the low one in between, as keys
 * at equal distances would lie close together under one number in a hundred.
 */
#ifndef REDUCER_MAP_H
#define REDUCER_MAP_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>

enum { MAP_PLACES = 16 }; /* at least, and at most eight for each entry, from the first one on */

struct map_entry {
    uint64_t key;
    void *value; /* NULL: the place is empty */
};

struct map {
    struct map_entry *entries;
    size_t mask; /* places - 1, a power of two less one; 0 while nothing was put */
    size_t count;
    uint64_t multiplier; /* odd; 0 while nothing was put, or it is to be drawn */
};

static inline size_t map_home(const struct map *map, uint64_t key)
{
    uint64_t mixed = key * map->multiplier;
    mixed ^= mixed >> 32;
    return (size_t)((mixed * map->multiplier) >> __builtin_clzll(map->mask));
}

static inline struct map_entry *map_place(const struct map *map, uint64_t key)
{
    size_t place = map_home(map, key);
    while (map->entries[place].value != NULL && map->entries[place].key != key)
        place = (place + 1) & map->mask;
    return &map->entries[place];
}

/* Returns the value of a key, NULL if there is none. */
static inline void *map_get(const struct map *map, uint64_t key)
{
    return map->count == 0 ? NULL : map_place(map, key)->value;
}

static inline bool map_resize(struct map *map, size_t places)
{
    if (map->multiplier == 0 &&
        getrandom(&map->multiplier, sizeof map->multiplier, 0) != sizeof map->multiplier)
        return false;
    map->multiplier |= 1;
    struct map other = {
        calloc(places, sizeof(struct map_entry)), places - 1, map->count, map->multiplier};
    if (other.entries == NULL)
        return false;
    if (map->entries != NULL)
        for (size_t place = 0; place <= map->mask; place++)
            if (map->entries[place].value != NULL)
                *map_place(&other, map->entries[place].key) = map->entries[place];
    free(map->entries);
    *map = other;
    return true;
}

/* Puts a value, not NULL, under a key that has none. Returns false when out of memory, or of chance. */
static inline bool map_put(struct map *map, uint64_t key, void *value)
{
    if (2 * (map->count + 1) > map->mask &&
        !map_resize(map, map->mask == 0 ? MAP_PLACES : 2 * (map->mask + 1)))
        return false;
    *map_place(map, key) = (struct map_entry){key, value};
    map->count++;
    return true;
}

/* Takes a key out, if it is there. */
static inline void map_remove(struct map *map, uint64_t key)
{
    if (map_get(map, key) == NULL)
        return;
    size_t hole = (size_t)(map_place(map, key) - map->entries);
    /* What was pushed past the hole moves back, so that no search stops short of it. */
    for (size_t next = (hole + 1) & map->mask; map->entries[next].value != NULL;
         next = (next + 1) & map->mask) {
        size_t home = map_home(map, map->entries[next].key);
        if (((next - home) & map->mask) >= ((next - hole) & map->mask)) {
            map->entries[hole] = map->entries[next];
            hole = next;
        }
    }
    map->entries[hole].value = NULL;
    map->count--;
    if (map->mask >= MAP_PLACES && 8 * map->count < map->mask)
        map_resize(map, (map->mask + 1) / 2); /* or it stays as it is, for want of memory */
}

static inline void map_free(struct map *map)
{
    free(map->entries);
    *map = (struct map){0};
}

#endif
