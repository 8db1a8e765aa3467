"""Keys of the classes over what speaks CURVE: `curve.h` declared once, and calls of libsodium."""

from cpython.bytes cimport PyBytes_AsString
from libc.stdint cimport uint8_t
from libc.string cimport memcpy


cdef extern from "<string.h>" nogil:
    void explicit_bzero(void *wiped, size_t nbytes)


cdef extern from "<sodium.h>" nogil:
    int sodium_init() noexcept
    int crypto_box_keypair(uint8_t *public_key, uint8_t *secret_key) noexcept
    int crypto_scalarmult_base(uint8_t *public_key, const uint8_t *secret_key) noexcept


cdef extern from "reducer/zmtp/curve.h" nogil:
    const int CURVE_KEY_BYTES

    struct curve_keys:
        uint8_t public_key[32]
        uint8_t secret_key[32]
        uint8_t server_key[32]


cdef inline int begin_sodium() except -1:
    """Make libsodium ready for use, which any thread may do, and again."""
    if sodium_init() < 0:
        raise OSError("libsodium finds no source of random numbers")
    return 0


cdef inline int copy_keys(curve_keys *to, tuple keys) except -1:
    """Copy a public and a secret key, and the server's public one, if that is the third.

    Raises:
        OSError: libsodium cannot be used.
        ValueError: a key has another length.
    """
    for key in keys:
        if len(key) != CURVE_KEY_BYTES:
            raise ValueError(f"a key has {CURVE_KEY_BYTES} bytes")
    begin_sodium()
    memcpy(to.public_key, PyBytes_AsString(keys[0]), CURVE_KEY_BYTES)
    memcpy(to.secret_key, PyBytes_AsString(keys[1]), CURVE_KEY_BYTES)
    if len(keys) == 3:
        memcpy(to.server_key, PyBytes_AsString(keys[2]), CURVE_KEY_BYTES)
    return 0
