"""Real torchft: its lighthouse, manager and own tests over reducers; replicas that are killed."""

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

for package in ("torch", "torchft", "sklearn", "parameterized"):
    pytest.importorskip(package, reason=f"needs {package}")

coordination = pytest.importorskip("torchft.coordination")

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "torchft_digits.py"
STEPS = 120
# torchft's own test modules: how many tests of each are skipped, as they need a GPU or torchcomms,
# and how many fail.
THEIRS = {
    "torchft.manager_integ_test": (3, 0),
    "torchft.local_sgd_integ_test": (0, 0),
    "torchft.process_group_test.NormalGlooMultiPgTest": (0, 2),
}
# They look for Gloo's words in the error where a replica has gone; ours are "rank 2 left the job".
WORDS = re.compile(r"test_collective_with_resiliency_\d+_allreduce(_coalesced)?")
# Says at the end how many reductions went to reducers.
COUNTED = """
import atexit
from worker_client.torch_backend import ReductionGroup

def counted(group, *arguments, reduce=ReductionGroup._reduce):
    calls.append(1)
    return reduce(group, *arguments)

calls = []
ReductionGroup._reduce = counted
atexit.register(lambda: print(f"reduced {len(calls)} times"))
"""
# Imports take a process seconds, in which the others could end: they are done before it is let in.
TRAIN = f"""{COUNTED}
import os, pathlib, runpy, time
import sklearn.datasets, worker_client.torchft
while not pathlib.Path(os.environ["GATE"]).exists():
    time.sleep(0.05)
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""
# Runs some of torchft's tests with our process group in the place of theirs.
INSTEAD = f"""{COUNTED}
import importlib, sys, unittest
from worker_client.torchft import ProcessGroupReduction
for name in ("manager_integ_test", "local_sgd_integ_test", "process_group_test"):
    module = importlib.import_module("torchft." + name)
    module.ProcessGroupGloo = ProcessGroupReduction
unittest.main(module=None, argv=["tests", *sys.argv[1:]], verbosity=2)
"""


def reductions(said):
    return int(re.findall(r"reduced (\d+) times", said)[0])


class Replica:
    """A process that trains, and what it has said so far."""

    def __init__(self, number, environment, stack):
        command = [sys.executable, "-c", TRAIN, f"--replica={number}", f"--steps={STEPS}"]
        self._path = Path(environment["SAID"]) / f"{number}-{time.monotonic_ns()}"
        self._gate = self._path.with_suffix(".gate")
        environment = {**environment, "GATE": str(self._gate)}
        with self._path.open("w") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT
            )
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)

    @property
    def said(self):
        return self._path.read_text()

    def let_in(self):
        self._gate.touch()

    def reaches(self, step, replicas):
        """Wait until it has said that it was in a step this late, with so many replicas."""
        deadline = time.monotonic() + 120
        while not any(
            int(at) >= step and int(there) == replicas
            for at, there in re.findall(r"step (\d+): .*, (\d+) replicas", self.said)
        ):
            assert time.monotonic() < deadline, self.said[-5000:]
            assert self.process.poll() is None, self.said[-5000:]
            time.sleep(0.1)

    def weights(self):
        assert self.process.wait(120) == 0, self.said[-5000:]
        assert reductions(self.said) >= 10
        return re.findall(r"weights (\w+)", self.said)[0]


@pytest.fixture(params=["pool", "embedded"])
def environment(request, servers, tmp_path):
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=1000, heartbeat_timeout_ms=2000
    )
    there = {"REDUCTION_SERVERS": ",".join(servers)} if request.param == "pool" else {}
    yield {
        **os.environ,
        **there,
        "TORCHFT_LIGHTHOUSE": lighthouse.address(),
        "REDUCTION_JOB": f"torchft-{request.param}",
        "SAID": str(tmp_path),
    }
    lighthouse.shutdown()


def test_a_replica_is_killed_and_comes_back(environment):
    with ExitStack() as stack:
        first, second, third = (Replica(number, environment, stack) for number in range(3))
        again = Replica(2, environment, stack)
        for replica in (first, second, third):
            replica.let_in()
        for replica in (first, second, third):
            replica.reaches(20, 3)
        third.process.kill()
        first.reaches(40, 2)
        third = again
        third.let_in()
        third.reaches(60, 3)
        assert first.weights() == second.weights() == third.weights()
        losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", first.said)]
        assert losses[-1] < losses[0] / 2


def run_theirs(servers, *names):
    environment = {**os.environ, "REDUCTION_SERVERS": ",".join(servers), "REDUCTION_JOB": "theirs"}
    command = [sys.executable, "-c", INSTEAD, *names]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("theirs", THEIRS)
def test_its_own_tests_pass_over_reducers(theirs, servers):
    done = run_theirs(servers, theirs)
    skipped = re.findall(r"skipped=(\d+)", done.stderr)
    failed = re.findall(r"^(?:FAIL|ERROR): (\w+)", done.stderr, re.MULTILINE)
    by_words = [name for name in failed if WORDS.fullmatch(name)]
    assert (int((skipped or ["0"])[0]), len(by_words)) == THEIRS[theirs], done.stderr[-5000:]
    assert done.stderr.count('does not match "rank 2 left the job"') == len(by_words)
    assert reductions(done.stdout) >= 10
    # Their quorums have ten seconds, which is little beside other tests: each again by itself.
    for name in set(failed) - set(by_words):
        again = run_theirs(servers, "-k", name, theirs)
        assert again.returncode == 0, again.stderr[-5000:]
