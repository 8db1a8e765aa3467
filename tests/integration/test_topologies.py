"""Where reducers are: several threads of one, one in the worker's own process, and both kinds."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest

from harness import block8_oracle
from reducer.errors import (
    ConfigError,
    LocalProtocolError,
    RankLostError,
    ReducerLostError,
    ReductionError,
)
from tests.conftest import joined, reducer_here
from tests.integration.calls import check_bits, reduced
from tests.waits import eventually
from worker_client.client import compose
from worker_client.config import WorkerConfig
from worker_client.protocol.spec import JobSpec

SIZES = [0, 1, 1000, 5000, 100_003, 3_000_001]  # elements


def check_blocks(clients, count):
    rows = [np.random.default_rng(client.rank).standard_normal(count) for client in clients]
    rows = [row.astype(np.float32) for row in rows]
    expected = block8_oracle.reduced(rows, mean=True)
    assert all(result.tobytes() == expected.tobytes() for result in reduced(clients, rows))


def until_received(reducers, nbytes):
    """Wait until so many bytes lie, or lay, in slots; counters are up to date within a tick."""
    eventually(lambda: sum(reducer.counters.bytes_in for reducer in reducers) >= nbytes)


def test_every_thread_of_a_reducer_has_a_share():
    with (
        reducer_here(threads=3) as three,
        reducer_here() as one,
        joined(3, servers=[three.address, one.address], job="lanes") as clients,
    ):
        assert [client.lanes for client in clients] == [[3, 1]] * 3
        for step in range(3):
            for count in SIZES:
                check_bits(clients, "float32", "mean", count, step=step)
        total = 4 * sum(SIZES) * 3
        until_received([three, one], 3 * total)
        # Of large buffers both reducers own one half, whatever the number of their threads.
        for reducer in (three, one):
            assert reducer.counters.bytes_in == pytest.approx(3 * total / 2, rel=0.02)


def test_threads_listen_one_port_after_the_other():
    for first in range(21_000, 30_000, 3):  # below the kernel's ephemeral ports
        with (
            suppress(ConfigError),
            reducer_here(bind=f"tcp://127.0.0.1:{first}", threads=3) as started,
        ):
            assert list(started.lanes) == [f"127.0.0.1:{first + lane}" for lane in range(3)]
            return
    raise AssertionError("no free ports")


@contextmanager
def beside(servers, wire_dtype="none"):
    """One client in the process of each server, as embedded ranks are."""
    addresses = tuple(server.address for server in servers)

    def join(rank):
        hosted = servers[rank]
        spec = JobSpec("beside", 0, rank, len(servers), addresses, 1 << 24, inproc=hosted.inproc)
        settings = WorkerConfig(timeout=30.0, wire_dtype=wire_dtype)
        return compose.client(settings, spec, server=hosted)

    with ExitStack() as stack, ThreadPoolExecutor(len(servers)) as pool:
        yield [stack.enter_context(client) for client in pool.map(join, range(len(servers)))]


@pytest.mark.extended_cases("blocks-2")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("wire_dtype", ["none", "int8"], ids=["bits", "blocks"])
def test_a_reducer_in_the_same_process(threads, wire_dtype):
    with ExitStack() as stack:
        servers = [stack.enter_context(reducer_here(threads=threads)) for _ in range(3)]
        with beside(servers, wire_dtype) as clients:
            for count in SIZES if wire_dtype == "none" else SIZES[4:]:
                if wire_dtype != "none":
                    check_blocks(clients, count)
                else:
                    check_bits(clients, "float32", "mean", count)


def test_nobody_writes_to_a_contribution_that_was_not_sent_through_a_socket():
    # The reducer holds the caller's own memory: it may neither put the result there, nor send from
    # there what the caller may overwrite as soon as its all-reduce is done.
    count = 300_000
    with (
        reducer_here() as first,
        reducer_here() as second,
        beside([first, second]) as (one, two),
    ):
        for step in range(100):
            mine, others = np.full(count, 1.0, np.float32), np.full(count, 2.0, np.float32)
            later = two.all_reduce(others, op="sum")
            one.all_reduce(mine, op="sum").wait(30)
            assert (mine == 3.0).all()
            mine[:] = -1.0
            assert (later.wait(30) == 3.0).all(), step


def test_a_buffer_that_the_reducer_beside_reads_is_not_given_back():
    count = 1_000_000
    with (
        reducer_here() as first,
        reducer_here() as second,
        beside([first, second]) as (one, two),
    ):
        mine, others = np.full(count, 1.0, np.float32), np.full(count, 2.0, np.float32)
        work = one.all_reduce(mine, op="sum")
        late = []

        def overwrite(_):
            mine[:] = 99.0
            late.append(two.all_reduce(others, op="sum"))
            with suppress(ReductionError):
                late[0].wait(5)

        work.future().add_done_callback(overwrite)
        until_received([first, second], mine.nbytes)
        one.shutdown()
        with pytest.raises(LocalProtocolError):
            work.wait(5)
        with suppress(RankLostError, ReducerLostError):  # or its contribution was there in time
            late[0].wait(5)
        assert set(others) <= {2.0, 3.0}
