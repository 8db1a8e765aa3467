"""The gate of a pool with keys, of the plain loop: who may connect.

libzmq asks about every connection (ZAP, an ``inproc`` socket of the same context); pyzmq's
authenticator answers, in a thread of its own. What a key may do then is the engine's business.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

from zmq.auth import Authenticator

from reducer.runtime.plain_transport import ZAP_DOMAIN

if TYPE_CHECKING:
    import zmq

    from reducer.runtime.keyring import Keyring

_LOOK_MS = 100  # how soon the thread notices that it is to end


class Gate(threading.Thread):
    """Answers libzmq's questions about one context's connections.

    Args:
        context: of the reducer.
        keyring: whom to admit.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keyring: Keyring) -> None:
        super().__init__(name="reducer-gate", daemon=True)
        self._keyring = keyring
        self._stopping = threading.Event()
        quiet = logging.getLogger(f"{__name__}.zap")  # below a warning it would name keys
        quiet.setLevel(logging.WARNING)
        self._authenticator = Authenticator(context, log=quiet)
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, credentials_provider=self)
        self._authenticator.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a public key may connect; pyzmq calls this."""
        del domain
        return self._keyring.allowed.knows(key.decode("ascii"))

    def run(self) -> None:
        """Answer until `stop`."""
        # It is a coroutine for the sake of others; with `callback` it never waits.
        loop = asyncio.new_event_loop()
        try:
            questions = self._authenticator.zap_socket
            while not self._stopping.is_set():
                if questions.poll(_LOOK_MS):
                    asked = questions.recv_multipart()
                    loop.run_until_complete(self._authenticator.handle_zap_message(asked))
        finally:
            loop.close()
            self._authenticator.stop()

    def stop(self) -> None:
        """End the thread, and its socket with it."""
        self._stopping.set()
        if self.ident is None:
            self._authenticator.stop()
        else:
            self.join()
