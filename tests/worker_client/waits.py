"""Calls that are waited for, by one rank or by several."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from worker_client.client.client import Client
    from worker_client.runtime.driver import Driver

    Job = Callable[..., list[Client]]  # the fixture `job`


def at_all(clients: list[Client], call: Callable[[Client], Any]) -> list[Any]:
    """Have every rank do something at the same time, and return what came of it."""
    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(call, clients))


def break_here(
    patch: pytest.MonkeyPatch, owner: object, name: str, error: type[BaseException]
) -> None:
    """Let a method raise whenever this thread calls it."""
    here, whole = threading.get_ident(), getattr(owner, name)

    def broken(*arguments: Any) -> Any:
        if threading.get_ident() == here:
            raise error
        return whole(*arguments)

    patch.setattr(owner, name, broken)


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


class _LeftAlone:
    """The lead of a driver whose own thread alone ever gets it."""

    def __init__(self, lead: threading.RLock) -> None:
        self._lead = lead

    def acquire(self, **_how: object) -> bool:
        return False

    def __enter__(self) -> None:
        self._lead.acquire()

    def __exit__(self, *_: object) -> None:
        self._lead.release()


def leave_the_lead(patch: pytest.MonkeyPatch, driver: Driver) -> None:
    """Keep callers' threads from leading: every call is the driver's own thread's business."""
    patch.setattr(driver, "_lead", _LeftAlone(driver._lead))
