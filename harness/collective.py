"""Nodes that do what NCCL does with a collective network, and what must come of it.

`tests/nccl/harness_collective.c` has their side and says how they speak.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness import ROOT, HarnessError
from harness.oracle import half, widen
from lab import Host
from worker_client.commands.demo.ranks import pipe
from worker_client.commands.nccl import LIBRARY

VERSIONS = (8, 9, 10, 11, 12)  # of its tables
HARNESS = "tests/nccl/harness_collective.c"
# NCCL's numbers of what reducers have: how values are stored, and the type as oracles call it.
DTYPES = {
    0: (np.int8, ""),
    1: (np.uint8, ""),
    2: (np.int32, ""),
    4: (np.int64, ""),
    6: (np.float16, "float16"),
    7: (np.float32, ""),
    8: (np.float64, ""),
    9: (np.uint16, "bfloat16"),
}
FOLDS: list[Any] = [np.add, np.multiply, np.maximum, np.minimum]  # by NCCL's numbers
# The bits of a floating-point number that are drawn, and those that make it one from 1 to 2.
_DRAWN: dict[int, tuple[Any, int, int]] = {
    6: (np.uint16, 0x83FF, 0x3C00),
    7: (np.uint32, 0x807FFFFF, 0x3F800000),
    8: (np.uint64, 0x800FFFFFFFFFFFFF, 0x3FF0000000000000),
    9: (np.uint16, 0x807F, 0x3F80),
}


@dataclass(frozen=True)
class Built:
    """What was compiled: nodes as a program and as a library."""

    program: Path
    library: Path


def build(folder: Path) -> Built:
    """Compile nodes; the plug-in is the one that is installed."""
    built = Built(folder / "node", folder / "node.so")
    compile_c(built.program, HARNESS)
    compile_c(built.library, HARNESS, flags=["-shared", "-fPIC"])
    return built


def compile_c(
    output: Path,
    *sources: str,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Compile sources of this checkout, optimized and with warnings as errors."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    always = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O2", "-pthread"]
    command = [*compiler, *always, *flags, f"-I{ROOT}", *sources, "-o", output, "-ldl"]
    subprocess.run(command, check=True, cwd=ROOT, env=environment)


def draw(dtype: int, rank: int, count: int) -> np.ndarray[Any, Any]:
    """Return values of a rank: of a floating type, between 1 and 2 with any sign."""
    stored, _ = DTYPES[dtype]
    random = np.random.default_rng((dtype, rank))
    if dtype not in _DRAWN:
        return np.frombuffer(random.bytes(count * np.dtype(stored).itemsize), stored)
    bits, drawn, one = _DRAWN[dtype]
    found = random.integers(0, np.iinfo(bits).max, count, bits, endpoint=True)
    made: np.ndarray[Any, Any] = ((found & bits(drawn)) | bits(one)).view(stored)
    return made


def fold(dtype: int, op: int, values: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the left fold in rank order; of 16 bits in float32, rounded once."""
    _, name = DTYPES[dtype]
    total = widen(values[0], name)
    for others in values[1:]:
        total = FOLDS[op](total, widen(others, name))
    return np.asarray(half(total, name) if name else total)


def write_inputs(folder: Path, ranks: int, nbytes: int, dtypes: Any = DTYPES) -> None:
    """Write what each rank gives of each dtype, and what every rank must get of each reduction."""
    for dtype in dtypes:
        count = nbytes // np.dtype(DTYPES[dtype][0]).itemsize
        values = [draw(dtype, rank, count) for rank in range(ranks)]
        for rank, its in enumerate(values):
            its.tofile(folder / f"{dtype}-rank{rank}")
        for op in range(len(FOLDS)):
            with np.errstate(over="ignore"):
                fold(dtype, op, values).tofile(folder / f"{dtype}-op{op}")


@dataclass(frozen=True)
class Calls:
    """What nodes are to do.

    Attributes:
        calls: how many, in each life.
        most_bytes: of a call; with `fixed`, of each.
        version: of the table that they call.
        ahead: most in flight.
        communicators: that take turns.
        lives: how often a node connects, makes its calls and closes.
        dtype: of each call, by NCCL's number; -1: any.
        seed: of calls, and of the order in which requests are tested.
    """

    calls: int
    most_bytes: int
    version: int = VERSIONS[-1]
    ahead: int = 8
    communicators: int = 1
    lives: int = 1
    fixed: bool = False
    dtype: int = -1
    seed: int = 1


@dataclass(frozen=True)
class Outcome:
    """What came of a node's calls: how many ended well, could not begin at once, were wrong.

    Attributes:
        error: NCCL's number for how one has failed; 0 if none has.
        seconds, cpu_s: of all, and what the process has used of processors.
    """

    done: int
    blocked: int
    wrong: int
    error: int
    seconds: float
    cpu_s: float


