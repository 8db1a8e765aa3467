"""A reducer of 10,000 ranks in 256 jobs: what its HTTP port answers stays small and quick."""

import json
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from reducer.monitoring.observer import Observer, StatusInbox
from reducer.monitoring.status import MAX_RANKS
from reducer.wire.constants import MessageType
from reducer.wire.header import fingerprint
from tests.engine.words import Reducer, kinds, number
from tests.reducer.asked import ask, port_of

pytestmark = pytest.mark.extended("tests/reducer/test_http.py::test_what_a_job_does")

RANKS, JOBS = 10_000, 256
LATE = 9  # ranks that a job waits for; one more than a status tells
ROUNDS = 2 * LATE  # a wait is counted when the next one for the same rank begins
PATHS = ("/status.json", "/history.json", "/ras.json", "/metrics", "/", "/page.js")
ANSWER_S = 1.0
GROWTH_BYTES = 64 << 20
LARGEST_BYTES = 2 << 20


def filled():
    """An engine that every rank has joined, and has contributed to."""
    reducer = Reducer("compiled", memory_limit=1 << 44)
    for at in range(JOBS):
        name, ranks = f"job {at}", RANKS // JOBS + (at < RANKS % JOBS)
        peers = [b"%d of %d" % (rank, at) for rank in range(ranks)]
        for rank in range(ranks):
            said = reducer.hello(rank, peer=peers[rank], job=name, world_size=ranks)
            assert kinds(said) == [MessageType.WELCOME]
        for call in range(ROUNDS):
            for place in range(ranks):
                rank = (place + call % LATE) % ranks  # which one is last changes
                whose = {"peer": peers[rank], "job": fingerprint(name)}
                reducer.contribute(rank, number(call), **whose, at=call + 0.001 * (1 + place))
    return reducer


@contextmanager
def answering(reducer):
    """A port that tells of this engine, whose thread answers as that of a server does."""
    inbox = StatusInbox(reducer.engine, SimpleNamespace(connections=RANKS), 1)
    ended = threading.Event()

    def serve():
        while not ended.wait(0.01):
            inbox.answer()

    thread = threading.Thread(target=serve)
    observer = Observer([inbox], [thread], ended, version="1", address="a:1", incarnation="i")
    thread.start()
    with port_of(observer) as address:
        try:
            yield address
        finally:
            ended.set()
            thread.join()


def timed(port, path):
    """Return a path's answer, and the processor's time that it took at both ends, seconds."""
    time.sleep(0.25)  # until what it saw last is too old
    began = time.process_time()
    body = ask(port, path).body
    return body, time.process_time() - began


@pytest.fixture(scope="module")
def answers():
    """What every path has answered in the end, and the longest that it took."""
    before = psutil.Process().memory_info().rss
    found = {}
    with answering(filled()) as port:
        for path in PATHS * 3:
            body, seconds = timed(port, path)
            found[path] = body, max(seconds, found.get(path, (b"", 0.0))[1])
        assert psutil.Process().memory_info().rss - before < GROWTH_BYTES
    return found


def test_all_ranks_are_told(answers):
    told = json.loads(answers["/status.json"][0])
    assert told["lanes"][0]["members"] == RANKS
    assert told["jobs_total"] == len(told["jobs"]) == JOBS
    assert sum(job["present"] for job in told["jobs"]) == RANKS
    assert {len(job["costliest_ranks"]) for job in told["jobs"]} == {MAX_RANKS}
    assert json.loads(answers["/history.json"][0])["samples"]


def test_every_path_costs_less_than_a_second(answers):
    for path, (body, seconds) in answers.items():
        assert seconds < ANSWER_S, path
        assert len(body) < LARGEST_BYTES, path
