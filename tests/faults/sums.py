"""Rank 0 of 2: all-reduces of 3 chunks of ones, until the end of its input; it says each sum."""

import sys

import numpy as np

from worker_client.client.bootstrap import connect

if __name__ == "__main__":
    with connect(rank=0, world_size=2, connect_timeout="500ms", timeout="300ms") as client:
        print("joined", flush=True)
        for _ in sys.stdin:
            work = client.all_reduce(np.ones(49152, np.float32), op="sum")
            print(work.wait(10)[0], flush=True)
