#include "curve.h"

#include <sodium.h>
#include <stdlib.h>

#include "bytes.h"

enum { NONCE_BYTES = 24, COOKIE_BYTES = 96, LONG_NONCE_BYTES = 16 };

/* Where things lie in commands, by RFC 26. */
enum {
    NAME_HELLO = 6,
    HELLO_VERSION = NAME_HELLO,
    HELLO_KEY = 80, /* after zeros that make a HELLO longer than the answer to it */
    HELLO_NONCE = 112,
    HELLO_BOX = 120,
    HELLO_ZEROS = 64, /* in the box */

    NAME_WELCOME = 8,
    WELCOME_BOX = NAME_WELCOME + LONG_NONCE_BYTES,

    NAME_INITIATE = 9,
    INITIATE_NONCE = NAME_INITIATE + COOKIE_BYTES,
    INITIATE_BOX = INITIATE_NONCE + 8,
    VOUCH_BYTES = 64, /* two keys */

    NAME_READY = 6,
    READY_BOX = NAME_READY + 8,

    NAME_MESSAGE = 8,
    MESSAGE_BOX = NAME_MESSAGE + 8
};

struct curve {
    bool server;
    struct curve_keys keys;
    uint8_t own_public[CURVE_KEY_BYTES]; /* of the pair of this connection alone */
    uint8_t own_secret[CURVE_KEY_BYTES];
    uint8_t peer_public[CURVE_KEY_BYTES]; /* likewise the peer's */
    uint8_t shared[CURVE_KEY_BYTES];      /* HELLO's and WELCOME's, then that of all the others */
    uint8_t cookie[COOKIE_BYTES];
    uint64_t nonce;      /* of what we have sealed last */
    uint64_t peer_nonce; /* of what we have opened last */
};

/* -- nonces and boxes -------------------------------------------------------------------------- */

/* A nonce: a prefix of 16 bytes and a counter, or one of 8 bytes and a random number. */
static void make_nonce(uint8_t *nonce, const char *prefix, const uint8_t *rest)
{
    size_t nbytes = strlen(prefix);
    memcpy(nonce, prefix, nbytes);
    memcpy(nonce + nbytes, rest, NONCE_BYTES - nbytes);
}

/* Seals what lies behind the MAC's place. Fails for more bytes than there are addresses only. */
static void seal(uint8_t *box, size_t nbytes, const char *prefix, const uint8_t *rest,
                 const uint8_t *key)
{
    uint8_t nonce[NONCE_BYTES];
    make_nonce(nonce, prefix, rest);
    uint8_t *inside = box + CURVE_MAC_BYTES;
    crypto_box_detached_afternm(inside, box, inside, nbytes, nonce, key);
}

static bool unseal(uint8_t *box, size_t nbytes, const char *prefix, const uint8_t *rest,
                   const uint8_t *key)
{
    uint8_t nonce[NONCE_BYTES];
    make_nonce(nonce, prefix, rest);
    uint8_t *inside = box + CURVE_MAC_BYTES;
    return crypto_box_open_detached_afternm(inside, inside, box, nbytes, nonce, key) == 0;
}

/* Opens a box with the shared key, whose nonce must be beyond those before: nothing comes twice. */
static enum curve_verdict unseal_next(struct curve *curve, uint8_t *box, size_t nbytes,
                                      const char *prefix, const uint8_t *counter)
{
    uint64_t count = get_u64(counter);
    if (count <= curve->peer_nonce)
        return CURVE_BAD;
    if (!unseal(box, nbytes, prefix, counter, curve->shared))
        return CURVE_SHUT;
    curve->peer_nonce = count;
    return CURVE_OPEN;
}

/* -- a connection ------------------------------------------------------------------------------ */

struct curve *curve_new(bool server, const struct curve_keys *keys)
{
    struct curve *curve = calloc(1, sizeof *curve);
    if (curve == NULL)
        return NULL;
    curve->server = server;
    curve->keys = *keys;
    return curve;
}

void curve_free(struct curve *curve)
{
    if (curve == NULL)
        return;
    sodium_memzero(curve, sizeof *curve);
    free(curve);
}

void curve_end_handshake(struct curve *curve)
{
    sodium_memzero(&curve->keys, sizeof curve->keys);
    sodium_memzero(curve->own_secret, sizeof curve->own_secret);
    sodium_memzero(curve->cookie, sizeof curve->cookie);
}

/* -- the handshake ----------------------------------------------------------------------------- */

