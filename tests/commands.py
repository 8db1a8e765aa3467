"""Commands as users give them: one that runs to its end, and a reducer that serves meanwhile."""

import importlib
import io
import json
import os
import random
import shlex
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from reducer.cli import HTTP_READY

REDUCER = (sys.executable, "-m", "reducer")
# The only rank of a job, whose package is that of its own environment, and not of this checkout.
RANK = """
import sys
from pathlib import Path
import numpy
import reducer, worker_client
assert Path(reducer.__file__).is_relative_to(sys.prefix), reducer.__file__
client = worker_client.init(rank=0, world_size=1, servers=sys.argv[1])
print(client.impl, client.all_reduce(numpy.arange(5.0)).wait(10))
client.shutdown()
"""


class Serving(NamedTuple):
    """A running reducer: its process, the port of workers, the HTTP port if it was asked for."""

    process: subprocess.Popen[str]
    address: str
    http: str


def run_command(*argv, **options):
    """Run a command to its end, and return its exit code, whatever it is, and what it said."""
    return subprocess.run([*map(str, argv)], capture_output=True, text=True, check=False, **options)


def run_here(line, env=None):
    """Run a line of `reducer` or `worker-client` in this process: it imports nothing anew."""
    command, *_ = words = shlex.split(line)
    main = importlib.import_module(command.replace("-", "_") + ".cli").main
    with (
        patch.dict(os.environ, dict(os.environ if env is None else env), clear=True),
        patch.object(sys, "argv", words),
        patch.object(os, "execvpe", side_effect=AssertionError("this would end all tests")),
        redirect_stdout(io.StringIO()) as said,
        redirect_stderr(io.StringIO()) as complained,
    ):
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(words, code or 0, said.getvalue(), complained.getvalue())


def transcript(lines):
    """Lines of commands that end well, each with what it prints but for spaces at ends of lines."""
    said = ""
    for line in lines:
        done = run_here(line, env={"COLUMNS": "150"})
        assert done.returncode == 0, done.stderr
        printed = "\n".join(text.rstrip() for text in done.stdout.splitlines())
        said += f"$ {line}\n{printed}\n\n"
    return said


@contextmanager
def serving(*arguments, command=REDUCER, **options):
    """A reducer in an interpreter of its own, which is killed at the end."""
    with subprocess.Popen(
        [*command, "serve", "--bind", "tcp://127.0.0.1:0", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    ) as process:
        try:
            said = [process.stdout.readline() for _ in range(1 + ("--http" in arguments))]
            said = [json.loads(line)["event"] if line.startswith("{") else line for line in said]
            assert said[0].startswith("reducer ready on ")
            address, http = said[0].split()[-1], "".join(said[1:])
            yield Serving(process, address, http.removeprefix(HTTP_READY).strip())
        finally:
            process.kill()


def reduced_by(*python, code="", command=(), **options):
    """Run an all-reduce of one rank, which runs `code` first, and return what the rank printed.

    Reducer and rank have the interpreter `python`; `command` starts another reducer.
    """
    reducer = [*map(str, command or (*python, "-m", "reducer"))]
    with serving(command=reducer, **options) as server:
        done = run_command(*python, "-c", code + RANK, server.address, **options)
        assert done.returncode == 0, done.stderr
        server.process.terminate()
        assert server.process.wait(20) == 0
    return done.stdout.strip()


def free_ports(number):
    """Ports of loopback that nobody has, each another one, and none that the system gives away.

    Another test's socket without a port of its own could get one of those before it is used.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = random.SystemRandom().sample(range(first_given // 2, first_given), 50 + number)
    with ExitStack() as held:
        free = []
        while len(free) < number:
            one = held.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("127.0.0.1", ports.pop()))
                free.append(one.getsockname()[1])
        return free
