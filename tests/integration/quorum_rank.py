"""One rank of test_quorum: it trains, and averages by quorum, while the test stops ranks.

Started as ``python -m tests.integration.quorum_rank PORT STEPS GRACE`` (of the store; of each rank;
seconds) with the launcher's usual environment.
"""

import hashlib
import sys
import time

import torch
from torch import nn
from torch.distributed import TCPStore

import worker_client
from tests import inside
from tests.ranks import write_result
from worker_client.outer import OuterOptimizer

WIDTH = 300
STEP_S = 0.05


def main(port, steps, grace_s):
    store = TCPStore("127.0.0.1", port, is_master=False)
    client = worker_client.init()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    settings = {"every": 10, "fragments": 2, "min_ranks": client.world_size - 1, "grace": grace_s}
    outer = OuterOptimizer(model, client, store=store, **settings)
    chance = torch.Generator().manual_seed(client.rank)
    digests, waits = {}, []

    def note():
        for number, made, parameters, velocity in inside.fragments(outer):
            common = torch.cat([parameters, velocity]).numpy()
            digests.setdefault(f"{number}.{made}", hashlib.sha256(common.tobytes()).hexdigest())

    note()
    sys.stdout.write("begins\n")
    sys.stdout.flush()
    for _ in range(steps):
        time.sleep(STEP_S)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=chance), alpha=0.01)
        began = time.monotonic()
        outer.step(tokens=client.rank + 1)
        waits.append((began, time.monotonic()))
        note()
    outer.finish()
    note()
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    found = {"digests": digests, "waits": waits, "left_out": outer.left_out}
    write_result({**found, "weights": hashlib.sha256(weights).hexdigest()})
    client.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), float(sys.argv[3]))
