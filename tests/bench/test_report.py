"""The page of all results: verdicts, warnings, glossary, and what a browser shows of it."""

import json
import re
import shutil
import subprocess

import pytest

from bench import report
from bench.results import MicroResults, read

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
WIDTH = 1200
# How far anything on the page reaches to the right, the part of the window that shows the page (not
# its scroll bar), and the window.
MEASURE = """<script>
const all = [document.documentElement, ...document.querySelectorAll("body *")];
const ends = all.map(e => e.getBoundingClientRect().left + Math.max(e.offsetWidth, e.scrollWidth));
const shown = document.documentElement.clientWidth;
document.title = `widest ${Math.ceil(Math.max(...ends))} of ${shown} in ${window.innerWidth}`;
</script>"""


@pytest.fixture
def all_results(all_reduces, soak, ddp, chaos, micro):
    return [all_reduces, soak, ddp, chaos, MicroResults.model_validate(micro)]


@pytest.fixture
def no_drawing(monkeypatch):
    monkeypatch.setattr(report, "picture", lambda _: b"")


def html(results, folder):
    report.compose(results, "pictures").write(folder / "page.html")
    return (folder / "page.html").read_text()


@pytest.mark.usefixtures("no_drawing")
def test_verdicts_are_derived_from_the_figures(all_results, tmp_path):
    page = html(all_results, tmp_path)
    verdicts = re.findall(r"<li>(.*?)</li>", page.partition("<h2>")[0])
    compared = sum(row.checked for row in all_results[0].rows)
    assert verdicts == [
        (
            "All-reduces: 256 MiB, 4 workers, 1 Gbit/s: pool-4-bf16-keys is 2.50 times as fast as "
            "gloo (1.25 times at equal cards), and reaches 1.674 of the payload rate; "
            f"0 wrong of {compared:,} elements compared in 10 results."
        ),
        (
            "Soak: 4,000 all-reduces, 1.0 GB per rank, 9 s; 0 wrong of 1,000,000 elements "
            "compared; memory is flat: over the second half at most +0.00 MiB."
        ),
        (
            "DDP end to end: resnet50, 4 workers, 1 Gbit/s: 1.47 times the samples/s of gloo-25; "
            "0 wrong weights of 8,000."
        ),
        (
            "Reducers that die: 4 workers, 3 reducers: 200 kills, 0 of 2,345 steps lost, "
            "longest stall 0.51 s; final weights equal the undisturbed training&#x27;s."
        ),
        "Micro-benchmarks: 3 benchmarks in 2 groups, nothing to compare them with.",
    ]
    assert 'class="alarm"' not in page
    assert 'class="warning"' not in page


def test_a_verdict_without_baseline_says_so(all_reduces):
    all_reduces.rows = [row for row in all_reduces.rows if row.contender == "pool-4"]
    assert report.verdict(all_reduces).text.startswith(
        "256 MiB, 4 workers, 1 Gbit/s: pool-4 takes 2274.88 ms, with no baseline to compare it"
    )


@pytest.mark.usefixtures("no_drawing")
def test_whatever_is_wrong_stands_first(all_results, tmp_path):
    all_reduces, soak, ddp, chaos, _ = all_results
    all_reduces.rows[1].wrong = 7
    soak.soak.wrong = 3
    soak.soak.trends[1].flat = False
    ddp.rows[0].wrong, ddp.rows[0].identical = 5, False
    chaos.lost, chaos.identical = 2, False
    start = html(all_results, tmp_path).partition("<ul>")[0]
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
    all_reduces.rows = [row for row in all_reduces.rows if not row.ours]
    assert report.verdict(all_reduces).alarms == ["no all-reduce of ours was measured"]


@pytest.mark.usefixtures("no_drawing")
@pytest.mark.parametrize(("load", "warns"), [(0.99, False), (1.0, True), (1.7, True)])
def test_a_busy_machine_is_warned_of_in_every_kind(load, warns, all_results, tmp_path):
    *ours, micro = all_results
    micro.machine_info["load"] = load
    busy = [found.model_copy(update={"load": load}) for found in ours]
    found = re.findall(
        r'class="warning">(.*?): the machine was busy: .*?</p>', html(busy, tmp_path)
    )
    assert len(found) == len(ours) * warns
    page = html([micro], tmp_path)
    assert page.count(f"the machine was busy: other processes used {load:.1f} of 2") == warns


