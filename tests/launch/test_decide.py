"""What `launch` turns into, by who the process is and what was asked for."""

import sys

import pytest

from reducer.errors import ConfigError
from tests.launch.environments import LAUNCHERS, TABLE, variables, vertex
from worker_client.launch import decide, resolve

WORDS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
    "python": (sys.executable,),
    "SCRIPT": ("train.py", "--epochs", "5"),
}
ENV, MPICH, OPEN_MPI, SLURM = (LAUNCHERS[name] for name in ("env", "mpich", "open_mpi", "slurm"))


def plan(environment, script="SCRIPT", processes="auto", gpus=0):
    """Decide as the command does, on a machine with some GPUs."""
    resolved, script = resolve(environment), words(script)
    return decide(resolved, environment, script, processes=processes, devices=lambda: gpus)


def words(line):
    return [word for name in line.split() for word in WORDS.get(name, (name,))]


@pytest.mark.parametrize(("given", "asked", "runs", "sets"), TABLE["decided"])
def test_what_it_turns_into(given, asked, runs, sets):
    found = plan(variables(given), **asked)
    line = words(runs.removesuffix(" ..."))
    assert list(found.argv)[: len(line) if runs.endswith("...") else None] == line
    assert sets is None or found.sets == sets


def test_kubeflow_may_leave_the_number_of_processes_to_this_command():
    without = {k: v for k, v in LAUNCHERS["kubeflow"].items() if k != "PET_NPROC_PER_NODE"}
    assert list(plan(without, gpus=2).argv) == words("torchrun --nproc-per-node 2 SCRIPT")


@pytest.mark.parametrize(
    ("line", "alone"), [("-m training -e 5", ""), ("accelerate-train -x", "--no-python ")]
)
def test_modules_and_programs_can_be_run_as_well(line, alone):
    run = line if alone else f"python {line}"
    assert list(plan(SLURM, line).argv) == words(run)
    assert " ".join(plan({}, line).argv).endswith(f" {alone}{line}")


OTHERS = "--nproc-per-node 4 would start as many in each"
MISTAKES = [
    (vertex(2, 1), {}, r"set REDUCTION_KEYS to .*or, .*REDUCTION_INSECURE=1"),
    (OPEN_MPI, {"processes": "4"}, OTHERS),
    (LAUNCHERS["torchrun"], {"processes": "4"}, OTHERS),
    ({**ENV, "LOCAL_RANK": "1"}, {"processes": "4"}, OTHERS),
    (OPEN_MPI, {}, "Open MPI does not say where rank 0 is: set MASTER_ADDR"),
    (MPICH, {}, "set MASTER_ADDR"),
    ({}, {"script": ""}, "nothing to run"),
    *(({}, {"processes": n}, f"-node: .*got '{n}'") for n in ("0", "gpu", "-1", "1.5")),
]


@pytest.mark.parametrize(("environment", "asked", "says"), MISTAKES)
def test_mistakes_are_refused(environment, asked, says):
    with pytest.raises(ConfigError, match=says):
        plan(environment, **asked)
