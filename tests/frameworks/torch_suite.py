"""PyTorch's own tests of its distributed package, over Gloo and over the backend ``reduction``.

They come with torch. Every test that passes over Gloo is run over the backend, by the backend's own
name. All run in the same processes, each in a process group of its own; where one fails or hangs,
the next gets new processes.

    python -m tests.frameworks.torch_suite [--world-size 4] [--only NAME,NAME]
"""
# ruff: noqa: PLC0415 (torch's tests read the environment when imported; this is a command)

import argparse
import json
import os
import sys
import tempfile
import traceback
import types
import unittest
from datetime import timedelta
from pathlib import Path

from reducer import local_pool
from tests.frameworks import suites
from tests.frameworks.suites import Ranks, Verdict

LIMITS = {"start_s": 300.0, "test_s": 60.0, "after_s": 5.0}
GLOO, OURS = "gloo", "reduction"
MODULE = "torch.testing._internal.distributed.distributed_test"


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
            verdict = run(*task)._replace(bytes_reduced=torch_backend.bytes_reduced())
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 (the verdict on the test)
            verdict = Verdict("failed", traceback.format_exc())
        pipe.send(verdict)


def run_all(backend, world_size, names):
    """Run tests one after the other; yield each with what became of it."""
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
            ranks = ranks or Ranks(serve, world_size, backend, **LIMITS)
            verdict = ranks.run((name, f"{root}/{name}"))
            yield name, verdict
            if verdict.outcome == "failed":
                ranks.stop()
                ranks = None
        if ranks is not None:
            ranks.stop()


def all_names():
    """Return the names of all tests that torch does not skip whatever the backend."""
    base = suite(GLOO).DistributedTest._DistTestBase
    tests = {name: getattr(base, name) for name in dir(base) if name.startswith("test_")}
    return [name for name in tests if not getattr(tests[name], "__unittest_skip__", False)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    suites.add_options(parser)
    options = parser.parse_args()
    os.environ["WORLD_SIZE"] = str(options.world_size)  # tests read it when they are imported
    names = options.only.split(",") if options.only else all_names()
    ends = {}
    with local_pool(2) as servers:
        os.environ["REDUCTION_SERVERS"] = ",".join(servers)
        for backend in (GLOO, OURS):
            verdicts = run_all(backend, options.world_size, names)
            ends[backend] = suites.shown(verdicts, f"{backend}: ")
            names = [name for name, end in ends[backend].items() if end.outcome == "passed"]
    if options.json:
        options.json.write_text(json.dumps(ends, indent=1))
    sys.exit(names != list(ends[OURS]))


if __name__ == "__main__":
    main()
