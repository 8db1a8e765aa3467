"""The page of a reducer's HTTP port: its files, what it may ask, and who may read the answers."""

import re
import socket
from email.message import Message

import pytest

from reducer.errors import ConfigError
from reducer.monitoring import page
from tests.conftest import reducer_here
from tests.reducer.asked import ask, port_of

pytestmark = pytest.mark.usefixtures("no_settings")

# Hosts of pages that may read what reducers say, and of those that may not.
INSIDE = (
    *("localhost:9090", "127.0.0.1:9090", "[::1]:9090", "10.1.2.3", "192.168.0.1:80"),
    *("172.16.5.4:9090", "[fd00::1]:9090", "pool-0:9090", "reducer-0.reducer.jobs.svc:9090"),
    *("reducer-0.reducer.jobs.svc.cluster.local:9090", "pool.local", "pool.corp.internal:9090"),
)
OUTSIDE = (
    *("example.com", "10.0.0.1.example.com:9090", "127.0.0.1.:9090", "localhost.example.com"),
    *("evil.com.:9090", "evillocal.com", "8.8.8.8:9090", "[2606:4700::1111]:9090"),
    *("[::ffff:8.8.8.8]:9090", "0.0.0.0:9090", "user@localhost:9090", "localhost:9090/"),
    *("localhost:9090, http://example.com", "localhost\r\nX: y", "pool;evil.com"),
)
ORIGINS = ("", "null", "*", "https://localhost:9090", "file://localhost")


@pytest.fixture(scope="module")
def port():
    with reducer_here() as server, port_of(server.observer) as address:
        yield address


def test_its_files_are_all_that_it_needs(port):
    html = ask(port, "/")
    assert (html.code, html.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    needed = set(re.findall(r'(?:src|href)="([^"]+)"', html.text))
    files = {name: ask(port, f"/{name}") for name in needed}
    assert all(file.code == 200 and file.body for file in files.values())
    assert files["page.js"].headers["Content-Type"].startswith("text/javascript")
    assert files["icon.svg"].headers["Content-Type"].startswith("image/svg+xml")


def test_nothing_of_it_is_inline_nor_from_elsewhere(port):
    html, script, style = (ask(port, path).text for path in ("/", "/page.js", "/page.css"))
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?! src=)", html)
    for text in (html, script, style):
        addresses = re.findall(r"https?://[^\s\"'`]*", text)
        # Those of other reducers, and the name of a vocabulary.
        assert set(addresses) <= {"http://${one}/", "http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", script)
    assert not re.search(r"@import|url\(", style)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/", "'self'"),
        ("/?reducers=pool-1:9090,10.0.0.2:80", "'self' http://pool-1:9090 http://10.0.0.2:80"),
        ("/?reducers=a_b.c:1%2C%20d:2&reducers=a_b.c:1", "'self' http://a_b.c:1 http://d:2"),
    ],
)
def test_a_page_may_ask_its_own_port_and_those_that_are_named(port, path, asked):
    answer = ask(port, path)
    assert answer.code == 200
    assert answer.headers["Content-Security-Policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        f"connect-src {asked}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@pytest.mark.parametrize(
    "named",
    [
        *("", ",", "a", ":1", "a:0", "a:65536", "a:1,", "http://a:1", "a:x", "*:1", "[::1]:9090"),
        *("a:1;script-src%20*", "a'b:1", "a:1%0d%0aX:%20y", "a@b:1", "a%00:1", "a:%D9%A1"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(port, named):
    answer = ask(port, f"/?reducers={named}")
    assert answer.code == 400
    assert "?reducers=HOST:PORT,HOST:PORT" in answer.text
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert "X" not in answer.headers


def test_a_page_follows_so_many_at_most():
    ports = [f"a:{number}" for number in range(1, page.MAX_REDUCERS + 1)]
    assert page.reducers(f"reducers={','.join(ports)}") == ports
    with pytest.raises(ConfigError, match="64 reducers at most"):
        page.reducers(f"reducers={','.join([*ports, 'b:1'])}")


@pytest.mark.parametrize("path", ["/status.json", "/history.json"])
def test_pages_of_a_private_network_may_read_and_those_of_the_internet_may_not(port, path):
    for origin in (f"http://{host}" for host in INSIDE):
        headers = ask(port, path, Origin=origin).headers
        assert (headers["Access-Control-Allow-Origin"], headers["Vary"]) == (origin, "Origin")
    headers = ask(port, path).headers
    assert "Access-Control-Allow-Origin" not in headers
    assert headers["Vary"] == "Origin"
    for origin in (*ORIGINS, *(f"http://{host}" for host in OUTSIDE)):
        assert not page.may_read(origin), origin
        if "\r" not in origin:  # which no client of ours sends
            headers = ask(port, path, Origin=origin).headers
            assert "Access-Control-Allow-Origin" not in headers, origin


BROWSERS = [
    {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)"},
    {"User-Agent": "as a page wrote", "Accept-Language": ""},
    {"Sec-Fetch-Site": "none"},
    {"Origin": "http://evil.example:9090"},
]


@pytest.mark.parametrize("browser", BROWSERS, ids=str)
@pytest.mark.parametrize("path", ["/", "/status.json"])
def test_a_site_cannot_have_its_name_lead_to_this_port(port, path, browser):
    for host in ["evil.example", "evil.example.:9090", "localhost.evil.example", "a@b"]:
        answer = ask(port, path, Host=host, **browser)
        kind = answer.headers["Content-Type"]
        assert (answer.code, kind) == (421, "text/plain; charset=utf-8")
        assert "evil" not in answer.text
        assert "address" in answer.text
    own = [socket.gethostname(), socket.getfqdn(), "8.8.8.8:9090", "[2606:4700::1111]:9090"]
    own += ["pool.lan", "localhost.:9090", ""]
    for host in [*own, *INSIDE]:
        assert ask(port, path, Host=host, **browser).code == 200


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
        assert ask(port, "/status.json", Host=host, **headers).code == 200


def test_nobody_is_asked_who_an_origin_is(monkeypatch):
    def resolve(host, *_):
        raise AssertionError(host)

    monkeypatch.setattr("reducer.units.socket.getaddrinfo", resolve)
    assert page.may_read("http://pool-0:9090")
    assert not page.may_read("http://pool-0.example.com:9090")


@pytest.mark.parametrize("path", ["/", "/?reducers=x", "/status.json", "/metrics", "/nothing"])
def test_every_answer_binds_the_browser(port, path):
    headers = ask(port, path).headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
