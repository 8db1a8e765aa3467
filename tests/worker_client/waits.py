"""Calls that are waited for, by one rank or by several."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from worker_client.client.client import Client

Job = Callable[..., list[Client]]  # the fixture `job`


def at_all(clients, call):
    """Have every rank do something at the same time, and return what came of it."""
    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(call, clients))


def one_after_another(client, calls=30):
    for call in range(calls):
        data = np.full(100, call, np.int32)
        assert (client.all_reduce(data, op="sum").wait(10) == call).all()


def half_a_job(make):
    """Two ranks in this process."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(make, range(2), (2, 2)))


def own_threads():
    """The threads of clients that lead while no caller does."""
    return [thread for thread in threading.enumerate() if thread.name == "worker-client"]
