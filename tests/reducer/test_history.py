"""What a reducer remembers of the last ten minutes, and how `/history.json` tells it."""

import json
import logging
import threading
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from reducer.engine.lateness import BUCKETS, RankWaits, Waits
from reducer.engine.traffic import Traffic
from reducer.monitoring import history, status
from reducer.monitoring.history import History
from reducer.monitoring.observer import Observer
from reducer.monitoring.strips import MAX_ROWS, MAX_STRIPS, Strips
from tests.commands import serving
from tests.reducer.asked import ask
from tests.waits import eventually
from worker_client.client.bootstrap import connect

pytestmark = pytest.mark.usefixtures("no_settings")

LOG = logging.getLogger("reducer.test")


class FakeObserver:
    """Counts how often it is asked; one of its threads may be silent."""

    incarnation = "i"

    def __init__(self):
        self.asked = 0
        self.silent = False
        self.uptime_s = 0.0

    def status(self):
        self.asked += 1
        self.uptime_s += 5.0
        memory = status.Memory(1000, 100, self.asked)
        counters = {"bytes_in": 10 * self.asked, "bytes_out": 20 * self.asked}
        lane = status.LaneStatus(1, not self.silent, 1, 0, memory, counters)
        state = "serving"
        return status.ReducerStatus(
            "1", "i", "a:1", state, self.uptime_s, memory, counters, (), 0, (lane,)
        )


@pytest.fixture
def kept():
    """One that keeps events, and has the sample of its beginning."""
    kept = History(FakeObserver())
    with kept.kept():
        eventually(lambda: bool(kept.told().samples))
        yield kept


def texts(kept):
    return [event.text for event in kept.told().events]


def test_samples_are_taken_all_the_time_and_are_bounded(monkeypatch):
    monkeypatch.setattr(history, "SAMPLE_S", 0.0)
    observer = FakeObserver()
    kept = History(observer)
    with kept.kept():
        eventually(lambda: observer.asked > 2 * history.MAX_SAMPLES)
    found, last = kept.told().samples, observer.asked
    assert len(found) == history.MAX_SAMPLES
    assert found[-1].uptime_s - found[0].uptime_s == 600.0  # ten minutes
    assert found[-1] == history.Sample(5.0 * last, 10 * last, 20 * last, last)


def test_what_a_silent_thread_has_done_is_no_fall(monkeypatch):
    monkeypatch.setattr(history, "SAMPLE_S", 0.0)
    observer = FakeObserver()
    observer.silent = True
    kept = History(observer)
    with kept.kept():
        eventually(lambda: observer.asked > 10)
        assert kept.told().samples == ()
        observer.silent = False
        eventually(lambda: bool(kept.told().samples))


def test_events_are_about_jobs_or_warn_and_the_latest_are_kept(kept):
    LOG.info("of no interest")
    LOG.info("job %r: rank %d left", "a", 3, extra={"job": "a", "rank": 3})
    LOG.warning("look out")
    LOG.error("it is over")
    LOG.debug("a detail of a job", extra={"job": "a"})
    logging.getLogger("other").warning("another program's")
    told = [(e.level, e.text, e.job, e.rank) for e in kept.told().events]
    assert told == [
        ("info", "job 'a': rank 3 left", "a", 3),
        ("warning", "look out", "", None),
        ("error", "it is over", "", None),
    ]
    for number in range(history.MAX_EVENTS + 5):
        LOG.warning("number %d", number)
    assert texts(kept) == [f"number {number}" for number in range(5, history.MAX_EVENTS + 5)]


def left(job, rank, host="", *, last=False, done="left"):
    """Log what an engine does when a rank leaves."""
    facts = {"job": job, "rank": rank, "done": done, "last": last, "host": host}
    said = "left the job" if done == "left" else "is back"
    LOG.info("job %r: rank %d %s%s", job, rank, said, ", the last one" * last, extra=facts)


def test_what_ranks_do_one_after_another_is_one_event(kept):
    for rank in range(300):  # more than there is room for
        left("a", rank, "node-a" if rank < 200 else "node-b")
        left("b", rank % 2)  # two threads say the same
    left("a", 300, "node-b", last=True)
    assert sorted(texts(kept)) == [
        "job 'a': ranks 0-300 on node-a, node-b left the job, the last ones",
        "job 'b': ranks 0-1 left the job",
    ]
    assert {event.rank for event in kept.told().events} == {None}


