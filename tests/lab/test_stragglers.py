"""A rank that comes late and one whose link is slow: both are named, and told apart."""

import json
import subprocess
import sys
import time
from subprocess import PIPE

import pytest

from lab import Lab

pytestmark = pytest.mark.extended(
    "tests/engine/test_lateness.py",
    "tests/reducer/test_prometheus.py::test_every_metric_and_label",
)

WORKERS, REDUCERS, MBIT = 4, 2, 500.0
NAMED_S = 10.0
START_S = 30.0
QUIET_S = 12.0  # two looks of the reducers at least
PYTHON = [sys.executable, "-m"]
GET = "from urllib.request import urlopen; print(urlopen('{}').read().decode())"


class Job:
    """Ranks that make steps, and the reducers that see them."""

    def __init__(self, lab, late):
        self.workers = lab.hosts[:WORKERS]
        self.watch = lab.hosts[WORKERS]
        self.logs = []
        self.http = []
        servers = []
        for host in lab.hosts[WORKERS:]:
            serve = [*PYTHON, "reducer", "serve", "--insecure", "--bind"]
            serve += [f"tcp://{host.address}:5555", "--http", f"{host.address}:8080"]
            process = host.start(serve, stdout=PIPE, stderr=subprocess.STDOUT)
            assert process.stdout is not None
            while not process.stdout.readline().startswith("reducer ready"):
                assert process.poll() is None
            self.logs.append(process)
            servers.append(f"{host.address}:5555")
            self.http.append(f"{host.address}:8080")
        settings = {f"LATE_{rank}": f"{seconds}" for rank, seconds in late.items()}
        settings |= {"REDUCTION_SERVERS": ",".join(servers), "WORLD_SIZE": f"{WORKERS}"}
        settings |= {"REDUCTION_JOB": "steps", "OMP_NUM_THREADS": "1"}
        self.processes = [
            host.start(
                [*PYTHON, "tests.lab.straggling_rank"],
                env={**settings, "RANK": f"{rank}"},
                stdout=PIPE if rank == 1 else None,
            )
            for rank, host in enumerate(self.workers)
        ]

    def said(self, *arguments):
        """Return what Python says on a host of the pool."""
        process = self.watch.start([sys.executable, *arguments], stdout=PIPE)
        return process.communicate(timeout=START_S)[0]

    def metrics(self):
        """Return what a reducer tells Prometheus."""
        return self.said("-c", GET.format(f"http://{self.http[0]}/metrics"))

    def status(self):
        """Return what every reducer says of the job."""
        told = json.loads(self.said("-m", "reducer", "status", "--json", ",".join(self.http)))
        return [job for one in told for job in one["jobs"]]

    def begin(self):
        """Wait until the ranks make steps."""
        end = time.monotonic() + START_S
        while not any(job["costliest_ranks"] for job in self.status()):
            assert time.monotonic() < end, self.status()

    def straggler(self, until):
        """Return the first one that both reducers name."""
        while True:
            told = [job["straggler"] for job in self.status()]
            if len(told) == REDUCERS and all(told):
                assert len({(one["rank"], one["cause"]) for one in told}) == 1
                return dict(told[0])
            assert time.monotonic() < until, json.dumps(self.status())

    def stop(self):
        """End all; return what the reducers have logged."""
        for process in [*self.processes, *self.logs]:
            process.kill()
            process.wait()
        return "".join(process.stdout.read() for process in self.logs if process.stdout)


@pytest.fixture(scope="module")
def network(namespaces):
    with Lab(WORKERS + REDUCERS, MBIT) as lab:
        yield lab


def run(network, late, slow=None):
    job = Job(network, late)
    try:
        job.begin()
        if slow is not None:
            network.set_rate(slow, MBIT / 10)
    except BaseException:
        job.stop()
        raise
    return job


@pytest.mark.parametrize("cause", ["late", "slow"])
def test_it_is_named_with_the_reason(network, cause):
    late, slow = ({2: 0.03}, None) if cause == "late" else ({}, network.hosts[2])
    began = time.monotonic()
    job = run(network, late, slow)
    try:
        found = job.straggler(began + START_S + NAMED_S)
        assert (found["rank"], found["cause"]) == (2, cause), json.dumps(job.status())
        why = "it comes late" if cause == "late" else "its link is slow"
        top = job.said("-m", "reducer", "top", ",".join(job.http), "--count", "1")
        assert "job steps: the others wait for rank 2 for" in top
        assert why in top
        told = job.processes[1].stdout
        assert told is not None
        assert why in told.readline()  # what the reducers tell the ranks
        labels = f'cause="{cause}",job="steps",rank="2"'
        assert f"reducer_job_straggler_share{{{labels}}}" in job.metrics()
    finally:
        if slow is not None:
            network.set_rate(slow, MBIT)
        logged = job.stop()
    assert "job 'steps': the others wait for rank 2 for" in logged
    assert why in logged
    if cause == "late":
        assert 0.015 < found["median_s"] < 0.06


@pytest.mark.parametrize("number", range(20))
def test_nobody_is_accused_without_a_reason(network, number):
    job = run(network, {})
    try:
        end = time.monotonic() + QUIET_S
        while time.monotonic() < end:
            assert [one["straggler"] for one in job.status()] == [None] * REDUCERS, number
    finally:
        logged = job.stop()
    assert "the others wait" not in logged
