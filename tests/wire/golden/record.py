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


def relay(address, records):
    """Pass on the bytes of each connection to a reducer, and keep them; return where to connect.

    A record is the number of a connection, whether a worker has said it, and the bytes.
    """
    host, port = address.split(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on(number, up, source, sink):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                records.append((number, up, data))
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def accept():
        for number in count():
            worker, _ = listener.accept()
            reducer = socket.create_connection((host, int(port)))
            for way in ((True, worker, reducer), (False, reducer, worker)):
                threading.Thread(target=pass_on, args=(number, *way), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def record(calls):
    """Run a session, and return its records."""
    records = []
    with reducer_here() as server, ThreadPoolExecutor(2) as pool:
        servers = relay(server.address, records)

        def run(rank):
            with connect(rank=rank, world_size=2, servers=servers, job="golden") as client:
                for call in calls:
                    with suppress(MismatchError):
                        call.begin(client).wait(20)

        list(pool.map(run, range(2)))
    return records


def main():
    for name, calls in SESSIONS.items():
        data = b"".join(
            struct.pack("<BBI", number, up, len(data)) + data for number, up, data in record(calls)
        )
        with Path(sys.argv[1], f"{name}.wire").open("xb") as file:
            file.write(data)


if __name__ == "__main__":
    main()
