"""A rank of a job, as `worker-client conform` starts it: the client and the reference of it."""

import os
import sys

import numpy as np

import worker_client
from worker_client import reference

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def sums(all_reduce):
    for count in (1, 0, 1000, 300_000, 16):
        array = np.arange(count, dtype=np.float32) % 97 * (RANK + 1)
        all_reduce(array)
        assert (array == np.arange(count) % 97 * (SIZE * (SIZE + 1) // 2)).all()


def ours():
    client = worker_client.init()
    sums(lambda array: client.all_reduce(array, op="sum").wait(20))
    client.shutdown()


def the_reference():
    servers = os.environ["REDUCTION_SERVERS"].split(",")
    chunk_bytes = int(os.environ.get("REDUCTION_CHUNK_BYTES", "0"))
    job = os.environ["REDUCTION_JOB"]
    client = reference.Client(servers, job, RANK, SIZE, chunk_bytes=chunk_bytes, timeout_s=20)
    try:
        sums(client.all_reduce)
    finally:
        client.close()


if __name__ == "__main__":
    the_reference() if sys.argv[1] == "reference" else ours()
