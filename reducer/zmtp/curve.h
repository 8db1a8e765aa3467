/* CURVE (RFC 26): keys, the handshake's boxes, and sealed frames, by libsodium. */
#ifndef REDUCER_CURVE_H
#define REDUCER_CURVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CURVE_KEY_BYTES = 32 };

/* 32 bytes each, not Z85. */
struct curve_keys {
    uint8_t public_key[CURVE_KEY_BYTES];
    uint8_t secret_key[CURVE_KEY_BYTES];
    uint8_t server_key[CURVE_KEY_BYTES]; /* public, of the server that a client expects */
};

struct curve; /* the state of one connection; see curve.c */

/* -- what follows is for zmtp.c ---------------------------------------------------------------- */

/* Sizes of commands, less the metadata in INITIATE and READY. */
enum {
    CURVE_MAC_BYTES = 16,
    CURVE_HELLO_BYTES = 200,
    CURVE_WELCOME_BYTES = 168,
    CURVE_INITIATE_BYTES = 257,
    CURVE_READY_BYTES = 30,
    CURVE_MESSAGE_BYTES = 33 /* its name, nonce, MAC and flags: all that is not the sender's body */
};

enum { CURVE_MORE = 1, CURVE_COMMAND = 2 }; /* the flags within a MESSAGE */

enum curve_verdict {
    CURVE_OPEN,
    CURVE_SHUT, /* made with other keys, or changed on its way */
    CURVE_BAD   /* no such command: its name, size or nonce is wrong */
};

/* NULL: out of memory. To be called after sodium_init. */
struct curve *curve_new(bool server, const struct curve_keys *keys);

/* Wipes and frees; NULL is fine. */
void curve_free(struct curve *curve);

/* Wipes what only the handshake needs. */
void curve_end_handshake(struct curve *curve);

/* Each of them writes a command of the size above, with the metadata, if any, at its end. False:
 * the other side's public key is no key (HELLO, INITIATE). */
bool curve_write_hello(struct curve *curve, uint8_t *out);
void curve_write_welcome(struct curve *curve, uint8_t *out);
bool curve_write_initiate(struct curve *curve, uint8_t *out, const uint8_t *metadata,
                          size_t nbytes);
void curve_write_ready(struct curve *curve, uint8_t *out, const uint8_t *metadata, size_t nbytes);

/* Each of them opens a command of any size in its place. The metadata in INITIATE begins behind
 * CURVE_INITIATE_BYTES, in READY behind CURVE_READY_BYTES. */
enum curve_verdict curve_read_hello(struct curve *curve, uint8_t *body, size_t nbytes);
enum curve_verdict curve_read_welcome(struct curve *curve, uint8_t *body, size_t nbytes);
enum curve_verdict curve_read_initiate(struct curve *curve, uint8_t *body, size_t nbytes,
                                       uint8_t *client_key);
enum curve_verdict curve_read_ready(struct curve *curve, uint8_t *body, size_t nbytes);

/* Makes a MESSAGE of the `nbytes` that lie at out + CURVE_MESSAGE_BYTES. */
void curve_seal(struct curve *curve, uint8_t *out, size_t nbytes, uint8_t flags);

/* Opens a MESSAGE in its place: the sender's bytes lie behind CURVE_MESSAGE_BYTES. */
enum curve_verdict curve_unseal(struct curve *curve, uint8_t *body, uint64_t nbytes,
                                uint8_t *flags);

#endif
