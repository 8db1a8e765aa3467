"""Rank 0 of 2: all-reduces of 3 chunks of ones, until the end of its input; it says each sum."""

import sys

import numpy as np

from worker_client.client.bootstrap import connect

if __name__ == "__main__":
    with connect(rank=0, world_size=2, connect_timeout="500ms", timeout="300ms") as client:
        sys.stdout.write("joined\n")
        sys.stdout.flush()
        for _ in sys.stdin:
            work = client.all_reduce(np.ones(49152, np.float32), op="sum")
            sys.stdout.write(f"{work.wait(10)[0]}\n")
            sys.stdout.flush()
