/* A binary heap of 64-bit numbers, the least first. */
#ifndef REDUCER_HEAP_H
#define REDUCER_HEAP_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

struct heap {
    uint64_t *numbers; /* each is at least the one at half its place; places count from 1 */
    size_t count, room;
};

/* Returns the least number; there must be one. */
static inline uint64_t heap_least(const struct heap *heap)
{
    return heap->numbers[1];
}

/* Puts a number. Returns false when out of memory. */
static inline bool heap_put(struct heap *heap, uint64_t number)
{
    if (heap->count + 1 >= heap->room) {
        size_t room = heap->room == 0 ? 16 : 2 * heap->room;
        uint64_t *numbers = realloc(heap->numbers, room * sizeof *numbers);
        if (numbers == NULL)
            return false;
        heap->numbers = numbers;
        heap->room = room;
    }
    size_t place = ++heap->count;
    for (; place > 1 && heap->numbers[place / 2] > number; place /= 2)
        heap->numbers[place] = heap->numbers[place / 2];
    heap->numbers[place] = number;
    return true;
}

/* Takes the least number out; there must be one. */
static inline void heap_take(struct heap *heap)
{
    uint64_t last = heap->numbers[heap->count--];
    size_t place = 1;
    for (size_t next = 2; next <= heap->count; place = next, next *= 2) {
        if (next < heap->count && heap->numbers[next + 1] < heap->numbers[next])
            next++;
        if (heap->numbers[next] >= last)
            break;
        heap->numbers[place] = heap->numbers[next];
    }
    heap->numbers[place] = last;
}

static inline void heap_free(struct heap *heap)
{
    free(heap->numbers);
    *heap = (struct heap){0};
}

#endif
