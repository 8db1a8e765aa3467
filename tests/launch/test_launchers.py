"""One training script, unchanged, under real launchers: the same bits from each of them."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.commands import REDUCER, run_command, run_here
from tests.launch.conftest import ROOT, bare_environment
from tests.launch.environments import CLUSTERS, spec
from worker_client.commands.demo.ranks import free_port

pytest.importorskip("torch", reason="needs torch")

SCRIPT = str(ROOT / "examples" / "quickstart.py")
LAUNCH = [
    *(sys.executable, "-c", "from worker_client.cli import main; main()"),
    "launch",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
TWO_NODES = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
TWO_NODES += ["--master-port=MASTER_PORT"]
RANKS = 4  # of the runs that must lead to the same weights
SAID = re.compile(r"rank (\d+): loss [0-9.e+-]+, weights ([0-9a-f]{16}), (\d+) reducers")
LIMIT_S = 500

# What every launcher must lead to, by the number of ranks: the first test that trains says.
FINGERPRINTS = {}


def train(commands, environment, ranks=RANKS):
    """Run commands side by side, and check that their ranks trained to the same weights."""
    with ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        said = "".join(process.communicate(timeout=LIMIT_S)[0] for process in processes)
        assert [process.returncode for process in processes] == [0] * len(processes), said
    found = SAID.findall(said)
    assert sorted(int(rank) for rank, _, _ in found) == list(range(ranks)), said
    assert {reducers for _, _, reducers in found} == {"2"}
    before = FINGERPRINTS.setdefault(ranks, set())
    before.update(weights for _, weights, _ in found)
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
    assert [(rank, reducers) for rank, _, reducers in SAID.findall(said)] == [("0", "1")], said


@pytest.mark.extended("test_a_rank_is_told_who_it_is")
@pytest.mark.timeout(600)
def test_torchrun_on_two_nodes(settings):
    where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    shape = ["--nnodes", "2", "--nproc-per-node", "1"]
    commands = [[*TORCHRUN, *shape, *where, "--node-rank", str(node), SCRIPT] for node in range(2)]
    train(commands, settings, ranks=2)


# -- what becomes of the process ------------------------------------------------------------------

MPI_RANK = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def launched(tmp_path, script, *options, **variables):
    """Start `launch` with a script of these lines."""
    path = tmp_path / "script.py"
    path.write_text(script)
    return subprocess.Popen(
        [*LAUNCH, *options, "--", str(path), "--epochs", "5"],
        env=bare_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_rank_is_told_who_it_is_and_its_exit_code_is_passed_on(tmp_path):
    script = (
        "import os, sys\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK',"
        " 'MASTER_ADDR')\n"
        "print(os.getpid(), *(os.environ[name] for name in names), *sys.argv[1:])\n"
        "sys.exit(7)\n"
    )
    with launched(tmp_path, script, **MPI_RANK) as process:
        said, complained = process.communicate(timeout=60)
        assert said.split() == [
            str(process.pid),
            *["1", "2", "1", "2", "0", "127.0.0.1", "--epochs", "5"],
        ]
    assert process.returncode == 7
    assert "Open MPI has started this process as rank 1 of 2" in complained


@pytest.mark.extended("tests/integration/test_cli.py::test_a_signal_in_the_middle")
def test_a_signal_ends_all_ranks(tmp_path):
    script = (
        "import os, time\n"
        "os.write(1, f'{os.getpid()}\\n'.encode())\n"  # at once: two ranks share the pipe
        "while True:\n    time.sleep(1)\n"
    )
    with launched(tmp_path, script, "--nproc-per-node", "2") as process:
        assert process.stdout
        try:
            ranks = [int(process.stdout.readline()) for _ in range(2)]
            assert process.pid not in ranks  # torchrun is what launch turned into
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode != 0
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


def test_a_dry_run_says_what_would_be_run_and_why(tmp_path):
    (tmp_path / "script.py").write_text("raise SystemExit(9)")
    line = f"worker-client launch --dry-run -- {tmp_path}/script.py --epochs 5"
    done = run_here(line, env=bare_environment(**MPI_RANK))
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line[:4] != "sets"}
    assert "Open MPI" in rows["launcher"]
    assert "(OMPI_COMM_WORLD_RANK)" in rows["rank"]
    assert "script.py --epochs 5" in " ".join(done.stdout.split())
    assert re.search(r"^sets +WORLD_SIZE=2$", done.stdout, flags=re.M)


def test_a_reducer_needs_no_script():
    given = {"CLUSTER_SPEC": spec(CLUSTERS["vertex"], "workerpool2", 0), "REDUCTION_INSECURE": "1"}
    done = run_here("worker-client launch --dry-run", env=bare_environment(**given))
    assert (done.returncode, done.stderr) == (0, "")
    assert "reducer serve" in done.stdout
