/* The libzmq that pyzmq loaded, as a table of functions (libzmq.py fills it in).
 *
 * pyzmq's wheels ship neither zmq.h nor a library that could be linked, and a second libzmq could
 * not use the first one's sockets. The types and options below are libzmq's public ABI, zmq.h 4.x.
 */
#ifndef REDUCER_LIBZMQ_H
#define REDUCER_LIBZMQ_H

#include <stddef.h>

/* Opaque, 64 bytes, as aligned as a pointer. */
typedef struct zmq_msg_t {
    _Alignas(8) unsigned char opaque[64];
} zmq_msg_t;

typedef void zmq_free_fn(void *data, void *hint);

enum { ZMQ_DONTWAIT = 1, ZMQ_SNDMORE = 2 };
enum { ZMQ_SRCFD = 2, ZMQ_SHARED = 3 }; /* properties of a message */

struct libzmq {
    int (*msg_init)(zmq_msg_t *message);
    int (*msg_init_size)(zmq_msg_t *message, size_t nbytes);
    int (*msg_init_data)(
        zmq_msg_t *message, void *data, size_t nbytes, zmq_free_fn *release, void *hint);
    int (*msg_move)(zmq_msg_t *to, zmq_msg_t *from);
    int (*msg_copy)(zmq_msg_t *to, zmq_msg_t *from); /* shares what is not tiny */
    int (*msg_close)(zmq_msg_t *message);
    void *(*msg_data)(zmq_msg_t *message);
    size_t (*msg_size)(const zmq_msg_t *message);
    int (*msg_more)(const zmq_msg_t *message);
    int (*msg_get)(const zmq_msg_t *message, int property);
    int (*msg_send)(zmq_msg_t *message, void *socket, int flags); /* takes the message if >= 0 */
    int (*msg_recv)(zmq_msg_t *message, void *socket, int flags);
    int (*last_errno)(void);
    const char *(*msg_gets)(const zmq_msg_t *message, const char *property); /* NULL: not set */
};

#endif
