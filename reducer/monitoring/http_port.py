"""A reducer's HTTP port: a page, probes, metrics and status, read-only, on a thread of its own.

========================  =======================================================================
``GET /``                 a page for people, which follows other reducers, too (`monitoring.page`)
``GET /healthz``          200 if every serving thread runs, 503 if one has ended or hangs
``GET /readyz``           200 if workers may connect, 503 while it starts or drains
``GET /metrics``          Prometheus' text format
``GET /status.json``      `reducer.monitoring.status.ReducerStatus`
``GET /history.json``     `reducer.monitoring.history.ReducerHistory`
``GET /ras.json``         jobs as NCCL's RAS subsystem tells of communicators (`monitoring.ras`)
========================  =======================================================================

Clients may be slow or hostile: a connection has `CONNECTION_S` to ask, in few bytes, and as long
for its answer; only so many are open at once, and the oldest makes way for a new one. One thread
does it all, and gets a part of a core: all-reduces would pay for more. (A server such as waitress
stops accepting at its limit: beside 1,000 idle connections a probe got no answer from it in 10
seconds.)
"""

from __future__ import annotations

import errno
import logging
import math
import re
import selectors
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import HeaderParser
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import ConfigError
from reducer.monitoring import history, page, status
from reducer.monitoring.history import History
from reducer.monitoring.metrics import Metrics
from reducer.monitoring.ras import Ras

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reducer.monitoring.observer import Observer

MAX_ANSWERS = 16  # at once
ANSWER_S = 0.5  # then, if there are as many, the oldest makes way for another one
CONNECTION_S = 5.0  # to ask, and again for the answer
MAX_HEAD_BYTES, MAX_HEAD_LINES = 8 << 10, 100  # of the request line and all headers
POLL_S = 0.1  # how soon the port closes, and a connection that has had its time
# After all that clients do there is a pause of so many times what that has taken of a core. It is
# no longer than half of the time that a request may wait: one that comes after a costly answer is
# answered all the same.
TIMES = 4
PAUSE_S = 0.005  # the shortest one
CROWD, CROWD_S = 32, 0.05  # the shortest one while more than so many have yet to ask
BUSY_S = 0.01  # of a core, after which what clients do waits for the end of a pause
MAX_ACCEPTED = 64  # connections between two pauses
BACKLOG = 64
OUT_OF_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
TEXT = "text/plain; charset=utf-8"
_EMPTY_LINE = re.compile(rb"\n\r?\n")
_REQUEST = re.compile(
    r"(?P<method>[!-~]+) (?P<path>[!->@-~]+)(\?(?P<query>[!-~]*))? "
    r"HTTP/(?P<version>[0-9])\.[0-9]\r?"
)

log = logging.getLogger(__name__)


