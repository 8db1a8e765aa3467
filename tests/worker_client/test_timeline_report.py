"""The page of timelines: its figures beside others' arithmetic, and what a browser makes of it."""

import json
import re
import sys
import time
from collections import defaultdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from reducer.errors import ConfigError
from reducer.wire.constants import PLACES
from tests.browser import PHONE, browser, opened
from tests.conftest import joined, reducer_here
from tests.worker_client.waits import at_all
from worker_client import cli
from worker_client.commands.timeline import align, merge, read
from worker_client.commands.timeline_figures import LateFigures, figures
from worker_client.commands.timeline_report import report

pytest.importorskip("matplotlib", reason="needs matplotlib")
pytestmark = pytest.mark.usefixtures("no_settings")

HOSTILE = "<img src=x onerror=alert(1)>$x^$&amp;\n\x1b\ud800\u4e2d"
SHOWN = r"<img src=x onerror=alert(1)>$x^$&amp;\n\x1b\ud800" + "\u4e2d"
LATE_S = 0.05


class Page(HTMLParser):
    """A page's elements, the rows of its tables, and its text."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.rows, self.links, self.text = set(), [], [], ""
        self._cell = False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in {"src", "href", "xlink:href"}]
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        self._cell = self._cell and tag not in {"td", "th"}

    def handle_data(self, data):
        self.text += data
        if self._cell:
            self.rows[-1][-1] += data

    def row(self, *begins):
        """The only row that begins so."""
        (found,) = (row for row in self.rows if row[: len(begins)] == list(begins))
        return found


# -- by hand ---------------------------------------------------------------------------------------


def a_slice(name, span_us, **args):
    event = {"ph": "X", "name": name, "ts": span_us[0], "dur": span_us[1] - span_us[0]}
    return event | ({"args": args} if args else {})


def a_call(call, nbytes, times_us, names=("queued", "sent", "waited", "received"), **more):
    args = {"job": "job", "generation": 0, "sequence": call * PLACES + 1, "bytes": nbytes} | more
    parts = zip(names, pairwise(times_us), strict=True)
    whole = a_slice(f"all-reduce {call}", (times_us[0], times_us[-1]), **args)
    return [whole, *(a_slice(name, span) for name, span in parts)]


def a_round(call, nbytes, times_us, last_rank, place=1):
    times = zip(("begun_us", "alone_us", "complete_us", "done_us"), times_us, strict=True)
    args = {"job": "job", "generation": 0, "sequence": call * PLACES + place, "nbytes": nbytes}
    args |= {"first_rank": 0, "last_rank": last_rank, "chunks": 1, **dict(times)}
    return [a_slice(f"all-reduce {call}", (times_us[0], times_us[-1]), **args)]


def write(path, kind, events, **about):
    about |= {"kind": kind, "boot": "one", "host": "one", "wall_ns": 1_000_000_000}
    begins = {"ph": "i", "name": "begins", "ts": 0.0, "args": about}
    path.write_text(json.dumps([begins, *(event for some in events for event in some)]))
    return path


@pytest.fixture
def by_hand(tmp_path):
    """Two ranks whose all-reduces overlap, and two reducers, of which rank 1 is late."""
    first = [
        a_call(1, 1000, (1000, 1010, 1030, 1080, 1100), rank=0),
        a_call(2, 3000, (1020, 1040, 1060, 1120, 1150), rank=0),
        a_call(
            3, 9, (1200, 1210, 1260), ("queued", "unfinished"), rank=0, error="RankLostError: x"
        ),
        [a_slice("2 tensors", (1000, 1260), tensors=["a", "b"]), a_slice("reduced", (1000, 1260))],
    ]
    second = [
        a_call(1, 1000, (1055, 1056, 1074, 1080, 1100), rank=1),
        a_call(2, 3000, (1058, 1059, 1076, 1080, 1150), rank=1),
    ]
    one = [
        a_round(0, 100, (900, 910, 990, 995), 1, place=0),  # the ranks' own question
        a_round(1, 1000, (1015, 1035, 1075, 1079), 1),
        a_round(2, 2000, (1045, 1070, 1110, 1118), 1),
    ]
    other = [a_round(2, 1000, (1045, 1046, 1050, 1052), 0)]
    return [
        write(tmp_path / "rank0.json", "rank", first, rank=0, job="job"),
        write(tmp_path / "rank1.json", "rank", second, rank=1, job="job"),
        write(tmp_path / "one.json", "reducer", one, address="a:1"),
        write(tmp_path / "other.json", "reducer", other, address="b:1"),
    ]


def found_in(paths):
    processes, _ = read(paths, Path("none.html"))
    return figures(processes, align(processes))


def test_figures_are_those_that_a_hand_has_computed(by_hand):
    found = found_in(by_hand)
    assert (found.jobs, found.lasted_us) == (["job"], 260.0)
    first, second = found.ranks
    # The first call counts until 1100, of the second what is left; rank 1 was waited for until 1075
    # in the former, and until 1110 in the latter.
    expected = {"no all-reduce": 50, "queued": 10 + 10, "sent": 20, "waited for a rank": 40 + 10}
    expected |= {"waited for the sum": 10 + 10, "received": 20 + 30, "failed or elsewhere": 50}
    assert first.spent_us == expected
    assert first[:4] == ("rank 0", 3, 1, 4000)
    assert first.awaited_us == {"rank 1": 50}
    assert second.awaited_us == {}, "it has not waited for itself"
    assert second.spent_us["no all-reduce"] == 260 - 95
    assert sum(second.spent_us.values()) == 260
    rate = 2e6 * 1000 / (100 + 45)
    assert found.sizes[0] == (1000, 1000, 2, 45.0, 100.0, rate)
    assert found.sizes[1][:5] == (3000, 3000, 2, 92.0, 130.0)
    assert [one[:4] for one in found.reducers] == [("a:1", 2, 3000, 103.0), ("b:1", 1, 1000, 7.0)]
    assert found.reducers[0][4:] == (20 + 25, 40 + 40, 4 + 8)
    assert found.reducers[0].rate == pytest.approx(1e6 * 3000 / 103)
    assert found.late == [
        LateFigures("rank 1", 1, 75.0, 75.0, 75.0),  # from 1035 to 1110
        LateFigures("rank 0", 1, 4.0, 4.0, 4.0),
    ]


def test_octaves_quantiles_and_waits_that_touch(tmp_path):
    calls = [
        a_call(took, nbytes, (1000 * took, 1001 * took), ("sent",), rank=0)
        for took, nbytes in ((took, 1024 + 1023 * (took % 2)) for took in range(1, 201))
    ]
    for call, nbytes in ((201, 1023), (202, 2048)):
        calls.append(a_call(call, nbytes, (1000 * call, 1000 * call + 5), ("sent",), rank=0))
    one = [a_round(1, 1, (990, 1000, 1010, 1011), 0), a_round(2, 1, (990, 1010, 1025, 1026), 0)]
    found = found_in(
        [
            write(tmp_path / "rank0.json", "rank", calls, rank=0, job="job"),
            write(tmp_path / "one.json", "reducer", one, address="a:1"),
        ]
    )
    assert [octave[:5] for octave in found.sizes] == [
        (1023, 1023, 1, 5.0, 5.0),
        (1024, 2047, 200, 100.0, 198.0),
        (2048, 2048, 1, 5.0, 5.0),
    ]
    assert found.late == [LateFigures("rank 0", 1, 25.0, 25.0, 25.0)]


def test_the_page_has_them(by_hand, tmp_path):
    page_at = tmp_path / "report.html"
    (note,) = report(by_hand, page_at)
    page = Page(page_at)
    shares = ["19.2 %", "7.7 %", "7.7 %", "19.2 %", "7.7 %", "19.2 %", "19.2 %"]
    assert page.row("rank 0", "3") == ["rank 0", "3", "4.0 kB", *shares, "rank 1, 50 us"]
    assert page.row("1.0 kB", "2") == ["1.0 kB", "2", "45 us", "100 us", "13.8 MB/s"]
    assert page.row("a:1")[1:4] == ["2", "3.0 kB", "29.1 MB/s"]
    assert page.row("rank 1", "1") == ["rank 1", "1", "75 us", "28.8 %", "75 us", "75 us"]
    for sentence in (
        "Of 260 us, ranks had an all-reduce in progress for 58.7 % in the mean.",
        "Most bytes were in all-reduces of 3.0 kB: half of these took 92 us at most, 99 % 130 us.",
        "The others waited for rank 1 alone for 75 us, 28.8 % of the time: 1 wait, 75 us in the",
        "1 all-reduce failed.",
        note,
    ):
        assert sentence in page.text
    assert page.tags >= {"svg", "table"}
    assert "script" not in page.tags
    assert [link for link in page.links if not link.startswith("#")] == []
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_files_of_one_kind_say_what_they_can(by_hand, tmp_path):
    ranks, reducers = found_in(by_hand[:2]), found_in(by_hand[2:])
    assert ranks.ranks[0].spent_us["waited for the sum"] == 70, "nobody knows for whom"
    assert (ranks.reducers, ranks.late) == ([], [])
    assert (reducers.ranks, reducers.sizes, reducers.lasted_us) == ([], [], 1118 - 1015)
    assert reducers.late == found_in(by_hand).late
    for some in (by_hand[:2], by_hand[2:]):
        report(some, tmp_path / "report.html")
        assert "No file says so: set REDUCTION_TIMELINE" in Page(tmp_path / "report.html").text


def test_ranks_are_called_what_they_are_in_the_job(tmp_path):
    """Rank 0 was lost; of ranks 1 and 2, which go on, rank 2 is the second."""
    call = a_call(1, 8, (100, 110, 120, 180, 190), rank=0)
    late = a_call(1, 8, (150, 151, 175, 180, 190), rank=1)
    waits = [a_round(1, 8, (115, 120, 170, 178), 1)]
    found = found_in(
        [
            write(tmp_path / "rank1.json", "rank", [call], rank=1, job="job"),
            write(tmp_path / "rank2.json", "rank", [late], rank=2, job="job"),
            write(tmp_path / "reducer.json", "reducer", waits, address="a:1"),
        ]
    )
    assert [one.name for one in found.late] == ["rank 2"]
    assert found.ranks[0].awaited_us == {"rank 2": 50}


def test_what_strangers_name_is_text(by_hand, tmp_path):
    for path in by_hand:
        told = json.loads(path.read_text())
        for event in told:
            its = event.get("args", {})
            its |= {name: HOSTILE for name in ("job", "address", "host") if name in its}
        path.write_text(json.dumps(told))
    report(by_hand, tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert page.tags.isdisjoint({"img", "script"})
    assert f"Timelines of {SHOWN}" in page.text
    assert page.row(f"{SHOWN} (one.json)")[1] == "2"
    assert f"host {SHOWN}: its clock is" in page.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("bytes", "many"), ("dur", None), ("rank", [1]), ("alone_us", float("nan")), ("job", None)],
)
def test_a_damaged_file_is_refused(by_hand, name, value):
    for path in by_hand:
        told = json.loads(path.read_text())
        for event in told:
            if event["ph"] == "X" and value is None:
                (event.get("args", {}) if name != "dur" else event).pop(name, None)
            elif event["ph"] == "X" and name in event.get("args", {}):
                event["args"][name] = value
        path.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"is no timeline of a rank or reducer|is damaged"):
        found_in(by_hand)


def test_what_cannot_be_done_is_said(by_hand, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"a name that ends in \.html"):
        report(by_hand, tmp_path / "report.png")
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        report(by_hand, tmp_path / "none" / "report.html")
    nothing = write(tmp_path / "rank9.json", "rank", [], rank=9, job="job")
    with pytest.raises(ConfigError, match="there is no all-reduce in these timelines"):
        report([nothing], tmp_path / "report.html")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        report(by_hand, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


# -- of a job --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def a_job(tmp_path_factory):
    """The timelines of two ranks, of which rank 1 is late, and of their two reducers."""
    folder = tmp_path_factory.mktemp("timelines")

    def step(client):
        for size in (1000, 1_000_000) * 4:
            time.sleep(LATE_S * (client.rank == 1))
            works = [client.all_reduce(np.ones(size + more, np.float32)) for more in (0, 8)]
            for work in works:
                work.wait(20)

    with (
        pytest.MonkeyPatch.context() as patch,
        reducer_here(timeline=folder) as one,
        reducer_here(timeline=folder) as other,
    ):
        patch.setenv("REDUCTION_TIMELINE", str(folder))
        with joined(2, servers=[one.address, other.address], job="shown", timeout=20) as clients:
            at_all(clients, step)
    return folder


def states_at(events, instants_us):
    """What the first of the all-reduces in progress does, at each instant, by brute force."""
    wholes, parts = [], defaultdict(list)
    for event in events:
        if "sequence" in event.get("args", {}):
            wholes.append(event)
        elif "args" not in event:
            parts[id(wholes[-1])].append(event)
    found = np.full(len(instants_us), "no all-reduce", dtype=object)
    for whole in sorted(wholes, key=lambda one: one["ts"], reverse=True):  # the first one last
        for part in parts[id(whole)]:
            inside = (part["ts"] <= instants_us) & (instants_us < part["ts"] + part["dur"])
            found[inside] = part["name"]
    return found


@pytest.fixture(scope="module")
def merged(a_job, tmp_path_factory):
    """What each process of the job shows, on one clock: slices, by the process's name."""
    path = tmp_path_factory.mktemp("merged") / "merged.json"
    merge([a_job], path)
    slices, called = defaultdict(list), {}
    for event in json.loads(path.read_text()):
        if event["name"] == "process_name":
            called[event["pid"]] = event["args"]["name"].partition(" of")[0]
        elif event["ph"] == "X":
            slices[called[event["pid"]]].append(event)
    return slices


