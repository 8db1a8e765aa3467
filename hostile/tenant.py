"""One rank of an honest job: for each line of its input it makes so many all-reduces.

It answers with one JSON object a line: the median and the longest time, in seconds, and how many
elements were wrong.
"""

import json
import os
import statistics
import sys
import time

import numpy as np

from worker_client.client.bootstrap import connect


def main() -> None:
    """Join, say so, and reduce what is asked for."""
    given = json.loads(sys.argv[1])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    count = given["nbytes"] // 4
    step = 0
    with connect(
        rank=rank,
        world_size=world_size,
        servers=given["servers"],
        job=given["job"],
        keys=given["keys"],
        window_bytes="4MiB",
        chunk_bytes="256KiB",
    ) as client:
        print(json.dumps({"rank": rank}), flush=True)
        for line in sys.stdin:
            times, wrong = [], 0
            for _ in range(int(line)):
                step += 1
                # Whole numbers, whose sum is exact in any order, others in every step.
                array = (np.arange(count, dtype=np.int64) * (rank + 1) + step) % 997
                values = array.astype(np.float32)
                start = time.perf_counter()
                client.all_reduce(values, op="sum").wait(60)
                times.append(time.perf_counter() - start)
                wrong += int((values != expected(count, world_size, step)).sum())
            report = {"median": statistics.median(times), "longest": max(times), "wrong": wrong}
            print(json.dumps(report), flush=True)


def expected(count: int, world_size: int, step: int) -> np.ndarray:
    """Return what all ranks together give."""
    numbers = np.arange(count, dtype=np.int64)
    total = sum((numbers * (rank + 1) + step) % 997 for rank in range(world_size))
    return np.asarray(total, dtype=np.float32)


if __name__ == "__main__":
    main()
