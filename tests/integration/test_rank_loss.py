"""A rank that is killed or stops is named by every other one, in time; the job can start again."""

import json
import re
import signal
import socket
import time

import pytest

from harness import pool
from tests.conftest import local_pool
from tests.ranks import Loopback, environments, ranks
from tests.waits import within_s
from torture import rank_loss
from torture.fault_job import Job
from worker_client.commands.demo.ranks import free_port

STOPPED_S = 3.0
NAMED_S = 3.0  # a process that stops breaks no connection: first its heartbeats have to be missed


def show(found):
    print(f"\n{found}")  # noqa: T201 (with -s)


@pytest.mark.extended_cases("20")
@pytest.mark.parametrize(("tries", "jobs"), [(4, 2), (20, 4)])
def test_a_killed_rank_is_named_in_time_and_leaves_nothing_behind(tries, jobs):
    found = rank_loss.measure(tries=tries, workers=4, reducers=2, jobs=jobs)
    show(found)
    assert found.misnamed == []
    assert len(found.seconds) == tries
    assert found.p99_s <= rank_loss.BOUND_S
    assert found.kept <= rank_loss.SLACK_BYTES


def test_which_tries_are_good():
    seconds, grown = [1.0] * 20, [11 + rank_loss.SLACK_BYTES]
    assert rank_loss.Found(seconds, [], [10], [10]).good
    assert not rank_loss.Found([*seconds[1:], 9.0], [], [10], [10]).good
    assert not rank_loss.Found(seconds, ["rank 0 said something else"], [10], [10]).good
    assert not rank_loss.Found(seconds, [], [10], grown).good


@pytest.fixture
def job():
    """Four ranks and two reducers."""
    with Loopback(6) as lab:
        servers = [reducer.address for reducer in pool.start(lab.hosts[4:])]
        with Job(lab, lab.hosts[:4], servers) as started:
            yield started


def test_a_rank_that_stops_for_seconds_is_fenced(job):
    job.begin(rank_loss.ELEMENTS)
    assert job.wait_for_steps(3, 10)
    others = [0, 1, 3]
    start = time.monotonic()
    job.ranks[2].signal(signal.SIGSTOP)
    assert job.wait_for_failure(NAMED_S + 1, others), job.told
    for told in (job.told[rank] for rank in others):
        assert (told.failure.error, told.failure.rank) == ("RankLostError", 2)
        assert f"rank 2 on {socket.gethostname()}" in told.failure.text
        assert re.search(r"no heartbeat for [12]\.\d s", told.failure.text)
    assert max(job.told[rank].failure.at for rank in others) - start <= NAMED_S
    time.sleep(max(0.0, start + STOPPED_S - time.monotonic()))
    job.ranks[2].signal(signal.SIGCONT)
    assert job.wait_for_end(5), [told.failure for told in job.told]
    fenced = job.told[2].failure
    assert (fenced.error, fenced.rank) == ("RankLostError", 2)
    assert re.search(r"this process, did not run for \d\.\d s.*set REDUCTION_PATIENCE", fenced.text)
    # Its last contribution was of a round that is over: it may not get into a later one.
    assert all(step.wrong == 0 for told in job.told for step in told.steps)
    begun = time.monotonic()
    job.begin(rank_loss.ELEMENTS, count=20)
    within_s(10, begun)
    assert job.wait_for_end(10)
    assert [told.failure for told in job.told] == [None] * 4
    assert [sum(step.wrong == 0 for step in told.steps) for told in job.told] == [20] * 4


TRAINING = """
import json, os, signal, sys
from pathlib import Path
import numpy as np, worker_client
folder, client = Path(sys.argv[1]), worker_client.init()
restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
checkpoint, first, weights = folder / "checkpoint.npz", 0, np.zeros(50_000, np.float32)
if checkpoint.exists():
    saved = np.load(checkpoint)
    weights, first = saved["weights"], int(saved["step"])
for step in range(first, 12):
    x = np.random.default_rng([step, client.rank]).standard_normal(50_000, np.float32)
    gradient = weights - x
    work = client.all_reduce(gradient, name="gradient")
    if (client.rank, step, restarts) == (2, 6, "0") and "KILLED" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    work.wait()
    weights = weights - np.float32(0.05) * gradient
    if client.rank == 0 and step % 4 == 3:
        np.savez(folder / "new.npz", weights=weights, step=step + 1)
        (folder / "new.npz").rename(checkpoint)
facts = [restarts, client.spec.generation, first, weights.tobytes().hex()]
(folder / f"rank{client.rank}.json").write_text(json.dumps(facts))
"""


@pytest.mark.extended("test_a_killed_rank_is_named_in_time_and_leaves_nothing_behind[4-2]")
def test_torchrun_starts_a_job_again_on_the_same_pool(tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    script, whole, disturbed = (tmp_path / name for name in ("train.py", "whole", "disturbed"))
    script.write_text(TRAINING)
    whole.mkdir()
    disturbed.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--master-port", str(free_port())]
    torchrun += ["--max-restarts", "2", "--nproc-per-node", "3", script, disturbed]
    with local_pool(2) as servers:
        with ranks(environments(1, servers, KILLED=""), *torchrun, fresh=True) as launcher:
            launcher.finish()
        with ranks(environments(3, servers, REDUCTION_JOB="whole"), script, whole) as job:
            job.finish()
    for rank in range(3):
        before, after = (
            json.loads((folder / f"rank{rank}.json").read_text()) for folder in (whole, disturbed)
        )
        assert before == ["0", 0, 0, after[-1]]
        assert after[:-1] == ["1", 1, 4], "from the checkpoint on"
