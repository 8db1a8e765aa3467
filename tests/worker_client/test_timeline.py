"""Timelines: what their files hold at any time, and several of them on one clock."""

import json
import logging
import math
import os
import re
import shutil
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from reducer import timeline
from reducer.errors import ConfigError, LocalProtocolError, MismatchError
from reducer.timeline import LogEvents, Timeline
from tests.conftest import joined, reducer_here
from tests.waits import eventually
from tests.worker_client.transcripts import GOLDEN
from tests.worker_client.waits import at_all
from worker_client.client.bootstrap import connect
from worker_client.commands.timeline import (
    Clock,
    Process,
    TimelineRound,
    TimelineSpan,
    align,
    described,
    merge,
)

pytestmark = pytest.mark.usefixtures("no_settings")

ABOUT = {"kind": "rank", "rank": 0, "job": "job"}


def events(path, kind="X"):
    """The events of one kind, from a file that must be whole."""
    found = json.loads(path.read_bytes())
    check_nesting(found)
    return [event for event in found if event["ph"] == kind]


def check_nesting(events):
    """Look at a timeline as a viewer does: of a thread's slices one is in another, or beside it."""
    assert {event["ph"] for event in events} <= {"M", "X", "i"}
    ends_ns = defaultdict(list)  # of the slices that are open, by thread
    slices = (event for event in events if event["ph"] == "X")
    for event in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        begin_ns, lasts_ns = round(1000 * event["ts"]), round(1000 * event["dur"])
        around_ns = ends_ns[event["pid"], event["tid"]]
        while around_ns and around_ns[-1] <= begin_ns:
            around_ns.pop()
        assert 0 <= lasts_ns <= (around_ns[-1] if around_ns else math.inf) - begin_ns
        around_ns.append(begin_ns + lasts_ns)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "file.json"


@pytest.fixture
def lines(path, monkeypatch):
    monkeypatch.setattr(timeline, "FLUSH_S", 0.01)
    made = Timeline(path, "a process", ABOUT, most_bytes=20_000)
    yield made
    made.close()


def test_the_file_is_whole_at_any_time(lines, path):
    assert events(path, "i")[0]["args"]["rank"] == 0
    for number in range(50):
        lines.slice("track", f"slice {number}", (number, number + 0.5), {})
        events(path)
    eventually(lambda: len(events(path)) == 50)
    assert [event["name"] for event in events(path)] == [f"slice {at}" for at in range(50)]
    assert {event["dur"] for event in events(path)} == {500_000.0}


def test_what_overlaps_is_in_lanes_of_its_own(lines, path):
    parts = (("first", 0.0, 2.0), ("second", 2.0, 3.0))
    lines.slice("track", "short", (1.0, 2.0), {})
    lines.slice("track", "long", (0.0, 3.0), {}, parts)
    lines.slice("track", "after both", (3.0, 4.0), {})
    lines.slice("other", "elsewhere", (0.0, 9.0), {})
    lines.close()
    named = (event for event in events(path, "M")[1:] if "name" in event["args"])
    names = {event["tid"]: event["args"]["name"] for event in named}
    lanes = {}
    for event in events(path):
        lanes.setdefault(names[event["tid"]], []).append(event["name"])
    assert lanes == {
        "track": ["short", "after both"],
        "track 2": ["long", "first", "second"],
        "other": ["elsewhere"],
    }


def test_the_file_is_bounded(lines, path, caplog):
    for number in range(1000):
        lines.slice("track", "slice", (number, number + 1), {"text": "x" * 100})
        time.sleep(0.0001)
    lines.close()
    assert 2_000 < path.stat().st_size < 20_000 + 1_000
    assert events(path, "i")[-1]["name"] == "the file is full"
    assert "is full: what follows is left out" in caplog.text


def test_what_nobody_could_write_is_counted(path, monkeypatch):
    monkeypatch.setattr(timeline, "MOST_WAITING", 10)
    monkeypatch.setattr(timeline, "FLUSH_S", 60)
    made = Timeline(path, "a process", ABOUT)
    for number in range(25):
        made.slice("track", "slice", (number, number + 1), {})
    made.close()
    assert len(events(path)) == 10
    assert events(path, "i")[-1]["name"] == "15 events are missing"


