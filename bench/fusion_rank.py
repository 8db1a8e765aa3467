"""One rank of `bench.fusion`: reduces many small tensors in several ways, and times each.

Started as ``python -m bench.fusion_rank SPEC`` with the launcher's usual environment.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from worker_client import config
from worker_client.client.bootstrap import connect
from worker_client.client.client import Client

TIMEOUT_S = 120.0


def main(tensors: int, nbytes: int, thresholds: list[int], shuffle: bool, rounds: int) -> None:
    """Time every way in every round, and print the seconds of each as JSON.

    Each threshold of fusion is a way. Others are all of the bytes as one tensor, and each tensor by
    itself, without a name, with a wait for each.
    """
    launch = config.launch()
    parts = [np.ones(nbytes // 4, np.float32) for _ in range(tensors)]
    whole = np.ones(tensors * nbytes // 4, np.float32)
    clients = {
        f"{threshold}": connect(job=f"fusion-{threshold}", fusion_threshold=threshold)
        for threshold in thresholds
    }
    meeting = clients[f"{thresholds[0]}"]
    dice = random.Random(launch.rank)  # noqa: S311 (no secret): every rank has its own

    def order() -> Iterable[int]:
        return dice.sample(range(tensors), tensors) if shuffle else range(tensors)

    ways: dict[str, Callable[[], object]] = {
        "one": lambda: meeting.all_reduce(whole, "sum").wait(TIMEOUT_S),
        "waits": lambda: [meeting.all_reduce(part, "sum").wait(TIMEOUT_S) for part in parts],
        **{name: partial(_each, client, parts, order) for name, client in clients.items()},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):  # the first two make connections and announce tensors
        for name, way in ways.items():
            meeting.all_reduce(np.zeros(1), "sum").wait(TIMEOUT_S)
            begin = time.perf_counter()
            way()
            if number > 1:
                seconds[name].append(time.perf_counter() - begin)
    print(json.dumps({"rank": launch.rank, "seconds": seconds}), flush=True)
    sys.stdin.readline()  # who leaves early would be missed by the others
    for client in clients.values():
        client.shutdown()


def _each(client: Client, parts: list[np.ndarray], order: Callable[[], Iterable[int]]) -> None:
    works = [client.all_reduce(parts[at], "sum", name=f"tensor {at}") for at in order()]
    for work in works:
        work.wait(TIMEOUT_S)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
