"""Real reducers with an HTTP port, and clients of it."""

from __future__ import annotations

import http.client
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from reducer.cli import HTTP_READY
from reducer.pool import READY

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = (sys.executable, "-m", "reducer")


class Serving(NamedTuple):
    """A running reducer: its process, the port of workers, the HTTP port."""

    process: subprocess.Popen[str]
    address: str
    http: str


@contextmanager
def serving(*arguments: str) -> Iterator[Serving]:
    with subprocess.Popen(
        [*COMMAND, "serve", "--bind", "tcp://127.0.0.1:0", "--http", "0", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            address = process.stdout.readline().removeprefix(READY).strip()
            port = process.stdout.readline().removeprefix(HTTP_READY).strip()
            yield Serving(process, address, port)
        finally:
            process.kill()


def ask(port: str, path: str, method: str = "GET") -> tuple[int, bytes]:
    """Return the status code and the body of an answer."""
    connection = http.client.HTTPConnection(port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
