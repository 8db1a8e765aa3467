"""A training script for torchrun, in which a rank may kill itself in the first start.

    KILL_IN_STEP=6 torchrun --max-restarts 2 --nproc-per-node 3 restarted_training.py FOLDER

It trains from the last checkpoint in FOLDER, and writes there what each rank ends with. The last
rank kills itself in KILL_IN_STEP, unless it was started again. It needs no process group of
torch's: ranks, job and generation are what torchrun says.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

import worker_client

STEPS = 12
CHECKPOINT_EVERY = 4
SIZE = 50_000


def main(folder, kill):
    client = worker_client.init()
    rank = client.rank
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    weights, momentum = np.random.default_rng(0).standard_normal((2, SIZE), np.float32)
    checkpoint, first = folder / "checkpoint.npz", 0
    if checkpoint.exists():
        saved = np.load(checkpoint)
        weights, momentum, first = saved["weights"], saved["momentum"], int(saved["step"])
    for step in range(first, STEPS):
        x = np.random.default_rng([step, rank]).standard_normal(SIZE, np.float32)
        gradient = weights - x
        work = client.all_reduce(gradient, name="gradient")
        if rank == client.world_size - 1 and step == kill and not restarts:
            os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
        momentum = np.float32(0.9) * momentum + gradient
        weights = weights - np.float32(0.05) * momentum
        if rank == 0 and (step + 1) % CHECKPOINT_EVERY == 0:
            np.savez(folder / "new.npz", weights=weights, momentum=momentum, step=step + 1)
            (folder / "new.npz").rename(checkpoint)
    facts = {
        "first": first,
        "restarts": restarts,
        "generation": client.spec.generation,
        "bytes_reduced": client.bytes_reduced,
        "weights": weights.tobytes().hex(),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ.get("KILL_IN_STEP", "-1")))
