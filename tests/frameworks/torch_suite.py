"""PyTorch's own tests of its distributed package, over Gloo and over the backend ``reduction``.

They come with torch. Every test that passes over Gloo is run over the backend, by the backend's own
name. All run in the same processes, each in a process group of its own; where one fails or hangs,
the next gets new processes.

    python tests/frameworks/torch_suite.py [--world-size 4] [--only NAME,NAME]
"""
# ruff: noqa: PLC0415, T201 (torch's tests read the environment when imported; this is a command)

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import types
import unittest
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from reducer import local_pool

START_S, TEST_S = 300.0, 60.0  # for all ranks to start, and to make one test
GLOO, OURS = "gloo", "reduction"
MODULE = "torch.testing._internal.distributed.distributed_test"


class Verdict(NamedTuple):
    """What became of a test at a rank: ``passed``, ``skipped`` or ``failed``, and why."""

    outcome: str
    why: str = ""


class Name(str):
    """A backend's name. Where tests ask by it what a backend can do, it is Gloo's as well."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other):
        return other == GLOO or str.__eq__(self, other)

    def __ne__(self, other):
        return not self == other


def suite(backend):
    """Import the tests that torch has for Gloo, to be run by a backend's name."""
    os.environ["BACKEND"] = GLOO  # what is skipped is decided while they are imported
    try:
        import expecttest  # noqa: F401
    except ModuleNotFoundError:  # torch's tests inherit from a class of it, these need no more
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    tests = __import__(MODULE, fromlist=["DistributedTest"])
    tests.BACKEND = os.environ["BACKEND"] = Name(backend)
    return tests


def serve(rank, backend, pipe):
    """Run the tests that the pipe names, until it says None."""
    tests = suite(backend)
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed

    from worker_client import torch_backend

    case_class = type("Case", (tests.TestDistBackend, tests.DistributedTest._DistTestBase), {})
    skip_codes = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    world_size = int(os.environ["WORLD_SIZE"])

    def run(name, file):
        case = case_class(name)
        case.rank, case.file_name = rank, file
        tests.Barrier.barrier_id = 0
        timeout_s = tests.CUSTOM_PG_TIMEOUT.get(name, tests.default_pg_timeout)
        dist.init_process_group(
            backend,
            init_method=f"file://{file}",
            world_size=world_size,
            rank=rank,
            timeout=timedelta(seconds=timeout_s),
        )
        assert dist.get_backend() == backend
        case._barrier()
        set_rng_seed()
        try:
            getattr(case, name)()
        except unittest.SkipTest as skip:
            return Verdict("skipped", str(skip))
        except SystemExit as end:
            if end.code not in skip_codes:
                return Verdict("failed", f"exited with {end.code}")
            return Verdict("skipped", skip_codes[end.code])
        case._barrier()
        return Verdict("passed")

    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        try:
            verdict = run(*task)
            reduced = torch_backend.bytes_reduced()
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 (the verdict on the test)
            verdict, reduced = Verdict("failed", traceback.format_exc()), 0
        pipe.send((verdict, reduced))


class Ranks:
    """The processes that run tests."""

    def __init__(self, backend, world_size):
        spawn = multiprocessing.get_context("spawn")
        pairs = [spawn.Pipe() for _ in range(world_size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            spawn.Process(target=serve, args=(rank, backend, theirs))
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for pipe in self._pipes:
            assert pipe.poll(START_S)
            assert pipe.recv() == "ready"

    def run(self, name, file):
        """Return each rank's verdict on a test, and the bytes that rank 0 reduced."""
        for pipe in self._pipes:
            pipe.send((name, file))
        until = time.monotonic() + TEST_S
        said = []
        for rank, pipe in enumerate(self._pipes):
            if any(verdict.outcome == "failed" for verdict, _ in said):
                until = min(until, time.monotonic() + 5)
            try:
                if not pipe.poll(max(0.0, until - time.monotonic())):
                    said.append((Verdict("failed", f"rank {rank} was not done in time"), 0))
                    continue
                said.append(pipe.recv())
            except EOFError:
                said.append((Verdict("failed", f"the process of rank {rank} ended"), 0))
        return [verdict for verdict, _ in said], said[0][1]

    def stop(self):
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def run_all(backend, world_size, names):
    """Run tests one after the other; yield each with what became of it and the bytes reduced."""
    ranks = None
    with tempfile.TemporaryDirectory() as root:
        os.environ.update(
            TEMP_DIR=root, WORLD_SIZE=str(world_size), INIT_METHOD=f"file://{root}/shared"
        )
        for name in names:
            for folder in ("barrier", "test_dir", "init_dir"):
                Path(root, folder).mkdir(exist_ok=True)
                for left in Path(root, folder).iterdir():
                    left.unlink()
            ranks = ranks or Ranks(backend, world_size)
            verdicts, reduced = ranks.run(name, f"{root}/{name}")
            bad = [verdict for verdict in verdicts if verdict.outcome == "failed"]
            if bad:
                ranks.stop()
                ranks = None
            yield name, (bad or verdicts)[0], reduced
        if ranks is not None:
            ranks.stop()


def all_names():
    """Return the names of all tests that torch does not skip whatever the backend."""
    base = suite(GLOO).DistributedTest._DistTestBase
    tests = {name: getattr(base, name) for name in dir(base) if name.startswith("test_")}
    return [name for name in tests if not getattr(tests[name], "__unittest_skip__", False)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--only", default="", help="names of tests, with commas")
    parser.add_argument("--json", type=Path, help="where to write what became of each")
    options = parser.parse_args()
    os.environ["WORLD_SIZE"] = str(options.world_size)  # tests read it when they are imported
    names = options.only.split(",") if options.only else all_names()
    ends = {}
    with local_pool(2) as servers:
        os.environ["REDUCTION_SERVERS"] = ",".join(servers)
        for backend in (GLOO, OURS):
            ends[backend] = {}
            for name, verdict, reduced in run_all(backend, options.world_size, names):
                ends[backend][name] = (*verdict, reduced)
                what = f"{backend}: {verdict.outcome:8}{name} ({reduced} bytes reduced)"
                print(what, verdict.why[-800:], flush=True)
            print(backend, dict(Counter(end[0] for end in ends[backend].values())))
            names = [name for name, end in ends[backend].items() if end[0] == "passed"]
    if options.json:
        options.json.write_text(json.dumps(ends, indent=1))
    sys.exit(names != list(ends[OURS]))


if __name__ == "__main__":
    main()
