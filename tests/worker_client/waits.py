"""Calls that are waited for, by one rank or by two."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.client.client import Client


def one_after_another(client: Client, calls: int = 30) -> None:
    for call in range(calls):
        data = np.full(100, call, np.int32)
        assert (client.all_reduce(data, op="sum").wait(10) == call).all()


def half_a_job(make: Callable[..., Client]) -> tuple[Client, Client]:
    """Two ranks in this process."""
    first: list[Client] = []
    thread = threading.Thread(target=lambda: first.append(make(0, 2)))
    thread.start()
    second = make(1, 2)
    thread.join()
    return first[0], second
