"""One rank of `bench.hierarchy`: all-reduces flat and by nodes in turn, and reads its host's card.

``python -m bench.hierarchy_rank ARGUMENTS``, those of `main` as JSON, with a launcher's
environment. Every rank prints, as JSON, what each all-reduce took and sent.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from worker_client.client.bootstrap import connect

MODES = {"flat": "off", "hierarchical": "auto"}
DEVICE = "eth0"


def main(nbytes: int, rounds: int) -> None:
    """Measure, after an all-reduce of each kind that is not counted."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    clients = {name: connect(hierarchy=mode) for name, mode in MODES.items()}
    data = np.empty(nbytes // 4, np.float32)
    expected = (world_size - 1) / 2
    calls = []
    for number in range(-1, rounds):
        for name, client in clients.items():
            data[:] = rank
            dist.barrier()
            before = counters()
            dist.barrier()
            start = time.perf_counter()
            client.all_reduce(data).wait()
            dist.barrier()
            seconds = time.perf_counter() - start
            sent, received = (now - then for now, then in zip(counters(), before, strict=True))
            wrong = int(np.count_nonzero(data != expected))
            figures = {"sent": sent, "received": received, "seconds": seconds, "wrong": wrong}
            if number >= 0:
                calls.append({"mode": name, **figures})
    print(json.dumps({"rank": rank, "calls": calls}), flush=True)
    sys.stdin.readline()
    for client in clients.values():
        client.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def counters() -> tuple[int, int]:
    counts = Path(f"/sys/class/net/{DEVICE}/statistics")
    return int((counts / "tx_bytes").read_text()), int((counts / "rx_bytes").read_text())


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
