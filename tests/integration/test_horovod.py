"""The Horovod interface at three real ranks: every call, every option of the optimizer, join()."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reducer import local_pool
from tests.integration.launch import rank_environment
from worker_client.demo.ranks import free_port

pytest.importorskip("torch", reason="needs torch")

from tests.integration import horovod_ops, horovod_training

HERE = Path(__file__).parent
SIZE = 3


def run(environments: list[dict[str, str]], *command: str, timeout_s: float = 220) -> list[str]:
    """Run a command at every rank, and return what each printed."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments
    ]
    try:
        said = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(said)
    return said


def run_cases(module: str, out: Path) -> list[dict[str, str]]:
    """Run a module's cases at every rank, and return what went wrong at each."""
    with local_pool(2) as servers:
        shared = rank_environment(
            SIZE, REDUCTION_SERVERS=",".join(servers), REDUCTION_TIMEOUT="60s"
        )
        run(
            [{**shared, "RANK": str(rank)} for rank in range(SIZE)],
            *(str(HERE / "horovod_rank.py"), str(out), module),
        )
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(SIZE)]


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_cases("horovod_ops", tmp_path_factory.mktemp("horovod") / "ops")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", [case.__name__ for case in horovod_ops.CASES])
def test_calls(ops: list[dict[str, str]], case: str) -> None:
    assert [rank.get(case, "not reached") for rank in ops] == [""] * SIZE


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_cases("horovod_training", tmp_path_factory.mktemp("horovod") / "training")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", [case.__name__ for case in horovod_training.CASES])
def test_training(training: list[dict[str, str]], case: str) -> None:
    assert [rank.get(case, "not reached") for rank in training] == [""] * SIZE


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


def environment(**told: str) -> dict[str, str]:
    """Return this process's environment without what a launcher says, and with this."""
    mine = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in mine}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1]), **told}


@pytest.mark.timeout(240)
def test_without_servers_every_rank_hosts_a_reducer_until_all_have_left() -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said = run([environment(**shared, RANK=str(rank)) for rank in range(2)], "-c", SCRIPT)
    assert said == ["0 2 0 2 0 1 -0.5 -0.5 2\n", "1 2 1 2 0 1 -0.5 -0.5 2\n"]


@pytest.mark.timeout(240)
def test_mpirun_says_who_is_who() -> None:
    # As if on two hosts: what the launcher says of places goes before what is found out.
    with local_pool(1) as servers:
        said = run(
            [
                environment(
                    REDUCTION_SERVERS=servers[0],
                    OMPI_COMM_WORLD_RANK=str(rank),
                    OMPI_COMM_WORLD_SIZE="2",
                    OMPI_COMM_WORLD_LOCAL_RANK="0",
                    OMPI_COMM_WORLD_LOCAL_SIZE="1",
                )
                for rank in range(2)
            ],
            *("-c", SCRIPT),
        )
    assert said == ["0 2 0 1 0 2 -0.5 -0.5 2\n", "1 2 0 1 1 2 -0.5 -0.5 2\n"]


@pytest.mark.timeout(120)
def test_without_a_launcher_the_job_is_of_one() -> None:
    assert run([environment()], "-c", SCRIPT) == ["0 1 0 1 0 1 0.0 0.0 1\n"]


@pytest.mark.timeout(120)
def test_servers_without_a_launcher_are_refused() -> None:
    command = "import worker_client.horovod as hvd; hvd.init()"
    done = subprocess.run(
        [sys.executable, "-c", command],
        env=environment(REDUCTION_SERVERS="127.0.0.1:1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ConfigError: rank and world size are unknown" in done.stderr
