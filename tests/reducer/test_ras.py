"""What a reducer tells in the form of NCCL's RAS: ranks that wait, and those that are missing."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from tests.conftest import joined
from tests.reducer.asked import ask
from tests.waits import eventually
from worker_client.client.bootstrap import connect

pytestmark = pytest.mark.usefixtures("no_settings")

# The sample of NCCL's user guide (troubleshooting, RAS, JSON output), of one collective alone.
SAMPLE = """
{
  "nccl_version": "2.29.1", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
  "timestamp": "2025-12-19 13:06:53", "communicators_count": 1,
  "communicators": [{
    "hash": "0xae94423cfbb2ef4a", "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
    "size": 2, "ranks_count": 1, "missing_ranks_count": 1,
    "ranks": [{
      "rank": 0, "host": "172.16.64.245", "pid": 1524344, "cuda_dev": 0, "nvml_dev": 0,
      "status": {
        "init_state": 0, "async_error": 0, "finalize_called": false, "destroy_flag": false,
        "abort_flag": false
      },
      "collective_counts": {"AllReduce": 0}
    }],
    "missing_ranks": [{
      "rank": 1, "host": "172.16.64.245", "pid": 1524345, "cuda_dev": 1, "nvml_dev": 1,
      "status": {"unresponsive": true, "considered_dead": false}
    }]
  }],
  "ras": {"collection_time_sec": 0.000, "timeouts_count": 0}
}
"""


def told(port):
    """Return the one communicator that there is; None if there is none."""
    document = ask(port, "/ras.json").json
    assert document["communicators_count"] == len(document["communicators"]) <= 1
    return next(iter(document["communicators"]), None)


def begun(port):
    ranks = (told(port) or {"ranks": []})["ranks"]
    return [rank["collective_counts"]["AllReduce"] for rank in ranks]


def shape(value):
    """Return a document with the types of its values in their place."""
    match value:
        case dict():
            return {name: shape(one) for name, one in value.items()}
        case list():
            return [shape(one) for one in value]
        case _:
            return type(value)


def gone(port):
    return told(port) is None


@pytest.mark.parametrize("elements", [10, 1_000_000])
def test_ranks_that_wait_have_begun_more(server, port, elements):
    with joined(3, servers=server.address, job="waits") as clients:
        for calls in range(1, 4):
            works = [client.all_reduce(np.ones(elements, np.float32)) for client in clients[:2]]
            eventually(lambda calls=calls: begun(port) == [calls, calls, calls - 1])
            works.append(clients[2].all_reduce(np.ones(elements, np.float32)))
            for work in works:
                work.wait(20)
            eventually(lambda calls=calls: begun(port) == [calls] * 3)
    eventually(lambda: gone(port))


def test_a_rank_with_a_full_window_has_begun(server, port):
    common = {"servers": server.address, "world_size": 3, "job": "narrow"}
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        windows = "1MiB", "16MiB", "16MiB"
        joins = [
            threads.submit(connect, rank=rank, window_bytes=window, **common)
            for rank, window in enumerate(windows)
        ]
        clients = [stack.enter_context(join.result()) for join in joins]
        works = [client.all_reduce(np.ones(1_000_000, np.float32)) for client in clients[:2]]
        eventually(lambda: begun(port) == [1, 1, 0])
        works.append(clients[2].all_reduce(np.ones(1_000_000, np.float32)))
        for work in works:
            work.wait(20)
    eventually(lambda: gone(port))


def test_it_has_the_form_of_nccls_and_names_who_has_not_come(server, port):
    common = {"servers": server.address, "world_size": 2, "job": "partial"}
    with connect(rank=0, **common) as first:
        work = first.all_reduce(np.ones(10))
        eventually(lambda: told(port) is not None)
        document = ask(port, "/ras.json").json
        assert shape(document) == shape(json.loads(SAMPLE))
        (job,) = document["communicators"]
        assert [rank["rank"] for rank in job["ranks"]] == [0]
        assert job["ranks"][0]["status"]["init_state"] == 7  # in progress
        assert [(rank["rank"], rank["status"]) for rank in job["missing_ranks"]] == [
            (1, {"unresponsive": True, "considered_dead": False})
        ]
        with connect(rank=1, **common) as second:
            second.all_reduce(np.ones(10)).wait(20)
            work.wait(20)
            eventually(lambda: told(port)["ranks_count"] == 2)
            job = told(port)
            assert job["missing_ranks"] == []
            assert {rank["status"]["init_state"] for rank in job["ranks"]} == {0}
        eventually(lambda: told(port)["ranks_count"] == 1)
        (missing,) = told(port)["missing_ranks"]
        assert missing["status"]["considered_dead"] is True
    eventually(lambda: gone(port))
