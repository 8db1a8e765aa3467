/* Puts the keys that come into the slots' hash map, and prints how far from their homes they lie. */
#include <stdio.h>

#include "reducer/engine/map.h"

int main(void)
{
    struct map map = {0};
    uint64_t key;
    while (fread(&key, sizeof key, 1, stdin) == 1)
        if (!map_put(&map, key, &map))
            return 1;
    size_t far = 0;
    for (size_t place = 0; place <= map.mask; place++)
        if (map.entries[place].value != NULL)
            far += (place - map_home(&map, map.entries[place].key)) & map.mask;
    printf("%zu\n", far);
    map_free(&map);
    return 0;
}
