"""Starts the ranks of a job, waits for them, and leaves none behind.

    with ranks(environments(2, servers), "-m", "tests.integration.ddp_cases", "case_") as job:
        first, second = job.results()

A rank is a process of its own, forked from one that has imported torch (`tests.fork_server`), with
the command line that `python` would get, its environment and nothing else in it, and files for what
it writes. It can be killed, stopped and interrupted, and its exit code is real. `fresh` starts an
interpreter for it instead: for a launcher, and where it matters what a rank imports.
"""

import atexit
import contextlib
import functools
import itertools
import json
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE
from tempfile import TemporaryDirectory
from threading import Lock

from reducer.errors import ConfigError
from worker_client.commands.demo.ranks import free_port

ROOT = Path(__file__).parents[1]
RESULT = "RANK_RESULT"  # names the file for a rank's result
PATIENCE_S = 200.0  # less than pytest's own timeout, which would not say where the ranks are
OTHERS_S = 10.0  # for the others to end when a rank has failed, and to say why
STOP_S = 10.0  # for a rank to say where it is, or for a launcher to end its ranks
POLL_S = 0.01
# OpenMP and BLAS read these when they are loaded, and their threads would not survive a fork.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
SETTINGS = {**ONE_THREAD, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(ROOT)}


def environments(world_size, servers=(), **settings):
    """Return the environment of every rank as a launcher sets it on this machine, and settings.

    Where there are servers, the job has a name of its own: ranks without a process group need one.
    Without any, the ranks host them. `settings` go before all that.
    """
    shared = {
        **{name: value for name, value in os.environ.items() if not _is_setting(name)},
        **SETTINGS,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
    }
    if servers:
        job = f"test-{secrets.token_hex(4)}"
        shared |= {"REDUCTION_SERVERS": ",".join(servers), "REDUCTION_JOB": job}
    shared |= settings
    return [{**shared, "RANK": str(rank)} for rank in range(world_size)]


def _is_setting(name):
    """Whether this tells a job what to do that the test does not know of."""
    return name.startswith("REDUCTION_") and name != "REDUCTION_IMPL"


def write_result(result):
    """Write this rank's result, for `Ranks.results`; a later one replaces it."""
    Path(os.environ[RESULT]).write_text(json.dumps(result))


def refusal(call, *arguments, **named):
    """What is said where a call is refused, as a part of a rank's result."""
    try:
        return f"refused nothing: {call(*arguments, **named)}"
    except ConfigError as error:
        return str(error)