def test_what_is_of_another_kind_or_later_is_another_event(kept, monkeypatch):
    left("a", 0)
    left("a", 0, done="back")
    left("a", 0)
    LOG.info("job 'a': 2 all-reduces failed", extra={"job": "a", "failed": 2})
    left("a", 1)
    monkeypatch.setattr(history, "TOGETHER_S", -1.0)
    left("a", 2)
    assert [(event.level, event.text, event.rank) for event in kept.told().events] == [
        ("info", "job 'a': rank 0 left the job", 0),
        ("info", "job 'a': rank 0 is back", 0),
        ("info", "job 'a': rank 0 left the job", 0),
        ("warning", "job 'a': 2 all-reduces failed", None),
        ("info", "job 'a': rank 1 left the job", 1),
        ("info", "job 'a': rank 2 left the job", 2),
    ]


def test_ranks_of_many_hosts_are_not_all_named(kept):
    for rank in range(5):
        left("a", rank, f"node-{rank}")
    assert texts(kept) == ["job 'a': ranks 0-4 on 5 hosts left the job"]


def strips_of(strips, at_s, *jobs):
    """Have strips take a sample of jobs, and return the cells of the first one by rank."""
    memory = status.Memory(1, 1, 1)
    strips.take(status.ReducerStatus("1", "i", "a:1", "serving", at_s, memory, {}, jobs, 1, ()), 5)
    return {one.rank: one.cells for one in strips.told[0].ranks} if strips.told else {}


def job_with(waits_s, world_size=4, absent=(), threads=1, name="a"):
    """A job; by rank, for how many seconds the others have waited since it began, late and slow."""
    none = (0,) * BUCKETS
    waits = tuple(
        RankWaits(rank, *(Waits(round(1e6 * seconds), none) for seconds in its))
        for rank, its in waits_s.items()
    )
    here = frozenset(range(world_size)) - set(absent)
    values = {"present": len(here), "ranks_present": "", "ranks_absent": ""}
    values |= {"reserved": 1, "held": 0, "rounds": 0}
    return status.JobStatus(name, 0, world_size, **values, ranks=here, waits=waits, threads=threads)


def test_a_strip_says_when_a_rank_was_late_slow_or_absent():
    strips = Strips()
    assert set(strips_of(strips, 0, job_with({1: (9.0, 0)})).values()) == {""}  # what was before
    waits = {1: (9.0, 0), 2: (0, 0)}
    for at, (late, slow, absent) in enumerate(
        [(0.09, 0, ()), (0.11, 0, ()), (0.51, 0, ()), (0.1, 0.2, ()), (0, 4.0, (3,)), (7.0, 0, ())],
        1,
    ):
        waits[1] = waits[1][0] + late, waits[1][1] + slow
        found = strips_of(strips, 5 * at, job_with(waits, absent=absent))
    assert found == {0: "......", 1: ".lLsSL", 2: "......", 3: "....a."}
    waited = {one.rank: one.waited_s for one in strips.told[0].ranks}
    assert waited == {0: 0.0, 1: 10.0, 2: 0.0, 3: 0.0}  # of 7 s, no more than the 5 that passed
    found = strips_of(strips, 45, job_with(waits))  # two samples are missing
    assert found[1] == ".lLsSL  ."
    for at in range(10, 140):
        found = strips_of(strips, 5 * at, job_with(waits))
    assert found[3] == "." * 120
    assert strips_of(strips, 5 * at + 5) == {}  # it has ended


def test_all_threads_wait_for_a_rank_at_once():
    strips = Strips()
    strips_of(strips, 0, job_with({}, threads=2))
    assert strips_of(strips, 5, job_with({1: (0.18, 0)}, threads=2))[1] == "."
    assert strips_of(strips, 10, job_with({1: (0.40, 0)}, threads=2))[1] == ".l"


def test_of_a_large_job_those_have_a_strip_for_which_the_others_waited():
    strips = Strips()
    waits = dict.fromkeys(range(100, 200), (0.0, 0.0))
    many = [job_with({}, name=f"job {number}") for number in range(100)]
    strips_of(strips, 0, job_with(waits, world_size=1000), *many)
    waits |= {rank: (1.0 + rank / 1000, 0.0) for rank in range(150, 180)}
    found = strips_of(strips, 5, job_with(waits, world_size=1000, absent=(999,)), *many)
    assert found == dict.fromkeys(range(164, 180), "L")
    assert (len(found), strips.told[0].others) == (MAX_ROWS, 984)
    assert len(strips.told) == MAX_STRIPS


