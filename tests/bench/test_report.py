"""The page of all results: verdicts, warnings, glossary, and what a browser shows of it."""

import json
import re
from pathlib import Path

import pytest

from bench import report
from bench.results import read
from tests.browser import browser, opened
from tests.golden import check_golden

KINDS = ("allreduce", "soak", "ddp", "chaos", "micro")
WIDTH = 1200


@pytest.fixture
def results():
    """What each kind of benchmark has found, by its name."""
    folder = Path(__file__).with_name("results")
    return {kind: read(folder / f"{kind}.json") for kind in KINDS}


def html(results, folder, name="page.html", *, drawn=False):
    """Return the text of the page; its pictures would take a second."""
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr(report, "picture", lambda _: b"")
        report.compose([*results], "pictures").write(folder / name)
    return (folder / name).read_text()


def test_the_page_of_all_results(results, tmp_path):
    page = html(results.values(), tmp_path, "page.md")
    check_golden(Path(__file__).with_name("page.md"), page.partition("## Glossary")[0])


def test_whatever_is_wrong_stands_first(results, tmp_path):
    all_reduces, soak, ddp, chaos, _ = results.values()
    all_reduces.rows[1].wrong = 7
    soak.soak.wrong = 3
    soak.soak.trends[1].flat = False
    ddp.rows[0].wrong, ddp.rows[0].identical = 5, False
    chaos.lost, chaos.identical = 2, False
    start = html(results.values(), tmp_path).partition("<ul>")[0]
    assert re.findall(r'class="alarm">FAILED: (.*?)</p>', start) == [
        "All-reduces, 4 workers, 1 Gbit/s: pool-4 at 4 KiB: 7 wrong elements of 4,096 compared",
        "Soak, 2 workers, unshaped: 3 wrong elements of 1,000,000 compared",
        "Soak, 2 workers, unshaped: memory grows in reducer 0",
        "DDP end to end, resnet50, 4 workers, 1 Gbit/s: reducers: 5 wrong weights",
        "DDP end to end, resnet50, 4 workers, 1 Gbit/s: reducers: ranks have different weights",
        "Reducers that die, 4 workers, 3 reducers: 2 of 2,345 steps lost",
        (
            "Reducers that die, 4 workers, 3 reducers: "
            "final weights differ between ranks, or from the undisturbed training&#x27;s"
        ),
    ]
    all_reduces.rows = [row for row in all_reduces.rows if row.contender == "pool-4"]
    assert "takes 2274.88 ms, with no baseline" in report.verdict(all_reduces).text
    all_reduces.rows = []
    assert report.verdict(all_reduces).alarms == ["no all-reduce of ours was measured"]


@pytest.mark.parametrize(("load", "warns"), [(0.99, False), (1.0, True)])
def test_a_busy_machine_is_warned_of_in_every_kind(load, warns, results, tmp_path):
    *ours, micro = results.values()
    micro.machine_info["load"] = load
    busy = [found.model_copy(update={"load": load}) for found in ours]
    found = re.findall(
        r'class="warning">(.*?): the machine was busy: .*?</p>', html(busy, tmp_path)
    )
    assert len(found) == len(ours) * warns
    page = html([micro], tmp_path)
    assert page.count(f"the machine was busy: other processes used {load:.1f} of 2") == warns


def test_what_is_the_same_in_all_rows_stands_above_the_table(results, tmp_path):
    for row in results["allreduce"].rows:
        row.iterations = 20
    page = html([results["allreduce"]], tmp_path)  # page.md has sizes with other iterations
    assert "In all rows: n 4, type float32, redop sum, iters 20<" in page
    assert "<th>iters</th>" not in page


def test_the_glossary_has_every_column(results, tmp_path):
    titles = {
        "All-reduces": {column.title for column in report.all_reduce_columns(["gloo"])},
        "Soak": {column.title for column in report.TRENDS},
        "DDP end to end": {column.title for column in report.DDP},
        "Reducers that die": set(report.CHAOS),
        "The report": {column.title for column in report.MICRO},
    }
    glossary = html(results.values(), tmp_path).partition("<h2>Glossary</h2>")[2]
    for section, known in titles.items():
        terms = {one for term, _ in report.terms(section) for one in term.split(", ")}
        assert known <= terms
        assert f"<h3>{section}</h3>" in glossary
    assert "**" not in glossary
    assert "`" not in glossary


def test_other_files_are_refused(tmp_path):
    file = tmp_path / "found.json"
    of_another_version = json.dumps({"kind": "allreduce", "schema_version": 1})
    for text in (of_another_version, "[]", "{}", "nonsense", None):
        file.write_text(text) if text else file.unlink()
        with pytest.raises(SystemExit, match=r"found\.json is no result of these benchmarks"):
            report.main([file], tmp_path / "page.html")


def test_a_browser_of_1200_pixels_shows_every_column(results, tmp_path):
    results["allreduce"].rows[0].workers = 16  # so that this column is shown, too
    html(results.values(), tmp_path, drawn=True)
    with (
        browser() as launched,
        opened(launched, f"file://{tmp_path}/page.html", window=(WIDTH, 2000)) as page,
    ):
        assert page.page.locator("th", has_text="contender").count()
        assert page.spare_width() >= 0
        assert page.errors == []
