"""One rank of test_quorum: it trains, and averages by quorum, while the test stops and kills ranks.

Started as ``python -m tests.integration.quorum_rank ARGUMENTS`` (JSON, those of `main`) with the
launcher's usual environment.
"""

import hashlib
import json
import sys
import time

import torch
from torch import nn
from torch.distributed import TCPStore

import worker_client
from reducer.errors import ReductionError
from tests import inside
from tests.ranks import write_result
from worker_client.outer import OuterOptimizer

WIDTH = 300


def main(port, steps, step_s=0.02, **settings):
    """Train, and write what came of it.

    Args:
        port: of the store.
        steps: of each rank.
        step_s: how long each of them takes.
        settings: of the outer optimizer.
    """
    store = TCPStore("127.0.0.1", port, is_master=False)
    client = worker_client.init()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    outer = OuterOptimizer(
        model, client, store=store, **{"every": 10, "fragments": 2, "delay": 0, **settings}
    )
    chance = torch.Generator().manual_seed(client.rank)
    digests = {}
    waits = []
    errors = []

    def note():
        for number, made, parameters, velocity in inside.fragments(outer):
            key = f"{number}.{made}"
            common = torch.cat([parameters, velocity])
            digests.setdefault(key, hashlib.sha256(common.numpy().tobytes()).hexdigest())

    note()
    sys.stdout.write("begins\n")
    sys.stdout.flush()
    for _ in range(steps):
        time.sleep(step_s)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=chance), alpha=0.01)
        began = time.monotonic()
        try:
            outer.step(tokens=client.rank + 1)
        except ReductionError as error:
            errors.append(f"{type(error).__name__}: {error}")
        waits.append((began, time.monotonic()))
        note()
    began = time.monotonic()
    try:
        outer.finish()
    except ReductionError as error:
        errors.append(f"at the end: {type(error).__name__}: {error}")
    note()
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    write_result(
        {
            "digests": digests,
            "waits": waits,
            "last_s": time.monotonic() - began,
            "errors": errors,
            "left_out": outer.left_out,
            "made": [made for _, made, *_ in inside.fragments(outer)],
            "weights": hashlib.sha256(weights).hexdigest(),
        }
    )
    client.shutdown()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
