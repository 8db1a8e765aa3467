"""Takes the pictures of the page: light and dark, of two reducers and a job with a straggler.

Run ``.venv/bin/python docs/pictures.py`` after the page has changed, and look at what it makes. It
takes four minutes, so that the lines of the rates have some length.
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

RUNS_S = 110.0  # of each of two jobs; the second one has the straggler
RESTS_S = 15.0
MOST_BYTES = 150_000


def main(seconds: float) -> None:
    """Take both pictures, `seconds` after the second job has begun."""
    with ExitStack() as stack:
        launched = stack.enter_context(browser())
        limit = ("--http", 0, "--memory-limit", "512MiB")
        pool = [stack.enter_context(serving(*limit)) for _ in range(2)]
        servers = [one.address for one in pool]
        for job, late in (("resnet-a", {}), ("resnet-b", {"LATE_3": "0.03"})):
            settings = {"REDUCTION_JOB": job, **late}
            with ranks(environments(8, servers, **settings), "-m", "tests.lab.straggling_rank"):
                time.sleep(seconds)
                address = f"http://{pool[0].http}/?reducers={pool[1].http}"
                for scheme in ("light", "dark") if late else ():
                    with opened(launched, address, scheme=scheme) as page:
                        page.shows("article.job .finding", "Rank 3 keeps the others waiting")
                        time.sleep(11.0)  # the page has looked at waits for as long as it does
                        picture = DOCS / f"page-{scheme}.png"
                        page.page.screenshot(path=picture, full_page=True)
                        assert picture.stat().st_size < MOST_BYTES, picture
            time.sleep(RESTS_S)


if __name__ == "__main__":
    main(RUNS_S)