class Told:
    """An inbox at which a thread tells of jobs at once."""

    port, ticked = 1, 1.0

    def __init__(self):
        self.known = ()

    def ask(self, question=None):
        del question
        asked = Future()
        memory = status.Memory(1, 1, 1)
        asked.set_result(status.LaneStatus(1, True, 1, 1, memory, {}, known=self.known))
        return asked


def test_what_a_job_did_lately_is_what_it_did_in_the_last_minute(monkeypatch):
    clock = [1000.0]
    fake = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr("reducer.monitoring.observer.time", fake)
    inbox, here = Told(), threading.main_thread()
    about = {"version": "1", "address": "a:1", "incarnation": "i"}
    observer = Observer([inbox], [here], threading.Event(), **about)

    def lately(at, name="a", **moved):
        clock[0] = 1000.0 + at
        inbox.known = (replace(job_with({}, name=name), moved=Traffic(**moved)),) if moved else ()
        jobs = observer.status().jobs
        return jobs[0].lately if jobs else None

    assert lately(0.0, bytes_in=7) is None  # nobody has asked before
    assert lately(1.0, bytes_in=17) == status.Lately(1.0, 10, 0, 0, 0.0, 0.0)
    for at in range(5, 200, 5):  # 2 all-reduces a second at first, and then 4 that take longer
        number = 2 * min(at, 100) + 4 * max(0, at - 100)
        times = {8 * 10: 2 * min(at, 100), 8 * 12: 4 * max(0, at - 100)}
        found = lately(at, bytes_in=100 * number, bytes_out=1, all_reduces=number, buckets=times)
        if at == 130:
            assert (found.seconds, found.all_reduces, found.bytes_in) == (60, 180, 18_000)
            assert found.median_s == pytest.approx(2**12 * 17 / 16 / 1e6)  # 120 of 180
    assert (found.seconds, found.all_reduces, found.bytes_out) == (60, 240, 0)
    assert found.median_s == found.p99_s
    assert lately(200, bytes_in=3).bytes_in == 3  # it began anew
    assert lately(205) is None
    assert lately(210, bytes_in=5).seconds == 60
    new = lately(212, name="of which nothing was known then", bytes_in=50)
    assert (new.seconds, new.bytes_in) == (2, 50)


def test_events_are_short_and_visible(kept, monkeypatch):
    # pytest would send what it has captured to another process, which half a character stops.
    monkeypatch.setattr(logging.getLogger("reducer"), "propagate", False)
    LOG.warning("a\x1b[31m\n\u202eb \ud800 \\n" + "x" * 1000, extra={"job": "\x1b"})
    try:
        raise ValueError("of a secret")
    except ValueError:
        LOG.exception("it failed")
    first, second = kept.told().events
    assert first.text.startswith("a\\x1b[31m\\n\\u202eb \\ud800 \\nx")
    assert len(first.text) == history.MAX_TEXT
    assert first.job == "\\x1b"
    assert second.text == "it failed (ValueError)"
    assert json.loads(history.dump(kept.told()))["events"][0]["text"] == first.text


def test_a_line_that_cannot_be_formatted_costs_its_author_nothing(kept, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("reducer"), "propagate", False)
    LOG.warning("%d", "no number")
    assert texts(kept) == []
    assert "no number" in capsys.readouterr().err


def test_events_are_kept_where_the_log_shows_none():
    logger = logging.getLogger("reducer")
    level, handlers = logger.level, list(logger.handlers)
    logger.setLevel(logging.ERROR)
    try:
        kept = History(FakeObserver())
        with kept.kept():
            LOG.info("a line", extra={"job": "a"})
        LOG.error("afterwards")
        assert texts(kept) == ["a line"]
        assert (logger.level, logger.handlers) == (logging.ERROR, handlers)
    finally:
        logger.setLevel(level)
    assert not [each for each in threading.enumerate() if each.name == "reducer-history"]


def test_the_log_shows_no_more_than_it_is_to(capfd):
    with serving("--http", 0, "--log-level", "warning") as reducer:
        with connect(servers=reducer.address, rank=0, world_size=1, job="quiet"):
            pass
        eventually(lambda: len(ask(reducer.http, "/history.json").json["events"]) == 2)
        events = ask(reducer.http, "/history.json").json["events"]
        assert [event["text"] for event in events] == [
            "job 'quiet': all 1 ranks are here",
            "job 'quiet': rank 0 left the job, the last one",
        ]
    assert "quiet" not in capfd.readouterr().err
