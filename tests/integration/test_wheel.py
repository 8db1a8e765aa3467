"""The built wheel in an empty environment: a reducer needs neither torch nor a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

TALK = """
import importlib.util, shutil, subprocess, sys
from pathlib import Path
import numpy
assert importlib.util.find_spec("torch") is None
assert shutil.which("gcc") is None and shutil.which("cc") is None
from reducer import kernels
assert kernels.variants()[-1] == "numpy" and len(kernels.variants()) > 1, kernels.variants()
import worker_client
command = [str(Path(sys.executable).with_name("reducer")), "serve", "--bind", "tcp://127.0.0.1:0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reducer:
    address = reducer.stdout.readline().split()[-1]
    client = worker_client.init(rank=0, world_size=1, servers=address)
    print(client.all_reduce(numpy.arange(5.0)).wait(10))
    client.shutdown()
    reducer.terminate()
    assert reducer.wait(5) == 0
"""


@pytest.mark.timeout(240)
def test_a_reducer_runs_from_the_wheel_alone(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    home = tmp_path / "empty"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", wheel], check=True, capture_output=True)
    done = subprocess.run(
        [python, "-c", TALK],
        env={**os.environ, "PATH": str(home / "bin")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[0. 1. 2. 3. 4.]"
