"""One rank of an honest job: for each line of its input it makes so many all-reduces.

It answers with one JSON object a line: the median, the 99th percentile and the longest of the
times, in seconds, and how many elements were wrong.
"""

import json
import os
import statistics
import sys
import time

import numpy as np

from worker_client.client.bootstrap import connect


def main() -> None:
    given = json.loads(sys.argv[1])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    numbers = np.arange(given["nbytes"] // 4, dtype=np.int64)
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
                values = ((numbers * (rank + 1) + step) % 997).astype(np.float32)
                start = time.perf_counter()
                client.all_reduce(values, op="sum").wait(60)
                times.append(time.perf_counter() - start)
                # What all ranks together give.
                given = ((numbers * (each + 1) + step) % 997 for each in range(world_size))
                wrong += int((values != sum(given)).sum())
            report = {"median": statistics.median(times), "longest": max(times), "wrong": wrong}
            report["p99"] = float(np.percentile(times, 99))
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
