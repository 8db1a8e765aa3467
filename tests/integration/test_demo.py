"""`worker-client demo`: what it shows, how it fails, and that it leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
import time
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


def session(process):
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def alive(process):
    # An orphan that has ended stays listed until init reaps it, which may take seconds.
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command(process):
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # a zombie is one, too
        return []


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
        return [
            process
            for process in psutil.process_iter()
            if process.pid != self.main.pid
            and session(process) == self.main.pid
            and alive(process)
            and (module is None or module in command(process))
        ]

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

    def assert_nobody_is_left(self, within_s):
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == []


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
        assert demo.main.stdout is not None
        demo.main.stdout.close()


def cells(said, row):
    found = re.search(rf"│ {row} +│ +(\S.*?) │ +(\S.*?) │", said)
    assert found, said
    return [cell.strip() for cell in found.groups()]


@pytest.mark.extended("tests/integration/test_readme.py::test_the_quick_start_runs_as_shown[forks]")
def test_the_command_trains_alike(start, tmp_path):
    demo = start("--workers", "2", "--epochs", "3")
    code, said = demo.finish()
    demo.assert_nobody_is_left(within_s=0)
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
    assert_two_curves(tmp_path / "demo-loss.png")


def assert_two_curves(path):
    from matplotlib.image import imread  # noqa: PLC0415 (takes long)

    picture = imread(path)
    assert picture.shape[:2] == (600, 960)
    for colour in ("1f77b4", "ff7f0e"):  # matplotlib's first two
        target = np.array([int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)])
        drawn = np.argwhere(np.abs(picture[..., :3] - target).max(axis=2) < 0.02)
        height, width = np.ptp(drawn, axis=0)
        assert height > 200, "the loss falls"
        assert width > 600, "from the first step to the last"


@pytest.mark.extended("test_ranks_that_differ_are_a_failure")
def test_too_little_training_is_a_failure_that_says_so(start, tmp_path):
    demo = start("--workers", "2", "--reducers", "0", "--epochs", "1", "--plot", "other.png")
    code, said = demo.finish()
    assert code == 1, said
    assert "embedded reducers" in said
    assert "Failed: through reducers, the test accuracy is" in said
    assert "Failed: through Gloo, the test accuracy is" in said
    assert "below 95 %" in said
    assert (tmp_path / "other.png").exists()
    demo.assert_nobody_is_left(within_s=0)


def test_ranks_that_differ_are_a_failure_that_says_so(monkeypatch, capsys, tmp_path):
    def differing(workers, servers, spec):
        np.save(spec["weights_to"], np.zeros(3, np.float32))
        for rank in range(workers):
            yield {"event": "step", "rank": rank, "loss": 0.5, "of": 1}
            digest = f"{rank if spec['through_reducers'] else 0:064x}"[::-1]
            end = {"accuracy": 0.99, "samples_per_s": 1.0, "bytes_reduced": 4, "digest": digest}
            yield {"event": "end", "rank": rank, **end}

    monkeypatch.setattr(ranks, "run", differing)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    code = run.demo(workers=2, reducers=0, epochs=1, plot_to=tmp_path / "loss.png")
    said = " ".join(capsys.readouterr().out.split())
    assert code == 1
    assert "through reducers, the ranks' final weights differ: rank 0 00000000, rank 1 1" in said
    assert "through Gloo, the" not in said


@pytest.mark.extended("tests/integration/test_readme.py::test_the_quick_start_runs_as_shown[forks]")
def test_a_worker_that_dies_is_named_and_the_others_are_stopped(start):
    demo = start("--workers", "2", "--epochs", "500", "--reducers", "1")
    victim = demo.wait_until_it_trains(workers=2)[-1]
    rank = victim.environ()["RANK"]
    victim.kill()
    code, said = demo.finish()
    assert code == 1, said
    assert f"worker-client: worker {rank} was killed by SIGKILL, and the others were" in said
    demo.assert_nobody_is_left(within_s=0)


@pytest.mark.extended("tests/integration/test_readme.py::test_the_quick_start_runs_as_shown[forks]")
@pytest.mark.parametrize(
    ("number", "to_all"),
    [(signal.SIGINT, True), (signal.SIGTERM, False)],
    ids=["ctrl-c", "terminate"],
)
def test_it_can_be_stopped(start, number, to_all):
    demo = start("--workers", "2", "--epochs", "500", "--reducers", "1")
    workers = demo.wait_until_it_trains(workers=2)
    (os.killpg if to_all else os.kill)(demo.main.pid, number)
    eventually(lambda: not any(map(alive, workers)), GONE_S)
    code, said = demo.finish()
    demo.assert_nobody_is_left(within_s=0)
    assert code == 128 + number
    assert "Traceback" not in said


@pytest.mark.extended("tests/integration/test_readme.py::test_the_quick_start_runs_as_shown[forks]")
def test_nobody_outlives_a_killed_demo(start):
    demo = start("--workers", "2", "--epochs", "500", "--reducers", "1")
    demo.wait_until_it_trains(workers=2)
    demo.main.kill()
    demo.assert_nobody_is_left(within_s=GONE_S)


@pytest.mark.extended_cases("options1", "options2", "options4")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--workers", "0"], "--workers must be between 1 and 16, got 0"),
        (["--reducers", "-1"], "--reducers must be between 0 and 16, got -1"),
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--plot", "no/such/folder.png"], "--plot no/such/folder.png cannot be written"),
        (["--plot", "."], "--plot . cannot be written"),
    ],
)
def test_wrong_options_are_one_sentence(start, options, says):
    code, said = start(*options).finish()
    assert code == 2
    assert said.startswith(f"worker-client: {says}")
    assert said.count("\n") == 1


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
