/* All-reduces of NCCL's collective network (CollNet), through a worker's core.
 *
 * Functions return what NCCL calls ncclResult_t. `listen`, `connect` and the two that close are for
 * setting up and may take long; the others never wait, and know no interpreter.
 */
#ifndef WORKER_NCCL_COLLECTIVE_H
#define WORKER_NCCL_COLLECTIVE_H

#include <stddef.h>

int collective_devices(int *count);
/* Makes what another rank needs to know, 128 bytes, before any rank connects. */
int collective_listen(int device, void *handle, void **listener);
/* Joins the job of all whose handles these are, in rank order. */
int collective_connect(void *handles[], int ranks, int rank, void *listener, void **communicator);
int collective_supports(int dtype, int op, int *supported);
/* Begins one, from `sent` to `received`, which may be the same. A request of NULL: there is no room now. */
int collective_all_reduce(void *communicator, const void *sent, void *received, size_t count,
                          int dtype, int op, void **request);
int collective_test(void *request, int *done, int *nbytes);
/* Leaves the job; what has not ended fails. */
int collective_close(void *communicator);
int collective_close_listener(void *listener);

#endif
