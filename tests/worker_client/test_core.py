"""Threads without an interpreter ask the core for all-reduces, and hear of their end."""

import ctypes
import os
import subprocess
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests import inside
from tests.waits import within_s
from tests.worker_client.waits import at_all, half_a_job

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reduce(tmp_path_factory):
    """Sums arrays from a thread that Python does not know: `reduce(client, arrays, leads)`."""
    built = tmp_path_factory.mktemp("core") / "caller.so"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    source = Path(__file__).with_name("core_caller.c")
    flags = ["-shared", "-fPIC", "-O1", f"-I{ROOT}", "-pthread"]
    subprocess.run([*compiler, *flags, source, "-o", built], check=True)
    called = ctypes.CDLL(str(built)).reduce  # without the GIL
    called.restype = ctypes.c_long
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p

    def ask(client, arrays, leads=False):
        calls = pointer(inside.flat(client).core.calls(), b"worker_client.core")
        sizes = map(ctypes.c_uint64, arrays.shape)
        return called(ctypes.c_void_p(calls), ctypes.c_void_p(arrays.ctypes.data), *sizes, leads)

    return ask


@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize(("count", "elements"), [(300, 100), (40, 20_000), (10, 300_000)])
def test_a_thread_that_python_does_not_know_sums(make, reduce, count, elements, leads):
    """Large and small ones, of sizes that the session has cut before and has not."""

    def rank(client):
        numbers = np.arange(count * elements, dtype=np.float32).reshape(count, elements) % 1000
        arrays = numbers * (1 + client.rank)
        since = time.monotonic()
        assert reduce(client, arrays, leads) == count
        timed = inside.flat(client).session.flight.unowned
        assert timed.count == count, "with those that the session has begun"
        assert 0 < timed.quantile(0.5) <= time.monotonic() - since
        return (arrays == 3 * numbers).all()

    assert all(at_all(half_a_job(make), rank))


def test_it_and_python_take_turns(make, reduce):
    """Numbers are given in the order of calls, whoever makes them."""

    def rank(client):
        good = []
        for call in range(40):
            arrays = np.full((3, 50 + call), 1 + client.rank, np.float32)
            assert reduce(client, arrays, call % 2 == 1) == 3
            mine = client.all_reduce(np.full(7 + call, 2.0, np.float32), "sum").wait(10)
            good += [(arrays == 3).all(), (mine == 4).all()]
        return all(good)

    assert all(at_all(half_a_job(make), rank))


@pytest.mark.parametrize("leads", [False, True])
def test_it_hears_of_a_failure(make, reduce, leads):
    """Of a client that is shut down, and of what is asked for afterwards."""
    one, other = half_a_job(make)
    start = time.monotonic()
    timer = threading.Timer(0.3, one.shutdown)
    timer.start()
    assert reduce(one, np.ones((3, 10), np.float32), leads) == -1  # the other rank makes no call
    timer.join()
    assert reduce(one, np.ones((3, 10), np.float32), leads) == -1
    other.shutdown()
    within_s(5.0, start)


@pytest.mark.parametrize("leads", [False, True])
def test_what_has_just_come_ends_when_its_client_does(make, reduce, leads):
    """Python has looked at a call that takes long, and then its result comes with the shutdown."""

    def rank(client):
        if client.rank == 1:
            time.sleep(0.2)
        ended = reduce(client, np.ones((1, 10), np.float32), leads)
        client.shutdown()
        return ended

    for _ in range(5):
        assert set(at_all(half_a_job(make), rank)) <= {1, -1}
