/* Two connections of one process that are each other's peers, without a socket between them.
 *
 * One end reads out of what the other one has queued: bytes are copied once, and no system call is
 * made unless the other end sleeps.
 */
#ifndef REDUCER_PAIR_H
#define REDUCER_PAIR_H

#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>
#include <sys/uio.h>

struct connection;

struct pair {
    pthread_mutex_t lock;      /* of everything here, and of what both ends have queued */
    int fd[2];                 /* an eventfd for each end, which its owner polls as it would a socket */
    struct connection *end[2]; /* NULL: it has not come yet, or has gone; 0 is the server's */
    bool gone[2];
    bool sleeps[2];            /* it has read everything, and is to be woken when there is more */
};

/* Makes a pair whose ends are yet to come. NULL, with errno: out of files or memory. */
struct pair *pair_make(void);
void pair_join(struct pair *pair, unsigned side, struct connection *end);
/* Has an end go, which perhaps has never come; the other one is told. The pair goes with the latter. */
void pair_leave(struct pair *pair, unsigned side);

/* readv for one end; it also fails as that does. What the other end has left unread when it goes is
 * lost. */
ssize_t pair_read(struct pair *pair, unsigned side, struct iovec *places, int count);
/* Whether the other end has queued as much as this one waits for; to be called with the lock. */
bool pair_has_enough(const struct pair *pair, unsigned side);
/* Has the other end read what this one has queued, if that is enough, or for little; to be called with
 * the lock. */
void pair_wake_other(struct pair *pair, unsigned side, bool for_little);
/* Whether nobody will ever read what this end has queued. */
bool pair_is_deserted(struct pair *pair, unsigned side);

#endif
