# What the extensions say to libzmq.h: its table of functions, and no library to link with.

cdef extern from "reducer/libzmq.h" nogil:
    ctypedef struct zmq_msg_t:
        pass

    const int ZMQ_SRCFD

    struct libzmq:
        int (*msg_init_size)(zmq_msg_t *message, size_t size) noexcept nogil
        int (*msg_close)(zmq_msg_t *message) noexcept nogil
        void *(*msg_data)(zmq_msg_t *message) noexcept nogil
        size_t (*msg_size)(const zmq_msg_t *message) noexcept nogil
        int (*msg_get)(const zmq_msg_t *message, int property) noexcept nogil
        int (*last_errno)() noexcept nogil
        const char *(*msg_gets)(const zmq_msg_t *message, const char *property) noexcept nogil
