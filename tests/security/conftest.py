"""Pools with keys, in this process or one of their own, and one for whoever comes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest

from hostile import company
from reducer.commands.keygen import keygen
from reducer.runtime.keyring import Keyring
from tests.conftest import joined, reducer_here
from tests.integration.calls import all_reduce, reduced

WAIT_S = 100.0  # far more than anything takes, unless the machine is very busy
SHORT = ("--handshake-timeout", "500ms", "--memory-limit", "256MiB", "--max-jobs", "8")
HONEST = {"job": "honest", "window_bytes": "4MiB", "chunk_bytes": "64KiB"}


@pytest.fixture
def home(tmp_path):
    """Keys of a pool and of two jobs."""
    keygen(tmp_path / "keys", ["one", "two"])
    return tmp_path / "keys"


class Pool:
    """A reducer with keys in this process.

    Attributes:
        home: what `reducer keygen` has made.
        address: of the reducer.
    """

    def __init__(self, server, home):
        self._server = server
        self._stack = ExitStack()
        self._lines = []
        self.home = home
        self.address = server.address

    @property
    def counters(self):
        return self._server.counters

    @property
    def members(self):
        """Number of members by job."""
        jobs = self._server.observer.status().jobs
        return {job.name: job.present for job in jobs}

    def join(self, key, world_size=2, **arguments):
        """All ranks of a job as clients that have the keys of `key`."""
        keys = self.home / "jobs" / key
        arguments = {"servers": self.address, "keys": keys, "job": key, **arguments}
        return self._stack.enter_context(joined(world_size, **arguments))

    def allow(self, *jobs):
        """Leave only the lines of these jobs on the allow-list."""
        path = self.home / "pool" / "allowed"
        self._lines = self._lines or path.read_text().splitlines(keepends=True)
        kept = [line for line in self._lines if line.split(" ")[0] in {*jobs, "#"}]
        path.with_suffix(".new").write_text("".join(kept))
        path.with_suffix(".new").replace(path)

    def close(self):
        self._stack.close()
        self._server.stop()


@pytest.fixture
def pool(home):
    keys = Keyring.load(home / "pool")
    with reducer_here(keys) as server, closing(Pool(server, home)) as pool:
        yield pool


@contextmanager
def busy(clients):
    """Make all-reduces without end meanwhile; none may fail, each must be exact.

    Yields:
        A list with one number: how many were made.
    """
    stop, made = threading.Event(), [0]

    def run():
        while not stop.is_set():
            all_reduce(clients)
            made[0] += 1

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        try:
            yield made
        finally:
            stop.set()
        running.result()


def reduces(clients):
    """Whether an all-reduce of a job gives every rank the sum of what all gave."""
    n = len(clients)
    given = np.arange(1 << 16, dtype=np.float32)
    sums = reduced(clients, [given * (rank + 1) for rank in range(n)], "sum")
    return all(np.array_equal(found, given * (n * (n + 1) // 2)) for found in sums)


@pytest.fixture(scope="module")
def reducer():
    """A reducer process that has little patience and little memory."""
    with company.reducer(*SHORT) as running:
        yield running


@pytest.fixture
def honest(reducer):
    """Two ranks of a job that keeps the rules."""
    with joined(2, servers=[reducer.address], **HONEST) as clients:
        assert reduces(clients)
        yield clients