def case_names(module):
    """Return the names of a module's functions ``case_...``, unimported, as that may take long."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return re.findall(r"^def (case_\w+)", path.read_text(), re.MULTILINE)


class Rank:
    """What a rank writes; `Forked` and `Fresh` are its process, and have what `Popen` has."""

    stem: Path  # beginning of the names of its files
    last: signal.Signals  # which asks it to end

    @property
    def out(self):
        """What it has written to standard output, if the test does not read that from a pipe."""
        return Path(f"{self.stem}.out").read_text()

    @property
    def err(self):
        """What it has written to standard error."""
        return Path(f"{self.stem}.err").read_text()

    @property
    def result(self):
        """What it has given to `write_result`."""
        return json.loads(Path(f"{self.stem}.json").read_text())

    def stop(self):
        """Ask the process to end, if it has not, and wait for a while."""
        self.send_signal(self.last)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(STOP_S)


class Ranks(list[Rank]):
    """All ranks of a job, in order."""

    def finish(self, timeout_s=PATIENCE_S, killed=()):
        """Wait until all ranks have ended well; if one does not, raise what all have written.

        The ranks `killed` must end by SIGKILL; one that still runs in the end says where it is.
        """
        right = [-signal.SIGKILL if rank in killed else 0 for rank in range(len(self))]
        until = time.monotonic() + timeout_s
        while None in (codes := [rank.poll() for rank in self]) and time.monotonic() < until:
            if any(code not in {None, good} for code, good in zip(codes, right, strict=True)):
                until = min(until, time.monotonic() + OTHERS_S)
            time.sleep(POLL_S)
        if codes != right:
            raise AssertionError(self.report())

    def results(self, timeout_s=PATIENCE_S, killed=()):
        """Return the results of all ranks that were not killed; see `finish`."""
        self.finish(timeout_s, killed)
        return [rank.result for at, rank in enumerate(self) if at not in killed]

    def outputs(self, timeout_s=PATIENCE_S):
        """Return what each rank has written to standard output; see `finish`."""
        self.finish(timeout_s)
        return [rank.out for rank in self]

    def kill(self):
        """End all ranks, and what they have started, now."""
        for rank in self:
            if isinstance(rank, Fresh):
                rank.stop()
            end(rank)

    def report(self):
        """Say how all ranks have ended, or where they are."""
        codes = [rank.poll() for rank in self]
        for rank in self:
            rank.stop()
        ends = ["still ran" if code is None else f"ended with code {code}" for code in codes]
        return "\n".join(
            f"-- rank {at} {end}\n{rank.err}{rank.out}"
            for at, (rank, end) in enumerate(zip(self, ends, strict=True))
        )


@contextmanager
def ranks(environments, *command, talk=False, fresh=False):
    """Run a command of Python's at every rank, and kill the ranks that still run at the end.

    Args:
        environments: see there. Added is where a result is written.
        command: ``"-m", MODULE`` or ``"-c", CODE`` or a script, and arguments.
        talk: make standard input and output pipes; otherwise the input is empty, and the output
            goes to a file.
        fresh: start an interpreter for each, instead of a fork.
    """
    with TemporaryDirectory() as folder, ExitStack() as stack:
        started = Ranks()
        stack.callback(started.kill)
        for at, environment in enumerate(environments):
            stem = Path(folder, str(at))
            whole = {**environment, RESULT: f"{stem}.json"}
            with Path(f"{stem}.out").open("w") as out, Path(f"{stem}.err").open("w") as err:
                streams = (PIPE, PIPE, err) if talk else (DEVNULL, out, err)
                rank = (Fresh if fresh else Forked)(list(map(str, command)), whole, *streams)
            rank.stem = stem
            started.append(rank)
        yield started


def run(environments, *command, timeout_s=PATIENCE_S):
    """Run a command at every rank, and return the results of all."""
    with ranks(environments, *command) as job:
        return job.results(timeout_s)


class Fresh(subprocess.Popen, Rank):
    """An interpreter of its own; see `Forked`."""

    last = signal.SIGTERM  # a launcher ends its ranks

    def __init__(self, command, environment, stdin, stdout, stderr):
        streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        command = [sys.executable, *command]
        super().__init__(command, env=environment, text=True, start_new_session=True, **streams)


class Forked(Rank):
    """A fork of the fork server, with what tests and benchmarks use of `subprocess.Popen`.

    `command` is that of Python, without its name, and `environment` all of it. Each stream is
    `PIPE`, `DEVNULL`, a file or a descriptor; None: this process's.
    """

    last = signal.SIGABRT  # it says where all its threads are

    def __init__(self, command, environment, stdin=None, stdout=None, stderr=None):
        self.returncode = None
        self.stdin = None
        self.stdout = None
        with ExitStack() as theirs:
            if stdin == PIPE:
                reads, writes = os.pipe()
                stdin, self.stdin = theirs.enter_context(os.fdopen(reads)), os.fdopen(writes, "w")
            if stdout == PIPE:
                reads, writes = os.pipe()
                stdout, self.stdout = theirs.enter_context(os.fdopen(writes)), os.fdopen(reads)
            nothing = theirs.enter_context(Path(os.devnull).open("r+b"))
            streams = [
                standard if stream is None else nothing if stream == DEVNULL else stream
                for standard, stream in enumerate((stdin, stdout, stderr))
            ]
            self.pid = fork_server().ask(
                {"command": command, "environment": environment, "folder": str(Path.cwd())},
                [stream if isinstance(stream, int) else stream.fileno() for stream in streams],
            )

    def poll(self):
        """Return the exit code; None while the process runs."""
        if self.returncode is None:
            self.returncode = fork_server().ask(self.pid)
        return self.returncode

    def wait(self, timeout=None):
        """Wait for the end and return the exit code."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number):
        """Send a signal, if the process has not ended."""
        if self.poll() is None:  # until it is polled, nobody else gets its number
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class Loopback:
    """Stands in for a `lab.Lab` on loopback: Python processes on its hosts are forks."""

    address = "127.0.0.1"
    mbit = None

    def __init__(self, hosts):
        self.hosts = [self] * hosts
        self._started = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._started:
            end(process)

    def start(self, argv, env=None, stdout=None, stderr=None, *, stdin=DEVNULL, cwd=ROOT):
        """Start a Python process of this checkout, as `lab.Host.start` does."""
        assert (argv[0], cwd) == (sys.executable, ROOT)
        environment = {**os.environ, **SETTINGS, **(env or {})}
        self._started.append(Forked(argv[1:], environment, stdin, stdout, stderr))
        return self._started[-1]


class ForkServer:
    """The process that forks ranks: one for all tests of this process, from the first one on."""

    def __init__(self):
        self._lock = Lock()
        self._numbers = itertools.count()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, **SETTINGS},
                stdin=DEVNULL,
                stdout=DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for this process alone
            )
        atexit.register(self._stop)

    def ask(self, request, streams=()):
        """Send a request, and return the answer."""
        with self._lock:
            number = next(self._numbers)
            socket.send_fds(self._control, [json.dumps([number, request]).encode()], streams)
            while message := self._control.recv(1 << 10):
                answered, answer = json.loads(message)
                if answered == number:
                    return answer
                # Otherwise it answers a request that pytest's timeout has interrupted.
        fork_server.cache_clear()
        raise RuntimeError(f"the fork server has ended with code {self.process.wait()}")

    def _stop(self):
        self._control.close()
        self.process.wait()


@functools.cache
def fork_server():
    """Return this process's fork server, which is started by the first call."""
    return ForkServer()


def end(process):
    """Kill a process and what it has started, and close its pipes."""
    if isinstance(process, Forked):
        process.kill()  # the fork server sees to what it has started
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with contextlib.suppress(BrokenPipeError):  # of what was not flushed
                pipe.close()
