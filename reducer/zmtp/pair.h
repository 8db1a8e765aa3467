/* Two connections of one process that are each other's peers, without a socket between them.
 *
 * An end offers what it sends, in its own memory, and the other one reads from there: bytes are copied
 * once, and no system call is made unless the other end sleeps.
 */
#ifndef REDUCER_PAIR_H
#define REDUCER_PAIR_H

#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { PAIR_PARTS = 128 /* the most in an offer */ };

struct pair_end {
    int fd; /* an eventfd, which its owner polls as it would a socket */
    bool gone;
    bool sleeps;      /* it has read everything, and is to be woken when there is more */
    size_t low_water; /* bytes that it is woken for; 0: any */
    struct iovec offer[PAIR_PARTS], *next; /* of what it sends, and what of that has not been read: */
    int count;
    size_t left, taken; /* bytes, and those that have been since the offer was made */
    bool more;          /* it has more to offer, and is to be woken when all was read */
};

struct pair {
    pthread_mutex_t lock;   /* of everything here, and of what is offered */
    struct pair_end end[2]; /* 0 is the server's */
};

/* Makes a pair whose ends have nothing to say yet. NULL, with errno: out of files or memory. */
struct pair *pair_make(void);
/* Has an end go; the other one is told. The pair goes with the latter. */
void pair_leave(struct pair *pair, unsigned side);

/* Offers these bytes, which stay as they are until pair_withdraw or pair_leave; no other offer may
 * stand. `more`: others are to follow when they were read. Whether the other end is still there. */
bool pair_offer(struct pair *pair, unsigned side, const struct iovec *parts, int count, bool more);
/* Takes the offer back, if there is one; returns how many bytes of it the other end has read. */
size_t pair_withdraw(struct pair *pair, unsigned side);
/* readv for one end; it also fails as that does. What the other end has left unread when it goes is
 * lost. */
ssize_t pair_read(struct pair *pair, unsigned side, struct iovec *places, int count);
/* Has an end woken when so many bytes are offered to it, or as many as an offer may have. Whether they
 * are. */
bool pair_await(struct pair *pair, unsigned side, size_t low_water);

#endif
