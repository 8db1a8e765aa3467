"""The structs of ZMTP, its connections and their payloads, for all extensions over them."""

from libc.stdint cimport uint8_t, uint64_t


cdef extern from "reducer/zmtp/block.h" nogil:
    struct block:
        unsigned char *data
        size_t nbytes

    struct block_pool:
        size_t most_spare_bytes

    block *block_take(block_pool *pool, size_t nbytes) noexcept
    void block_drop(block_pool *pool, block *dropped) noexcept


cdef extern from "reducer/zmtp/zmtp.h" nogil:
    enum zmtp_fault:
        ZMTP_NO_FAULT
        ZMTP_FOREIGN
        ZMTP_DIFFERS
        ZMTP_REFUSED
        ZMTP_WRONG_KEY
        ZMTP_UNKNOWN_KEY
        ZMTP_MALFORMED
        ZMTP_TOO_LARGE

    struct zmtp_frame:
        uint64_t wire_bytes, nbytes
        bint more, command

    ctypedef struct zmtp_t "struct zmtp":
        bint ready, sealed
        zmtp_fault fault
        char *peer_mechanism
        char *reason
        zmtp_frame frame
        uint8_t *peer_key
        size_t reply_bytes
        uint8_t *reply


cdef extern from "reducer/zmtp/connection.h" nogil:
    struct message:
        unsigned frames
        bint foreign
        unsigned char *header
        block *payload

    struct channel:
        pass

    enum connection_state:
        CONNECTING
        HANDSHAKE
        OPEN
        SUSPENDED
        CLOSING
        CLOSED

    struct connection:
        channel *channel
        int error
        connection_state state, reached
        bint in_frame
        zmtp_t zmtp
        message message
        uint64_t bytes_read, bytes_written

    void channel_close(channel *channel, unsigned side) noexcept
