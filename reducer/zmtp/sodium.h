/* libsodium as a table of functions (sodium.py fills it in, in this order).
 *
 * pyzmq's wheels ship libsodium for libzmq, without sodium.h and under a name of their own, so that
 * it cannot be linked. The types below are libsodium's public ABI, which is stable since 1.0.
 */
#ifndef REDUCER_SODIUM_H
#define REDUCER_SODIUM_H

#include <stddef.h>

struct sodium {
    void (*randombytes_buf)(void *out, size_t nbytes); /* ends the process if there are none */
    void (*memzero)(void *start, size_t nbytes);
    int (*memcmp)(const void *one, const void *other, size_t nbytes); /* constant time; 0: same */
    int (*box_keypair)(unsigned char *public_key, unsigned char *secret_key);
    int (*box_beforenm)(unsigned char *key, const unsigned char *public_key,
                        const unsigned char *secret_key); /* -1: a public key of small order */
    /* `out` and `in` may be the same. */
    int (*box_detached_afternm)(unsigned char *out, unsigned char *mac, const unsigned char *in,
                                unsigned long long nbytes, const unsigned char *nonce,
                                const unsigned char *key);
    int (*box_open_detached_afternm)(unsigned char *out, const unsigned char *in,
                                     const unsigned char *mac, unsigned long long nbytes,
                                     const unsigned char *nonce, const unsigned char *key);
};

#endif