def test_what_is_logged_is_shown_and_what_cannot_be_is_said(lines, path, capsys, monkeypatch):
    mine, handler = logging.getLogger("tests.timeline"), LogEvents(lines, logging.WARNING)
    monkeypatch.setattr(mine, "propagate", False)
    mine.addHandler(handler)
    mine.info("not this")
    mine.warning("a %s", "warning")
    mine.warning("%d", "no number")
    mine.removeHandler(handler)
    lines.close()
    told = events(path, "i")[1:]
    assert [(one["name"], one["args"]["level"]) for one in told] == [("a warning", "warning")]
    assert capsys.readouterr().err.count("Logging error") == 1


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with reducer_here() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDUCTION_TIMELINE", str(tmp_path / "file"))
        with pytest.raises(ConfigError, match="name a directory that can be written to"):
            connect(rank=0, world_size=1, servers=server.address, job="nowhere")


@pytest.fixture
def job(tmp_path):
    """Two ranks at one reducer, all of which write timelines into a directory."""
    with reducer_here(timeline=tmp_path) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDUCTION_TIMELINE", str(tmp_path))
        settings = {"job": "a/job", "timeout": 5, "cycle_time": "30s"}
        with joined(2, servers=server.address, **settings) as clients:
            yield clients, tmp_path


def ones(client, size, **how):
    client.all_reduce(np.ones(size, np.float32), **how).wait()


SHOWN = ("bytes", "dtype", "op", "rank", "tensors", "job", "error")  # of a slice's arguments


def told(path):
    """Return what a rank shows, without times; the parts of each slice are all of it."""
    tracks, lines, slices = {}, [], []
    for event in json.loads(path.read_bytes()):
        its = event.get("args", {})
        if event["name"] == "thread_name":
            tracks[event["tid"]] = its["name"].rstrip(" 0123456789")
        elif event["ph"] == "X" and its:
            its |= {"error": its["error"].partition(":")[0]} if "error" in its else {}
            said = ", ".join(f"{name} {its[name]}" for name in SHOWN if name in its)
            lines.append(f"{tracks[event['tid']]}: {event['name']}: {said}:")
            slices.append([event])
        elif event["ph"] == "X":
            lines[-1] += f" {event['name']}"
            slices[-1].append(event)
    for whole, *parts in slices:
        ends = [whole["ts"], *(part["ts"] + part["dur"] for part in parts)]
        assert [part["ts"] for part in parts] == pytest.approx(ends[:-1], abs=0.01)
        assert ends[-1] == pytest.approx(whole["ts"] + whole["dur"], abs=0.01)
    return re.sub(r" [0-9a-f]{8}:", " STATE:", "\n".join(lines) + "\n")


def test_what_a_rank_shows(job, devices):
    torch = pytest.importorskip("torch", reason="needs torch")
    clients, directory = job

    def step(client):
        for size in (1, 1000, 1_000_000):
            if client.rank == 1:
                time.sleep(0.05)
            ones(client, size)
        works = [client.all_reduce(np.ones(9), "sum", name=f"t{at}") for at in range(3)]
        for work in works:
            work.wait()
        client.all_reduce(torch.ones(100)).wait()
        with pytest.raises(MismatchError):
            client.all_reduce(np.ones(1 + client.rank, np.uint8), "max").wait()

    at_all(clients, step)
    for client in clients:
        client.stop_timeline()
    paths = [directory / f"a%2Fjob-rank{rank}.json" for rank in range(2)]
    shown = "".join(f"-- rank {at}\n{told(path)}" for at, path in enumerate(paths))
    assert shown == (GOLDEN / "timeline.txt").read_text()
    waited = [event["dur"] for event in events(paths[0]) if event["name"] == "waited"]
    assert max(waited) >= 25_000, "the other one kept it waiting"


