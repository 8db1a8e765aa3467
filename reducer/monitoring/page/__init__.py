"""The page at ``/`` of a reducer's HTTP port: its files, and who may ask whom.

Its script asks the HTTP ports that the query names, each of which is another origin to a browser.
So three things are decided here: whom the page may ask (its content-security policy), which pages
may read what this port answers (`may_read`), and under which names a browser finds it (`may_ask`).
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from concurrent.futures import Future, wait
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs

from reducer.errors import ConfigError
from reducer.units import is_private

if TYPE_CHECKING:
    from email.message import Message

MAX_REDUCERS = 64  # that one page follows
NAME_S = 0.5  # for a name server: others wait for their answers meanwhile
# No address of IPv6: a content-security policy cannot name one. Nor anything that could end the
# directive that this becomes a part of.
_PORT = re.compile(r"(?P<host>[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?):(?P<port>[0-9]{1,5})")
_ORIGIN = re.compile(r"http://(?P<host>\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?")
# Ends of names that no site has.
_INSIDE = (".svc", ".local", ".internal", ".cluster.local", ".lan", ".home.arpa", ".localhost")
# A browser sends one of these, or is a Mozilla. A page may write other values, but leaves out no
# Accept-Language; Sec-Fetch-Site goes to https and loopback alone, and Origin to other origins.
_BROWSERS = ("Accept-Language", "Sec-Fetch-Site", "Origin")


class File(NamedTuple):
    """A file of the page."""

    content_type: str
    body: bytes


def files() -> dict[str, File]:
    """Return the files of the page, by path."""
    home = resources.files(__name__)
    types = {
        "/": ("index.html", "text/html; charset=utf-8"),
        "/page.css": ("page.css", "text/css; charset=utf-8"),
        "/page.js": ("page.js", "text/javascript; charset=utf-8"),
        "/icon.svg": ("icon.svg", "image/svg+xml"),
    }
    return {
        path: File(content_type, (home / name).read_bytes())
        for path, (name, content_type) in types.items()
    }


def reducers(query: str) -> list[str]:
    """Return the HTTP ports of other reducers that a query names, each ``host:port``.

    Args:
        query: of the page's address, such as ``reducers=pool-1:9090,pool-2:9090``.

    Raises:
        ConfigError: one of them is none, or they are too many.
    """
    given = parse_qs(query, keep_blank_values=True).get("reducers")
    if given is None:
        return []
    words = [word.strip() for word in ",".join(given).split(",")]
    for word in words:
        match = _PORT.fullmatch(word)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ConfigError(
                "write the HTTP ports of other reducers as ?reducers=HOST:PORT,HOST:PORT, each "
                "with a name or an address of IPv4 (browsers cannot limit a page to one of IPv6)"
            )
    if len(words) > MAX_REDUCERS:
        raise ConfigError(f"a page follows {MAX_REDUCERS} reducers at most: name fewer of them")
    return words


def policy(others: list[str]) -> str:
    """Return the content-security policy of a page that follows other reducers, too."""
    asked = " ".join(["'self'", *(f"http://{one}" for one in dict.fromkeys(others))])
    return (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        f"connect-src {asked}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def may_read(origin: str) -> bool:
    """Whether a page of this origin may read what this port answers.

    One of a private network may: it comes from another reducer, or a port that was forwarded. One
    of a site of the internet, which somebody has open beside their work, may not.
    """
    match = _ORIGIN.fullmatch(origin)
    if match is None:
        return False
    host = match["host"].lower()
    return is_private(f"{host}:80") if _is_address(host) else _is_inside(host)


def may_ask(headers: Message) -> bool:
    """Whether a request is to be answered: a browser's only under a name that no site has.

    A site could have its own name lead to this address, and its pages would be this port's to a
    browser (DNS rebinding). Other programs ask under any name, and so does a page that may read.

    Args:
        headers: of the request; a ``Host`` that is missing is no browser's.
    """
    host = headers.get("Host", "")
    if not host or not _is_of_browser(headers) or may_read(headers.get("Origin", "")):
        return True
    match = _ORIGIN.fullmatch(f"http://{host}")
    if match is None:
        return False
    name = match["host"].lower().removesuffix(".")
    return _is_address(name) or _is_inside(name) or _is_own(name)


def _is_of_browser(headers: Message) -> bool:
    return any(name in headers for name in _BROWSERS) or "Mozilla" in headers.get("User-Agent", "")


def _is_own(name: str) -> bool:
    """Whether this host is called so, in full or by the first parts of its name."""
    host = socket.gethostname()
    full = _full_name(host)
    names = [host, full.result()] if full.done() else [host]
    return any(f"{own.lower()}.".startswith(f"{name}.") for own in names)


@cache
def _full_name(host: str) -> Future[str]:
    """Ask a name server what this host is called in full, and wait for it for a moment, once."""
    full: Future[str] = Future()
    asking = threading.Thread(target=lambda: full.set_result(socket.getfqdn(host)), daemon=True)
    asking.start()
    wait([full], NAME_S)
    return full


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _is_inside(name: str) -> bool:
    return "." not in name or name.endswith(_INSIDE)
