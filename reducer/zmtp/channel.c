#include "channel.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { COPIED = 64 << 10 /* bytes, while the other end cannot offer more */ };

struct channel *channel_make(void)
{
    struct channel *channel = calloc(1, sizeof *channel);
    if (channel == NULL)
        return NULL;
    for (unsigned side = 0; side < 2; side++) {
        channel->end[side].fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        channel->end[side].sleeps = true;
    }
    if (channel->end[0].fd >= 0 && channel->end[1].fd >= 0 &&
        pthread_mutex_init(&channel->lock, NULL) == 0)
        return channel;
    int error = errno;
    for (unsigned side = 0; side < 2; side++)
        if (channel->end[side].fd >= 0)
            close(channel->end[side].fd);
    free(channel);
    errno = error;
    return NULL;
}

static void wake(struct channel_end *end)
{
    end->sleeps = false;
    eventfd_write(end->fd, 1);
}

/* Whether an end offers as much as the other one waits for. */
static bool is_enough(const struct channel_end *from, const struct channel_end *to)
{
    return from->left > 0 && (from->left >= to->low_water || from->more);
}

static void clear(struct channel_end *end)
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
static size_t copy(struct channel_end *from, struct iovec **places, int *count)
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

void channel_close(struct channel *channel, unsigned side)
{
    struct channel_end *end = &channel->end[side], *other = &channel->end[!side];
    pthread_mutex_lock(&channel->lock);
    clear(end);
    end->gone = true;
    close(end->fd);
    bool last = other->gone;
    if (!last)
        wake(other);
    pthread_mutex_unlock(&channel->lock);
    if (last) {
        pthread_mutex_destroy(&channel->lock);
        free(channel);
    }
}

bool channel_offer(struct channel *channel, unsigned side, const struct iovec *parts, int count,
                   bool more)
{
    struct channel_end *end = &channel->end[side], *other = &channel->end[!side];
    pthread_mutex_lock(&channel->lock);
    memcpy(end->offer, parts, (size_t)count * sizeof *parts);
    end->next = end->offer;
    end->count = count;
    end->more = more;
    for (int at = 0; at < count; at++)
        end->left += parts[at].iov_len;
    bool gone = other->gone;
    if (other->sleeps && !gone && is_enough(end, other))
        wake(other);
    pthread_mutex_unlock(&channel->lock);
    return !gone;
}

size_t channel_withdraw(struct channel *channel, unsigned side)
{
    struct channel_end *end = &channel->end[side];
    pthread_mutex_lock(&channel->lock);
    size_t taken = end->taken;
    clear(end);
    pthread_mutex_unlock(&channel->lock);
    return taken;
}

ssize_t channel_read(struct channel *channel, unsigned side, struct iovec *places, int count)
{
    struct channel_end *end = &channel->end[side], *other = &channel->end[!side];
    size_t copied = 0, part = 1;
    bool gone = false;
    while (count > 0 && part > 0) {
        /* For one part at a time: the other end may be about to send. */
        pthread_mutex_lock(&channel->lock);
        part = copy(other, &places, &count);
        copied += part;
        end->sleeps |= part == 0;
        gone = other->gone;
        pthread_mutex_unlock(&channel->lock);
    }
    if (copied > 0 || gone)
        return (ssize_t)copied;
    errno = EAGAIN;
    return -1;
}

bool channel_await(struct channel *channel, unsigned side, size_t low_water)
{
    struct channel_end *end = &channel->end[side];
    pthread_mutex_lock(&channel->lock);
    end->low_water = low_water;
    bool enough = is_enough(&channel->end[!side], end);
    pthread_mutex_unlock(&channel->lock);
    return enough;
}
