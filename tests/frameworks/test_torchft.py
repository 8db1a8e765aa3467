"""Real torchft: its lighthouse, manager and own tests over reducers; replicas that are killed."""

import os
import re
import subprocess
import sys

import pytest

from tests.ranks import ROOT, ranks
from tests.waits import eventually

for package in ("torch", "torchft", "sklearn", "parameterized"):
    pytest.importorskip(package, reason=f"needs {package}")

coordination = pytest.importorskip("torchft.coordination")

pytestmark = pytest.mark.timeout(300)
EXAMPLE = ROOT / "examples" / "torchft_digits.py"
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
import os, pathlib, runpy, sys, time
import sklearn.datasets, worker_client.torchft
while not pathlib.Path(os.environ["GATE"]).exists():
    time.sleep(0.05)
sys.argv = ["", "--replica=" + os.environ["REPLICA"], "--steps=120"]
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


def reaches(replica, step, replicas):
    """Wait until one has said that it was in a step this late, with so many replicas."""

    def there():
        assert replica.poll() is None, replica.err
        said = re.findall(r"step (\d+): .*, (\d+) replicas", replica.out)
        return any(int(at) >= step and int(count) == replicas for at, count in said)

    eventually(there, 120)


@pytest.mark.parametrize("embedded", [False, True])
def test_a_replica_is_killed_and_comes_back(servers, tmp_path, embedded):
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=1000, heartbeat_timeout_ms=2000
    )
    environment = {**os.environ, "REDUCTION_JOB": f"torchft-{embedded}", "PYTHONPATH": str(ROOT)}
    environment["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    if not embedded:
        environment["REDUCTION_SERVERS"] = ",".join(servers)
    gates = [tmp_path / str(at) for at in range(4)]
    given = [
        {**environment, "REPLICA": replica, "GATE": str(gate)}
        for replica, gate in zip("0122", gates, strict=True)
    ]
    with ranks(given, "-c", TRAIN, fresh=True) as replicas:
        for gate in gates[:3]:
            gate.touch()
        for replica in replicas[:3]:
            reaches(replica, 20, 3)
        replicas[2].kill()
        reaches(replicas[0], 40, 2)
        gates[3].touch()
        reaches(replicas[3], 60, 3)
        replicas.finish(killed=[2])
        said = [replica.out for replica in replicas if replica is not replicas[2]]
    lighthouse.shutdown()
    assert all(reductions(one) >= 10 for one in said)
    assert len({re.findall(r"weights (\w+)", one)[0] for one in said}) == 1
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", said[0])]
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
