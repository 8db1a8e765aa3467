"""One side of a TCP transfer between two hosts, started by the tests in each.

``serve BYTES`` prints the port, then the steady rate at which the bytes came, in bytes per second;
``send ADDRESS PORT BYTES`` sends them; ``echo`` and ``ask ADDRESS PORT`` pass one line to and fro
for every line of standard input.
"""
# ruff: noqa: T201 - standard output is how it answers

import socket
import sys
import time

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
            connection.sendall(line.encode())
            print(connection.recv(100).decode(), end="", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case "serve", total:
            serve(int(total))
        case "send", address, port, total:
            send(address, int(port), int(total))
        case "ask", address, port:
            ask(address, int(port))
        case ["echo"]:
            echo()
