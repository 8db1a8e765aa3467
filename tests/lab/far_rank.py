"""One rank far from its reducer: it reduces large buffers, and says how large its window became."""

import json
import sys
import time

import numpy as np

import worker_client
from tests import inside
from worker_client.protocol.flow_control import MOST_BYTES

BUFFERS, ELEMENTS = 6, 2 << 20


def main(patience_s):
    """All-reduce until a window beyond what is set aside is in use, or for so many seconds."""
    client = worker_client.init()
    flight = inside.flat(client).session.flight
    buffers = [np.empty(ELEMENTS, np.float32) for _ in range(BUFFERS)]
    until = time.monotonic() + patience_s
    usual = latest = flight.stats(0).window
    wrong = 0
    while latest <= MOST_BYTES and time.monotonic() < until:
        for number, buffer in enumerate(buffers):
            buffer.fill((number + 1) * (client.rank + 1))
        for number, work in enumerate([client.all_reduce(one, "sum") for one in buffers]):
            wrong += int((work.wait() != (number + 1) * sum(range(client.world_size + 1))).sum())
        latest = flight.stats(0).window
    said = {"usual": usual, "latest": latest, "wrong": wrong, "losses": client.losses}
    print(json.dumps(said), flush=True)  # noqa: T201 (the test reads it)
    client.shutdown()


if __name__ == "__main__":
    main(float(sys.argv[1]))
