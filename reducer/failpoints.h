/* Places at which a build for tests can make this process die, stop, be slow or lose a message: see
 * torture/failpoints. In any other build there is nothing at them. */
#ifndef REDUCER_FAILPOINTS_H
#define REDUCER_FAILPOINTS_H

#ifdef REDUCTION_FAILPOINTS
#include "torture/failpoints/failpoints.h"
#else
#include <stdbool.h>

static const bool failpoints_armed = false;
static inline bool nothing_is_dropped(void)
{
    return false;
}
#define failpoint(place) nothing_is_dropped()
#define failpoint_message(place, frame, nbytes, type) nothing_is_dropped()
#endif

#endif
