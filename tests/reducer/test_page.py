"""The page of a reducer's HTTP port: its files, what it may ask, and who may read the answers."""

import http.client
import re
import socket
from email.message import Message

import pytest

from reducer.errors import ConfigError
from reducer.monitoring import page
from reducer.monitoring.http_port import HttpPort
from tests.conftest import reducer_here

pytestmark = pytest.mark.usefixtures("no_settings")

INSIDE = [
    "http://localhost:9090",
    "http://127.0.0.1:9090",
    "http://[::1]:9090",
    "http://10.1.2.3",
    "http://192.168.0.1:80",
    "http://172.16.5.4:9090",
    "http://[fd00::1]:9090",
    "http://pool-0:9090",
    "http://reducer-0.reducer.jobs.svc:9090",
    "http://reducer-0.reducer.jobs.svc.cluster.local:9090",
    "http://pool.local",
    "http://pool.corp.internal:9090",
]
OUTSIDE = [
    "",
    "null",
    "*",
    "https://localhost:9090",
    "file://localhost",
    "http://example.com",
    "http://10.0.0.1.example.com:9090",
    "http://127.0.0.1.:9090",
    "http://localhost.example.com",
    "http://evil.com.:9090",
    "http://evillocal.com",
    "http://8.8.8.8:9090",
    "http://[2606:4700::1111]:9090",
    "http://[::ffff:8.8.8.8]:9090",
    "http://0.0.0.0:9090",
    "http://user@localhost:9090",
    "http://localhost:9090/",
    "http://localhost:9090, http://example.com",
    "http://localhost\r\nX: y",
    "http://pool;evil.com",
]


@pytest.fixture(scope="module")
def port():
    with reducer_here() as server:
        http_port = HttpPort("127.0.0.1:0")
        with http_port.serving(server.observer):
            yield http_port.address
        http_port.close()


def ask(port, path, **headers):
    """Return the status code, the headers and the body of an answer."""
    connection = http.client.HTTPConnection(port, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_its_files_are_all_that_it_needs(port):
    code, headers, html = ask(port, "/")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    needed = set(re.findall(r'(?:src|href)="([^"]+)"', html))
    assert needed >= {"page.js", "page.css", "icon.svg"}
    for name in needed:
        code, headers, body = ask(port, f"/{name}")
        assert code == 200
        assert body
    types = {name: ask(port, f"/{name}")[1]["Content-Type"] for name in needed}
    assert types["page.js"].startswith("text/javascript")
    assert types["page.css"].startswith("text/css")
    assert types["icon.svg"] == "image/svg+xml"


def test_nothing_of_it_is_inline_nor_from_elsewhere(port):
    html, script, style = (ask(port, path)[2] for path in ("/", "/page.js", "/page.css"))
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?! src=)", html)
    for text in (html, script, style):
        addresses = re.findall(r"https?://[^\s\"'`]*", text)
        # Those of other reducers, and the name of a vocabulary.
        assert set(addresses) <= {"http://${one}/", "http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", script)
    assert "@import" not in style
    assert "url(" not in style