class Node:
    """A process: a program without Python, or a Python that does other things meanwhile.

    Attributes:
        outcomes: of its lives.
        left: open files and resident pages after each life.
        refused: NCCL's number for how it could not connect; 0 if it could.
        ended_at: when it told of its latest outcome, by the monotonic clock.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], host: Host | None
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.left: list[tuple[int, int]] = []
        self.refused = 0
        self.ended_at = 0.0
        self.handles: list[str] = []
        start = partial(subprocess.Popen[str], text=True) if host is None else host.start
        self.process = start(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        self.errors: list[str] = []

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        stream = pipe(self.process.stdin)
        stream.write(line + "\n")
        stream.flush()

    def note(self, words: list[str]) -> None:
        """Note what it has told."""
        if words[0] == "done":
            counts, times = map(int, words[1:5]), map(float, words[5:])
            self.outcomes.append(Outcome(*counts, *times))
            self.ended_at = time.monotonic()
        elif words[0] == "closed":
            self.left.append((int(words[1]), int(words[2])))
        elif words[0] == "refused":
            self.refused = int(words[1])
        elif words[0] == "handles":
            size = len(words[1]) if words[1:] else 0
            self.handles = [words[1][at : at + 256] for at in range(0, size, 256)]


class Nodes:
    """All nodes of one job, which are killed when the context ends if they still run.

    They are processes of this machine, or one on each of the `hosts` of a lab.
    """

    def __init__(
        self,
        built: Built,
        folder: Path,
        ranks: int,
        plan: Calls,
        settings: Mapping[str, str],
        *,
        in_python: bool = False,
        plans: Mapping[int, Calls] | None = None,
        per_rank: Callable[[int], Mapping[str, str]] = lambda _: {},
        hosts: Sequence[Host] = (),
    ) -> None:
        self._heard: queue.Queue[tuple[int, list[str]]] = queue.Queue()
        self._threads: list[threading.Thread] = []
        self.nodes: list[Node] = []
        program = [sys.executable, "-m", "harness.foreign", str(built.library)]
        start = program if in_python else [str(built.program)]
        for rank in range(ranks):
            its = (plans or {}).get(rank, plan)
            told = [its.communicators, its.lives, its.calls, its.ahead, its.most_bytes]
            told += [int(its.fixed), its.dtype, its.seed]
            command = [*start, LIBRARY, its.version, folder, rank, ranks, *told]
            environment = {**environments(), **settings, **per_rank(rank)}
            if hosts and hosts[rank].name != "localhost":
                environment["NCCL_SOCKET_IFNAME"] = "eth0"
            host = hosts[rank] if hosts else None
            self.nodes.append(Node([*map(str, command)], environment, host))

    def __enter__(self) -> Nodes:
        for rank, node in enumerate(self.nodes):
            for reads in (self._read, self._read_errors):
                thread = threading.Thread(target=reads, args=(rank, node), daemon=True)
                thread.start()
                self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.process.kill()
            node.process.wait()
        for thread in self._threads:
            thread.join()
        for node in self.nodes:
            pipe(node.process.stdin).close()

    @property
    def said(self) -> list[str]:
        """What each has written to standard error."""
        return ["".join(node.errors) for node in self.nodes]

    def run(
        self, patience_s: float = 60.0, *, at: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        """Let them live to their ends.

        Args:
            patience_s: for the next line of any.
            at: called with a rank and how many of its calls have ended.

        Raises:
            HarnessError: nothing was said for so long.
        """
        running = len(self.nodes)
        waiting: dict[str, set[int]] = {"handles": set(), "done": set()}
        gone: set[int] = set()
        while running:
            try:
                rank, words = self._heard.get(timeout=patience_s)
            except queue.Empty:
                raise HarnessError("\n".join(["no node says anything", *self.said])) from None
            if not words:
                running -= 1
                gone.add(rank)
            elif words[0] == "at":
                at(rank, int(words[1]))
            else:
                self.nodes[rank].note(words)
                waiting.get(words[0], set()).add(rank)
            for word, those in waiting.items():
                if those and len(those | gone) == len(self.nodes):
                    self._go_on(word, those - gone)
                    those.clear()

    def _go_on(self, word: str, ranks: set[int]) -> None:
        lines = ["go"]
        if word == "handles":
            every = zip(*(node.handles for node in self.nodes), strict=True)
            lines = ["".join(handles) for handles in every]
        for rank in ranks:
            for line in lines:
                self.nodes[rank].tell(line)

    def _read(self, rank: int, node: Node) -> None:
        with pipe(node.process.stdout) as lines:
            for line in lines:
                self._heard.put((rank, line.split()))
        self._heard.put((rank, []))

    def _read_errors(self, rank: int, node: Node) -> None:
        del rank
        with pipe(node.process.stderr) as lines:
            node.errors.extend(lines)


def environments() -> dict[str, str]:
    """Return what a node's process is told, for a Python of its own if it needs one."""
    folder, name = map(sysconfig.get_config_var, ("LIBDIR", "INSTSONAME"))
    packages = [path for path in sys.path if path.endswith("site-packages")]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("REDUCTION_")}
    return {
        **mine,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *packages]),
        "REDUCTION_LIBPYTHON": f"{folder}/{name}",
        "REDUCTION_TIMEOUT": "30s",
        "NCCL_SOCKET_IFNAME": "lo",
    }
