"""The timelines of a real job in which a reducer is killed, as Perfetto sees it."""

import signal
import time

import pytest

from tests.commands import serving
from tests.integration import perfetto
from tests.ranks import environments, ranks
from worker_client.commands.timeline import merge

SIZE = 4
STEPS = """
import numpy as np
import worker_client

client = worker_client.init()
buffers = [np.ones(size, np.float32) for size in (100, 100_000, 1_000_000)]
while True:
    works = [client.all_reduce(buffer) for buffer in buffers]
    works += [client.all_reduce(buffers[0], name="a tensor")]
    for work in works:
        work.wait()
    print("step", flush=True)
"""
PARTS = """
select whole.id, whole.dur as whole, sum(part.dur) as parts
from slice whole join slice part on part.parent_id = whole.id
where whole.depth = 0 group by whole.id
"""
BY_PROCESS = """
select process.name as process, slice.name as name, count(*) as number
from slice join thread_track on track_id = thread_track.id
join thread using (utid) join process using (upid) group by 1, 2
"""


@pytest.mark.extended("tests/worker_client/test_timeline.py")
@pytest.mark.skipif(not perfetto.BROWSER, reason="needs chromium: make test-tools")
def test_perfetto_opens_the_timelines_of_a_job(tmp_path):
    told = {"REDUCTION_TIMELINE": str(tmp_path), "REDUCTION_JOB": "shown"}
    with serving("--timeline", tmp_path) as first, serving("--timeline", tmp_path) as second:
        given = environments(SIZE, [first.address, second.address], **told)
        with ranks(given, "-c", STEPS, talk=True) as job:
            for rank in job:
                for _ in range(30):
                    assert rank.stdout.readline() == "step\n"
            time.sleep(0.6)  # by then the reducer has written what it did
            second.process.kill()
            time.sleep(1.5)  # by then all ranks have gone on without it
            for rank in job:
                rank.send_signal(signal.SIGINT)
            for rank in job:
                rank.stdout.read()
                rank.wait()
            first.process.send_signal(signal.SIGINT)
            first.process.wait()
    output = tmp_path / "timeline.json"
    (clock,), _ = merge([tmp_path], output)
    assert clock.error_us <= 1000
    with perfetto.trace_processor(output) as trace:
        assert trace.query("select * from stats where severity != 'info' and value > 0") == []
        sums = trace.query(PARTS)
        assert len(sums) > SIZE * 4 * 50
        assert all(abs(one["parts"] - one["whole"]) <= 0.05 * one["whole"] for one in sums)
        found = {}
        for row in trace.query(BY_PROCESS):
            found.setdefault(row["process"], {})[row["name"]] = row["number"]
    check(found, first.address, second.address)


def check(found, alive, killed):
    """See whether each process has shown what it did."""
    assert len(found) == SIZE + 2
    for rank in range(SIZE):
        shown = found[f"rank {rank} of {SIZE}, shown"]
        assert shown["received"] > 4 * 50
        assert shown["negotiated"] >= 50
        assert any(killed in name and "going on without it" in name for name in shown)
    for address in (alive, killed):
        shown = found[f"reducer {address}"]
        assert shown["gathered"] == shown["summed"] > 50
        assert any(name.startswith("waited for rank ") for name in shown)
