"""One rank of `torture.rolling`: makes calls at some pace until it is told to stop."""

import json
import sys
import threading
import time

import numpy as np

import worker_client
from reducer.errors import ReductionError

ELEMENTS = 10_000
MOST_ERRORS = 100


def main(pace: float, warm: int) -> None:
    """Make calls, and say what came of them, as a line of JSON."""
    stop = threading.Event()
    errors: list[str] = []
    wrong = calls = 0

    def listen() -> None:
        sys.stdin.readline()
        stop.set()

    with worker_client.init(timeout=30) as client:
        for _ in range(warm):
            client.all_reduce(np.ones(ELEMENTS, np.float32), "sum").wait()
        print(json.dumps({"warm": client.rank}), flush=True)
        threading.Thread(target=listen, daemon=True).start()
        begun, ending = time.monotonic(), False
        while not ending and len(errors) < MOST_ERRORS:
            data = np.full(ELEMENTS, calls % 1000, np.float32)
            vote = np.array([stop.is_set()], np.float32)
            # All ranks stop at the same call: what one of them says counts.
            works = client.all_reduce(data, "mean"), client.all_reduce(vote, "max")
            try:
                wrong += int((works[0].wait() != calls % 1000).any())
                ending = bool(works[1].wait()[0])
            except ReductionError as error:
                errors.append(f"call {calls}: {type(error).__name__}: {error}")
            calls += 1
            time.sleep(max(0.0, begun + calls / pace - time.monotonic()))
        in_use = client.in_use
    said = {"calls": calls, "errors": errors, "wrong": wrong, "in_use": in_use}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
