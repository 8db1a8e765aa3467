"""The site that `make docs` has just built: its links, what it loads, and how it looks.

It is served over loopback, as a browser restricts what pages of files may load.
"""

import re
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import PHONE, browser, opened

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "docs"
if not (SITE / "index.html").is_file():
    pytest.skip("needs the site: run make docs", allow_module_level=True)
PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
FIRST = "index.html"  # leads to the first page
# Of a page's elements that a browser loads by itself, the attributes that say from where.
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
LOADING = {"stylesheet", "icon", "preload", "modulepreload", "manifest"}  # kinds of <link>
# Commands; what the settings and the client's page have; and what the specification shows.
NOT_PUBLIC = {"cli", "config", "work", "reference"}


class Page(HTMLParser):
    """A page's links, what it loads, and the anchors that links may name."""

    def __init__(self, name):
        super().__init__()
        self.links = []
        self.loads = []
        self.anchors = set()
        self.feed((SITE / name).read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] or "" for name in ("id", "name") if name in given}
        where = given.get(LOADED.get(tag, "href"))
        if tag == "link" and not set((given.get("rel") or "").split()) & LOADING:
            return
        if where and tag in LOADED:
            self.loads.append(where)
        elif where and tag == "a":
            self.links.append(where)


PARSED = {name: Page(name) for name in PAGES}


@pytest.fixture(scope="module")
def address():
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(SITE))
    ) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def chromium():
    with browser() as launched:
        yield launched


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_a_page_and_a_place_on_it(name):
    for link in PARSED[name].links + PARSED[name].loads:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (SITE / name).parent / unquote(parts.path) if parts.path else SITE / name
        assert target.is_file(), link
        found = PARSED.get(str(target.resolve().relative_to(SITE)))
        if parts.fragment and found:
            assert unquote(parts.fragment) in found.anchors, link


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_loaded_from_other_hosts(name):
    loads = PARSED[name].loads
    assert loads or name == FIRST
    assert [one for one in loads if urlsplit(one).netloc] == []


def test_every_public_module_is_in_the_reference():
    documented = set().union(*(page.anchors for page in PARSED.values()))
    package = ROOT / "worker_client"
    modules = {path.stem for path in package.glob("[a-z]*.py")} - NOT_PUBLIC
    assert {f"module-worker_client.{name}" for name in modules} <= documented
    names = {"worker_client.attach", "worker_client.init", "worker_client.Client.all_reduce"}
    names |= {"worker_client.Work.wait", "worker_client.horovod.allreduce", "reducer.local_pool"}
    names |= {"reducer.errors.RankLostError", "worker_client.torch_backend.bytes_reduced"}
    assert names <= documented


def test_a_new_user_comes_from_the_site_to_the_tutorial(chromium, address):
    with opened(chromium, address) as seen:
        seen.shows("h1", "Reduction server")
        seen.page.locator("article table a", has_text="Tutorial").click()
        seen.shows("h1", "Tutorial")
        assert seen.page.locator("pre", has_text="reducer keygen ~/keys --job vision").count() == 1
        assert (seen.errors, seen.asked) == ([], {urlsplit(address).netloc})


def test_no_page_is_wider_than_a_phone(chromium, address):
    with opened(chromium, f"{address}/docs/index.html", window=PHONE) as seen:
        for name in set(PAGES) - {FIRST}:
            seen.page.goto(f"{address}/{name}")
            assert seen.spare_width() >= 0, name
        assert (seen.errors, seen.asked) == ([], {urlsplit(address).netloc})


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_it_is_as_light_as_its_reader_prefers(chromium, address, scheme, dark):
    with opened(chromium, f"{address}/docs/settings.html", scheme=scheme) as seen:
        for selector in ("body", "pre, table"):
            colour = seen.page.locator(selector).first.evaluate(
                "shown => getComputedStyle(shown).color"
            )
            text = sum(map(int, re.findall(r"\d+", colour)[:3])) / 3
            assert (text > 128) == dark, (selector, colour)
