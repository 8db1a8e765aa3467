"""One peer of `bench.hivemind`: averages a tensor by hivemind, and says when each stage ended.

Started as ``python -m bench.hivemind_rank SPEC`` with a launcher's usual environment, by the Python
of .venv-hivemind.
"""

import json
import os
import sys
import time
from typing import Any

import hivemind
import numpy as np
import torch
from hivemind.averaging.control import AveragingStage

MATCHMAKING_S = 1.0  # min_matchmaking_time; request_timeout has to be less
PATIENCE_S = 300.0
POLL_S = 0.001  # no event tells a step's stage
NO_MEAN = 0.1  # an error that no compression makes


def main(nbytes: int, compressions: list[str]) -> None:
    """Average when the parent names a compression, and leave when it says ``done``."""
    rank, peers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    draws = [np.random.default_rng(of).standard_normal(nbytes // 4, "f4") for of in range(peers)]
    mine, mean = torch.from_numpy(draws[rank]), np.mean(draws, axis=0, dtype=np.float64)
    told = json.loads(sys.stdin.readline()) if rank else []
    here = [f"/ip4/{os.environ['LAB_ADDRESS']}/tcp/0"]
    one_network = dict.fromkeys(("auto_nat", "nat_port_map", "use_relay", "use_auto_relay"), False)
    dht = hivemind.DHT(initial_peers=told, host_maddrs=here, start=True, **one_network)
    if rank == 0:
        addresses = [str(address) for address in dht.get_visible_maddrs()]
        tell({"addresses": addresses}, await_all=True)
    all_peers: dict[str, Any] = {"target_group_size": peers, "min_group_size": peers, "start": True}
    all_peers |= {"min_matchmaking_time": MATCHMAKING_S, "request_timeout": MATCHMAKING_S / 2}
    averagers = {}
    for name in compressions:
        way = {"prefix": f"bench_{name}", "compression": getattr(hivemind.compression, name)()}
        tensors = [torch.zeros_like(mine)]
        averagers[name] = hivemind.DecentralizedAverager(tensors, dht, **way, **all_peers)
    tell({"pid": os.getpid()})
    while (compression := sys.stdin.readline().strip()) != "done":
        averager = averagers[compression]
        with averager.get_tensors() as (tensor,):
            tensor.copy_(mine)
        average(averager)
        with averager.get_tensors() as (tensor,):
            error = float(np.sqrt(np.mean((tensor.numpy() - mean) ** 2) / np.mean(mean**2)))
        assert error < NO_MEAN, f"{compression} has made no mean: its error is {error}"
        tell({"error": error})
    for averager in averagers.values():
        averager.shutdown()
    dht.shutdown()


def average(averager: hivemind.DecentralizedAverager) -> None:
    """Find a group when all are ready, and average when all have found it; tell how each went."""
    tell({}, await_all=True)
    begun = time.monotonic()  # one clock for all processes of the machine
    step = averager.step(wait=False, require_trigger=True, timeout=PATIENCE_S, allow_retries=False)
    while step.stage is not AveragingStage.AWAITING_TRIGGER and not step.done():
        time.sleep(POLL_S)
    tell({"begun": begun, "ended": time.monotonic()}, await_all=True)
    begun = time.monotonic()
    step.allow_allreduce()
    step.result(PATIENCE_S)
    tell({"begun": begun, "ended": time.monotonic()}, await_all=True)


def tell(what: dict[str, Any], *, await_all: bool = False) -> None:
    """Tell the parent; it answers with a line when it has heard all peers."""
    print(json.dumps(what), flush=True)
    if await_all:
        sys.stdin.readline()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
