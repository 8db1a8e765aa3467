"""The Horovod interface at three real ranks: every call, every option of the optimizer, join()."""

import re

import pytest

from tests.ranks import case_names, environments, ranks, run
from tests.waits import eventually

torch = pytest.importorskip("torch", reason="needs torch")

MODULE = "tests.integration.horovod_{}"
NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Modules of cases with the numbers of ranks that run them, and the marks of these tests.
RUNS = {
    ("ops", 3): (),
    ("training", 3): (),
    ("elastic", 3): (),
    ("errors", 3): (),
    ("errors", 2): pytest.mark.extended("test_case"),
    ("cuda", 2): NEEDS_A_GPU,
}


@pytest.fixture(scope="module")
def went(request, pool):
    """What went wrong with each case of a module, at every rank."""
    module, size = request.param
    given = environments(size, pool, REDUCTION_TIMEOUT="60s")
    return run(given, "-m", "tests.integration.horovod_rank", MODULE.format(module))


@pytest.mark.parametrize(
    ("went", "case"),
    [
        pytest.param(of, case, marks=marks, id=f"{of[0]}-{of[1]}-{case}")
        for of, marks in RUNS.items()
        for case in case_names(MODULE.format(of[0]))
    ],
    indirect=["went"],
    scope="module",  # of the run, in which all its cases are
)
def test_case(went, case):
    assert [rank[case] for rank in went] == [""] * len(went)


SCRIPT = """
import time
import torch
import worker_client.horovod as hvd
hvd.init()
place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
place += [hvd.cross_rank(), hvd.cross_size()]
parameter = torch.nn.Parameter(torch.zeros(2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)])
(parameter * hvd.rank()).sum().backward()
optimizer.step()
time.sleep(1.5 * hvd.rank())  # longer than a reducer that a rank hosts outlives its work
print(*place, *parameter.tolist(), int(hvd.allreduce(torch.tensor(1), op=hvd.Sum)))
time.sleep(1.5 * (hvd.size() - hvd.rank() - 1))
"""


def run_script(given):
    """Run SCRIPT at every rank, and return what each prints; a slow one also logs who has left."""
    with ranks(given, "-c", SCRIPT) as job:
        return job.outputs()


def environment(**told):
    """Return the environment of a rank that no launcher has told anything, but for this."""
    (given,) = environments(1)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del given[name]
    return {**given, **told}


@pytest.mark.extended("tests/integration/test_embedded.py", "test_case")
def test_without_servers_every_rank_hosts_a_reducer_until_all_have_left():
    assert run_script(environments(2)) == [
        "0 2 0 2 0 1 -0.5 -0.5 2\n",
        "1 2 1 2 0 1 -0.5 -0.5 2\n",
    ]


def test_mpirun_says_who_is_who(pool):
    # As if on two hosts: what the launcher says of places goes before what is found out.
    told = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "7", "REDUCTION_SERVERS": pool[0]}
    told |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    said = run_script([environment(OMPI_COMM_WORLD_RANK=str(at), **told) for at in range(2)])
    assert said == ["0 2 0 1 0 2 -0.5 -0.5 2\n", "1 2 0 1 1 2 -0.5 -0.5 2\n"]


@pytest.mark.extended("test_servers_without_a_launcher_are_refused")
def test_without_a_launcher_the_job_is_of_one():
    assert run_script([environment()]) == ["0 1 0 1 0 1 0.0 0.0 1\n"]


def test_servers_without_a_launcher_are_refused():
    given = [environment(REDUCTION_SERVERS="127.0.0.1:1")]
    with ranks(given, "-c", "import worker_client.horovod as hvd; hvd.init()") as (rank,):
        rank.wait(100)
        assert "ConfigError: rank and world size are unknown" in rank.err


@pytest.mark.extended("test_case", "tests/integration/test_join.py")
def test_a_rank_is_killed_and_one_joins(pool):
    arguments = ["examples/horovod_elastic_digits.py", "--epochs", "12", "--pause", "0.01"]
    settings = {"REDUCTION_ON_RANK_LOST": "continue", "REDUCTION_TIMEOUT": "60s"}
    given = environments(3, pool, REDUCTION_JOB="elastic", **settings)
    newcomer = {k: v for k, v in given[0].items() if k not in {"RANK", "WORLD_SIZE"}}
    with ranks(given, *arguments) as old:
        eventually(lambda: "epoch 1" in old[0].out)
        old[1].kill()
        eventually(lambda: ", 2 ranks" in old[0].out)
        with ranks([{**newcomer, "REDUCTION_JOIN": "1"}], *arguments) as new:
            old.finish(killed=[1])
            new.finish()
            said = [old[0].out, old[2].out, new[0].out]
    ends = [re.findall(r"rank (\d) of (\d) ends with weights (\w+)", one)[0] for one in said]
    assert [end[:2] for end in ends] == [("0", "3"), ("1", "3"), ("2", "3")]
    assert len({weights for _, _, weights in ends}) == 1
    epochs = re.findall(r"epoch (\d+): loss ([0-9.]+), (\d) ranks", said[0])
    assert [int(epoch) for epoch, _, _ in epochs] == list(range(12))
    assert "".join(size for _, _, size in epochs).rstrip("3").lstrip("3").strip("2") == ""
    assert float(epochs[-1][1]) < float(epochs[0][1]) / 2


STALL = """
import sys, time, torch
import worker_client.horovod as hvd
hvd.init()
state = hvd.elastic.ObjectState(step=0, total=0)

@hvd.elastic.run
def train(state):
    while state.step < 6:
        if hvd.rank() == 1 and state.step == 3 and not stalled:
            stalled.append(1)
            time.sleep(3.5)
        state.total += int(hvd.allreduce(torch.tensor(state.step), op=hvd.Sum))
        state.step += 1
        if state.step % 2 == 0:
            state.commit()

stalled = []
train(state)
print(state.step, state.total, len(stalled))
hvd.shutdown()
"""


@pytest.mark.extended("test_case", "tests/integration/test_join.py")
def test_a_rank_that_is_stopped_for_longer_than_the_timeout_is_waited_for(pool):
    settings = {"REDUCTION_ON_RANK_LOST": "continue", "REDUCTION_TIMEOUT": "1500ms"}
    with ranks(environments(2, pool, REDUCTION_JOB="stall", **settings), "-c", STALL) as job:
        assert job.outputs() == ["6 30 0\n", "6 30 1\n"]
        assert "going on from the last commit, after this error" in job[0].err
