"""A reducer's HTTP port: a page, probes, metrics and status, read-only, on threads of its own.

========================  =======================================================================
``GET /``                 a page for people, which follows other reducers, too (`monitoring.page`)
``GET /healthz``          200 if every serving thread runs, 503 if one has ended or hangs
``GET /readyz``           200 if workers may connect, 503 while it starts or drains
``GET /metrics``          Prometheus' text format
``GET /status.json``      `reducer.monitoring.status.ReducerStatus`
``GET /history.json``     `reducer.monitoring.history.ReducerHistory`
========================  =======================================================================

Clients may be slow or hostile: a connection has `CONNECTION_S` to ask, in few bytes, and as long
for its answer; only so many are open at once, and the oldest makes way for a new one. Threads are
started for answers, not for connections, and all of it gets a part of a core: all-reduces would pay
for more. (A server such as waitress stops accepting at its limit: beside 1,000 idle connections a
probe got no answer from it in 10 seconds.)
"""

from __future__ import annotations

import errno
import io
import logging
import math
import selectors
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, NamedTuple

from reducer.errors import ConfigError
from reducer.monitoring import history, page, status
from reducer.monitoring.history import History
from reducer.monitoring.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reducer.monitoring.observer import Observer

MAX_ANSWERS = 16  # at once, each by a thread
ANSWER_S = 0.5  # then, if there are as many, the oldest makes way for another one
CONNECTION_S = 5.0  # to ask, and again for the answer
MAX_HEAD_BYTES = 8 << 10  # of the request line and all headers
POLL_S = 0.1  # how soon the port closes, and a connection that has had its time
# After all that clients do there is a pause of so many times what that has taken of a core, in
# parts that are not too long; meanwhile no answer is begun. No more than half of the time that a
# request may wait is ever owed: one that comes after a costly answer is answered all the same.
TIMES = 4
PAUSE_S, MOST_S = 0.005, 0.1
CROWD, CROWD_S = 32, 0.05  # the shortest pause while more than so many have yet to ask
MAX_ACCEPTED, MAX_BEGUN = 64, 8  # connections and answers between two pauses
BACKLOG = 64
OUT_OF_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

log = logging.getLogger(__name__)


TEXT = "text/plain; charset=utf-8"
TOO_LONG = b"HTTP/1.0 431 Request Header Fields Too Large\r\nContent-Length: 0\r\n\r\n"


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
        connections: how many may be open that nobody answers yet.

    Attributes:
        address: the same, with the port that was taken.

    Raises:
        ConfigError: it cannot be bound.
    """

    def __init__(self, address: str, connections: int = 64) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._connections = _Connections(host.strip("[]"), int(port), connections)
        except OSError as error:
            raise ConfigError(_explain(address, error)) from None
        self.address = f"{host}:{self._connections.port}"

    @contextmanager
    def serving(self, observer: Observer) -> Iterator[None]:
        """Answer with what `observer` sees, until the end of the block."""
        remembered = History(observer)
        connections = self._connections
        connections.paths = _paths(observer, remembered)
        thread = threading.Thread(target=connections.serve, name="reducer-http", daemon=True)
        thread.start()
        try:
            with remembered.kept():
                yield
        finally:
            connections.stopping = True
            thread.join()

    def close(self) -> None:
        """Free the port, and end what is still connected."""
        self._connections.close()


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
    """Answers one request.

    Args:
        connection: over which it has come.
        head: the request, up to the empty line at least.
        paths: what answers, by path.
    """

    timeout = CONNECTION_S
    error_content_type = TEXT
    error_message_format = "%(code)d %(message)s\n"

    def __init__(
        self, connection: socket.socket, head: bytes, paths: Mapping[str, Callable[[str], Reply]]
    ) -> None:
        self._head = head
        self._paths = paths
        nobody: Any = None  # the standard library's server
        super().__init__(connection, None, nobody)

    def setup(self) -> None:
        """Let the request be read from the bytes that were received already."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(self._head)

    def do_GET(self) -> None:
        """Answer with what the path has to say."""
        if not page.may_ask(self.headers):
            self.send_error(
                421,
                "have the browser ask by this host's address or its own name, or forward the port "
                "and ask localhost: a site could have any other name lead here",
            )
            return
        path, _, query = self.path.partition("?")
        answer = self._paths.get(path)
        if answer is None:
            self.send_error(404, f"here are {', '.join(self._paths)}")
            return
        try:
            reply = answer(query)
        except Exception:
            log.exception("the HTTP port has no answer to %s", path)
            self.send_error(500)
            return
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


