"""Key pairs of CURVE, by libsodium."""

from cpython.bytes cimport PyBytes_AsString
from libc.stdint cimport uint8_t

from reducer.zmtp.curve cimport (
    CURVE_KEY_BYTES, begin_sodium, crypto_box_keypair, crypto_scalarmult_base, explicit_bzero,
)

from reducer.keyfiles import KeyPair
from reducer.zmtp.z85 import encode


def make_pair():
    """Return a new key pair.

    Raises:
        OSError: libsodium cannot be used.
    """
    cdef uint8_t public[32]
    cdef uint8_t secret[32]
    begin_sodium()
    crypto_box_keypair(public, secret)
    made = KeyPair(encode(public[:CURVE_KEY_BYTES]), encode(secret[:CURVE_KEY_BYTES]))
    explicit_bzero(secret, sizeof(secret))
    return made


def public_of(secret):
    """Return the public key of a secret one, both of 32 bytes.

    Raises:
        OSError: libsodium cannot be used.
        ValueError: the key has another length.
    """
    cdef uint8_t public[32]
    if len(secret) != CURVE_KEY_BYTES:
        raise ValueError(f"a key has {CURVE_KEY_BYTES} bytes")
    begin_sodium()
    crypto_scalarmult_base(public, <const uint8_t *>PyBytes_AsString(secret))
    return public[:CURVE_KEY_BYTES]