@pytest.mark.usefixtures("no_drawing")
def test_what_is_the_same_in_all_rows_stands_above_the_table(all_reduces, tmp_path):
    page = html([all_reduces], tmp_path)
    assert "In all rows: n 4, type float32, redop sum<" in page
    assert "<th>iters</th>" in page
    for row in all_reduces.rows:
        row.iterations = 20
    page = html([all_reduces], tmp_path)
    assert "In all rows: n 4, type float32, redop sum, iters 20<" in page
    assert "<th>iters</th>" not in page


def test_micro_benchmarks_have_a_table_per_group(micro, tmp_path):
    file = tmp_path / "micro.json"
    file.write_text(json.dumps(micro))
    report.main([file], tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    grouped, alone = page.partition("### fold float32")[2].split("### without a group")
    assert "| test_fold[one pass-1 MiB] | 1000.000 | 100.000 | 50 | 8.39 |" in grouped
    assert "| test_fold[chain-1 MiB] | 2000.000 | 200.000 | 50 | - |" in grouped
    assert "| test_header | 0.300 | 0.030 | 50 |" in alone


@pytest.mark.usefixtures("no_drawing")
def test_the_glossary_has_every_column(all_results, tmp_path):
    titles = {
        "All-reduces": {column.title for column in report.all_reduce_columns(["gloo"])},
        "Soak": {column.title for column in report.TRENDS},
        "DDP end to end": {column.title for column in report.DDP},
        "Reducers that die": set(report.CHAOS),
        "The report": {column.title for column in report.MICRO},
    }
    glossary = html(all_results, tmp_path).partition("<h2>Glossary</h2>")[2]
    for section, known in titles.items():
        terms = {one for term, _ in report.terms(section) for one in term.split(", ")}
        assert known <= terms
        assert f"<h3>{section}</h3>" in glossary
    assert "**" not in glossary
    assert "`" not in glossary


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 1}, "its schema has version 1, and not 2: measure again"),
        ({"kind": "kernels"}, "Input should be 'allreduce', 'scaling' or 'soak'"),
        ({"rows": 3}, "Input should be a valid list"),
    ],
)
def test_other_files_are_refused(change, said, all_reduces, tmp_path):
    file = tmp_path / "found.json"
    file.write_text(json.dumps(json.loads(all_reduces.model_dump_json()) | change))
    with pytest.raises(SystemExit, match=f"found.json is no result .*(?s:.*){re.escape(said)}"):
        report.main([file], tmp_path / "page.html")
    for text in ("[]", "{}", "nonsense"):
        file.write_text(text)
        with pytest.raises(SystemExit, match=r"found\.json is no result of these benchmarks"):
            report.main([file], tmp_path / "page.html")


def test_results_are_read_as_they_were_written(all_reduces, ddp, chaos, tmp_path):
    for found in (all_reduces, ddp, chaos):
        found.write(tmp_path / "found.json")
        assert read(tmp_path / "found.json") == found


@pytest.mark.extended("tests/bench/test_allreduce.py::test_all_reduces_are_compared")
def test_markdown_has_its_pictures_beside_it(all_results, tmp_path):
    report.compose(all_results, "page-pictures").write(tmp_path / "page.md")
    pictures = re.findall(r"!\[.*\]\((.*)\)", (tmp_path / "page.md").read_text())
    assert len(pictures) == 3
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not BROWSER, reason="needs chromium: make test-tools")
def test_a_browser_of_1200_pixels_shows_every_column(all_results, tmp_path):
    all_results[0].rows[0].workers = 16  # so that this column is shown, too
    page = html(all_results, tmp_path)
    (tmp_path / "page.html").write_text(page.replace("</body>", f"{MEASURE}</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command += ["--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={WIDTH},2000", "--dump-dom", f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"<title>widest (\d+) of (\d+) in (\d+)</title>", done.stdout)
    assert found, done.stderr
    widest, shown, window = map(int, found.groups())
    assert window == WIDTH
    assert widest <= shown
