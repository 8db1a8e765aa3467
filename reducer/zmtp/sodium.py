"""Where the functions of libsodium are, for CURVE in C.

pyzmq's wheels bring a libsodium for libzmq's own CURVE. It is taken, as it is loaded anyway; a
pyzmq that was built from source, or a distribution's, uses the system's.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from importlib.util import find_spec
from pathlib import Path

from reducer.errors import ConfigError

# In the order of `struct sodium` in sodium.h.
FUNCTIONS = (
    "randombytes_buf",
    "sodium_memzero",
    "sodium_memcmp",
    "crypto_box_keypair",
    "crypto_box_beforenm",
    "crypto_box_detached_afternm",
    "crypto_box_open_detached_afternm",
)


def addresses() -> tuple[int, ...]:
    """Return the address of each of `FUNCTIONS`, in a library that is ready for use.

    Raises:
        ConfigError: there is no libsodium, or none that can be used.
    """
    path = library()
    if path is None:
        raise ConfigError(
            "keys need libsodium, which is neither beside pyzmq nor on this system: install pyzmq "
            "from a wheel (pip install --only-binary :all: pyzmq), or the system's package, such "
            "as libsodium23 on Debian"
        )
    try:
        loaded = ctypes.CDLL(path)
        if loaded.sodium_init() < 0:  # 1 if libzmq has done it
            raise OSError("sodium_init has failed")
        found = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value for name in FUNCTIONS]
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"keys need libsodium, but {path} cannot be used: {error}; install pyzmq from a wheel, "
            "or libsodium 1.0.18 or later"
        ) from None
    return tuple(address for address in found if address is not None)


def library() -> str | None:
    """Return what to load: the file that libzmq has loaded in pyzmq's wheel, or the system's."""
    spec = find_spec("zmq")
    for place in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(place).parent.glob("pyzmq.libs/libsodium*")):
            return str(path)
    return ctypes.util.find_library("sodium")
