"""A reducer's HTTP port: a page, probes, metrics and status, read-only, on threads of its own.

========================  =======================================================================
``GET /``                 a page for people, which follows other reducers, too (`monitoring.page`)
``GET /healthz``          200 if every serving thread runs, 503 if one has ended or hangs
``GET /readyz``           200 if workers may connect, 503 while it starts or drains
``GET /metrics``          Prometheus' text format
``GET /status.json``      `reducer.monitoring.status.ReducerStatus`
``GET /history.json``     `reducer.monitoring.history.ReducerHistory`
========================  =======================================================================

Clients may be slow or hostile: a connection serves one short request within `CONNECTION_S`, only so
many are open at once, and the oldest makes way for a new one. (A server such as waitress stops
accepting at its limit: beside 1,000 idle connections a probe got no answer from it in 10 seconds.)
"""

from __future__ import annotations

import errno
import io
import logging
import socket
import socketserver
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import ConfigError
from reducer.monitoring import history, page, status
from reducer.monitoring.history import History
from reducer.monitoring.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reducer.monitoring.observer import Observer

MAX_CONNECTIONS = 16  # and as many threads
CONNECTION_S = 5.0  # from accept to the last byte of the answer
MAX_HEAD_BYTES = 8 << 10  # of the request line and all headers
POLL_S = 0.1  # how soon the port closes
CHURN_S = 0.005  # between two connections while there is no place for them

log = logging.getLogger(__name__)


TEXT = "text/plain; charset=utf-8"


class Reply(NamedTuple):
    """What a path answers."""

    code: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = {}


class HttpPort:
    """A bound port that answers nothing yet.

    Args:
        address: ``HOST:PORT``; port 0 takes a free one.

    Attributes:
        address: the same, with the port that was taken.

    Raises:
        ConfigError: it cannot be bound.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port))
        except OSError as error:
            raise ConfigError(_explain(address, error)) from None
        self.address = f"{host}:{self._server.server_address[1]}"

    @contextmanager
    def serving(self, observer: Observer) -> Iterator[None]:
        """Answer with what `observer` sees, until the end of the block."""
        remembered = History(observer)
        self._server.paths = _paths(observer, remembered)
        thread = threading.Thread(
            target=self._server.serve_forever, args=[POLL_S], name="reducer-http", daemon=True
        )
        thread.start()
        try:
            with remembered.kept():
                yield
        finally:
            self._server.shutdown()
            thread.join()

    def close(self) -> None:
        """Free the port, and end what is still connected."""
        self._server.server_close()


def _paths(observer: Observer, remembered: History) -> dict[str, Callable[[str], Reply]]:
    """Return what answers, by path; each takes the query."""
    metrics = Metrics(observer.status)
    files = page.files()
    return {
        "/healthz": lambda _: _probe(observer.unhealthy()),
        "/readyz": lambda _: _probe(observer.unready()),
        "/metrics": lambda _: Reply(200, metrics.content_type, metrics.text()),
        "/status.json": lambda _: _json(status.dump(observer.status())),
        "/history.json": lambda _: _json(history.dump(remembered.told())),
        **{path: partial(_file, file) for path, file in files.items()},
        "/": partial(_page, files["/"]),
    }


def _probe(wrong: str) -> Reply:
    return Reply(503 if wrong else 200, TEXT, f"{wrong or 'ok'}\n".encode())


def _json(body: bytes) -> Reply:
    return Reply(200, "application/json", body)


def _file(file: page.File, query: str) -> Reply:
    del query
    return Reply(200, file.content_type, file.body)


def _page(file: page.File, query: str) -> Reply:
    """Return the page, with leave to ask the reducers that the query names and nobody else."""
    try:
        others = page.reducers(query)
    except ConfigError as error:
        return Reply(400, TEXT, f"{error}\n".encode())
    allowed = {"Content-Security-Policy": page.policy(others)}
    return Reply(200, file.content_type, file.body, allowed)


class _Handler(BaseHTTPRequestHandler):
    """One request of one connection."""

    server: _Server
    timeout = CONNECTION_S
    error_content_type = TEXT
    error_message_format = "%(code)d %(message)s\n"

    def handle(self) -> None:
        """Answer the request if it is short, whole and in time."""
        # At most so many bytes are ever kept: the standard library's own limits are far higher.
        head = self._head()
        if head is None:
            self.command = self.requestline = self.request_version = ""
            self.close_connection = True
            self.send_error(431)
            return
        self.rfile.close()
        self.rfile = io.BytesIO(head)
        super().handle()

    def do_GET(self) -> None:
        """Answer with what the path has to say."""
        path, _, query = self.path.partition("?")
        answer = self.server.paths.get(path)
        if answer is None:
            self.send_error(404, f"here are {', '.join(self.server.paths)}")
            return
        reply = answer(query)
        self.send_response(reply.code)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Vary", "Origin")
        origin = self.headers.get("Origin", "")
        if page.may_read(origin):
            self.send_header("Access-Control-Allow-Origin", origin)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    do_HEAD = do_GET  # noqa: N815 (the standard library's name)

    def end_headers(self) -> None:
        """End the headers of whatever is answered, errors too, with what binds every browser."""
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        super().end_headers()

    def version_string(self) -> str:
        """Name the software, but no version of anything."""
        return "reducer"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (likewise)
        """Log nothing: probes come every few seconds, and a request is a stranger's text."""

    def _head(self) -> bytes | None:
        """Return the request up to the empty line, or all there is; None if it is too long."""
        head = b""
        while b"\n\r\n" not in head and b"\n\n" not in head:
            more = self.connection.recv(MAX_HEAD_BYTES)
            head += more
            if len(head) > MAX_HEAD_BYTES:
                return None
            if not more:
                break
        return head