def test_a_page_may_ask_its_own_port_and_those_that_are_named(port):
    for path, asked in (
        ("/", "'self'"),
        ("/?x=1", "'self'"),
        ("/?reducers=pool-1:9090,10.0.0.2:80", "'self' http://pool-1:9090 http://10.0.0.2:80"),
        ("/?reducers=a_b.c:1%2C%20d:2&reducers=a_b.c:1", "'self' http://a_b.c:1 http://d:2"),
    ):
        code, headers, _ = ask(port, path)
        assert code == 200
        assert headers["Content-Security-Policy"] == (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
            f"connect-src {asked}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )


@pytest.mark.parametrize(
    "named",
    [
        *("", ",", "a", "a:", ":1", "a:0", "a:65536", "a:1,", "http://a:1", "a:1/", "a:x", "*:1"),
        *("a:1%20b:2", "a:1;script-src%20*", "a'b:1", "a:1%0d%0aX:%20y", "[::1]:9090", "-:1"),
        *("%C3%A4:1", "a@b:1", "a%00:1", "a:%D9%A1"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(port, named):
    code, headers, said = ask(port, f"/?reducers={named}")
    assert code == 400
    assert "?reducers=HOST:PORT,HOST:PORT" in said
    assert headers["Content-Type"].startswith("text/plain")
    assert "X" not in headers


def test_a_page_follows_so_many_at_most():
    ports = [f"a:{number}" for number in range(1, page.MAX_REDUCERS + 1)]
    assert page.reducers(f"reducers={','.join(ports)}") == ports
    with pytest.raises(ConfigError, match="64 reducers at most"):
        page.reducers(f"reducers={','.join([*ports, 'b:1'])}")


@pytest.mark.parametrize("path", ["/status.json", "/history.json"])
def test_pages_of_a_private_network_may_read(port, path):
    for origin in INSIDE:
        headers = ask(port, path, Origin=origin)[1]
        assert headers["Access-Control-Allow-Origin"] == origin
        assert headers["Vary"] == "Origin"
    headers = ask(port, path)[1]
    assert "Access-Control-Allow-Origin" not in headers
    assert headers["Vary"] == "Origin"


@pytest.mark.parametrize("origin", OUTSIDE)
def test_pages_of_the_internet_may_not(port, origin):
    assert not page.may_read(origin)
    if "\r" not in origin:  # which no client of ours sends
        assert "Access-Control-Allow-Origin" not in ask(port, "/status.json", Origin=origin)[1]


@pytest.mark.parametrize(
    "browser",
    [
        {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)"},
        {"User-Agent": "as a page wrote", "Accept-Language": ""},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://evil.example:9090"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/", "/status.json"])
def test_a_site_cannot_have_its_name_lead_to_this_port(port, path, browser):
    for host in ["evil.example", "evil.example.:9090", "localhost.evil.example", "a@b"]:
        code, headers, said = ask(port, path, Host=host, **browser)
        assert (code, headers["Content-Type"]) == (421, "text/plain; charset=utf-8")
        assert "evil" not in said
        assert "address" in said
    own = [socket.gethostname(), socket.getfqdn(), "8.8.8.8:9090", "[2606:4700::1111]:9090"]
    own += ["pool.lan", "localhost.:9090", ""]
    for host in [*own, *(origin.removeprefix("http://") for origin in INSIDE)]:
        assert ask(port, path, Host=host, **browser)[0] == 200


def test_a_browser_calls_a_host_by_the_first_parts_of_its_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Reducer-0")
    monkeypatch.setattr(socket, "getfqdn", lambda host: f"{host}.reducer.jobs.example.edu")

    def may_ask(host):
        headers = Message()
        headers["Host"], headers["accept-language"] = host, "en"
        return page.may_ask(headers)

    assert may_ask("reducer-0.reducer:9090")
    assert may_ask("REDUCER-0.reducer.jobs.example.edu.")
    assert not may_ask("reducer-0.red")
    assert not may_ask("reducer.jobs.example.edu")
    assert not may_ask("reducer-0.reducer.jobs.example.edu.evil.example")


@pytest.mark.parametrize("host", ["reducer-0.reducer.default:9090", "node1.hpc.example.edu", "a@b"])
def test_programs_and_pages_of_a_private_network_use_any_name(port, host):
    prometheus = {"User-Agent": "Prometheus/2.53.0", "Accept-Encoding": "gzip", "Accept": "*/*"}
    for headers in ({}, prometheus, {"Origin": "http://localhost:9090", "Accept-Language": "en"}):
        assert ask(port, "/status.json", Host=host, **headers)[0] == 200


def test_nobody_is_asked_who_an_origin_is(monkeypatch):
    def resolve(host, *_):
        raise AssertionError(host)

    monkeypatch.setattr("reducer.units.socket.getaddrinfo", resolve)
    assert page.may_read("http://pool-0:9090")
    assert not page.may_read("http://pool-0.example.com:9090")


@pytest.mark.parametrize(
    "path", ["/", "/?reducers=x", "/page.js", "/status.json", "/metrics", "/healthz", "/nothing"]
)
def test_every_answer_binds_the_browser(port, path):
    headers = ask(port, path)[1]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
