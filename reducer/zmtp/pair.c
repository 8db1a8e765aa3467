#include "pair.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { COPIED = 64 << 10 /* bytes, while the other end cannot offer more */ };

struct pair *pair_make(void)
{
    struct pair *pair = calloc(1, sizeof *pair);
    if (pair == NULL)
        return NULL;
    for (unsigned side = 0; side < 2; side++) {
        pair->end[side].fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        pair->end[side].sleeps = true;
    }
    if (pair->end[0].fd >= 0 && pair->end[1].fd >= 0 && pthread_mutex_init(&pair->lock, NULL) == 0)
        return pair;
    int error = errno;
    for (unsigned side = 0; side < 2; side++)
        if (pair->end[side].fd >= 0)
            close(pair->end[side].fd);
    free(pair);
    errno = error;
    return NULL;
}

static void wake(struct pair_end *end)
{
    end->sleeps = false;
    eventfd_write(end->fd, 1);
}

/* Whether an end offers as much as the other one waits for. */
static bool is_enough(const struct pair_end *from, const struct pair_end *to)
{
    return from->left > 0 && (from->left >= to->low_water || from->more);
}

static void clear(struct pair_end *end)
{
    end->count = 0;
    end->left = end->taken = 0;
    end->more = false;
}

static void advance(struct iovec **parts, int *count, size_t nbytes)
{
    (*parts)->iov_base = (unsigned char *)(*parts)->iov_base + nbytes;
    (*parts)->iov_len -= nbytes;
    if ((*parts)->iov_len == 0) {
        (*parts)++;
        (*count)--;
    }
}

/* Copies some of what is offered; the places move on. */
static size_t copy(struct pair_end *from, struct iovec **places, int *count)
{
    size_t copied = 0;
    while (from->count > 0 && *count > 0 && copied < COPIED) {
        size_t there = from->next->iov_len, room = (*places)->iov_len;
        size_t nbytes = there < room ? there : room;
        if (nbytes > COPIED - copied)
            nbytes = COPIED - copied;
        memcpy((*places)->iov_base, from->next->iov_base, nbytes);
        advance(&from->next, &from->count, nbytes);
        advance(places, count, nbytes);
        copied += nbytes;
    }
    from->taken += copied;
    from->left -= copied;
    if (from->more && from->count == 0) {
        from->more = false;
        wake(from);
    }
    return copied;
}

void pair_leave(struct pair *pair, unsigned side)
{
    struct pair_end *end = &pair->end[side], *other = &pair->end[!side];
    pthread_mutex_lock(&pair->lock);
    clear(end);
    end->gone = true;
    close(end->fd);
    bool last = other->gone;
    if (!last)
        wake(other);
    pthread_mutex_unlock(&pair->lock);
    if (last) {
        pthread_mutex_destroy(&pair->lock);
        free(pair);
    }
}

bool pair_offer(struct pair *pair, unsigned side, const struct iovec *parts, int count, bool more)
{
    struct pair_end *end = &pair->end[side], *other = &pair->end[!side];
    pthread_mutex_lock(&pair->lock);
    memcpy(end->offer, parts, (size_t)count * sizeof *parts);
    end->next = end->offer;
    end->count = count;
    end->more = more;
    for (int at = 0; at < count; at++)
        end->left += parts[at].iov_len;
    bool gone = other->gone;
    if (other->sleeps && !gone && is_enough(end, other))
        wake(other);
    pthread_mutex_unlock(&pair->lock);
    return !gone;
}

size_t pair_withdraw(struct pair *pair, unsigned side)
{
    struct pair_end *end = &pair->end[side];
    pthread_mutex_lock(&pair->lock);
    size_t taken = end->taken;
    clear(end);
    pthread_mutex_unlock(&pair->lock);
    return taken;
}

ssize_t pair_read(struct pair *pair, unsigned side, struct iovec *places, int count)
{
    struct pair_end *end = &pair->end[side], *other = &pair->end[!side];
    size_t copied = 0, part = 1;
    bool gone = false;
    while (count > 0 && part > 0) {
        pthread_mutex_lock(&pair->lock); /* for one part at a time: the other end may be about to send */
        part = copy(other, &places, &count);
        copied += part;
        end->sleeps |= part == 0;
        gone = other->gone;
        pthread_mutex_unlock(&pair->lock);
    }
    if (copied > 0 || gone)
        return (ssize_t)copied;
    errno = EAGAIN;
    return -1;
}

bool pair_await(struct pair *pair, unsigned side, size_t low_water)
{
    struct pair_end *end = &pair->end[side];
    pthread_mutex_lock(&pair->lock);
    end->low_water = low_water;
    bool enough = is_enough(&pair->end[!side], end);
    pthread_mutex_unlock(&pair->lock);
    return enough;
}
