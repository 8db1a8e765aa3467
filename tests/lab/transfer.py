"""One side of a TCP transfer between two hosts, started by the tests in each.

Who listens prints its port first. ``serve BYTES`` prints the steady rate, in bytes per second, at
which what ``send ADDRESS PORT BYTES`` sends came; ``echo`` and ``ask ADDRESS PORT`` pass a line to
and fro for every line of standard input, and ``ask`` prints what came, and after how many seconds;
``count`` prints, when its standard input ends, how many datagrams of ``flood ADDRESS PORT COUNT``
came.
"""
# ruff: noqa: T201 - standard output is how it answers

import socket
import sys
import time
from contextlib import suppress

BURST = 1_000_000  # what the shaper lets through at once is not counted, nor TCP's start


def listen():
    server = socket.create_server(("", 0))
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    return connection


def serve(total):
    with listen() as connection:
        count = start = first = 0.0
        while count < total:
            count += len(connection.recv(1 << 16))
            if not start and count > BURST:
                start, first = time.monotonic(), count
        print((count - first) / (time.monotonic() - start), flush=True)


def send(address, port, total):
    with socket.create_connection((address, port)) as connection:
        connection.sendall(bytes(total))
        connection.recv(1)  # ends when the other side has everything


def echo():
    with listen() as connection:
        while data := connection.recv(100):
            connection.sendall(data)


def ask(address, port):
    with socket.create_connection((address, port)) as connection:
        for line in sys.stdin:
            start = time.monotonic()
            connection.sendall(line.encode())
            print(connection.recv(100).decode().strip(), time.monotonic() - start, flush=True)


def count():
    with socket.socket(type=socket.SOCK_DGRAM) as receiver:
        # SO_RCVBUFFORCE: the socket itself loses none.
        receiver.setsockopt(socket.SOL_SOCKET, 33, 1 << 23)
        receiver.bind(("", 0))
        print(receiver.getsockname()[1], flush=True)
        sys.stdin.read()
        receiver.settimeout(0.3)
        came = 0
        with suppress(TimeoutError):
            while receiver.recv(9):
                came += 1
        print(came)


def flood(address, port, datagrams):
    with socket.socket(type=socket.SOCK_DGRAM) as sender:
        for _ in range(datagrams):
            with suppress(OSError):  # the host itself may drop it
                sender.sendto(b"x", (address, port))


if __name__ == "__main__":
    commands = {each.__name__: each for each in (serve, send, echo, ask, count, flood)}
    name, *arguments = sys.argv[1:]
    commands[name](*(int(word) if word.isdecimal() else word for word in arguments))