@pytest.fixture(scope="module")
def calls(merged):
    """The all-reduces of all ranks."""
    slices = (one for name in ("rank 0", "rank 1") for one in merged[name])
    return [one for one in slices if "args" in one]


@pytest.fixture(scope="module")
def instants(calls):
    """Microseconds, evenly spread from the first call to the last end."""
    end = max(one["ts"] + one["dur"] for one in calls)
    return np.linspace(min(one["ts"] for one in calls), end, 200_000, endpoint=False)


def covered(slices, instants):
    """Whether any slice covers each instant."""
    found = np.zeros(len(instants), bool)
    for one in slices:
        found |= (one["ts"] <= instants) & (instants < one["ts"] + one["dur"])
    return found


def test_ranks_of_a_job_did_what_their_slices_show_at_each_instant(a_job, merged, instants):
    found = found_in([a_job])
    assert [one.name for one in found.ranks] == ["rank 0", "rank 1"]
    for rank in found.ranks:
        states = states_at(merged[rank.name], instants)
        waited_us = rank.spent_us["waited for a rank"] + rank.spent_us["waited for the sum"]
        for state, us in [*rank.spent_us.items(), ("waited", waited_us)]:
            if state == "waited" or not state.startswith("waited"):
                share = (states == state).mean()
                assert us / found.lasted_us == pytest.approx(share, abs=0.002), (rank.name, state)


