"""Reducers and workers as processes of their own, with failpoints."""

from contextlib import contextmanager

from reducer.pool import READY
from tests.ranks import environments, ranks

SERVE = ["-m", "reducer", "serve", "--bind", "tcp://127.0.0.1:0", "--log-level", "error"]
# Rank 0 of 2: all-reduces of 3 chunks of ones, until it is told to stop by the end of its input.
WORK = """
import sys, numpy as np
from worker_client.client.bootstrap import connect
with connect(rank=0, world_size=2, connect_timeout="500ms", timeout="300ms") as client:
    print("joined", flush=True)
    for _ in sys.stdin:
        print(client.all_reduce(np.ones(49152, np.float32), op="sum").wait(10)[0], flush=True)
"""


@contextmanager
def reducer(failpoints):
    """A running `reducer serve`, and its address."""
    given = environments(1, REDUCTION_FAILPOINTS=failpoints)
    with ranks(given, *SERVE, talk=True) as (running,):
        yield running, running.stdout.readline().removeprefix(READY).strip()


@contextmanager
def worker(failpoints, servers, job):
    """A worker that makes an all-reduce for each line that it is sent, and says its first sum."""
    settings = {"REDUCTION_JOB": job, "REDUCTION_CHUNK_BYTES": "64KiB"}
    given = environments(1, servers, REDUCTION_FAILPOINTS=failpoints, **settings)
    with ranks(given, "-c", WORK, talk=True) as (running,):
        yield running
