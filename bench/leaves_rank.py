"""One rank of `bench.leaves`: times all-reduces over ranks and over leaves, by turns.

Started as ``python -m bench.leaves_rank SPEC`` with the launcher's usual environment.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import worker_client
from reducer.wire.leaves import Share
from worker_client.client.client import Client

TIMEOUT_S = 120.0
LEAST_S = 0.05  # of the calls of a turn: small ones are made again and again


def main(sizes: list[int], counts: list[int], rounds: int) -> None:
    """Time each way at each size in every round, and print the seconds of each as JSON."""
    with worker_client.init() as client:
        seconds = {nbytes: measure(client, nbytes, counts, rounds) for nbytes in sizes}
        print(json.dumps({"rank": client.rank, "seconds": seconds}), flush=True)
        sys.stdin.readline()  # who leaves early would be missed by the others


def measure(client: Client, nbytes: int, counts: list[int], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a call, in each round, over ranks (way 0) and over so many leaves."""
    whole = np.ones(nbytes // 4, np.float32)
    ways: dict[str, Callable[[], object]] = {
        "0": lambda: client.all_reduce(whole, "mean").wait(TIMEOUT_S)
    }
    for count in counts:
        share = client.leaves(count)
        sums = np.ones((len(share.parts), nbytes // 4), np.float32)
        ways[f"{count}"] = partial(_over_leaves, client, sums, share)
    times = np.zeros(1)
    begin = time.perf_counter()
    for way in ways.values():
        way()
    times[0] = max(1, LEAST_S * len(ways) // (time.perf_counter() - begin))
    client.all_reduce(times, "min").wait(TIMEOUT_S)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            client.all_reduce(np.zeros(1), "sum").wait(TIMEOUT_S)
            begin = time.perf_counter()
            for _ in range(int(times[0])):
                way()
            seconds[name].append((time.perf_counter() - begin) / times[0])
    return seconds


def _over_leaves(client: Client, sums: np.ndarray, share: Share) -> None:
    client.reduce_leaves(sums, share, "mean").wait(TIMEOUT_S)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
