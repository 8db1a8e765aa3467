"""The exit codes of both commands, as docs/deployment.md has them."""

import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import reducer
from tests.commands import REDUCER, run_command, run_here
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
PLAN = "reducer plan --workers 8 --worker-gbps 1 --reducer-gbps"
RANK = "RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1"
NOBODY = "127.0.0.1:1"  # a port that no unprivileged process has
DEPLOYMENT = Path(__file__).parents[2] / "docs" / "deployment.md"


@pytest.fixture(scope="module")
def taken():
    """A port that a socket listens at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield f"127.0.0.1:{taken.getsockname()[1]}"


LINES = yaml.safe_load(Path(__file__).with_name("lines.yaml").read_text())


@pytest.mark.extended_cases("reducer serve", "REDUCTION_MEMORY_LIMITS")  # need processes
@pytest.mark.parametrize("row", LINES, ids=lambda row: row[1])
def test_a_command_that_ends_by_itself(row, taken):
    code, line, *says = row
    stands_for = {"PLAN": PLAN, "RANK": RANK, "NOBODY": NOBODY, "TAKEN": taken}
    words = shlex.split(" ".join(stands_for.get(word, word) for word in line.split(" ")))
    given = [word for word in words if re.match(r"[A-Z_]+=", word)]
    environment = bare_environment(**dict(word.split("=", 1) for word in given))
    command = words[len(given) :]
    if command[:2] == ["reducer", "serve"]:
        done = run_command(*REDUCER, *command[1:], env=environment, timeout=60)
    else:
        done = run_here(shlex.join(command), env=environment)
    assert done.returncode == code, done.stderr
    for words in says:
        assert words.replace("VERSION", reducer.__version__) in done.stderr + done.stdout
    if code == 2:
        assert done.stdout == ""
        assert "Traceback" not in done.stderr


@pytest.mark.extended("test_a_command_that_looks_is_ended[2-")
def test_a_reducer_one_of_whose_threads_ends_ends():
    done = run_command(sys.executable, "-c", BROKEN, "serve", "--bind", "tcp://127.0.0.1:0")
    assert done.returncode == 1


@pytest.mark.extended_cases("15", "2-top")
@pytest.mark.parametrize("command", ["doctor", "top"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_looks_is_ended(command, number):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which it waits for
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        argv = [*WORKER, "doctor"] if command == "doctor" else [*REDUCER, "top", address]
        environment = bare_environment(REDUCTION_SERVERS=address)
        with subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL) as process:
            connection, _ = silent.accept()
            with connection:
                process.send_signal(number)
                interrupted = 130 if command == "doctor" else 0
                assert process.wait(30) == (interrupted if number == signal.SIGINT else -number)


def test_the_page_names_every_code():
    section = DEPLOYMENT.read_text().split("\n## Exit codes\n")[1].split("\n## ")[0]
    codes = re.findall(r"^\| ([^|]+) \|", section, flags=re.M)
    assert codes == ["code", "0", "1", "2", "130, 143", "any"]
    for command in ("serve", "top", "status", "doctor", "demo", "launch"):
        assert re.search(rf"`(reducer|worker-client) {command}`", section), command
