"""The timelines of a real job in which a reducer is killed, on one clock."""

import json
import signal
import time
from collections import Counter, defaultdict

import pytest

from tests.commands import serving
from tests.ranks import environments, ranks
from tests.worker_client.test_timeline import check_nesting
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


@pytest.mark.extended("tests/worker_client/test_timeline.py")
def test_all_processes_of_a_job_show_what_they_did(tmp_path):
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
    events = json.loads(output.read_bytes())
    check_nesting(events)
    found = defaultdict(Counter)
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    for event in events:
        found[names[event["pid"]]][event["name"]] += 1
    assert len(found) == SIZE + 2
    for rank in range(SIZE):
        shown = found[f"rank {rank} of {SIZE}, shown"]
        assert shown["received"] > 4 * 50
        assert shown["negotiated"] >= 50
        assert any(second.address in name and "going on without it" in name for name in shown)
    for address in (first.address, second.address):
        shown = found[f"reducer {address}"]
        assert shown["gathered"] == shown["summed"] > 50
        assert any(name.startswith("waited for rank ") for name in shown)