def test_all_reduces_of_a_job_took_as_long_as_their_slices_are(a_job, calls):
    found = found_in([a_job])
    end = max(one["ts"] + one["dur"] for one in calls)
    assert found.lasted_us == pytest.approx(end - min(one["ts"] for one in calls), abs=0.01)
    assert sum(one.calls for one in found.sizes) == len(calls) == 32
    for its in found.sizes:
        took = [one["dur"] for one in calls if its.least <= one["args"]["bytes"] <= its.most]
        assert len(took) == its.calls
        exact = np.quantile(took, (0.5, 0.99), method="inverted_cdf")
        assert (its.median_us, its.p99_us) == pytest.approx(exact, abs=0.01)


def test_reducers_of_a_job_waited_for_its_late_rank(a_job, merged, instants):
    found = found_in([a_job])
    late = []
    for reducer in found.reducers:
        rounds, asked = [], False  # by the ranks, of each other
        for event in merged[f"reducer {reducer.name}"]:
            if "args" in event:
                asked = event["args"]["sequence"] % PLACES == 0
                rounds += [] if asked else [event]
            elif event["name"] == "waited for rank 1" and not asked:
                late.append(event)
        assert reducer.rounds == len(rounds) >= 8
        assert reducer.nbytes == sum(one["args"]["nbytes"] for one in rounds)
        share = covered(rounds, instants).mean()
        assert reducer.busy_us / found.lasted_us == pytest.approx(share, abs=0.002)
    (worst, *_) = found.late
    assert worst.name == "rank 1"
    share = covered(late, instants).mean()
    assert worst.total_us / found.lasted_us == pytest.approx(share, abs=0.002)
    # In the first step all wait for the late one with the question before it.
    assert min(worst.total_us, found.ranks[0].awaited_us["rank 1"]) >= 0.8e6 * 7 * LATE_S


def test_the_command_says_what_it_has_written(a_job, tmp_path):
    output = tmp_path / "report.html"
    run = CliRunner().invoke(cli.app, ["timeline", "report", str(a_job), "-o", str(output)])
    assert run.exit_code == 0, run.output
    assert re.search(r"report\.html: open it in a\s+browser", run.output)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.png"}


HIGHEST_CELL = "Math.max(...[...document.querySelectorAll('td')].map(cell => cell.offsetHeight))"
LINE = 20  # pixels


def test_a_browser_shows_it(a_job, tmp_path):
    report([a_job], tmp_path / "report.html")
    with browser() as launched:
        for window in ((1200, 900), PHONE):
            with opened(launched, (tmp_path / "report.html").as_uri(), window=window) as seen:
                seen.shows("h1", "Timelines of shown")
                seen.shows("li", "The others waited for rank 1 alone for ")
                assert seen.page.locator("figure svg").count() == 4
                assert seen.spare_width() >= 0
                wrapped = seen.page.evaluate(HIGHEST_CELL) >= 2 * LINE
                assert window == PHONE or not wrapped
                assert (seen.errors, seen.asked) == ([], {""})
