"""Horovod's own tests of its interfaces, run over `worker_client.horovod`.

They are read from a checkout of Horovod, which HOROVOD_SOURCE names, and nothing in them is changed
but by the command of docs/horovod.md, for the imports. Helpers of Horovod that its tests alone use
are made here. The tests try every optimizer that torch has, and were written before Muon, which
takes matrices alone: that one is hidden from them. Those of TensorFlow run eagerly, as in
TensorFlow 2; Horovod runs them in sessions as well.

They run in the same processes, as with mpirun, and in one job, until one fails. It is then found
out whether that job goes on, and the test is run again by itself, in new processes, and this
counts. A test may fail if a table of docs/horovod.md says why, and has to.

    export HOROVOD_SOURCE=~/horovod
    python -m tests.frameworks.horovod_suite [FILE] [--world-size 3] [--only NAME]
"""
# ruff: noqa: PLC0415, S102, T201 (what is imported depends on the environment; a command)

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
import traceback
import types
import unittest
import unittest.mock
from contextlib import suppress
from pathlib import Path

import pytest

from reducer import local_pool
from tests.frameworks import suites
from tests.frameworks.suites import Ranks, Verdict
from tests.horovod_imports import PAGE, changed

LIMITS = {"start_s": 120.0, "test_s": 90.0, "after_s": 20.0}
SOURCE = "HOROVOD_SOURCE"
FOLDER = "test/parallel"
CLASSES = {  # by their files
    "test_torch.py": "TorchTests",
    "test_tensorflow.py": "TensorFlowTests",
    "test_tensorflow_process_sets.py": "TensorFlowProcessSetsTests",
    "test_tensorflow2_keras.py": "Tf2KerasTests",
}
LAUNCHED = "Gloo is not available"  # why two tests are skipped without horovodrun


def known(file, world_size):
    """Return the tests of a file that fail with so many ranks, as a table of the page says."""
    of_file = PAGE.read_text().partition(f"\n**{file}**")[2].partition("\n**")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", of_file, re.MULTILINE)
    return {name for name, sizes in rows if str(world_size) in sizes}


def load(name):
    """Import a module of Horovod's tests, changed by the command of the page."""
    path = Path(os.environ[SOURCE], FOLDER, name)
    with tempfile.TemporaryDirectory() as folder:
        text = changed(path.read_text(), Path(folder))
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def stand_in(name, **members):
    """Let a module of Horovod's be there, or let it have more members."""
    module = sys.modules.setdefault(name, types.ModuleType(name))
    vars(module).update(members)


def suite(file):
    """Import Horovod's tests of a file, and return their class."""

    def ranks():
        return tuple(int(os.environ[f"OMPI_COMM_WORLD_{what}"]) for what in ("RANK", "SIZE"))

    stand_in(
        "horovod.runner.util.threads",
        in_thread=lambda target: threading.Thread(target=target).start(),
    )
    stand_in("horovod.runner.common.util.env", get_env_rank_and_size=ranks)
    with suppress(ImportError):
        import parameterized  # noqa: F401 (it takes a module called mock for an old one)
    sys.modules.setdefault("mock", unittest.mock)
    if "tensorflow" in file:
        import tensorflow as tf
        from tensorflow.python.framework import test_util

        import worker_client.horovod.tensorflow as hvd

        eagerly = {"_executing_eagerly": tf.executing_eagerly}
        stand_in("worker_client.horovod.tensorflow.util", **eagerly)
        vars(hvd).update(eagerly, util=sys.modules["worker_client.horovod.tensorflow.util"])
        stand_in("worker_client.horovod.common.util", is_version_greater_equal_than=_at_least)
        test_util.run_all_in_graph_and_eager_modes = lambda tests: tests
        load("base_test_tensorflow.py")
    return getattr(load(file), CLASSES[file])


def _at_least(one, other):
    parts = [[int(part) for part in version.split(".")] for version in (one, other)]
    return parts[0] >= parts[1]


def serve(rank, file, world_size, pipe):
    """Send the names of a file's tests; run the tests that the pipe names, until it sends None."""
    os.environ |= {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world_size)}
    tests = suite(file)
    import torch

    import worker_client.horovod.torch as hvd

    torch.set_num_threads(1)
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "hidden"  # they look for those of torch.optim

    def run(name):
        case = tests(name)
        try:
            case.setUp()
            if getattr(getattr(case, name), "__unittest_skip__", False) or any(
                mark.name == "skip" or (mark.name == "skipif" and mark.args[0])
                for mark in getattr(getattr(case, name), "pytestmark", ())
            ):
                return Verdict("skipped", "Horovod skips it")
            getattr(case, name)()
            case.tearDown()
        except (unittest.SkipTest, pytest.skip.Exception) as skip:
            return Verdict("skipped", str(skip))
        except Exception:  # noqa: BLE001 (the verdict on the test)
            return Verdict("failed", traceback.format_exc())
        return Verdict("passed")

    def goes_on(number):
        """Say whether the next calls are right; those without names may be out of step."""
        hvd.init()
        try:
            total = hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, name=f"goes on {number}")
            gathered = hvd.allgather(torch.tensor([rank]), name=f"goes on {number}")
        except hvd.HorovodInternalError:
            return Verdict("failed", traceback.format_exc())
        right = total.tolist() == [sum(range(world_size))]
        right &= gathered.tolist() == list(range(world_size))
        return Verdict("passed" if right else "failed", f"{total} {gathered}")

    pipe.send([name for name, test in vars(tests).items() if name.startswith("test_") and test])
    tests.setUpClass()
    while (task := pipe.recv()) is not None:
        if isinstance(task, int):
            pipe.send(goes_on(task))
            continue
        verdict = run(task)
        if verdict.why == LAUNCHED:
            launched = {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(world_size)}
            with unittest.mock.patch.dict(os.environ, launched):
                verdict = run(task)
        pipe.send(verdict)


def run_all(file, world_size, only):
    """Run tests of a file, or all, one after the other; yield each with what became of it."""

    def start():
        os.environ["PMIX_NAMESPACE"] = f"{os.getpid()}.{time.monotonic_ns()}"
        return Ranks(serve, world_size, file, world_size, **LIMITS)

    ranks = start()
    try:
        for number, name in enumerate(only or ranks.ready):
            verdict = ranks.run(name)
            if verdict.outcome == "failed":
                after = ranks.run(number)
                print("among others:", name, verdict.why[-800:])
                print("the job", after.why if after.outcome == "failed" else "goes on", flush=True)
                ranks.stop()
                ranks = start()
                verdict = ranks.run(name)
                if verdict.outcome == "failed":  # each rank may have left it at another call
                    ranks.stop()
                    ranks = start()
            yield name, verdict
    finally:
        ranks.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default="test_torch.py", choices=CLASSES)
    suites.add_options(parser)
    options = parser.parse_args()
    os.environ["REDUCTION_TIMEOUT"] = "20s"
    with local_pool(2) as servers:
        os.environ["REDUCTION_SERVERS"] = ",".join(servers)
        only = options.only.split(",") if options.only else []
        ends = suites.shown(run_all(options.file, options.world_size, only))
    if options.json:
        options.json.write_text(json.dumps(ends, indent=1))
    failed = {name for name, end in ends.items() if end.outcome == "failed"}
    said = known(options.file, options.world_size).intersection(ends)
    for name in sorted(failed ^ said):
        print(name, "passes, and is said to fail" if name in said else "fails, and nobody said so")
    sys.exit(failed != said)


if __name__ == "__main__":
    main()
