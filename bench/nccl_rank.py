"""A rank that makes the calls of `bench.nccl` by `Client.all_reduce`."""

import ctypes
import json
import sys
import time
from pathlib import Path

import numpy as np

from worker_client import Work, init

AHEAD = 8


def main() -> None:
    """Make the calls, and print wrong results, the error code, seconds and CPU seconds as JSON."""
    folder, (rank, calls, nbytes) = Path(sys.argv[1]), map(int, sys.argv[2:])
    given = np.fromfile(folder / f"7-rank{rank}", np.float32)[: nbytes // 4]
    expected = np.fromfile(folder / "7-op0", np.float32)[: nbytes // 4]
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    buffers = [np.empty_like(given) for _ in range(AHEAD)]
    wrong = 0
    with init() as client:
        works: list[Work] = []
        since, cpu_s = time.monotonic(), time.process_time()
        for call in range(calls + AHEAD):
            buffer = buffers[call % AHEAD]
            if call >= AHEAD:
                works[call - AHEAD].wait()
                wrong += compare(buffer.ctypes.data, expected.ctypes.data, nbytes) != 0
            if call < calls:
                np.copyto(buffer, given)
                works.append(client.all_reduce(buffer, "sum"))
        seconds, cpu_s = time.monotonic() - since, time.process_time() - cpu_s
    print(json.dumps([wrong, 0, seconds, cpu_s]))


if __name__ == "__main__":
    main()
