"""Takes the pictures of docs/observing.md: the page, `reducer top`, and a report of timelines.

Run ``.venv/bin/python docs/pictures.py`` after one of them has changed, and look at what it makes.
The page shows two reducers and a job with a straggler, in light and dark colours and on a phone. It
takes four minutes, so that the lines of the rates have some length.
"""

from __future__ import annotations

import io
import re
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from reducer.commands import status  # noqa: E402 (a script's path is its own folder)
from tests.browser import browser, opened  # noqa: E402
from tests.commands import run_here, serving  # noqa: E402
from tests.ranks import environments, ranks  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RANK = ("-m", "tests.lab.straggling_rank")
PATIENT = {"REDUCTION_PATIENCE": "20s"}  # a busy machine is no failure to show
JOBS = (("vision", 8, {"LATE_3": "0.03"}), ("ablation", 2, {}))
ALONE_S, BOTH_S, AFTERWARDS_S = 50.0, 40.0, 60.0
LOOKS_S = 11.0  # the page looks at the waits of 10 s
WINDOW, PHONE = (1100, 900), (390, 844)
COLUMNS = 80
RECORDED_S = 10.0
REPORT = (1000, 900)
MOST_BYTES = 200_000


def main() -> None:
    """Take all pictures."""
    with browser() as launched:
        of_a_pool(launched)
        of_a_report(launched)
    for picture in (*DOCS.glob("*.png"), *DOCS.glob("top.svg")):
        assert picture.stat().st_size < MOST_BYTES, picture


def of_a_pool(launched: Browser) -> None:
    """Take those of the page and of `reducer top`, while one job trains and after another one."""
    with ExitStack() as stack:
        limit = ("--http", 0, "--memory-limit", "512MiB")
        pool = [stack.enter_context(serving(*limit)) for _ in range(2)]
        first, second = (
            ranks(
                environments(
                    number,
                    [one.address for one in pool],
                    REDUCTION_JOB=name,
                    **PATIENT,
                    **settings,
                ),
                *RANK,
            )
            for name, number, settings in JOBS
        )
        stack.enter_context(first)
        time.sleep(ALONE_S)
        with second:
            time.sleep(BOTH_S)
            of_top([one.http for one in pool])
        time.sleep(AFTERWARDS_S)
        address = f"http://{pool[0].http}/?reducers={pool[1].http}"
        for name, scheme, window in (
            ("page-light", "light", WINDOW),
            ("page-dark", "dark", WINDOW),
            ("page-phone", "light", PHONE),
        ):
            with opened(launched, address, scheme=scheme, window=window) as page:
                page.shows("article.job .finding", "keeps the others waiting")
                time.sleep(LOOKS_S)
                page.page.screenshot(path=DOCS / f"{name}.png", full_page=window != PHONE)


def of_top(ports: list[str]) -> None:
    """Draw what `reducer top` shows in a terminal at its second look."""
    before = status.read_all(ports)
    time.sleep(1.0)
    terminal = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    terminal.print(status.render(status.read_all(ports), before))
    drawn = terminal.export_svg(title=f"reducer top {','.join(ports)}")
    # A picture asks no other host for a font.
    (DOCS / "top.svg").write_text(re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL))


def of_a_report(launched: Browser) -> None:
    """Take that of a report of a job with a rank that is late."""
    with TemporaryDirectory() as folder:
        with serving("--timeline", folder) as one, serving("--timeline", folder) as other:
            told = {"REDUCTION_TIMELINE": folder, "REDUCTION_JOB": "vision", "LATE_2": "0.01"}
            with ranks(environments(4, [one.address, other.address], **PATIENT, **told), *RANK):
                time.sleep(RECORDED_S)
        page = Path(folder, "report.html")
        done = run_here(f"worker-client timeline report {folder} -o {page}")
        assert done.returncode == 0, done.stderr
        with opened(launched, page.as_uri(), window=REPORT) as report:
            # Of its four tables with pictures, two show what it is like.
            end = report.page.locator("h2").nth(2).bounding_box()
            clip = {"x": 0, "y": 0, "width": REPORT[0], "height": end["y"]}
            report.page.screenshot(path=DOCS / "report.png", full_page=True, clip=clip)


if __name__ == "__main__":
    main()
