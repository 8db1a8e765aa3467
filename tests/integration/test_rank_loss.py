"""A rank that is killed or stops is named by every other one, in time; the job can start again."""

import json
import re
import signal
import socket
import time
from contextlib import contextmanager

import pytest

from harness import pool
from tests.conftest import local_pool
from tests.integration import restarted_training
from tests.ranks import Loopback, environments, ranks
from tests.waits import within_s
from torture import rank_loss
from torture.fault_job import Job
from worker_client.commands.demo.ranks import free_port

STOPPED_S = 3.0
NAMED_S = 3.0  # a process that stops breaks no connection: first its heartbeats have to be missed


def show(found):
    print(f"\n{found}")  # noqa: T201 (with -s)


# -- a rank is killed -----------------------------------------------------------------------------


@pytest.mark.extended_cases("20")
@pytest.mark.parametrize(("tries", "jobs"), [(4, 2), (20, 4)])
def test_a_killed_rank_is_named_in_time_and_leaves_nothing_behind(tries, jobs):
    found = rank_loss.measure(tries=tries, workers=4, reducers=2, jobs=jobs)
    show(found)
    assert found.misnamed == []
    assert len(found.seconds) == tries
    assert found.p99_s <= rank_loss.BOUND_S
    assert found.kept <= rank_loss.SLACK_BYTES


@pytest.mark.extended("test_a_killed_rank_is_named_in_time_and_leaves_nothing_behind[4-2]")
def test_a_killed_rank_that_hosts_a_reducer_is_named_in_time(monkeypatch):
    pytest.importorskip("torch", reason="needs torch")
    monkeypatch.setattr(rank_loss.Lab, "loopback", Loopback)  # torch is imported there already
    found = rank_loss.measure(tries=1, workers=4, reducers=0)
    show(found)
    assert found.misnamed == []
    assert found.p99_s <= rank_loss.BOUND_S


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (rank_loss.Found([1.0] * 20, [], [10], [10]), 0),
        (rank_loss.Found([1.0] * 19 + [9.0], [], [10], [10]), 1),
        (rank_loss.Found([1.0] * 20, ["rank 0 said something else"], [10], [10]), 1),
        (rank_loss.Found([1.0] * 20, [], [10], [11 + rank_loss.SLACK_BYTES]), 1),
    ],
    ids=["good", "late", "misnamed", "grown"],
)
def test_the_command_fails_if_something_is_wrong(found, code, monkeypatch, capsys):
    monkeypatch.setattr(rank_loss, "measure", lambda *_: found)
    with pytest.raises(SystemExit) as ended:
        rank_loss.main(tries=20)
    assert ended.value.code == code
    said = capsys.readouterr().out
    assert "20 tries" in said
    assert all(text in said for text in found.misnamed)


# -- a rank stops, and goes on --------------------------------------------------------------------


@pytest.fixture
def job():
    """Four ranks and two reducers."""
    with Loopback(6) as lab:
        servers = [reducer.address for reducer in pool.start(lab.hosts[4:])]
        with Job(lab, lab.hosts[:4], servers) as started:
            yield started


@contextmanager
def stopped(job, rank):
    """A rank that does not run for three seconds, and from when on."""
    start, process = time.monotonic(), job.ranks[rank]
    process.signal(signal.SIGSTOP)
    try:
        yield start
        time.sleep(max(0.0, start + STOPPED_S - time.monotonic()))
    finally:
        process.signal(signal.SIGCONT)


def test_a_rank_that_stops_for_seconds_is_fenced(job):
    job.begin(rank_loss.ELEMENTS)
    assert job.wait_for_steps(3, 10)
    others = [0, 1, 3]
    with stopped(job, 2) as start:
        assert job.wait_for_failure(NAMED_S + 1, others), job.told
        for told in (job.told[rank] for rank in others):
            assert (told.failure.error, told.failure.rank) == ("RankLostError", 2)
            assert f"rank 2 on {socket.gethostname()}" in told.failure.text
            assert re.search(r"no heartbeat for [12]\.\d s", told.failure.text)
        named = max(job.told[rank].failure.at for rank in others) - start
        assert named <= NAMED_S
    goes_on = time.monotonic()
    assert job.wait_for_end(5), [told.failure for told in job.told]
    fenced = job.told[2].failure
    assert (fenced.error, fenced.rank) == ("RankLostError", 2)
    assert re.search(r"this process, did not run for \d\.\d s.*set REDUCTION_PATIENCE", fenced.text)
    show(
        f"named after {named:.3f} s; {fenced.at - goes_on:.3f} s after it went on, the rank that "
        f"had stopped got {fenced.error}: {fenced.text}"
    )
    # Its last contribution was of a round that is over: it may not get into a later one.
    assert all(step.wrong == 0 for told in job.told for step in told.steps)
    begun = time.monotonic()
    job.begin(rank_loss.ELEMENTS, count=20)
    within_s(10, begun)
    assert job.wait_for_end(10)
    assert [told.failure for told in job.told] == [None] * 4
    assert [sum(step.wrong == 0 for step in told.steps) for told in job.told] == [20] * 4


@pytest.mark.extended("test_a_rank_that_stops_for_seconds_is_fenced")
def test_a_rank_that_stops_does_not_disturb_the_next_generation(job):
    job.begin(rank_loss.ELEMENTS)
    assert job.wait_for_steps(3, 10)
    late = job.ranks[2]
    with stopped(job, 2):
        assert job.wait_for_end(NAMED_S + 2, [0, 1, 3]), job.told
        job.ranks[2] = job.spare(2)  # as a launcher would, which takes the stopped one for dead
        job.begin(rank_loss.ELEMENTS)
        assert job.wait_for_steps(3, 10)
        before = job.done
    try:
        assert job.wait(lambda: late.told.over, 5), late.told
        assert late.told.failure is not None
        show(f"the rank that had stopped got {late.told.failure.error}: {late.told.failure.text}")
        assert job.wait_for_steps(before + 20, 10)
        assert [told.failure for told in job.told] == [None] * 4
        assert all(step.wrong == 0 for told in job.told for step in told.steps)
    finally:
        late.end()


# -- a launcher starts the job again --------------------------------------------------------------


def facts(folder):
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.extended("test_a_killed_rank_is_named_in_time_and_leaves_nothing_behind[4-2]")
def test_torchrun_starts_a_job_again_on_the_same_pool(tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    whole.mkdir()
    disturbed.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--master-port", str(free_port())]
    torchrun += ["--max-restarts", "2", "--nproc-per-node", "3"]
    torchrun += [restarted_training.__file__, disturbed]
    with local_pool(2) as servers:
        given = environments(1, servers, KILL_IN_STEP="6")
        with ranks(given, *torchrun, fresh=True) as launcher:
            launcher.finish()
        given = environments(3, servers, REDUCTION_JOB="whole")
        with ranks(given, restarted_training.__file__, whole) as job:
            job.finish()
    for before, after in zip(facts(whole), facts(disturbed), strict=True):
        assert (before["restarts"], before["generation"], before["first"]) == (0, 0, 0)
        assert (after["restarts"], after["generation"], after["first"]) == (1, 1, 4)
        assert after["bytes_reduced"] == 8 * 4 * restarted_training.SIZE  # from the checkpoint on
        assert after["weights"] == before["weights"]