class _Connections:
    """The listener, and the connections of clients, of which one thread waits for all requests.

    Args:
        host, port: where to listen; port 0 takes a free one.
        most: connections that nobody answers yet.

    Attributes:
        paths: what answers, by path.
        port: the one that was taken.
        stopping: whether `serve` is to return.

    Raises:
        OSError: it cannot be bound.
    """

    def __init__(self, host: str, port: int, most: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.paths: dict[str, Callable[[str], Reply]] = {}
        self.stopping = False
        self._most = max(1, most)
        # All three in the order of their beginning.
        self._asking: dict[socket.socket, _Request] = {}  # whose request is not whole
        self._asked: dict[socket.socket, _Request] = {}  # whose request is
        self._answering: dict[socket.socket, float] = {}  # since when, or its latest interrupt
        self._spent_s = 0.0  # processor time of answers that has not been paused for
        self._lock = threading.Lock()  # guards the last two, and whose turn it is to close
        self._owed_s = 0.0  # of pauses
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.port = self._listener.getsockname()[1]

    def serve(self) -> None:
        """Accept connections, and have every request answered by a thread of its own."""
        while not self.stopping:
            self._outlive_round()

    def _outlive_round(self) -> None:
        try:
            self._serve_round()
        except Exception:  # memory ran out, say: probes must find this port afterwards
            log.exception("the HTTP port failed, and goes on")
            time.sleep(MOST_S)

    def _serve_round(self) -> None:
        """See to what clients do, and pause for it."""
        waits = self._asked or self._owed_s > 0.0
        ready = self._selector.select(0.0 if waits else POLL_S)
        began_s = time.thread_time()
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._read(key.fileobj)
        if self._owed_s <= 0.0:
            self._answer_some()
        self._drop_late(time.monotonic())
        with self._lock:
            spent_s, self._spent_s = self._spent_s, 0.0
        spent_s += time.thread_time() - began_s
        self._owed_s = min(self._owed_s + TIMES * spent_s, CONNECTION_S / 2)
        if ready or waits:
            least_s = CROWD_S if len(self._asking) > CROWD else PAUSE_S
            pause_s = min(max(least_s, self._owed_s), MOST_S)
            time.sleep(pause_s)
            self._owed_s = max(0.0, self._owed_s - pause_s)

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._listener.close()
        self._drop_late(math.inf)
        self._selector.close()

    def _accept(self) -> None:
        """Take new connections; the oldest make way for them."""
        for _ in range(MAX_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in OUT_OF_ROOM:
                    self._make_way()
                return
            if len(self._asking) + len(self._asked) >= self._most:
                self._make_way()
            connection.setblocking(False)
            try:
                self._selector.register(connection, selectors.EVENT_READ)
            except OSError:  # the kernel has no memory for it
                connection.close()
                return
            self._asking[connection] = _Request(time.monotonic() + CONNECTION_S)

    def _make_way(self) -> None:
        """End the oldest connection that no thread answers."""
        fronts = [next(iter(some.items())) for some in (self._asking, self._asked) if some]
        for connection, _ in sorted(fronts, key=lambda front: front[1].until)[:1]:
            self._drop(connection)

    def _read(self, connection: socket.socket) -> None:
        """Read on in a request."""
        request = self._asking.get(connection)
        if request is None:
            return  # it has made way a moment ago
        try:
            more = connection.recv(MAX_HEAD_BYTES + 1 - len(request.head))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        if not more:
            self._drop(connection)
            return
        head = request.head = (request.head + more).lstrip(b"\r\n")
        # At most so many bytes are ever kept: the standard library's own limits are far higher.
        whole = head[:MAX_HEAD_BYTES]
        if b"\n\r\n" in whole or b"\n\n" in whole:
            self._selector.unregister(connection)
            self._asked[connection] = self._asking.pop(connection)
        elif len(head) > MAX_HEAD_BYTES:
            with suppress(OSError):
                connection.send(TOO_LONG, socket.MSG_NOSIGNAL)
            self._drop(connection)

    def _answer_some(self) -> None:
        """Have requests answered, as far as there is room for threads."""
        for _ in range(MAX_BEGUN):
            if not self._asked:
                return
            now = time.monotonic()
            with self._lock:
                if len(self._answering) >= MAX_ANSWERS:
                    self._interrupt(now - ANSWER_S, 1)
                    return
                connection = next(iter(self._asked))
                request = self._asked.pop(connection)
                self._answering[connection] = now
            thread = threading.Thread(
                target=self._answer, args=(connection, request.head), name="http", daemon=True
            )
            try:
                thread.start()
            except (RuntimeError, MemoryError):  # the system has none left
                with self._lock:
                    del self._answering[connection]
                    connection.close()
                return

    def _answer(self, connection: socket.socket, head: bytes) -> None:
        # At its default action SIGPIPE would end the process, which may be a rank's.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        try:
            connection.settimeout(CONNECTION_S)
            _Handler(connection, head, self.paths)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the client's way of leaving, or it had its time
        except Exception:
            log.exception("a request to the HTTP port failed")
        finally:
            with self._lock:
                self._spent_s += time.thread_time()
                del self._answering[connection]
                connection.close()

    def _drop_late(self, now: float) -> None:
        """End the connections that have had their time."""
        for some in (self._asking, self._asked):
            while some and next(iter(some.values())).until < now:
                self._drop(next(iter(some)))
        with self._lock:
            self._interrupt(now - CONNECTION_S, MAX_ANSWERS)

    def _interrupt(self, before: float, most: int) -> None:
        """Let threads see the end of connections that they have answered since before a time."""
        late = [connection for connection, since in self._answering.items() if since < before]
        for connection in late[:most]:
            self._answering[connection] = time.monotonic()  # it is the others' turn next
            with suppress(OSError):  # the client has just ended it
                connection.shutdown(socket.SHUT_RDWR)

    def _drop(self, connection: socket.socket) -> None:
        """End a connection that no thread answers."""
        if self._asking.pop(connection, None) is None:
            del self._asked[connection]
        else:
            self._selector.unregister(connection)
        connection.close()


@dataclass
class _Request:
    """The bytes of a request that were received, and when its time is up."""

    until: float
    head: bytes = b""


def _explain(address: str, error: OSError) -> str:
    reasons = {
        errno.EADDRINUSE: "the port is taken: choose another one for --http, or 0 for a free one",
        errno.EADDRNOTAVAIL: "this machine has no such address: use one of its own, or the port",
        errno.EACCES: "ports below 1024 need privileges: choose a higher one",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    return f"cannot answer HTTP on {address}: {reason}"
