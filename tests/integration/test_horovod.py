"""The Horovod interface at three real ranks: every call, every option of the optimizer, join()."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reducer import local_pool
from tests.integration.launch import rank_environment

pytest.importorskip("torch", reason="needs torch")

from tests.integration import horovod_ops, horovod_training

HERE = Path(__file__).parent
SIZE = 3


def run(environments: list[dict[str, str]], *command: str, timeout_s: float = 150) -> list[str]:
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
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(said)
    return said


def run_cases(module: str, out: Path) -> list[dict[str, str]]:
    """Run a module's cases at every rank, and return what went wrong at each."""
    with local_pool(2) as servers:
        shared = rank_environment(
            SIZE, REDUCTION_SERVERS=",".join(servers), REDUCTION_TIMEOUT="20s"
        )
        run(
            [{**shared, "RANK": str(rank)} for rank in range(SIZE)],
            *(str(HERE / "horovod_rank.py"), str(out), module),
        )
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(SIZE)]


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_cases("horovod_ops", tmp_path_factory.mktemp("horovod") / "ops")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", [case.__name__ for case in horovod_ops.CASES])
def test_calls(ops: list[dict[str, str]], case: str) -> None:
    assert [rank.get(case, "not reached") for rank in ops] == [""] * SIZE


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_cases("horovod_training", tmp_path_factory.mktemp("horovod") / "training")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", [case.__name__ for case in horovod_training.CASES])
def test_training(training: list[dict[str, str]], case: str) -> None:
    assert [rank.get(case, "not reached") for rank in training] == [""] * SIZE