def test_a_reducer_shows_whom_it_waited_for(job):
    clients, directory = job

    def step(client):
        for _ in range(3):
            if client.rank == 1:
                time.sleep(0.2)  # on a busy machine the other one comes late, too
            ones(client, 1000)

    at_all(clients, step)
    for client in clients:
        client.shutdown()
    (path,) = directory.glob("reducer-*.json")

    def shown():
        calls = [one["args"] for one in events(path) if one.get("args", {}).get("job") == "a/job"]
        return [its for its in calls if its["nbytes"] == 4000]

    eventually(lambda: len(shown()) >= 3)
    # Before the first one the ranks agree on chunks, and wait for the late rank there.
    late = [its for its in shown() if its["complete_us"] - its["alone_us"] >= 25_000]
    assert len(late) >= 2
    assert {(its["first_rank"], its["last_rank"], its["chunks"]) for its in late} == {(0, 1, 1)}
    assert [one["name"] for one in events(path)].count("waited for rank 1") >= 2


def test_what_came_before_a_timeline_is_not_on_it(tmp_path):
    with reducer_here() as server, joined(1, servers=server.address) as (client,):
        ones(client, 77)
        client.start_timeline(tmp_path / "later.json")
        ones(client, 1, name="later")
        child = os.fork()
        if child == 0:
            try:
                client.start_timeline(tmp_path / "later.json")
            except LocalProtocolError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    shown = [event["args"] for event in events(tmp_path / "later.json") if "args" in event]
    assert any(its.get("tensors") == ["later"] for its in shown)
    assert 4 * 77 not in {its.get("bytes") for its in shown}


