"""Where the functions of the libzmq that pyzmq loaded are, for the compiled loops.

Linking a library would load a second libzmq, and sockets of one cannot be used by the other.
"""

from __future__ import annotations

import ctypes
from importlib import import_module

from reducer.errors import ConfigError

# In the order of `struct libzmq` in libzmq.h.
FUNCTIONS = (
    "zmq_msg_init",
    "zmq_msg_init_size",
    "zmq_msg_init_data",
    "zmq_msg_move",
    "zmq_msg_copy",
    "zmq_msg_close",
    "zmq_msg_data",
    "zmq_msg_size",
    "zmq_msg_more",
    "zmq_msg_get",
    "zmq_msg_send",
    "zmq_msg_recv",
    "zmq_errno",
    "zmq_msg_gets",
)


def addresses() -> tuple[int, ...]:
    """Return the address of each of `FUNCTIONS`.

    Raises:
        ConfigError: pyzmq was built in a way that hides its libzmq (as on PyPy): the plain loops
            serve there.
    """
    try:
        backend = import_module("zmq.backend.cython._zmq")
        library = ctypes.CDLL(backend.__file__)
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in FUNCTIONS]
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigError(
            f"the libzmq that pyzmq uses cannot be called directly: {error}"
        ) from None
    return tuple(address for address in found if address is not None)
