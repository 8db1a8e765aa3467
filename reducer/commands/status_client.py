"""Reads the status of reducers from their HTTP ports."""

from __future__ import annotations

import http.client
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from reducer.config import parse_http
from reducer.errors import ConfigError, ReducerLostError, ReductionError, RemoteProtocolError
from reducer.monitoring import status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reducer.monitoring.status import ReducerStatus

TIMEOUT_S = 4.0  # for each step of a request
MAX_BYTES = 4 << 20  # of an answer; `reducer.monitoring.status` keeps it far smaller
_AT_ONCE = 16


class Found(NamedTuple):
    """What one reducer said, or why it said nothing."""

    address: str
    status: ReducerStatus | None
    error: ReductionError | None


def addresses(text: str) -> list[str]:
    """Read ``HOST:PORT,HOST:PORT``.

    Raises:
        ConfigError: an address is none, or there is none.
    """
    words = [word for word in (part.strip() for part in text.split(",")) if word]
    if not words:
        raise ConfigError("name the HTTP ports of reducers: HOST:PORT,HOST:PORT")
    try:
        return [parse_http(word) for word in words]
    except ValueError:
        raise ConfigError(f"write HTTP ports as HOST:PORT,HOST:PORT, got {text!r}") from None


def read_all(ports: Sequence[str]) -> list[Found]:
    """Ask all reducers at once; the answers are in the order of `ports`."""
    with ThreadPoolExecutor(min(_AT_ONCE, len(ports))) as pool:
        return list(pool.map(_find, ports))


def read(port: str) -> ReducerStatus:
    """Ask one reducer.

    Args:
        port: its HTTP port, ``host:port``.

    Raises:
        ReducerLostError: nobody answers there.
        RemoteProtocolError: whoever answers is no reducer's HTTP port.
    """
    code, body = _get(port, "/status.json")
    if code != 200:
        raise RemoteProtocolError(
            f"{port} answers HTTP, but is no reducer's port (status {code} for /status.json)"
        )
    try:
        return status.load(body)
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"{port} answers with {error}") from None


def _get(port: str, path: str) -> tuple[int, bytes]:
    host, _, number = port.rpartition(":")
    # Not urllib: that would send it through the proxies that the environment names.
    connection = http.client.HTTPConnection(host.strip("[]"), int(number), timeout=TIMEOUT_S)
    try:
        connection.connect()
        response, body = _exchange(connection, port, path)
    except socket.gaierror:
        raise ReducerLostError(f"{host} is no known host: check the name", reducer=port) from None
    except ConnectionRefusedError:
        raise ReducerLostError(
            f"nothing listens at {port}: is the reducer running, and with --http {port}?",
            reducer=port,
        ) from None
    except OSError as error:
        reason = str(error) or type(error).__name__
        raise ReducerLostError(f"{port} cannot be reached: {reason}", reducer=port) from None
    finally:
        connection.close()
    if len(body) > MAX_BYTES:
        raise RemoteProtocolError(f"{port} answers with more than {MAX_BYTES} bytes: no reducer")
    return response.status, body


def _exchange(
    connection: http.client.HTTPConnection, port: str, path: str
) -> tuple[http.client.HTTPResponse, bytes]:
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response, response.read(MAX_BYTES + 1)
    except (http.client.HTTPException, OSError):
        # What libzmq says to a stranger is not HTTP, and may be nothing at all.
        raise RemoteProtocolError(
            f"{port} took the connection, but does not answer HTTP: name the port of --http, not "
            "the one that workers use"
        ) from None


def _find(port: str) -> Found:
    try:
        return Found(port, read(port), None)
    except ReductionError as error:
        return Found(port, None, error)
