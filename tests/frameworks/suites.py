"""Runs tests of other projects, at all ranks of a job, in processes that are kept between them.

A suite gives its own `serve`, which a process runs at every rank: it says when it is ready, and
then answers each task that its pipe brings with a `Verdict`, until the task is None.
"""
# ruff: noqa: T201 (what suites are commands for)

import multiprocessing
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Verdict(NamedTuple):
    """What became of a test at a rank."""

    outcome: str  # passed, skipped or failed
    why: str = ""
    bytes_reduced: int = 0


class Ranks:
    """The processes that run tests; `ready` is what they have said when they were ready.

    Args:
        serve: what each of them runs, with its rank, the arguments and a pipe.
        world_size, arguments: how many there are, and what all are given.
        start_s, test_s: for all of them to be ready, and for a test.
        after_s: for the others, when one rank has failed.
    """

    def __init__(self, serve, world_size, *arguments, start_s, test_s, after_s):
        self._test_s = test_s
        self._after_s = after_s
        spawn = multiprocessing.get_context("spawn")
        pairs = [spawn.Pipe() for _ in range(world_size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            spawn.Process(target=serve, args=(rank, *arguments, theirs))
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for pipe in self._pipes:
            assert pipe.poll(start_s), "no process is ready"
            self.ready = pipe.recv()

    def run(self, task):
        """Return a verdict on a task: of a rank that hangs, else of one that failed, else any."""
        for pipe in self._pipes:
            pipe.send(task)
        until = time.monotonic() + self._test_s
        said = []
        for rank, pipe in enumerate(self._pipes):
            if any(verdict.outcome == "failed" for verdict in said):
                until = min(until, time.monotonic() + self._after_s)
            try:
                late = not pipe.poll(max(0.0, until - time.monotonic()))
                said.append(Verdict("failed", f"rank {rank} hangs") if late else pipe.recv())
            except EOFError:
                said.append(Verdict("failed", f"the process of rank {rank} ended"))
        bad = [verdict for verdict in said if verdict.outcome == "failed"]
        hung = [verdict for verdict in bad if "hangs" in verdict.why]
        return (hung or bad or said)[0]

    def stop(self):
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def add_options(parser):
    """Add what all suites are told by their command lines."""
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--only", default="", help="names of tests, with commas")
    parser.add_argument("--json", type=Path, help="where to write what became of each")


def shown(verdicts, of=""):
    """Print what becomes of tests, one after the other, and return all of it by their names."""
    ends = {}
    for name, verdict in verdicts:
        ends[name] = verdict
        print(f"{of}{verdict.outcome:8}{name}", verdict.why[-800:], flush=True)
    print(of, dict(Counter(end.outcome for end in ends.values())))
    return ends
