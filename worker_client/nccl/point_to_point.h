/* Messages between two ranks over TCP, for what NCCL does not give to the collective network.
 *
 * NCCL's proxy thread calls these functions and must never wait: each does what is possible now. A
 * connection carries messages one way, in order, on several TCP streams: short ones on the first,
 * long ones in equal parts on all. What is on the wire is between two libraries of one version.
 */
#ifndef WORKER_NCCL_POINT_TO_POINT_H
#define WORKER_NCCL_POINT_TO_POINT_H

#include <stddef.h>

/* Writes the listener's address, and a nonce by which it knows its peer, into the handle. */
int point_to_point_listen(int device, void *handle, void **listener);
/* Both leave NULL until the peer is there, and are called again with the same handle, or listener. */
int point_to_point_connect(void *handle, void **sender);
int point_to_point_accept(void *listener, void **receiver);
/* Both leave a request of NULL where no more can be in flight: they are called again. */
int point_to_point_send(void *sender, const void *data, size_t nbytes, int tag, void **request);
/* A message of more bytes, or with another tag, is an error. */
int point_to_point_receive(void *receiver, void *data, size_t nbytes, int tag, void **request);
/* Requests may be tested in any order; one that has ended is forgotten. `nbytes` may be NULL. */
int point_to_point_test(void *request, int *done, int *nbytes);
int point_to_point_close(void *connection);
int point_to_point_close_listener(void *listener);

#endif
