"""The exit codes of both commands, as docs/deployment.md has them."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import reducer
from tests.commands import REDUCER, run_command, serving
from tests.launch.conftest import bare_environment

WORKER = (sys.executable, "-c", "from worker_client.cli import main; main()")
# One of whose threads has ended by itself.
BROKEN = (
    "from reducer import server; begin = server.Server.start\n"
    "def start(self):\n"
    "    self._lanes[0].run = lambda: setattr(self._lanes[0], 'failure', OSError('of a test'))\n"
    "    begin(self)\n"
    "server.Server.start = start\n"
    "from reducer.cli import main; main()"
)
PLAN = ("plan", "--workers", "8", "--worker-gbps", "1", "--reducer-gbps")
RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
NOBODY = "127.0.0.1:1"  # a port that no unprivileged process has
DEPLOYMENT = Path(__file__).parents[2] / "docs" / "deployment.md"


@pytest.fixture(scope="module")
def taken():
    """A port that a socket listens at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.extended_cases(
    "doctor", "launch ", "demo", "timeline", "status", "top", "plan", "keygen", "serve"
)
# A command line, its exit code, and what it says; TAKEN is `taken`.
@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ((*WORKER, "doctor"), 0, ""),  # one that finds something: test_doctor.py
        ((*WORKER, "doctor", NOBODY), 2, ""),
        ((*WORKER, "doctor", "--dump", "no/such/directory"), 2, ""),
        ((*WORKER, "launch"), 2, ""),
        ((*WORKER, "launch", "--", "no-such-program"), 2, "no-such-program"),
        ((*WORKER, "demo", "--workers", "0"), 2, ""),
        ((*WORKER, "timeline", "merge", "no/such/directory"), 2, ""),
        ((*WORKER, "--version"), 0, f"worker-client {reducer.__version__}\n"),
        ((*REDUCER, "--version"), 0, f"reducer {reducer.__version__}\n"),
        ((*REDUCER, "status", NOBODY), 1, ""),
        ((*REDUCER, "status", "nonsense"), 2, "nonsense"),
        ((*REDUCER, "top", NOBODY, "--count", "1"), 0, ""),
        ((*REDUCER, "top", "nonsense"), 2, "nonsense"),
        ((*REDUCER, *PLAN, "1"), 0, ""),
        ((*REDUCER, *PLAN, "0"), 2, ""),
        ((*REDUCER, *PLAN, "fast"), 2, "--reducer-gbps"),
        ((*REDUCER, "keygen", "/dev/null"), 2, "/dev/null"),
        ((*REDUCER, "serve", "--threads", "0"), 2, "threads"),
        ((*REDUCER, "serve", "--keys", "no/such/directory"), 2, "no/such/directory"),
        ((*REDUCER, "serve", "--bind", "127.0.0.1"), 2, "write it as HOST:PORT"),
        ((*REDUCER, "serve", "--bind", "tcp://192.0.2.1:5555", "--insecure"), 2, "no such address"),
        ((*REDUCER, "serve", "--bind", "tcp://0.0.0.0:0"), 2, "--insecure"),
        ((*REDUCER, "serve", "--bind", "TAKEN"), 2, "the port is taken"),
        ((*REDUCER, "serve", "--memory-limit", "plenty"), 2, "memory_limit"),
        ((*REDUCER, "serve", "--kernel", "mmx"), 2, "avx2"),
        ((*REDUCER, "serve", "--no-such-flag"), 2, "No such option"),
        (
            ("env", "REDUCTION_MEMORY_LIMITS=8GiB", *REDUCER, "serve"),
            2,
            "unknown setting REDUCTION_MEMORY_LIMITS: did you mean REDUCTION_MEMORY_LIMIT?",
        ),
        ((sys.executable, "-c", BROKEN, "serve", "--bind", "tcp://127.0.0.1:0"), 1, ""),
    ],
    ids=lambda value: " ".join(value[3:]) if isinstance(value, tuple) else str(value)[:20],
)
def test_a_command_that_ends_by_itself(command, code, says, taken):
    words = [taken if word == "TAKEN" else word for word in command]
    done = run_command(*words, env=bare_environment(), timeout=60)
    assert done.returncode == code, done.stderr
    assert says in done.stderr + done.stdout
    assert (code == 2) <= ("Traceback" not in done.stderr)


@pytest.mark.extended("test_a_command_that_ends_by_itself[launch-2-")
def test_a_program_that_was_launched_has_its_own():
    command = (*WORKER, "launch", "--", "/bin/sh", "-c", "exit 7")
    assert run_command(*command, env=bare_environment(**RANK), timeout=60).returncode == 7


@pytest.mark.extended("test_the_doctor_is_ended[2-")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_reducer_that_is_told_to_stop(number):
    with serving() as (process, *_):
        process.send_signal(number)
        assert process.wait(30) == 0


@pytest.mark.extended("test_the_doctor_is_ended[2-")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_top_is_ended(number, code):
    command = [*REDUCER, "top", NOBODY, "--interval", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()  # it looks
        process.send_signal(number)
        assert process.wait(30) == code


@pytest.mark.extended_cases("15")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_the_doctor_is_ended(number, code):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which the doctor waits for
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        environment = bare_environment(REDUCTION_SERVERS=address)
        with subprocess.Popen([*WORKER, "doctor"], env=environment) as process:
            connection, _ = silent.accept()
            with connection:
                process.send_signal(number)
                assert process.wait(30) == code


def test_the_page_names_every_code():
    section = DEPLOYMENT.read_text().split("\n## Exit codes\n")[1].split("\n## ")[0]
    codes = re.findall(r"^\| ([^|]+) \|", section, flags=re.M)
    assert codes == ["code", "0", "1", "2", "130, 143", "any"]
    for command in ("serve", "top", "status", "doctor", "demo", "launch"):
        assert re.search(rf"`(reducer|worker-client) {command}`", section), command