class Reply(NamedTuple):
    """What a path answers."""

    code: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = {}

    def rendered(self, origin: str = "", *, with_body: bool = True) -> bytes:
        """Return the bytes of the response to a page of this origin, or to another program."""
        headers = {
            "Server": "reducer",
            "Date": formatdate(usegmt=True),
            "Content-Type": self.content_type,
            "Content-Length": str(len(self.body)),
            "Cache-Control": "no-store",
            "Vary": "Origin",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            **({"Access-Control-Allow-Origin": origin} if page.may_read(origin) else {}),
            **self.headers,
        }
        lines = [f"HTTP/1.0 {self.code} {HTTPStatus(self.code).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + (self.body if with_body else b"")


Paths = dict[str, "Callable[[str], Reply]"]  # what answers, by path; each takes the query


@dataclass(eq=False)
class _HttpClient:
    """A connection.

    Attributes:
        since: when it was accepted, or its answer was begun, seconds of the monotonic clock.
        head: what has come of the request.
        response: what is left to be sent.
    """

    connection: socket.socket
    since: float
    head: bytes = b""
    response: memoryview | bytes = b""


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
        where = host.strip("[]"), int(port)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server(where, family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(_explain(address, error)) from None
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._most = max(1, connections)
        self._paths: Paths = {}
        self._ended = threading.Event()
        # Both in the order of `since`.
        self._asking: dict[_HttpClient, None] = {}
        self._answering: dict[_HttpClient, None] = {}

    @contextmanager
    def serving(self, observer: Observer) -> Iterator[None]:
        """Answer with what `observer` sees, until the end of the block."""
        remembered = History(observer)
        self._paths = _paths(observer, remembered)
        thread = threading.Thread(target=self._serve, name="reducer-http", daemon=True)
        thread.start()
        try:
            with remembered.kept():
                yield
        finally:
            self._ended.set()
            thread.join()

    def close(self) -> None:
        """Free the port, and end what is still connected."""
        self._listener.close()
        self._drop_older(math.inf)
        self._selector.close()

    def _serve(self) -> None:
        while not self._ended.is_set():
            self._outlive_round()

    def _outlive_round(self) -> None:
        try:
            self._serve_round()
        except Exception:  # memory ran out, say: probes must find this port afterwards
            log.exception("the HTTP port failed, and goes on")
            self._ended.wait(POLL_S)

    def _serve_round(self) -> None:
        """See to what clients do, and pause for it."""
        ready = self._selector.select(POLL_S)
        began_s = time.thread_time()
        for key, _ in ready:
            if time.thread_time() - began_s > BUSY_S:
                break  # the others have their turn after the pause
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._answering:
                self._send(key.data)
            elif key.data in self._asking and self._has_room():
                self._read(key.data)
        self._drop_older(time.monotonic() - CONNECTION_S)
        if ready:
            least_s = CROWD_S if len(self._asking) > CROWD else PAUSE_S
            owed_s = TIMES * (time.thread_time() - began_s)
            self._ended.wait(min(max(least_s, owed_s), CONNECTION_S / 2))

    def _accept(self) -> None:
        """Take new connections; the oldest make way for them."""
        for _ in range(MAX_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in OUT_OF_ROOM and self._asking:
                    self._drop(next(iter(self._asking)))
                return
            if len(self._asking) >= self._most:
                self._drop(next(iter(self._asking)))
            connection.setblocking(False)
            client = _HttpClient(connection, time.monotonic())
            try:
                self._selector.register(connection, selectors.EVENT_READ, client)
            except OSError:  # the kernel has no memory for it
                connection.close()
                return
            self._asking[client] = None

    def _has_room(self) -> bool:
        """Whether an answer may begin; the oldest one may have to make way for it."""
        if len(self._answering) < MAX_ANSWERS:
            return True
        return next(iter(self._answering)).since < time.monotonic() - ANSWER_S

    def _read(self, client: _HttpClient) -> None:
        """Read on in a request, and begin its answer if it is whole."""
        try:
            more = client.connection.recv(MAX_HEAD_BYTES - len(client.head))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        client.head = (client.head + more).lstrip(b"\r\n")
        if not more:
            self._drop(client)
        elif len(client.head) == MAX_HEAD_BYTES or _EMPTY_LINE.search(client.head):
            if len(self._answering) >= MAX_ANSWERS:
                self._drop(next(iter(self._answering)))
            del self._asking[client]
            self._answering[client] = None
            client.since = time.monotonic()
            client.response = memoryview(respond(client.head, self._paths))
            self._selector.modify(client.connection, selectors.EVENT_WRITE, client)
            self._send(client)

    def _send(self, client: _HttpClient) -> None:
        """Send on in an answer; the connection ends with it."""
        try:
            # At its default action SIGPIPE would end the process.
            sent = client.connection.send(client.response, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError:  # the client's way of leaving
            self._drop(client)
            return
        client.response = client.response[sent:]
        if not client.response:
            self._drop(client)

    def _drop_older(self, since: float) -> None:
        """End the connections that have had their time."""
        for clients in (self._asking, self._answering):
            while clients and next(iter(clients)).since < since:
                self._drop(next(iter(clients)))

    def _drop(self, client: _HttpClient) -> None:
        self._asking.pop(client, None)
        self._answering.pop(client, None)
        self._selector.unregister(client.connection)
        client.connection.close()


def respond(head: bytes, paths: Paths) -> bytes:
    """Return the response to a request.

    Args:
        head: what was read of it: to the empty line or further, or `MAX_HEAD_BYTES` without one.
        paths: what may be asked for.
    """
    end = _EMPTY_LINE.search(head)
    if end is None or head.count(b"\n", 0, end.start()) > MAX_HEAD_LINES:
        return _refusal(431, "send fewer headers").rendered()
    line, _, fields = head[: end.start()].decode("latin-1").partition("\n")
    request, headers = _REQUEST.fullmatch(line), HeaderParser().parsestr(fields)
    if request is None:
        return _refusal(400, "write GET /PATH HTTP/1.1").rendered()
    if request["version"] != "1":
        return _refusal(505, "write HTTP/1.1").rendered()
    if request["method"] not in {"GET", "HEAD"}:
        return _refusal(501, "there is GET and HEAD alone").rendered()
    if page.may_ask(headers):
        reply = _reply(request["path"], request["query"] or "", paths)
    else:
        reply = _refusal(
            421,
            "have the browser ask by this host's address or its own name, or forward the port "
            "and ask localhost: a site could have any other name lead here",
        )
    return reply.rendered(headers.get("Origin", ""), with_body=request["method"] == "GET")


def _reply(path: str, query: str, paths: Paths) -> Reply:
    answer = paths.get(path)
    if answer is None:
        return _refusal(404, f"here are {', '.join(paths)}")
    try:
        return answer(query)
    except Exception:
        log.exception("the HTTP port has no answer to %s", path)
        return _refusal(500, "the log says why")


def _paths(observer: Observer, remembered: History) -> Paths:
    metrics, ras = Metrics(observer.status), Ras(observer)
    files = page.files()
    return {
        "/healthz": lambda _: _probe(observer.unhealthy()),
        "/readyz": lambda _: _probe(observer.unready()),
        "/metrics": lambda _: Reply(200, metrics.content_type, metrics.text()),
        "/status.json": lambda _: _json(status.dump(observer.status())),
        "/history.json": lambda _: _json(history.dump(remembered.told())),
        "/ras.json": lambda _: _json(ras.told()),
        **{path: partial(_file, file) for path, file in files.items()},
        "/": partial(_page, files["/"]),
    }


def _refusal(code: int, advice: str) -> Reply:
    return Reply(code, TEXT, f"{code} {advice}\n".encode())


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


def _explain(address: str, error: OSError) -> str:
    reasons = {
        errno.EADDRINUSE: "the port is taken: choose another one for --http, or 0 for a free one",
        errno.EADDRNOTAVAIL: "this machine has no such address: use one of its own, or the port",
        errno.EACCES: "ports below 1024 need privileges: choose a higher one",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    return f"cannot answer HTTP on {address}: {reason}"
