"""One training script, unchanged, under real launchers: the same bits from each of them."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from tests.commands import REDUCER, run_command
from tests.launch.conftest import ROOT, bare_environment
from tests.pages import FINGERPRINT
from worker_client.commands.demo.ranks import free_port

pytest.importorskip("torch", reason="needs torch")

SCRIPT = str(ROOT / "examples" / "quickstart.py")
LAUNCH = [sys.executable, "-c", "from worker_client.cli import main; main()", "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
TWO_NODES = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
TWO_NODES += ["--master-port=MASTER_PORT"]
RANKS = 4  # of the runs that must lead to the same weights
LIMIT_S = 500

# What every launcher must lead to, by the number of ranks: the first test that trains says.
FINGERPRINTS = {}


def train(commands, environment, ranks=RANKS):
    """Run commands side by side, and check that their ranks trained to the same weights."""
    with ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen(
                command, env=environment, stdout=PIPE, stderr=STDOUT, text=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        said = "".join(process.communicate(timeout=LIMIT_S)[0] for process in processes)
        assert [process.returncode for process in processes] == [0] * len(processes), said
    found = FINGERPRINT.findall(said)
    assert sorted(int(rank) for rank, *_ in found) == list(range(ranks)), said
    assert {reducers for *_, reducers in found} == {"2"}
    before = FINGERPRINTS.setdefault(ranks, set())
    before.update(weights for _, _, weights, _ in found)
    assert len(before) == 1, f"another launcher led to other weights: {said}"


@pytest.fixture
def settings(pool):
    """What a user sets."""
    return bare_environment(REDUCTION_SERVERS=",".join(pool))


# The tool, what it runs, how many ranks that makes, and what else is set.
STARTED_BY = {
    "Open MPI": ("mpirun", [[*MPIRUN, "-n", str(RANKS), *LAUNCH, "--", SCRIPT]], RANKS, {}),
    "Azure ML, which calls mpirun": (
        "mpirun",
        [[*MPIRUN, "-n", "2", *LAUNCH, "--", SCRIPT]],
        2,
        {"AZ_BATCH_MASTER_NODE": "127.0.0.1:6000", "AZUREML_RUN_ID": "digits_1700000000_ab"},
    ),
    # Two nodes: the ranks meet at the first host of 127.0.0.[1-2].
    "SLURM": ("srun", [["srun", "-n", str(RANKS), "-N", "2", *LAUNCH, "--", SCRIPT]], RANKS, {}),
    "torchrun on two nodes": (
        "true",
        [[*TORCHRUN, *TWO_NODES, f"--node-rank={node}", SCRIPT] for node in range(2)],
        2,
        {},
    ),
}


@pytest.mark.extended("test_a_rank_is_told_who_it_is")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", STARTED_BY)
def test_ranks_train_to_the_same_weights(launcher, settings, request):
    tool, commands, ranks, more = STARTED_BY[launcher]
    if not shutil.which(tool):
        pytest.skip(f"needs `{tool}`: make test-tools")
    if tool == "srun":
        more = request.getfixturevalue("slurm")
    port = str(free_port())
    here = [[word.replace("MASTER_PORT", port) for word in command] for command in commands]
    train(here, {**settings, **more, "MASTER_PORT": port}, ranks)


@pytest.mark.extended("test_a_rank_is_told_who_it_is")
@pytest.mark.timeout(600)
def test_the_batch_script_for_nodes_of_one_kind(tmp_path, slurm):
    if not shutil.which("sbatch"):
        pytest.skip("needs `sbatch`: make test-tools")
    section = (ROOT / "docs" / "deployment.md").read_text().partition("\n## SLURM\n")[2]
    found = re.search(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found, "docs/deployment.md has no batch script"
    # Two nodes here, and another program may have the port.
    script = found[1].replace("reducers=2", "reducers=1").replace("5555", str(free_port()))
    (tmp_path / "train.sbatch").write_text(script)
    subprocess.run([*REDUCER, "keygen", "keys", "--job", "x"], cwd=tmp_path, check=True)
    settings = bare_environment(
        **slurm,
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        POOL_KEYS=str(tmp_path / "keys" / "pool"),
        JOB_KEYS=str(tmp_path / "keys" / "jobs" / "x"),
        REDUCTION_EMBEDDED="0",  # without the pool it shall fail
    )
    output = tmp_path / "output"
    batch = ["sbatch", "--wait", "--nodes=2", f"--output={output}", "train.sbatch", SCRIPT]
    ended = run_command(*batch, cwd=tmp_path, env=settings, timeout=LIMIT_S)
    said = output.read_text() if output.exists() else ended.stderr
    assert ended.returncode == 0, said
    [(rank, _, _, reducers)] = FINGERPRINT.findall(said)
    assert (rank, reducers) == ("0", "1")


def test_a_rank_is_told_who_it_is_and_its_exit_code_is_passed_on(tmp_path):
    script = (
        "import os, sys\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK',"
        " 'MASTER_ADDR')\n"
        "print(os.getpid(), *(os.environ[name] for name in names), *sys.argv[1:])\n"
        "sys.exit(7)\n"
    )
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [*LAUNCH, "--", str(path), "--epochs", "5"]
    given = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    environment = bare_environment(**{f"OMPI_COMM_WORLD_{name}": given[name] for name in given})
    with subprocess.Popen(command, env=environment, stdout=PIPE, stderr=PIPE, text=True) as process:
        said, complained = process.communicate(timeout=60)
    ours = ["1", "2", "1", "2", "0", "127.0.0.1", "--epochs", "5"]
    assert said.split() == [str(process.pid), *ours]  # the process is what it was
    assert process.returncode == 7
    assert "Open MPI has started this process as rank 1 of 2" in complained
