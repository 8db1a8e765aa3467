"""One chunk at a reducer, without a network: from the first rank's offer to the result for all.

The core of the loop takes the messages, and first copies each payload into a block of its own, as
the network would. `nbytes` are those of all contributions.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from reducer import kernels
from reducer.engine import _slots
from reducer.engine.actions import Action, Send
from reducer.engine.admission import ReducerIdentity
from reducer.engine.engine import Engine
from reducer.runtime._loop import Core
from reducer.wire.constants import PLACES, DType, MessageType, ReduceOp
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import Hello, encode

JOB = fingerprint("job")
ROUNDS = 500
WARM_UP = 20


class Offer(NamedTuple):
    """One rank's contribution: the name of its connection, and the frames."""

    peer: bytes
    header: bytes
    payload: bytes


def receiver(world_size: int) -> Callable[[bytes, bytes, bytes], Sequence[Action] | None]:
    """Return what takes the contributions of a job whose ranks have all joined."""
    table = kernels.select()
    engine = Engine(table, _slots, ReducerIdentity("1", "here:1"), memory_limit=1 << 30)
    core = Core(engine)
    body = encode(Hello("job", world_size, reducers=1, reducer_index=0, chunk_bytes=1 << 20))
    for rank in range(world_size):
        hello = Header(MessageType.HELLO, job=JOB, rank=rank, window=4 << 20)
        for action in engine.receive(name(rank), hello.pack(), body):
            if not isinstance(action, Send):
                core.perform(action)
    return core.offer


def name(rank: int) -> bytes:
    return b"%d" % rank


def offers(payloads: list[bytes]) -> Iterator[list[Offer]]:
    """Yield one contribution of each rank, for one all-reduce after the other."""
    nbytes = len(payloads[0])
    for call in range(WARM_UP + ROUNDS):
        sequence = call * PLACES + 1  # number 0 of each call is the ranks' own question's
        header = Header(
            MessageType.CONTRIBUTION,
            job=JOB,
            sequence=sequence,
            watermark=sequence,
            total_bytes=nbytes,
            nbytes=nbytes,
            dtype=DType.FLOAT32,
            op=ReduceOp.SUM,
            wire_dtype=DType.FLOAT32,
        )
        yield [
            Offer(name(rank), header._replace(rank=rank).pack(), payload)
            for rank, payload in enumerate(payloads)
        ]


@pytest.mark.parametrize("kib", [4, 512], ids=lambda kib: f"{kib}KiB")
@pytest.mark.parametrize("ranks", [2, 8], ids=lambda ranks: f"{ranks}ranks")
def test_offers_to_result(benchmark: BenchmarkFixture, ranks: int, kib: int) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((ranks, kib << 8), np.float32)
    receive = receiver(ranks)
    all_offers = offers([row.tobytes() for row in rows])

    def setup() -> tuple[tuple[list[Offer]], dict[str, object]]:
        return (next(all_offers),), {}

    def reduce_chunk(offered: list[Offer]) -> Sequence[Action] | None:
        for offer in offered:
            sends = receive(*offer)
        return sends

    benchmark.group = f"slots, {ranks} offers of {kib} KiB to the result"
    benchmark.extra_info["nbytes"] = rows.nbytes
    sends = benchmark.pedantic(
        reduce_chunk, setup=setup, rounds=ROUNDS, warmup_rounds=WARM_UP, iterations=1
    )
    assert {send.peer for send in sends} == {name(rank) for rank in range(ranks)}
    expected = reduce(np.add, rows).tobytes()
    assert all(bytes(send.payload) == expected for send in sends)
