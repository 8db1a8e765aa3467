"""Takes the pictures of the page: light and dark, of two reducers and a job with a straggler.

Run ``.venv/bin/python docs/pictures.py`` after the page has changed, and look at what it makes. It
takes three minutes, so that the lines of the rates have some length.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from tests.browser import browser, opened  # noqa: E402 (a script's path is its own folder)
from tests.commands import serving  # noqa: E402
from tests.ranks import environments, ranks  # noqa: E402

JOBS = (("vision", 8, {"LATE_3": "0.03"}), ("ablation", 2, {}))
ALONE_S, BOTH_S, AFTERWARDS_S = 50.0, 40.0, 60.0
LOOKS_S = 11.0  # the page looks at the waits of 10 s
WINDOW = (1100, 900)
MOST_BYTES = 200_000


def main() -> None:
    """Take both pictures, while one job trains and after another one has."""
    with ExitStack() as stack:
        launched = stack.enter_context(browser())
        limit = ("--http", 0, "--memory-limit", "512MiB")
        pool = [stack.enter_context(serving(*limit)) for _ in range(2)]
        first, second = (
            ranks(
                environments(number, [one.address for one in pool], REDUCTION_JOB=name, **settings),
                "-m",
                "tests.lab.straggling_rank",
            )
            for name, number, settings in JOBS
        )
        stack.enter_context(first)
        time.sleep(ALONE_S)
        with second:
            time.sleep(BOTH_S)
        time.sleep(AFTERWARDS_S)
        address = f"http://{pool[0].http}/?reducers={pool[1].http}"
        for scheme in ("light", "dark"):
            with opened(launched, address, scheme=scheme, window=WINDOW) as page:
                page.shows("article.job .finding", "keeps the others waiting")
                time.sleep(LOOKS_S)
                picture = DOCS / f"page-{scheme}.png"
                page.page.screenshot(path=picture, full_page=True)
                assert picture.stat().st_size < MOST_BYTES, picture


if __name__ == "__main__":
    main()
