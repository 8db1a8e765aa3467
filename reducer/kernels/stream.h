/* Copies past the caches: for a destination that nobody reads before it has left them anyway. An
 * ordinary store would first fetch from memory the line that it overwrites. memcpy does the same for
 * a long copy, and cannot know of one that comes in short parts.
 */
#ifndef REDUCER_STREAM_H
#define REDUCER_STREAM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Of a buffer whose beginning has left the caches when its end comes. */
enum { STREAM_BYTES = 16 << 20 };

/* memcpy for one part. */
static inline void stream(unsigned char *to, const unsigned char *from, size_t nbytes)
{
#ifdef __SSE2__
    if ((uintptr_t)to % sizeof(__m128i) == 0)
        for (; nbytes >= sizeof(__m128i); nbytes -= sizeof(__m128i)) {
            _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)from));
            to += sizeof(__m128i);
            from += sizeof(__m128i);
        }
#endif
    memcpy(to, from, nbytes);
}

/* After the last part, before anybody hears that it is there. */
static inline void stream_end(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

#endif
