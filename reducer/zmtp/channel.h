/* Two connections of one process that are each other's peers, without a socket between them.
 *
 * An end offers what it sends, in its own memory, and the other one reads from there: bytes are copied
 * once, and no system call is made unless the other end sleeps.
 */
#ifndef REDUCER_CHANNEL_H
#define REDUCER_CHANNEL_H

#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { CHANNEL_PARTS = 128 /* the most in an offer */ };

struct channel_end {
    int fd; /* an eventfd, which its owner polls as it would a socket */
    bool gone;
    bool sleeps;      /* it has read everything, and is to be woken when there is more */
    size_t low_water; /* bytes that it is woken for; 0: any */
    struct iovec offer[CHANNEL_PARTS], *next; /* of what it sends, and what of that has not been read: */
    int count;
    size_t left, taken; /* bytes, and those that have been since the offer was made */
    bool more;          /* it has more to offer, and is to be woken when all was read */
};

struct channel {
    pthread_mutex_t lock;      /* of everything here, and of what is offered */
    struct channel_end end[2]; /* 0 is the server's */
};

/* Makes a channel whose ends have nothing to say yet. NULL, with errno: out of files or memory. */
struct channel *channel_make(void);
/* Has an end go; the other one is told. The channel goes with the latter. */
void channel_close(struct channel *channel, unsigned side);

/* Offers these bytes, which stay as they are until channel_withdraw or channel_close; no other offer may
 * stand. `more`: others are to follow when they were read. Whether the other end is still there. */
bool channel_offer(struct channel *channel, unsigned side, const struct iovec *parts, int count,
                   bool more);
/* Takes the offer back, if there is one; returns how many bytes of it the other end has read. */
size_t channel_withdraw(struct channel *channel, unsigned side);
/* readv for one end; it also fails as that does. What the other end has left unread when it goes is
 * lost. */
ssize_t channel_read(struct channel *channel, unsigned side, struct iovec *places, int count);
/* Has an end woken when so many bytes are offered to it, or as many as an offer may have. Whether they
 * are. */
bool channel_await(struct channel *channel, unsigned side, size_t low_water);

#endif
