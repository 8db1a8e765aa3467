"""A headless browser, and what a page did in it: requests, and errors in its console.

Playwright drives the Chromium of this machine; without either, who asks for one is skipped.
"""

import shutil
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from tests.waits import TooLateError

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DESK, PHONE = (1200, 900), (375, 800)


@contextmanager
def browser():
    """A headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("needs chromium: run make test-tools")
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    options = ["--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with driver.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=options)
        try:
            yield launched
        finally:
            launched.close()


class Opened:
    """An open page.

    Attributes:
        asked: ``host:port`` of everything that it has asked.
        errors: what its console told of, but for requests without an answer.
        unanswered: ``host:port`` of those.
    """

    def __init__(self, launched, address, window=DESK, scheme="light"):
        self.asked = set()
        self.errors = []
        self.unanswered = set()
        size = {"width": window[0], "height": window[1]}  # pixels
        self.page = launched.new_context(color_scheme=scheme, viewport=size).new_page()
        self.page.on("request", lambda one: self.asked.add(urlsplit(one.url).netloc))
        self.page.on("console", self._note_line)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(address)

    def shows(self, selector, text, seconds=20.0):
        """Wait until one of some elements has a text."""
        from playwright.sync_api import TimeoutError as TimedOut  # noqa: PLC0415 (it is there)

        elements = self.page.locator(selector)
        try:
            elements.filter(has_text=text).first.wait_for(timeout=1000 * seconds)
        except TimedOut:
            there = elements.all_inner_texts()
            raise TooLateError(f"{text!r} not within {seconds:g} s: {there}") from None

    def spare_width(self):
        """Below 0 it has to be scrolled sideways."""
        script = "document.documentElement.clientWidth - document.documentElement.scrollWidth"
        return int(self.page.evaluate(script))

    def _note_line(self, line):
        if line.type not in {"error", "warning"}:
            return
        if "net::ERR_" in line.text:
            self.unanswered.add(urlsplit(line.location["url"]).netloc)
        else:
            self.errors.append(line.text)


@contextmanager
def opened(launched, address, **options):
    """An open page, as `Opened` has it, until the end of the block."""
    page = Opened(launched, address, **options)
    try:
        yield page
    finally:
        page.page.context.close()
