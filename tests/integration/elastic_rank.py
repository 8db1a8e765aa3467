"""One rank of test_elastic: all-reduces until it is told to stop, whoever is lost meanwhile.

Started as ``python -m tests.integration.elastic_rank SPEC`` with the launcher's usual environment.
Rank r contributes 100**r in every place, so a sum or mean tells whose contributions are in it.
"""

import json
import os
import sys
import threading
import time
from functools import partial

import numpy as np

import worker_client
from reducer.errors import ReductionError

SIZES = (300_000, 100, 40_000, 1, 70_001, 5_000)
IN_FLIGHT = 4


def say(event, **values):
    sys.stdout.write(json.dumps({"event": event, "rank": int(os.environ["RANK"]), **values}) + "\n")
    sys.stdout.flush()


def found(array):
    """What all places of a result hold; more than one number is a torn one."""
    values = np.unique(array)
    return float(values[0]) if len(values) == 1 else f"torn: {values[:8].tolist()}"


def train(stop_at):
    client = worker_client.init(on_rank_lost="continue")
    number = 0
    rest_s = float(os.environ.get("REST_S", "0"))
    while not (stop_at and number >= stop_at[0]):
        time.sleep(rest_s)  # as a rank that computes, and so hears of a loss in its next call
        arrays, works = [], []
        for at in range(number, number + IN_FLIGHT):
            dtype, op = ((np.int64, "sum"), (np.float64, "mean"))[at % 2]
            arrays.append(np.full(SIZES[at % len(SIZES)], 100**client.rank, dtype))
            works.append(client.all_reduce(arrays[-1], op=op))
        for at, (array, work) in enumerate(zip(arrays, works, strict=True), number):
            try:
                work.wait(60)
            except ReductionError as error:
                say("error", call=at, error=f"{type(error).__name__}: {error}")
                client.shutdown()
                return
            say("call", call=at, value=found(array), present=client.present)
            array[:] = 0  # as a caller may, while others have yet to finish
        number += IN_FLIGHT
    say("end", present=client.present)
    client.shutdown()


def listen(stop_at):
    line = sys.stdin.readline()
    if line:
        stop_at.append(int(line))


def main():
    json.loads(sys.argv[1])
    if "MEET" in os.environ:  # embedded reducers are found through a process group's store
        from torch import distributed as dist  # noqa: PLC0415

        dist.init_process_group("gloo")
    stop_at = []
    threading.Thread(target=partial(listen, stop_at), daemon=True).start()
    train(stop_at)
    os._exit(0)  # a process group does not survive the death of a rank, nor its own end then


if __name__ == "__main__":
    main()
