"""Records what workers and a reducer say to each other, in a folder of its own for a version.

    python -m tests.wire.golden.record FOLDER

A relay is between them. Its records, in the order in which it has read them, are one file for each
session; see `README.md`. A file that is there is not written again.
"""

import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path

from reducer.errors import MismatchError
from tests.conftest import reducer_here
from tests.wire.golden.sessions import SESSIONS
from worker_client.client.bootstrap import connect


class Relay:
    """Passes on the bytes of each connection, and keeps them.

    Attributes:
        records: connection, whether a worker has said it, bytes.
    """

    def __init__(self, address):
        self._host, port = address.split(":")
        self._port = int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.records = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        for number in count():
            worker, _ = self._listener.accept()
            reducer = socket.create_connection((self._host, self._port))
            for up, source, sink in ((True, worker, reducer), (False, reducer, worker)):
                threading.Thread(
                    target=self._pass_on, args=(number, up, source, sink), daemon=True
                ).start()

    def _pass_on(self, number, up, source, sink):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.records.append((number, up, data))
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def record(calls):
    """Run a session, and return its records."""
    with reducer_here() as server, ThreadPoolExecutor(2) as pool:
        relay = Relay(server.address)

        def run(rank):
            given = {"servers": relay.address, "job": "golden"}
            with connect(rank=rank, world_size=2, **given) as client:
                for call in calls:
                    with suppress(MismatchError):
                        call.begin(client).wait(20)

        list(pool.map(run, range(2)))
    return relay.records


def main():
    for name, calls in SESSIONS.items():
        data = b"".join(
            struct.pack("<BBI", number, up, len(data)) + data for number, up, data in record(calls)
        )
        with Path(sys.argv[1], f"{name}.wire").open("xb") as file:
            file.write(data)


if __name__ == "__main__":
    main()
