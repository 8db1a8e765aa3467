"""One rank of test_upgrading: for each line that it reads, it makes a step of exact sums."""

import sys

import numpy as np

import worker_client
from reducer.errors import VersionError

SIZES = (70_000, 5, 0, 300_000)  # elements: of several chunks to each reducer, of one, of none
MOST = 60_000  # their values: sums over all ranks are exact in float32


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main():
    try:
        client = worker_client.init()
    except VersionError as error:
        say(f"{type(error).__name__}: {error}")
        return
    for line in sys.stdin:
        step, ranks = int(line), np.arange(1, client.world_size + 1)
        right = [(np.arange(size, dtype=np.float32) * 7 + step) % MOST for size in SIZES]
        given = [values * np.float32(ranks[client.rank]) for values in right]
        works = [client.all_reduce(values, op="sum") for values in given]
        for work, values, expected in zip(works, given, right, strict=True):
            work.wait(30)
            assert np.array_equal(values, expected * ranks.sum()), f"step {step}: wrong"
        # The reference does not tell.
        used = client.in_use if client.impl == "compiled" else []
        say("".join("+" if one else "-" for one in used))
    client.shutdown()


if __name__ == "__main__":
    main()
