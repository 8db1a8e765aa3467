#include "pair.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "connection.h"

struct pair *pair_make(void)
{
    struct pair *pair = calloc(1, sizeof *pair);
    if (pair == NULL)
        return NULL;
    for (unsigned side = 0; side < 2; side++) {
        pair->fd[side] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        pair->sleeps[side] = true;
    }
    if (pair->fd[0] >= 0 && pair->fd[1] >= 0 && pthread_mutex_init(&pair->lock, NULL) == 0)
        return pair;
    int error = errno;
    for (unsigned side = 0; side < 2; side++)
        if (pair->fd[side] >= 0)
            close(pair->fd[side]);
    free(pair);
    errno = error;
    return NULL;
}

void pair_join(struct pair *pair, unsigned side, struct connection *end)
{
    pthread_mutex_lock(&pair->lock);
    pair->end[side] = end;
    pthread_mutex_unlock(&pair->lock);
}

void pair_leave(struct pair *pair, unsigned side)
{
    pthread_mutex_lock(&pair->lock);
    pair->end[side] = NULL;
    pair->gone[side] = true;
    close(pair->fd[side]);
    bool last = pair->gone[!side];
    if (!last)
        eventfd_write(pair->fd[!side], 1);
    pthread_mutex_unlock(&pair->lock);
    if (last) {
        pthread_mutex_destroy(&pair->lock);
        free(pair);
    }
}

ssize_t pair_read(struct pair *pair, unsigned side, struct iovec *places, int count)
{
    ssize_t copied = 0;
    while (count > 0) {
        pthread_mutex_lock(&pair->lock); /* for one part at a time: the other end may be about to send */
        struct connection *other = pair->end[!side];
        size_t part = other == NULL ? 0 : connection_take(other, &places, &count);
        bool gone = pair->gone[!side];
        if (part == 0)
            pair->sleeps[side] = true;
        pthread_mutex_unlock(&pair->lock);
        copied += (ssize_t)part;
        if (part == 0 && copied == 0 && !gone) {
            errno = EAGAIN;
            return -1;
        }
        if (part == 0)
            break;
    }
    return copied;
}

bool pair_has_enough(const struct pair *pair, unsigned side)
{
    const struct connection *from = pair->end[!side], *to = pair->end[side];
    size_t queued = from == NULL ? 0 : from->bytes_queued - from->sent;
    return queued > 0 && queued >= (to == NULL ? 0 : (size_t)to->low_water);
}

void pair_wake_other(struct pair *pair, unsigned side, bool for_little)
{
    const struct connection *from = pair->end[side];
    bool enough = pair_has_enough(pair, !side) || (for_little && from->sent < from->bytes_queued);
    if (pair->gone[!side] || !pair->sleeps[!side] || !enough)
        return;
    pair->sleeps[!side] = false;
    eventfd_write(pair->fd[!side], 1);
}

bool pair_is_deserted(struct pair *pair, unsigned side)
{
    pthread_mutex_lock(&pair->lock);
    bool deserted = pair->gone[!side];
    pthread_mutex_unlock(&pair->lock);
    return deserted;
}
