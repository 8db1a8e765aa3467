"""Tensors with names: accepted, packed into a fusion buffer, and unpacked from it.

1000 tensors of 4 KiB at a time, as `bench.fusion` has; `nbytes` are those of all.
"""

from typing import Any, TypeAlias

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from worker_client.fusion._tensor_queue import pack, unpack
from worker_client.fusion.fusion import fusion_buffers
from worker_client.fusion.tensor_queue import Request, TensorQueue

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

TENSORS = 1000
ELEMENTS = 1024
NBYTES = TENSORS * ELEMENTS * 4
ROUNDS = 100
WARM_UP = 5

pytestmark = pytest.mark.benchmark(max_time=0.2)


class Worker:
    """A rank with tensors that it submits again and again."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.tensors: list[Array] = [
            rng.standard_normal(ELEMENTS, np.float32) for _ in range(TENSORS)
        ]
        self._names = [f"layer{at}.weight" for at in range(TENSORS)]
        self.queue = TensorQueue(lambda _done, _until: None, 60.0, 64 << 20, cycle_s=0.001)

    def submit(self) -> list[Request]:
        """Submit every tensor under its name."""
        submit = self.queue.submit
        return [
            submit(tensor, "sum", name, None, exact=False)
            for tensor, name in zip(self.tensors, self._names, strict=True)
        ]

    def withdraw(self) -> None:
        """Forget the requests, so that their names can be submitted again."""
        self.queue.end(self.queue.take(list(self.queue.requests)), None)


def describe(benchmark: BenchmarkFixture, what: str) -> None:
    benchmark.group = f"fusion, {what} {TENSORS} tensors of {ELEMENTS * 4 >> 10} KiB"
    benchmark.extra_info["nbytes"] = NBYTES


def test_submit(benchmark: BenchmarkFixture) -> None:
    worker = Worker()
    describe(benchmark, "submit")
    requests = benchmark.pedantic(
        worker.submit, setup=worker.withdraw, rounds=ROUNDS, warmup_rounds=WARM_UP, iterations=1
    )
    views = [bytes(request.view) for request in requests]
    assert views == [tensor.tobytes() for tensor in worker.tensors]


def test_pack(benchmark: BenchmarkFixture) -> None:
    worker = Worker()
    requests = worker.submit()
    buffers = fusion_buffers()

    def pack_all() -> memoryview:
        memory = buffers.take(NBYTES)
        packed = memory.data[:NBYTES]
        pack(requests, packed)
        buffers.give_back(memory)
        return packed

    describe(benchmark, "pack")
    assert bytes(benchmark(pack_all)) == np.concatenate(worker.tensors).tobytes()


def test_unpack(benchmark: BenchmarkFixture) -> None:
    """Each tensor gets its part of the result, and its request ends."""
    worker = Worker()
    reduced = np.random.default_rng(1).standard_normal(TENSORS * ELEMENTS, np.float32)

    def setup() -> tuple[tuple[list[Request], memoryview], dict[str, object]]:
        worker.withdraw()
        return (worker.submit(), reduced.view(np.uint8).data), {}

    describe(benchmark, "unpack")
    benchmark.pedantic(unpack, setup=setup, rounds=ROUNDS, warmup_rounds=WARM_UP, iterations=1)
    assert (np.concatenate(worker.tensors).view(np.uint8) == reduced.view(np.uint8)).all()
