"""The parent's side of `bench.worker`: the processes of a contender, and their commands."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from bench.contenders import ALGORITHMS, Contender, Place
from harness import HarnessError
from lab import Host, Lab

ABORT_S = 5.0
LAST_LINES = 60
START_S = 180.0  # importing torch in 16 processes at once takes its time on few cores
REPLY_S = 120.0
# Open MPI starts a daemon on every host with `AGENT HOST COMMAND`, as it would with ssh.
AGENT = Path(__file__).with_name("mpi_agent.sh")
# TCP alone: shared memory would leave the links, and the comparison, out. Ranks that wait yield the
# processor, which they share with everybody here.
SETTINGS = {"pml": "ob1", "btl": "tcp,self", "mpi_yield_when_idle": "1"}


class Control:
    """Where workers report: a Unix socket with a path, which every network namespace can reach."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self.path = str(Path(self._folder.name, "control"))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen(256)
        self._socket.settimeout(0.5)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        self._folder.cleanup()

    def gather(self, crews: list[Crew]) -> None:
        """Wait until all workers of all crews have reported; a crew that cannot is failed."""
        waiting = {crew.name: crew for crew in crews}
        deadline = time.monotonic() + START_S
        while waiting:
            with suppress(TimeoutError):
                connection, _ = self._socket.accept()
                member = Member(connection)
                hello = member.receive(START_S)
                if crew := waiting.get(hello.get("name", "")):
                    member.pid = hello["pid"]
                    crew.members[hello["rank"]] = member
            for crew in list(waiting.values()):
                if crew.died or time.monotonic() > deadline:
                    crew.fail("a worker did not start")
                if crew.failure or crew.complete:
                    del waiting[crew.name]


class Member:
    """The connection to one worker, and its process id, once it has said hello."""

    def __init__(self, connection: socket.socket) -> None:
        self.pid = 0
        self._connection = connection
        self._stream = connection.makefile("r")

    def send(self, line: bytes) -> None:
        """Send a command."""
        self._connection.sendall(line)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Wait for a reply; it has an ``error`` if there is none."""
        self._connection.settimeout(timeout_s)
        try:
            line = self._stream.readline()
        except TimeoutError:
            return {"error": f"no reply within {timeout_s:g} s", "stalled": True}
        except OSError as error:
            return {"error": str(error)}
        reply: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
        return reply

    def close(self) -> None:
        """Hang up, which ends the worker."""
        self._stream.close()
        self._connection.close()


class Crew:
    """All ranks of one contender, and why it cannot be measured, once that is so."""

    def __init__(
        self,
        contender: Contender,
        lab: Lab,
        workers: int,
        servers: tuple[str, ...],
        keys: str = "",
    ) -> None:
        self.contender = contender
        self.name = contender.name
        self.failure = ""
        self.members: dict[int, Member] = {}
        self._lab = lab
        self._size = workers
        self._servers = servers
        self._keys = keys
        self._said: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives with the crew)
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def complete(self) -> bool:
        """Whether all ranks have reported."""
        return len(self.members) == self._size

    @property
    def died(self) -> bool:
        """Whether a process has ended."""
        return any(process.poll() is not None for process in self._processes)

    def start(self, control: Control) -> None:
        """Start the processes; `Control.gather` waits for them."""
        hosts = self._lab.hosts[: self._size]
        python = [sys.executable, "-m", "bench.worker", control.path]
        python += [self.name, self.contender.kind]
        root = self.contender.root
        environment = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        environment |= self.contender.environment
        shared = (self._servers, self.contender.wire_dtype, self._keys, self.name)
        places = [
            Place(host.index, self._size, host.address, hosts[0].address, *shared) for host in hosts
        ]
        if self.contender.kind == "mpi":
            program = [*python, json.dumps(asdict(places[0]))]
            commands = [(hosts[0], _mpirun(hosts, program, self.contender.algorithm))]
        else:
            commands = [
                (host, [*python, json.dumps(asdict(place))])
                for host, place in zip(hosts, places, strict=True)
            ]
        for host, argv in commands:
            self._processes.append(
                host.start(argv, env=environment, stdout=self._said, stderr=self._said, cwd=root)
            )

    @property
    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [self.members[rank].pid for rank in sorted(self.members)]

    def join(self) -> None:
        """Connect the ranks to each other."""
        offers = [reply["offer"] for reply in self.ask("offer")]
        self.ask("join", offers=offers)

    def ask(
        self, action: str, *, patience_s: float = REPLY_S, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Give all ranks one command of `bench.worker.Worker`; return their replies, in rank order.

        Raises:
            HarnessError: a rank failed or has failed before.
        """
        if self.failure:
            raise HarnessError(self.failure)
        line = json.dumps({"do": action, **arguments}).encode() + b"\n"
        members = [self.members[rank] for rank in sorted(self.members)]
        with suppress(OSError):  # a worker that is gone is found when it does not reply
            for member in members:
                member.send(line)
        replies: list[dict[str, Any]] = []
        for rank, member in enumerate(members):
            replies.append(member.receive(patience_s))
            if "error" in replies[-1]:
                # A process that stalls says where it is when it is aborted.
                end = signal.SIGABRT if "stalled" in replies[-1] else signal.SIGTERM
                self.fail(f"rank {rank}: {replies[-1]['error']}", end)
                raise HarnessError(self.failure)
        return replies

    def fail(self, why: str, end: signal.Signals = signal.SIGTERM) -> None:
        """End all processes, show what they said last, and remember why."""
        self.failure = why
        for process in self._processes:
            process.send_signal(end)
        for process in self._processes:
            _end(process)
        self._said.seek(0)
        lines = [line for line in self._said.read().splitlines() if line.strip()]
        print(f"# {self.name}: {why}", *lines[-LAST_LINES:], sep="\n", file=sys.stderr)

    def stop(self) -> None:
        """Let the ranks leave; the lab ends those that do not."""
        if not self.failure:
            with suppress(HarnessError):
                self.ask("close")
        for member in self.members.values():
            member.close()
        self._said.close()


def _mpirun(hosts: Sequence[Host], program: Sequence[str], algorithm: str) -> list[str]:
    settings = dict(SETTINGS)
    if algorithm:
        number, segment = ALGORITHMS[algorithm]
        settings["coll_tuned_use_dynamic_rules"] = "1"
        settings["coll_tuned_allreduce_algorithm"] = str(number)
        settings["coll_tuned_allreduce_algorithm_segmentsize"] = str(segment)
    if len({host.address for host in hosts}) > 1:
        settings |= {"plm_rsh_agent": str(AGENT), "oob_tcp_if_include": "eth0"}
        settings |= {"btl_tcp_if_include": "eth0"}
        where = ["--host", ",".join(f"{host.name}:1" for host in hosts)]
    else:
        settings |= {"btl_tcp_if_include": "lo"}
        where = ["--oversubscribe"]
    options = [word for name, value in settings.items() for word in ("--mca", name, value)]
    return [
        "mpirun",
        "--allow-run-as-root",
        *("--np", str(len(hosts)), *where, *options),
        *("--bind-to", "none", *program),
    ]


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(ABORT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def unavailable(contender: Contender) -> str:
    """Say why a contender cannot run on this machine; empty if it can."""
    if contender.kind == "mpi":
        if not shutil.which("mpirun"):
            return "mpirun is missing: install Open MPI (openmpi-bin)"
        if not find_spec("mpi4py"):
            return "mpi4py is missing: pip install mpi4py"
    if contender.kind in {"gloo", "embedded", "mixed"} and not find_spec("torch"):
        return "torch is missing: pip install torch"
    return ""
