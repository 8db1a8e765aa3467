"""What a reducer's HTTP port answers."""

import http.client
import json
from contextlib import closing, contextmanager
from typing import NamedTuple

from reducer.monitoring.http_port import HttpPort


class Answer(NamedTuple):
    code: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self):
        return self.body.decode()

    @property
    def json(self):
        return json.loads(self.body)


def ask(address, path, method="GET", **headers):
    """Ask a port for a path, as a program does."""
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


@contextmanager
def port_of(observer, *most):
    """The address of a port that tells what an observer sees."""
    with closing(HttpPort("127.0.0.1:0", *most)) as port, port.serving(observer):
        yield port.address
