"""One rank that makes steps for ever: it computes for a while, and all-reduces gradients."""

import os
import time

import numpy as np

import worker_client

COMPUTE_S = 0.02


def main():
    client = worker_client.init()
    late_s = float(os.environ.get(f"LATE_{client.rank}", "0"))
    gradients = [np.ones(elements, np.float32) for elements in (1 << 20, *[1 << 16] * 6, 1 << 8)]
    said = False
    while True:
        time.sleep(COMPUTE_S + late_s)
        if client.straggler is not None and not said:
            print(client.straggler, flush=True)  # noqa: T201 (the test reads it)
            said = True
        for work in [client.all_reduce(gradient, "mean") for gradient in gradients]:
            work.wait()


if __name__ == "__main__":
    main()