def test_what_the_disk_has_no_room_for_is_left_out(lines, path, monkeypatch):
    lines.slice("track", "before", (0.0, 1.0), {})
    eventually(lambda: len(events(path)) == 1)
    real = os.pwrite

    def short(file, data, offset):
        return real(file, data[: len(data) // 2] if len(data) > 50 else data, offset)

    monkeypatch.setattr(os, "pwrite", short)
    lines.slice("track", "after", (1.0, 2.0), {"text": "x" * 100})
    lines.close()
    assert [event["name"] for event in events(path)] == ["before"]


def test_the_timeline_of_an_earlier_reducer_is_kept(tmp_path):
    with reducer_here(timeline=tmp_path) as server:
        address = server.address
    with reducer_here(timeline=tmp_path, bind=f"tcp://{address}"):
        assert len(list(tmp_path.glob("reducer-*.json"))) == 2


AHEAD_US = {"rank0": 0.0, "rank1": 5_000_000.0, "reducer": -1_234_567.0}


def shift(path, host):
    """Make of a file what another host would have written, whose clock is ahead."""
    found = json.loads(path.read_bytes())
    for event in found:
        its = event.get("args", {})
        if event["name"] == "begins":
            its |= {"boot": host, "host": host}
        for name in {"begun_us", "alone_us", "complete_us", "done_us"} & its.keys():
            its[name] += AHEAD_US[host]
        if event["ph"] != "M":
            event["ts"] += AHEAD_US[host]
    path.write_text(json.dumps(found))


@pytest.fixture
def files(job):
    clients, directory = job
    at_all(clients, lambda client: [ones(client, 100) for _ in range(30)])
    for client in clients:
        client.shutdown()
    (reducer,) = directory.glob("reducer-*.json")
    # Counted as bytes: whoever reads while lines are added may see a part of one.
    eventually(lambda: reducer.read_bytes().count(b'"ph":"X"') > 100)
    ranks = [directory / f"a%2Fjob-rank{rank}.json" for rank in range(2)]
    return [Path(shutil.copy(path, f"{path}.copy")) for path in (*ranks, reducer)]


def test_clocks_are_found_from_the_messages(files, tmp_path):
    for path, host in zip(files, AHEAD_US, strict=True):
        shift(path, host)
    clocks, _ = merge(files, tmp_path / "merged.json")
    assert [clock.host for clock in clocks] == ["rank0", "rank1", "reducer"]
    for clock in clocks:
        assert clock.error_us < 5000  # beside other tests
        assert clock.offset_us == pytest.approx(-AHEAD_US[clock.host], abs=clock.error_us + 0.01)
    merged = events(tmp_path / "merged.json")
    assert {event["pid"] for event in merged} == {1, 2, 3}
    assert min(event["ts"] for event in merged) >= 0
    assert max(event["ts"] for event in merged) < 60e6


def test_one_host_has_one_clock_and_what_is_merged_already_is_left_out(files):
    folder = files[0].parent
    (clock,), left_out = merge([folder], folder / "one.json")
    assert (left_out, clock.offset_us, clock.error_us) == ([], 0.0, 0.0)
    assert described(clock).endswith("its clock is the one that all times are on")
    (folder / "empty.json").write_text("")
    for output, others in (("one", []), ("two", ["one"])):  # the output is not among what is read
        _, left_out = merge([folder], folder / f"{output}.json")
        names = [str(folder / f"{name}.json") for name in ("empty", *others)]
        assert [said.partition(" is no timeline")[0] for said in left_out] == names
    assert events(folder / "one.json") == events(folder / "two.json")


def a_process(host, kind, begun_us=0.0, **about):
    about |= {"boot": host, "host": host, "kind": kind, "wall_ns": 1_000_000_000}
    return Process(None, about, [{"ph": "i", "ts": begun_us, "name": "begins"}])


def test_bounds_add_up_along_a_path():
    key = ("job", 0, 1)
    first, second = (a_process(f"rank{rank}", "rank", rank=rank) for rank in range(2))
    reducer = a_process("reducer", "reducer")
    first.spans[key] = TimelineSpan(0, 100.0, 200.0)
    second.spans[key] = TimelineSpan(1, 1110.0, 1180.0)  # its clock is 1000 ahead
    reducer.rounds[key] = TimelineRound(
        begun_us=5110.0, complete_us=5150.0, done_us=5160.0, first_rank=0
    )
    clocks = align([first, second, reducer])
    assert clocks["reducer"] == Clock("reducer", -4985.0, 25.0)  # ahead by 4960 to 5010
    # Behind the reducer by 3980 to 4040: so ahead of the first by 920 to 1030.
    assert clocks["rank1"] == Clock("rank1", -975.0, 55.0)
    assert described(clocks["rank1"]) == (
        "host rank1: its clock is 0.975 ms ahead, give or take 0.055 ms"
    )
    assert "1.500 ms behind" in described(Clock("h", 1500.0, 20.0))


def test_who_shares_no_all_reduce_is_placed_by_the_wall_clock():
    first, other = a_process("a", "rank", 500.0, rank=0), a_process("b", "rank", 700.0, rank=1)
    clock = align([first, other])["b"]
    assert clock.offset_us == -200.0
    assert "was taken from the wall clocks" in described(clock)


def test_clocks_that_contradict_each_other_are_not_believed():
    rank, reducer = a_process("rank0", "rank", rank=0), a_process("reducer", "reducer")
    for number, ahead_us in enumerate((0.0, 5000.0)):
        rank.spans["job", 0, number] = TimelineSpan(0, 100.0, 200.0)
        times = (110.0 + ahead_us, 150.0 + ahead_us, 160.0 + ahead_us)
        reducer.rounds["job", 0, number] = TimelineRound(*times, first_rank=0)
    assert "contradict each other" in described(align([rank, reducer])["reducer"])


def test_ranks_are_known_by_the_numbers_of_their_membership():
    key = ("job~2", 0, 1)  # rank 0 was lost; of ranks 1 and 2, which go on, rank 2 is the second
    rank, reducer = a_process("rank2", "rank", rank=2), a_process("reducer", "reducer")
    rank.spans[key] = TimelineSpan(1, 100.0, 1200.0)
    reducer.rounds[key] = TimelineRound(
        begun_us=110.0, complete_us=1150.0, done_us=1160.0, first_rank=1
    )
    # Ahead by 10 at most, as its contribution was the first one, and behind by 40 at most.
    assert align([rank, reducer])["reducer"] == Clock("reducer", 15.0, 25.0)


@pytest.mark.parametrize("text", ["", "{}", '[{"name": "begins", "ph": "i", "args": {}}]'])
def test_what_is_no_timeline_is_refused(tmp_path, text):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ConfigError, match="is no timeline of a rank or reducer"):
        merge([tmp_path / "file.json"], tmp_path / "merged.json")
    (tmp_path / "file.json").unlink()
    with pytest.raises(ConfigError, match="set REDUCTION_TIMELINE to a directory"):
        merge([tmp_path], tmp_path / "merged.json")
