/* ZeroMQ's protocol, ZMTP 3.1 (RFC 37), for one side of one connection, sans I/O.
 *
 * Bytes that came go in, events come out, and what is to be sent lies in `reply`. The mechanisms
 * are NULL and CURVE (RFC 26). The roles are those that a reduction server needs: a client is a
 * DEALER, a server a ROUTER.
 *
 * The body of a message's frame is not copied: the caller receives it where it belongs. With CURVE
 * it is received as it is on the wire, and opened in its place by `zmtp_open`.
 *
 * With CURVE everything carries a number that grows: what was sealed first must be sent first, a
 * PONG in `reply` before any frame that is sealed later.
 */
#ifndef REDUCER_ZMTP_H
#define REDUCER_ZMTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "curve.h"

enum {
    ZMTP_GREETING_BYTES = 64,
    ZMTP_REPLY_BYTES = 1024,   /* the longest of our handshake: greeting, or a command of CURVE */
    ZMTP_COMMAND_BYTES = 1024, /* the longest command of a peer that is taken */
    ZMTP_HEADER_BYTES = 9      /* the most before a frame's body: flags and size */
};

enum zmtp_event {
    ZMTP_MORE,   /* all bytes were taken */
    ZMTP_ADMIT,  /* a server of CURVE is to say whether it admits `peer_key`: zmtp_admit */
    ZMTP_READY,  /* the handshake is done; told once */
    ZMTP_FRAME,  /* a frame begins: see `frame` */
    ZMTP_FAILED  /* see `fault`; what `reply` holds is still to be sent, then close */
};

enum zmtp_fault {
    ZMTP_NO_FAULT,
    ZMTP_FOREIGN,     /* the peer does not speak ZMTP 3 */
    ZMTP_DIFFERS,     /* the peer's mechanism is another one; it is in `peer_mechanism` */
    ZMTP_REFUSED,     /* the peer has said ERROR; its reason is in `reason` */
    ZMTP_WRONG_KEY,   /* what the peer has encrypted cannot be opened */
    ZMTP_UNKNOWN_KEY, /* zmtp_admit said no */
    ZMTP_MALFORMED,   /* anything else that RFC 37 does not allow */
    ZMTP_TOO_LARGE    /* a frame beyond `max_frame_bytes`, or a command beyond ZMTP_COMMAND_BYTES */
};

/* A frame whose header has come. The caller takes `wire_bytes` from the stream before it calls
 * zmtp_take again. */
struct zmtp_frame {
    uint64_t wire_bytes; /* of the body, as on the wire */
    uint64_t nbytes;     /* of the body, as its sender gave it; with CURVE known less a flag */
    bool more;           /* another frame of the same message follows; with CURVE after zmtp_open */
    bool command;        /* it goes to zmtp_command; with CURVE known after zmtp_open */
};

struct zmtp {
    bool server;
    bool ready;
    bool sealed;         /* frames are encrypted */
    uint8_t state;       /* of the handshake; see zmtp.c */
    enum zmtp_fault fault;
    char peer_mechanism[21];
    char reason[256];    /* that the peer has given with ERROR, as text */
    uint64_t max_frame_bytes;
    struct zmtp_frame frame;
    struct curve *curve; /* of a connection with keys, else NULL */
    uint8_t peer_key[CURVE_KEY_BYTES]; /* the client's, at a server of CURVE */
    size_t reply_bytes;  /* the caller sends these, before anything else, and sets it to 0 */
    uint8_t reply[ZMTP_REPLY_BYTES];
    size_t buffered;     /* bytes of a greeting, a command or a frame's header that is not whole */
    uint8_t buffer[ZMTP_COMMAND_BYTES + ZMTP_HEADER_BYTES];
};

/* Begins a connection; `reply` has the first part of the greeting, and the rest when the peer has
 * said its own first part. With keys the mechanism is CURVE. A server gives its pair, a client its
 * own and the server's public key. False: out of memory. */
bool zmtp_init(struct zmtp *zmtp, bool server, const struct curve_keys *keys,
               uint64_t max_frame_bytes);
void zmtp_free(struct zmtp *zmtp);

/* Takes bytes from `*at` up to `end` until there is an event, and moves `*at` behind them. Every
 * event may come with a reply. After ZMTP_FAILED nothing more is taken. */
enum zmtp_event zmtp_take(struct zmtp *zmtp, const uint8_t **at, const uint8_t *end);

/* The answer to ZMTP_ADMIT; the handshake goes on, or ends with ERROR 400. */
enum zmtp_event zmtp_admit(struct zmtp *zmtp, bool admitted);

/* With CURVE: opens a frame's body of `frame.wire_bytes` in its place, sets `frame`, and returns
 * where its `frame.nbytes` are; NULL: ZMTP_FAILED. */
uint8_t *zmtp_open(struct zmtp *zmtp, uint8_t *body);

/* Takes the body of a command's frame: answers PING, takes PONG, fails with ERROR and what is too
 * short; ignores others. ZMTP_MORE or ZMTP_FAILED. */
enum zmtp_event zmtp_command(struct zmtp *zmtp, const uint8_t *body, size_t nbytes);

/* Writes the header of a frame that is not encrypted; returns its 2 or 9 bytes. */
size_t zmtp_frame_header(uint8_t *out, uint64_t nbytes, bool more);

/* Bytes that a whole frame takes on the wire. */
uint64_t zmtp_wire_bytes(const struct zmtp *zmtp, uint64_t nbytes);

/* With CURVE: writes a whole frame to `out`, which has room for zmtp_wire_bytes; returns that. */
size_t zmtp_seal(struct zmtp *zmtp, uint8_t *out, const void *body, size_t nbytes, bool more);

/* Writes a whole PING to `out`, which has room for 64 bytes; returns how many it takes.
 * `ttl_ds`: tenths of a second after which the peer may take us for lost, 0 for never. */
size_t zmtp_ping(struct zmtp *zmtp, uint8_t *out, uint16_t ttl_ds);

#endif