class _Server(ThreadingHTTPServer):
    """The standard library's server, with bounds on what clients can take."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.paths: dict[str, Callable[[str], Reply]] = {}
        self._deadlines: dict[socket.socket, float] = {}  # in the order of their beginning
        self._lock = threading.Lock()
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind; the standard library would also ask the network for this host's name."""
        socketserver.TCPServer.server_bind(self)

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept; when descriptors run out, wait a little rather than try without a pause."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(POLL_S)
            raise

    def process_request(self, request: object, client_address: object) -> None:
        """Serve a connection on a thread of its own, as soon as there is one for it."""
        assert isinstance(request, socket.socket)
        if not self._free.acquire(blocking=False):
            time.sleep(CHURN_S)  # who comes again and again gets no more than so much of a core
            with self._lock:
                _end(next(iter(self._deadlines), None))
            if not self._free.acquire(timeout=1.0):
                self.shutdown_request(request)
                return
        with self._lock:
            self._deadlines[request] = time.monotonic() + CONNECTION_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: object) -> None:
        """Close a connection, and free its place."""
        super().shutdown_request(request)  # type: ignore[arg-type]
        with self._lock:
            known = self._deadlines.pop(request, None)  # type: ignore[call-overload]
        if known is not None:
            self._free.release()

    def service_actions(self) -> None:
        """End connections that have had their time."""
        now = time.monotonic()
        with self._lock:
            for request, deadline in self._deadlines.items():
                if deadline < now:
                    _end(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log what went wrong, unless it is the client's way of leaving."""
        del request, client_address
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            log.error("a request to the HTTP port failed", exc_info=error)

    def server_close(self) -> None:
        """Stop listening, and end all connections."""
        super().server_close()
        with self._lock:
            for request in self._deadlines:
                _end(request)


def _end(request: socket.socket | None) -> None:
    """Make the thread of a connection see its end."""
    if request is not None:
        with suppress(OSError):  # it has just ended by itself
            request.shutdown(socket.SHUT_RDWR)


def _explain(address: str, error: OSError) -> str:
    reasons = {
        errno.EADDRINUSE: "the port is taken: choose another one for --http, or 0 for a free one",
        errno.EADDRNOTAVAIL: "this machine has no such address: use one of its own, or the port",
        errno.EACCES: "ports below 1024 need privileges: choose a higher one",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    return f"cannot answer HTTP on {address}: {reason}"
