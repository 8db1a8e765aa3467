"""One all-reduce at a worker, without a network: submitted, sent, answered and complete.

Its buffer travels over 2 links in 64 chunks, all of them in flight at once. `nbytes` are those of
the buffer. Each result is copied into a block first, as the network would; in the loop no Python is
between the steps.
"""

from itertools import count
from typing import NamedTuple

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header
from worker_client.protocol._flight import CompiledFlight
from worker_client.protocol.flight import LinkShard, Send
from worker_client.protocol.operation import Operation

LINKS = 2
CHUNKS = 64
ROUNDS = 200
WARM_UP = 10


class Exchange(NamedTuple):
    """An all-reduce to submit, and what the reducers answer: link, header and payload."""

    operation: Operation
    shards: list[LinkShard]
    results: list[tuple[int, bytes, bytes]]


def exchange(sequence: int, data: bytes, reduced: bytes, chunk: int) -> Exchange:
    operation = Operation(memoryview(bytearray(data)), DType.UINT8, ReduceOp.SUM, None, 1.0)
    operation.sequence = sequence
    part = len(data) // LINKS
    header = Header(
        MessageType.RESULT,
        sequence=sequence,
        watermark=sequence,
        total_bytes=len(data),
        nbytes=chunk,
        dtype=DType.UINT8,
        op=ReduceOp.SUM,
        wire_dtype=DType.UINT8,
    )
    return Exchange(
        operation,
        [LinkShard(link, link * part, (link + 1) * part) for link in range(LINKS)],
        [
            (at // part, header._replace(offset=at).pack(), reduced[at : at + chunk])
            for at in range(0, len(data), chunk)
        ],
    )


def flight(window: int) -> CompiledFlight:
    made = CompiledFlight(Header(MessageType.HELLO))
    for link in range(LINKS):
        made.add_link(window, retain=False)
        made.open(link)
    return made


@pytest.mark.parametrize("kib", [4, 64], ids=lambda kib: f"{CHUNKS}x{kib}KiB")
def test_submit_to_complete(benchmark: BenchmarkFixture, kib: int) -> None:
    chunk = kib << 10
    nbytes = CHUNKS * chunk
    rng = np.random.default_rng(0)
    data, reduced = rng.bytes(nbytes), rng.bytes(nbytes)
    worker = flight(window=nbytes)
    sequences = count()

    def setup() -> tuple[tuple[Exchange], dict[str, object]]:
        return (exchange(next(sequences), data, reduced, chunk),), {}

    def complete(asked: Exchange) -> tuple[memoryview, list[Send], list[Operation] | None]:
        worker.submit(asked.operation, asked.shards, chunk, 0)
        sends = worker.refill(1.0)
        for link, header, payload in asked.results:
            done = worker.take(link, header, payload, 2.0)
        return asked.operation.view, sends, done

    benchmark.group = f"flight, {CHUNKS} chunks of {kib} KiB from submission to completion"
    benchmark.extra_info["nbytes"] = nbytes
    view, sends, done = benchmark.pedantic(
        complete, setup=setup, rounds=ROUNDS, warmup_rounds=WARM_UP, iterations=1
    )
    assert (len(sends), done and done[0].sequence) == (CHUNKS, next(sequences) - 1)
    assert bytes(view) == reduced
