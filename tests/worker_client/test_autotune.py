"""The sweep before a job: all ranks choose alike, and what was set stays."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.conftest import joined
from worker_client.client import autotune

if TYPE_CHECKING:
    from tests.worker_client.waits import Job
    from worker_client.client.client import Client


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "TRIAL_BYTES", 1 << 18)
    monkeypatch.setattr(autotune, "SIZES", (1 << 16, 1 << 18))


def test_all_ranks_choose_alike_and_say_so(
    servers: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REDUCTION_AUTOTUNE", "1")
    caplog.set_level(logging.INFO, "worker_client.client.autotune")
    with joined(2, servers=servers, job="tuned") as clients:
        one, other = (client.spec for client in clients)
        assert (one.chunk_bytes, one.window_bytes) == (other.chunk_bytes, other.window_bytes)
        assert one.chunk_bytes in autotune.CHUNKS
        assert one.window_bytes in autotune.WINDOWS
        assert len({client._fusion._threshold for client in clients}) == 1
    chosen = {m for m in caplog.messages if m.startswith("chosen: REDUCTION_CHUNK_BYTES=")}
    assert len(chosen) == 1
    assert sum("MB/s" in message for message in caplog.messages) == 2 * (7 + 2)


def test_what_was_set_stays(servers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDUCTION_AUTOTUNE", "1")
    given = {"chunk_bytes": "128KiB", "fusion_threshold": "3MiB"}
    with joined(1, servers=servers, job="set", **given) as (client,):
        assert client.spec.chunk_bytes == 128 << 10
        assert client._fusion._threshold == 3 << 20


def test_the_fastest_wins(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {(0, 0): 5.0, (1 << 20, 0): 9.0, (1 << 20, 8 << 20): 10.0}
    tried: list[tuple[int, int]] = []

    def rate(client: Client, nbytes: int) -> float:
        key = (client.spec.chunk_bytes, client.spec.window_bytes)
        if nbytes != autotune.TRIAL_BYTES or key in tried:
            return {1 << 16: 9.4, 1 << 18: 9.8}[nbytes]
        tried.append(key)
        return rates.get(key, 1.0)

    monkeypatch.setattr(autotune, "_rate", rate)

    def make(name: str, chunk_bytes: int, window_bytes: int) -> Client:
        sizes = {"chunk_bytes": chunk_bytes, "window_bytes": window_bytes}
        return job(1, job=f"trial {name}", **sizes)[0]

    with ThreadPoolExecutor(1) as pool:
        choice = pool.submit(autotune.sweep, make, {}).result()
    assert choice == (1 << 20, 8 << 20, 1 << 16)
    assert len(tried) == len(set(tried)) == 7