bool curve_write_hello(struct curve *curve, uint8_t *out)
{
    crypto_box_keypair(curve->own_public, curve->own_secret);
    if (crypto_box_beforenm(curve->shared, curve->keys.server_key, curve->own_secret) != 0)
        return false;
    memset(out, 0, CURVE_HELLO_BYTES);
    memcpy(out, "\5HELLO\1\0", NAME_HELLO + 2); /* version 1.0 */
    memcpy(out + HELLO_KEY, curve->own_public, CURVE_KEY_BYTES);
    put_u64(out + HELLO_NONCE, ++curve->nonce);
    seal(out + HELLO_BOX, HELLO_ZEROS, "CurveZMQHELLO---", out + HELLO_NONCE, curve->shared);
    return true;
}

enum curve_verdict curve_read_hello(struct curve *curve, uint8_t *body, size_t nbytes)
{
    if (nbytes != CURVE_HELLO_BYTES || !is_named(body, nbytes, "\5HELLO") ||
        body[HELLO_VERSION] != 1 || body[HELLO_VERSION + 1] != 0)
        return CURVE_BAD;
    memcpy(curve->peer_public, body + HELLO_KEY, CURVE_KEY_BYTES);
    if (crypto_box_beforenm(curve->shared, curve->peer_public, curve->keys.secret_key) != 0)
        return CURVE_SHUT;
    return unseal_next(
        curve, body + HELLO_BOX, HELLO_ZEROS, "CurveZMQHELLO---", body + HELLO_NONCE);
}

/* The cookie is random and kept. RFC 26 puts a server's state into it, for those that keep none; a
 * client cannot tell. */
void curve_write_welcome(struct curve *curve, uint8_t *out)
{
    crypto_box_keypair(curve->own_public, curve->own_secret);
    randombytes_buf(curve->cookie, COOKIE_BYTES);
    memcpy(out, "\7WELCOME", NAME_WELCOME);
    randombytes_buf(out + NAME_WELCOME, LONG_NONCE_BYTES);
    uint8_t *inside = out + WELCOME_BOX + CURVE_MAC_BYTES;
    memcpy(inside, curve->own_public, CURVE_KEY_BYTES);
    memcpy(inside + CURVE_KEY_BYTES, curve->cookie, COOKIE_BYTES);
    seal(out + WELCOME_BOX, CURVE_KEY_BYTES + COOKIE_BYTES, "WELCOME-", out + NAME_WELCOME,
         curve->shared);
}

enum curve_verdict curve_read_welcome(struct curve *curve, uint8_t *body, size_t nbytes)
{
    if (nbytes != CURVE_WELCOME_BYTES || !is_named(body, nbytes, "\7WELCOME"))
        return CURVE_BAD;
    if (!unseal(body + WELCOME_BOX, CURVE_KEY_BYTES + COOKIE_BYTES, "WELCOME-", body + NAME_WELCOME,
                curve->shared))
        return CURVE_SHUT;
    const uint8_t *inside = body + WELCOME_BOX + CURVE_MAC_BYTES;
    memcpy(curve->peer_public, inside, CURVE_KEY_BYTES);
    memcpy(curve->cookie, inside + CURVE_KEY_BYTES, COOKIE_BYTES);
    return CURVE_OPEN;
}

bool curve_write_initiate(struct curve *curve, uint8_t *out, const uint8_t *metadata, size_t nbytes)
{
    uint8_t key[CURVE_KEY_BYTES]; /* which shows that the client has its lasting key, too */
    if (crypto_box_beforenm(curve->shared, curve->peer_public, curve->own_secret) != 0 ||
        crypto_box_beforenm(key, curve->peer_public, curve->keys.secret_key) != 0)
        return false;
    memcpy(out, "\10INITIATE", NAME_INITIATE);
    memcpy(out + NAME_INITIATE, curve->cookie, COOKIE_BYTES);
    put_u64(out + INITIATE_NONCE, ++curve->nonce);
    uint8_t *inside = out + INITIATE_BOX + CURVE_MAC_BYTES;
    memcpy(inside, curve->keys.public_key, CURVE_KEY_BYTES);
    uint8_t *vouch_nonce = inside + CURVE_KEY_BYTES;
    randombytes_buf(vouch_nonce, LONG_NONCE_BYTES);
    uint8_t *vouch_box = vouch_nonce + LONG_NONCE_BYTES;
    uint8_t *vouch = vouch_box + CURVE_MAC_BYTES;
    memcpy(vouch, curve->own_public, CURVE_KEY_BYTES);
    memcpy(vouch + CURVE_KEY_BYTES, curve->keys.server_key, CURVE_KEY_BYTES);
    seal(vouch_box, VOUCH_BYTES, "VOUCH---", vouch_nonce, key);
    sodium_memzero(key, sizeof key);
    memcpy(vouch + VOUCH_BYTES, metadata, nbytes);
    seal(out + INITIATE_BOX, CURVE_INITIATE_BYTES - INITIATE_BOX - CURVE_MAC_BYTES + nbytes,
         "CurveZMQINITIATE", out + INITIATE_NONCE, curve->shared);
    return true;
}

