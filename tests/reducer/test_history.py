"""What a reducer remembers of the last ten minutes, and how `/history.json` tells it."""

import json
import logging
import threading

import pytest

from reducer.monitoring import history, status
from reducer.monitoring.history import History
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
