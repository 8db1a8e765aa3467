"""All-reduces that tests of jobs make, the reducers that they end, and ranks that share a node."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache

import ml_dtypes
import numpy as np
import psutil
import pytest

from reducer.errors import ReductionError
from tests.waits import eventually
from torture.guarantee_oracle import Oracle, Shape
from torture.guarantee_plan import Call

ORACLE = Oracle("calls", exact=False)


def ones(count=1000, dtype=np.float32):
    return np.ones(count, dtype)


def reduced(clients, given, op="mean", **how):
    """All ranks' results; a list among the arguments has one for each rank."""
    works = [
        client.all_reduce(
            array, op, **{k: v[rank] if isinstance(v, list) else v for k, v in how.items()}
        )
        for rank, (client, array) in enumerate(zip(clients, given, strict=True))
    ]
    return [work.wait(30) for work in works]


@cache
def expected_bits(call, shape):
    return ORACLE.result(call, shape).tobytes()


def check_bits(clients, dtype, op, count, *, step=0, nodes=1, wire_dtype="", weights=None):
    """Make an all-reduce of all ranks; each must end with exactly the oracle's bits."""
    call = Call((0, step, 0), None, dtype, op, count, weights=weights)
    rows = [ORACLE.contribution(call, rank) for rank in range(len(clients))]
    if dtype == "bfloat16":
        rows = [row.view(ml_dtypes.bfloat16) for row in rows]
    groups = np.arange(len(clients)).reshape(nodes, -1).tolist()
    right = expected_bits(call, Shape(tuple(map(tuple, groups)), wire_dtype))
    weighted = {} if weights is None else {"weight": list(weights)}
    for rank, result in enumerate(reduced(clients, rows, op, **weighted)):
        assert result.tobytes() == right, f"rank {rank} of {len(clients)}: {call}"


def each(clients, call):
    """What a call returns at each rank, all at the same time."""
    with ThreadPoolExecutor(len(clients)) as threads:
        return list(threads.map(call, clients))


def errors_of(works, within_s=4.0):
    """The error of every rank's all-reduce; none may come later than that."""
    deadline = time.monotonic() + within_s
    found = []
    for work in works:
        with pytest.raises(ReductionError) as error:
            work.wait(max(0.0, deadline - time.monotonic()))
        assert work.done(), "still in progress"
        found.append(error.value)
    return found


def process_of(server):
    """The reducer of a local pool that listens there. Other pools may be this process's, too."""
    port = int(server.rpartition(":")[2])
    (found,) = (
        child
        for child in psutil.Process().children(recursive=True)  # of the fork server's
        if any(c.laddr.port == port and c.status == "LISTEN" for c in child.net_connections())
    )
    return found


def until_stopped(pid):
    """Wait until a process has taken SIGSTOP."""
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def all_reduce(clients):
    """A plain all-reduce, to show that the job works."""
    for result in reduced(clients, [ones(70_000) for _ in clients], "sum"):
        assert (result == len(clients)).all()


class Board:
    """Where ranks of nodes meet that are threads of this process."""

    def __init__(self):
        import torch.distributed as dist  # noqa: PLC0415 (other tests do without torch)

        self._store = dist.HashStore()

    def around(self, place, *, takes_devices=False):
        """Return what `compose.Node` puts around a communicator between nodes, for one rank."""
        from worker_client.communicators.node import NodeCommunicator  # noqa: PLC0415

        def make(between, topic):
            node = self.group(place.peers, place.local_rank, topic)
            return NodeCommunicator(between, place, node, takes_devices=takes_devices)

        return make

    def group(self, ranks, local_rank, topic=""):
        """Return what a rank does with the others of its node."""
        import torch.distributed as dist  # noqa: PLC0415

        from worker_client.communicators.node_group import NodeGroup, NodePages  # noqa: PLC0415

        store = dist.PrefixStore(f"{ranks[0]}/{topic}", self._store)
        place = local_rank, len(ranks)

        def gather(text):
            store.set(f"{local_rank}", text)
            return [store.get(f"{at}").decode() for at in range(len(ranks))]

        pages = NodePages(ranks, local_rank, gather)
        return NodeGroup(pages, [gloo(dist.PrefixStore(way, store), *place) for way in "io"])


def gloo(store, rank, size):
    """A process group of Gloo's, where there may be no default one."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    made = dist.ProcessGroup(store, rank, size)
    inner = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))
    kind = dist.ProcessGroup.BackendType.GLOO
    made._register_backend(torch.device("cpu"), kind, inner)  # noqa: SLF001 (as torch does)
    made._set_default_backend(kind)  # noqa: SLF001
    return made