enum curve_verdict curve_read_initiate(struct curve *curve, uint8_t *body, size_t nbytes,
                                       uint8_t *client_key)
{
    if (nbytes < CURVE_INITIATE_BYTES || !is_named(body, nbytes, "\10INITIATE"))
        return CURVE_BAD;
    if (sodium_memcmp(body + NAME_INITIATE, curve->cookie, COOKIE_BYTES) != 0)
        return CURVE_SHUT;
    if (crypto_box_beforenm(curve->shared, curve->peer_public, curve->own_secret) != 0)
        return CURVE_SHUT;
    enum curve_verdict verdict =
        unseal_next(curve, body + INITIATE_BOX, nbytes - INITIATE_BOX - CURVE_MAC_BYTES,
                    "CurveZMQINITIATE", body + INITIATE_NONCE);
    if (verdict != CURVE_OPEN)
        return verdict;
    uint8_t *inside = body + INITIATE_BOX + CURVE_MAC_BYTES;
    uint8_t *vouch_nonce = inside + CURVE_KEY_BYTES;
    uint8_t *vouch_box = vouch_nonce + LONG_NONCE_BYTES;
    uint8_t *vouch = vouch_box + CURVE_MAC_BYTES;
    uint8_t key[CURVE_KEY_BYTES];
    bool vouched = crypto_box_beforenm(key, inside, curve->own_secret) == 0 &&
                   unseal(vouch_box, VOUCH_BYTES, "VOUCH---", vouch_nonce, key) &&
                   sodium_memcmp(vouch, curve->peer_public, CURVE_KEY_BYTES) == 0 &&
                   sodium_memcmp(vouch + CURVE_KEY_BYTES, curve->keys.public_key,
                                  CURVE_KEY_BYTES) == 0;
    sodium_memzero(key, sizeof key);
    if (!vouched)
        return CURVE_SHUT;
    memcpy(client_key, inside, CURVE_KEY_BYTES);
    return CURVE_OPEN;
}

void curve_write_ready(struct curve *curve, uint8_t *out, const uint8_t *metadata, size_t nbytes)
{
    memcpy(out, "\5READY", NAME_READY);
    put_u64(out + NAME_READY, ++curve->nonce);
    memcpy(out + CURVE_READY_BYTES, metadata, nbytes);
    seal(out + READY_BOX, nbytes, "CurveZMQREADY---", out + NAME_READY, curve->shared);
}

enum curve_verdict curve_read_ready(struct curve *curve, uint8_t *body, size_t nbytes)
{
    if (nbytes < CURVE_READY_BYTES || !is_named(body, nbytes, "\5READY"))
        return CURVE_BAD;
    return unseal_next(
        curve, body + READY_BOX, nbytes - CURVE_READY_BYTES, "CurveZMQREADY---", body + NAME_READY);
}

/* -- frames ------------------------------------------------------------------------------------ */

void curve_seal(struct curve *curve, uint8_t *out, size_t nbytes, uint8_t flags)
{
    memcpy(out, "\7MESSAGE", NAME_MESSAGE);
    put_u64(out + NAME_MESSAGE, ++curve->nonce);
    out[MESSAGE_BOX + CURVE_MAC_BYTES] = flags;
    seal(out + MESSAGE_BOX, 1 + nbytes, curve->server ? "CurveZMQMESSAGES" : "CurveZMQMESSAGEC",
         out + NAME_MESSAGE, curve->shared);
}

enum curve_verdict curve_unseal(struct curve *curve, uint8_t *body, uint64_t nbytes, uint8_t *flags)
{
    if (nbytes < CURVE_MESSAGE_BYTES || !is_named(body, nbytes, "\7MESSAGE"))
        return CURVE_BAD;
    enum curve_verdict verdict = unseal_next(
        curve, body + MESSAGE_BOX, nbytes - MESSAGE_BOX - CURVE_MAC_BYTES,
        curve->server ? "CurveZMQMESSAGEC" : "CurveZMQMESSAGES", body + NAME_MESSAGE);
    if (verdict == CURVE_OPEN)
        *flags = body[MESSAGE_BOX + CURVE_MAC_BYTES];
    return verdict;
}
