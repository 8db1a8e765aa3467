"""One rank of `bench.far`: keeps several all-reduces in flight, and tells when each ended.

Started as ``python -m bench.far_rank SPEC`` with the launcher's usual environment.
"""

import json
import sys
import time
from collections import deque

import numpy as np

from worker_client import config
from worker_client.client.bootstrap import connect
from worker_client.work import Work

SCALES = 7  # one all-reduce's values are not the next one's


def main(nbytes: int, in_flight: int, count: int) -> None:
    """Make `count` all-reduces, so many at once, compare all elements, and print what came."""
    launch = config.launch()
    assert launch.rank is not None
    assert launch.world_size is not None
    ranks = launch.world_size
    client = connect(job="far")
    buffers = [np.empty(nbytes // 4, np.float32) for _ in range(in_flight)]
    begun: deque[Work] = deque()
    ends: list[float] = []
    wrong = 0
    start = time.monotonic()
    for number in range(count + in_flight):
        if number >= in_flight:
            earlier = number - in_flight
            begun.popleft().wait()
            ends.append(time.monotonic() - start)
            expected = (1 + earlier % SCALES) * ranks * (ranks + 1) // 2
            wrong += int((buffers[earlier % in_flight] != expected).sum())
        if number < count:
            buffer = buffers[number % in_flight]
            buffer.fill((1 + number % SCALES) * (launch.rank + 1))
            begun.append(client.all_reduce(buffer, "sum"))
    losses = client.counters.losses
    print(json.dumps({"ends": ends, "wrong": wrong, "losses": losses}), flush=True)
    sys.stdin.readline()  # the last packets of another rank may take seconds longer
    client.shutdown()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
