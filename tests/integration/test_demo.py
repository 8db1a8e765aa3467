"""`worker-client demo`: what it shows, how it fails, and that it leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.commands import run_command
from tests.waits import eventually
from worker_client.commands.demo import ranks, run

for package in run.PACKAGES:  # some tests alone import them
    if not find_spec(package):
        pytest.skip("needs the extra 'demo'", allow_module_level=True)

COMMAND = [str(Path(sys.executable).with_name("worker-client")), "demo"]
START_S = 150.0  # of which a machine that is idle takes a twentieth
GONE_S = 2.0


def alive(process):
    # An orphan that has ended stays listed until init reaps it, which may take seconds.
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Demo:
    """A demo in a session of its own, by which its processes are found again."""

    def __init__(self, folder, *options):
        self.main = subprocess.Popen(
            [*COMMAND, *options],
            cwd=folder,
            env={**os.environ, "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A shell lets its jobs in the background, and their children, ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )

    def finish(self):
        said, _ = self.main.communicate(timeout=200)
        return self.main.returncode, said

    def processes(self, module=None):
        """Return the processes that the demo started, those of one module if it is named."""
        found = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):  # also of a zombie's command
                ours = process.pid != self.main.pid and os.getsid(process.pid) == self.main.pid
                if ours and alive(process) and module in {None, *process.cmdline()}:
                    found.append(process)
        return found

    def wait_until_it_trains(self, workers):
        """Wait until every worker is connected to a reducer and return the workers."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.main.poll() is None:
            ports = {
                connection.laddr.port
                for reducer in self.processes("reducer")
                for connection in reducer.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
            joined = [
                worker
                for worker in self.processes("worker_client.commands.demo.train")
                if any(c.raddr and c.raddr.port in ports for c in worker.net_connections("tcp"))
            ]
            if len(joined) == workers:
                time.sleep(0.5)  # some steps
                return joined
            time.sleep(0.1)
        raise AssertionError(f"it did not start to train:\n{self.finish()[1]}")


@pytest.fixture
def start(tmp_path):
    demos = []

    def begin(*options):
        demos.append(Demo(tmp_path, *options))
        return demos[-1]

    yield begin
    for demo in demos:
        for process in [demo.main, *demo.processes()]:
            process.kill()
        demo.main.wait()
        demo.main.stdout.close()


def cells(said, row):
    found = re.search(rf"│ {row} +│ +(\S.*?) +│ +(\S.*?) +│", said)
    assert found, said
    return list(found.groups())


@pytest.mark.extended("tests/integration/test_readme.py::test_the_quick_start_runs_as_shown[forks]")
def test_the_command_trains_alike(start, tmp_path):
    demo = start("--workers", "2", "--epochs", "3")
    code, said = demo.finish()
    assert demo.processes() == []
    assert code == 0, said
    accuracies = [float(cell.removesuffix(" %")) for cell in cells(said, "test accuracy")]
    assert min(accuracies) >= 95
    assert abs(accuracies[0] - accuracies[1]) <= 1
    assert all(float(cell.replace(",", "")) > 100 for cell in cells(said, "samples/s"))
    assert cells(said, "ranks identical to the bit") == ["yes", "yes"]
    assert 0 <= float(cells(said, "largest weight difference to Gloo")[0]) < 1e-5
    # Every step reduces every gradient once: 4 bytes for each of the network's parameters.
    steps, parameters = 3 * ((1797 - 360) // (2 * 16)), 151_498
    assert cells(said, "bytes reduced per worker") == [f"{steps * parameters * 4:,}", "-"]
    assert (tmp_path / "demo-loss.png").read_bytes().startswith(b"\x89PNG")


def test_ranks_that_differ_and_too_little_training_are_failures_that_say_so(
    monkeypatch, capsys, tmp_path
):
    def differing(workers, servers, spec):
        np.save(spec["weights_to"], np.zeros(3, np.float32))
        for rank in range(workers):
            yield {"event": "step", "rank": rank, "loss": 0.5, "of": 1}
            digest = f"{rank if spec['through_reducers'] else 0:064x}"[::-1]
            end = {"accuracy": 0.94, "samples_per_s": 1.0, "bytes_reduced": 4, "digest": digest}
            yield {"event": "end", "rank": rank, **end}

    monkeypatch.setattr(ranks, "run", differing)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    code = run.demo(workers=2, reducers=0, epochs=1, plot_to=tmp_path / "loss.png")
    said = " ".join(capsys.readouterr().out.split())
    assert code == 1
    assert "through reducers, the ranks' final weights differ: rank 0 00000000, rank 1 1" in said
    assert "through Gloo, the ranks" not in said
    assert said.count("the test accuracy is 94.0 %, below 95 %") == 2


@pytest.mark.extended("tests/integration/test_readme.py::test_the_quick_start_runs_as_shown[forks]")
def test_a_worker_that_dies_is_named_and_the_others_are_stopped(start):
    demo = start("--workers", "2", "--epochs", "500", "--reducers", "1")
    victim = demo.wait_until_it_trains(workers=2)[-1]
    rank = victim.environ()["RANK"]
    victim.kill()
    code, said = demo.finish()
    assert code == 1, said
    assert f"worker-client: worker {rank} was killed by SIGKILL, and the others were" in said
    assert demo.processes() == []


@pytest.mark.extended("tests/integration/test_readme.py::test_the_quick_start_runs_as_shown[forks]")
@pytest.mark.parametrize("how", ["ctrl-c", "terminate", "kill"])
def test_it_can_be_stopped_and_killed(start, how):
    demo = start("--workers", "2", "--epochs", "500", "--reducers", "1")
    workers = demo.wait_until_it_trains(workers=2)
    number = {"terminate": signal.SIGTERM, "kill": signal.SIGKILL}.get(how, signal.SIGINT)
    (os.killpg if how == "ctrl-c" else os.kill)(demo.main.pid, number)
    eventually(lambda: not any(map(alive, workers)), GONE_S)
    code, said = demo.finish()
    eventually(lambda: not demo.processes(), GONE_S * (how == "kill"))
    assert code == (-number if how == "kill" else 128 + number)
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("module", "package"),
    [("torch", "torch"), ("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")],
)
def test_a_missing_package_is_named_with_the_extra(module, package):
    code = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv[1:] = ['demo']; "
        "from worker_client.cli import main; main()"
    )
    done = run_command(sys.executable, "-c", code)
    assert done.returncode == 2
    here = Path(__file__).parents[2]  # a checkout
    expected = f'the demo needs {package}: pip install "{here}[demo]"'
    assert done.stderr == f"worker-client: {expected}\n"
