"""What goes wrong says who, at every rank, in seconds; everybody else goes on."""

from __future__ import annotations

import contextlib
import http.server
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
import zmq

import worker_client
from reducer import local_pool
from reducer.errors import (
    CapacityError,
    ConfigError,
    DuplicateRankError,
    LocalProtocolError,
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionError,
    ReductionTimeout,
    StaleGenerationError,
)
from reducer.wire.constants import MessageType
from reducer.wire.header import Header
from worker_client.startup import connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.client import Client

pytestmark = [
    pytest.mark.usefixtures("impl"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def ones(count: int = 1000, dtype: type = np.float32) -> np.ndarray:
    return np.ones(count, dtype)


def errors_of(works: list, within_s: float = 2.0) -> list[ReductionError]:
    """The error of every rank's all-reduce; none may come later than that."""
    deadline = time.monotonic() + within_s
    found = []
    for work in works:
        with pytest.raises(ReductionError) as error:
            work.wait(max(0.0, deadline - time.monotonic()))
        assert work.done(), "still in progress"
        found.append(error.value)
    return found


def all_reduce(clients: list[Client]) -> None:
    """A plain all-reduce, to show that the job works."""
    works = [client.all_reduce(ones(70_000), op="sum") for client in clients]
    for work in works:
        assert (work.wait(10) == len(clients)).all()


# -- ranks that disagree ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "calls", "values"),
    [
        ("total_bytes", [{}, {}, {"data": ones(1001)}], (4000, 4004)),
        ("dtype", [{}, {}, {"data": ones(1000, np.int32), "op": "sum"}], ("float32", "int32")),
        ("op", [{}, {}, {"op": "max"}], ("sum", "max")),
        ("name", [{"name": "a"}, {"name": "a"}, {"name": "b"}], ("a", "b")),
    ],
)
def test_disagreement_is_named_at_every_rank(
    job: Callable[..., list[Client]], field: str, calls: list[dict], values: tuple
) -> None:
    clients = job(3)
    with_defaults = [{"data": ones(), "op": "sum", **call} for call in calls]
    works = [client.all_reduce(**call) for client, call in zip(clients, with_defaults, strict=True)]
    for error in errors_of(works):
        assert isinstance(error, MismatchError)
        assert error.field == field
        assert 2 in {error.rank, error.other_rank}
        assert error.rank != error.other_rank
        if field != "name":  # a rank knows those names alone that it has used itself
            assert {error.expected, error.got} == set(values)
            assert all(str(value) in str(error) for value in values)
        assert f"rank {error.rank}" in str(error)
        assert f"rank {error.other_rank}" in str(error)
    all_reduce(clients)


def test_another_order_is_named(job: Callable[..., list[Client]]) -> None:
    clients = job(2)
    for name in ("weights", "bias"):  # a rank knows those names alone that it has used itself
        for work in [client.all_reduce(ones(), name=name) for client in clients]:
            work.wait(10)
    orders = [("weights", "bias"), ("bias", "weights")]
    works = [
        client.all_reduce(ones(), name=name)
        for client, order in zip(clients, orders, strict=True)
        for name in order
    ]
    for error in errors_of(works):
        assert isinstance(error, MismatchError)
        assert {error.expected, error.got} == {"weights", "bias"}
    all_reduce(clients)


def test_another_job_does_not_notice(job: Callable[..., list[Client]]) -> None:
    quarrelling, working = job(2), job(3, job="the other job")
    done = threading.Event()

    def quarrel() -> None:
        while not done.is_set():
            works = [c.all_reduce(ones(100 + r)) for r, c in enumerate(quarrelling)]
            errors_of(works)

    thread = threading.Thread(target=quarrel)
    thread.start()
    for _ in range(50):
        all_reduce(working)
    done.set()
    thread.join()
    all_reduce(quarrelling)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("chunk_bytes", {"chunk_bytes": "64KiB"}), ("world_size", {"world_size": 3})],
)
def test_settings_must_agree(field: str, arguments: dict) -> None:
    with contextlib.ExitStack() as stack:
        name = f"settings-{field}"
        servers = stack.enter_context(local_pool(1))
        common = {"servers": servers, "job": name, "world_size": 2}
        stack.enter_context(connect(rank=0, **common))
        with pytest.raises(MismatchError, match="rank 0 says") as error:
            connect(rank=1, **{**common, **arguments})
        assert (error.value.field, error.value.rank, error.value.other_rank) == (field, 0, 1)


def test_reducers_in_another_order(servers: list[str]) -> None:
    common = {"job": "order", "world_size": 2}
    with (
        connect(rank=0, servers=servers, **common),
        pytest.raises(MismatchError, match="reducer_index"),
    ):
        connect(rank=1, servers=servers[::-1], **common)


# -- ranks that are missing, or die -----------------------------------------------------------


def test_a_rank_that_does_not_come_is_named(job: Callable[..., list[Client]]) -> None:
    clients = job(3, timeout="500ms")
    works = [client.all_reduce(ones(70_000)) for client in clients[:2]]
    for error in errors_of(works, within_s=2.5):
        assert isinstance(error, ReductionTimeout)
        assert error.missing == (2,)
        assert "rank 2" in str(error)


def test_a_rank_that_never_joined_is_named(servers: list[str]) -> None:
    with connect(rank=0, world_size=2, servers=servers, job="alone", timeout="500ms") as alone:
        (error,) = errors_of([alone.all_reduce(ones())], within_s=2.5)
    assert isinstance(error, ReductionTimeout)
    assert "rank 1 (never joined)" in str(error)


WORKER = """
import sys, numpy, worker_client
client = worker_client.init(rank={rank}, world_size={world_size}, servers={servers!r}, job={job!r})
print("joined", flush=True)
for _ in range({count}):
    client.all_reduce(numpy.ones({size}, numpy.float32), op="sum").wait()
    print("step", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def worker(**arguments: object):
    """A rank in a process of its own; it ends when its standard input does."""
    code = WORKER.format(**{"count": 0, "size": 1000, **arguments})
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "joined\n"
            yield process
        finally:
            process.kill()


def test_a_killed_worker_is_named_and_the_job_can_start_again(servers: list[str]) -> None:
    common = {"servers": servers, "job": "killed", "world_size": 3}
    for _ in range(2):  # the second time under the same name, at once
        with contextlib.ExitStack() as stack:
            victim = stack.enter_context(worker(rank=1, **common))
            others = [stack.enter_context(connect(rank=rank, **common)) for rank in (0, 2)]
            works = [other.all_reduce(ones(70_000)) for other in others]
            os.kill(victim.pid, signal.SIGKILL)
            for error in errors_of(works):
                assert isinstance(error, RankLostError)
                assert error.rank == 1
            # And whatever comes later, until it is back.
            (error,) = errors_of([others[0].all_reduce(ones())])
            assert isinstance(error, RankLostError)


def test_a_whole_job_killed_can_start_again_at_once(servers: list[str]) -> None:
    common = {"servers": servers, "job": "all killed", "world_size": 2}
    with worker(rank=0, **common) as first, worker(rank=1, **common) as second:
        first.kill()
        second.kill()
    with connect(rank=0, **common) as zero, connect(rank=1, **common) as one:
        all_reduce([zero, one])


def test_a_stopped_worker_is_given_up(servers: list[str]) -> None:
    common = {"servers": servers, "job": "stopped", "world_size": 2}
    with worker(rank=1, **common) as victim, connect(rank=0, **common) as other:
        work = other.all_reduce(ones())
        os.kill(victim.pid, signal.SIGSTOP)
        (error,) = errors_of([work], within_s=3.0)
        assert isinstance(error, RankLostError)


def test_a_rank_that_leaves_is_named(job: Callable[..., list[Client]]) -> None:
    clients = job(2)
    all_reduce(clients)
    work = clients[0].all_reduce(ones())
    clients[1].shutdown()
    (error,) = errors_of([work])
    assert isinstance(error, RankLostError)
    assert "left the job" in str(error)


def test_a_rank_claimed_twice_is_refused(job: Callable[..., list[Client]], servers) -> None:
    job(2, job="twice")
    with pytest.raises(DuplicateRankError, match="rank 1"):
        connect(rank=1, world_size=2, servers=servers, job="twice")


def test_a_later_generation_ends_the_earlier_one(job: Callable[..., list[Client]], servers) -> None:
    earlier = job(2, job="generations")
    works = [earlier[0].all_reduce(ones())]
    later = job(2, job="generations", generation=1)
    (error,) = errors_of(works)
    assert isinstance(error, StaleGenerationError)
    assert (error.generation, error.current) == (0, 1)
    all_reduce(later)
    with pytest.raises(StaleGenerationError):
        connect(rank=0, world_size=2, servers=servers, job="generations")


# -- reducers that are not there, or die ------------------------------------------------------


def test_a_killed_reducer_is_named() -> None:
    with local_pool(2) as servers, contextlib.ExitStack() as stack:
        common = {"servers": servers, "job": "reducer killed", "world_size": 2}
        clients = [stack.enter_context(connect(rank=rank, **common)) for rank in range(2)]
        all_reduce(clients)
        work = clients[0].all_reduce(ones(70_000))
        port = int(servers[1].rpartition(":")[2])
        (victim,) = (
            child
            for child in psutil.Process().children()
            if any(c.laddr.port == port and c.status == "LISTEN" for c in child.net_connections())
        )
        victim.kill()
        (error,) = errors_of([work])
        assert isinstance(error, ReducerLostError)
        assert error.reducer == servers[1]
        (error,) = errors_of([clients[1].all_reduce(ones(70_000))])
        assert isinstance(error, ReducerLostError)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_nobody_listens(servers: list[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    start = time.monotonic()
    with pytest.raises(ReducerLostError, match="refused") as error:
        connect(rank=0, world_size=1, servers=[servers[0], address], connect_timeout="1s")
    assert error.value.reducer == address
    assert address in str(error.value)
    assert time.monotonic() - start < 4


def test_somebody_else_listens() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    with pytest.raises(ReducerLostError, match="does not speak this protocol") as error:
        connect(rank=0, world_size=1, servers=address, connect_timeout="1s")
    assert address in str(error.value)
    server.shutdown()
    server.server_close()


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid"):
        connect(rank=0, world_size=1, servers="no-such-host.invalid:5555")


def test_a_job_that_does_not_fit_is_refused() -> None:
    with (
        local_pool(1, memory_limit="1MiB") as servers,
        pytest.raises(CapacityError, match="--memory-limit") as error,
    ):
        connect(rank=0, world_size=8, servers=servers)
    assert "REDUCTION_WINDOW_BYTES" in str(error.value)
    assert error.value.limit == "memory_limit"


# -- strangers --------------------------------------------------------------------------------


def test_garbage_disturbs_nobody(job: Callable[..., list[Client]], servers: list[str]) -> None:
    clients = job(2)
    all_reduce(clients)
    host, port = servers[0].split(":")
    rng = np.random.default_rng(0)
    with contextlib.ExitStack() as stack, zmq.Context() as context:
        for said in (b"GET / HTTP/1.1\r\n\r\n", rng.bytes(5000), b"\xff" * 100, b""):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(said)
        with context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.connect(f"tcp://{servers[0]}")
            hello = Header(MessageType.HELLO, rank=0).pack()
            for frames in (
                [b""],
                [rng.bytes(96)],
                [Header(MessageType.CONTRIBUTION, sequence=1).pack(), b"xx"],
                [hello, b"{}"],
                [hello, b"[" * 4000],
                [hello, b'{"job":"\\ud800"}'],
                [hello, b"{}", b"third"],
                [hello],
                [b"RDSV\x09\x01"],
            ):
                peer.send_multipart(frames)
                all_reduce(clients)
                reply = peer.recv_multipart()  # told what is wrong
                assert Header.unpack(reply[0]).type is MessageType.ERROR


def test_slots_are_freed(job: Callable[..., list[Client]]) -> None:
    clients = job(2)
    reducers = [p for p in psutil.Process().children() if "serve" in p.cmdline()]
    assert len(reducers) == 2
    arrays = [ones(1 << 20) for _ in clients]
    sizes = []
    for round_ in range(60):
        works = [c.all_reduce(a, op="max") for c, a in zip(clients, arrays, strict=True)]
        [work.wait(10) for work in works]
        for _ in range(30):
            works = [c.all_reduce(a[:50], op="max") for c, a in zip(clients, arrays, strict=True)]
            [work.wait(10) for work in works]
        if round_ >= 20:
            sizes.append(sum(p.memory_info().rss for p in reducers))
    assert max(sizes) - sizes[0] < 16 << 20  # a leak of one shard a round would be 80 MB


# -- using the client -------------------------------------------------------------------------


def test_many_in_flight_and_many_threads(job: Callable[..., list[Client]]) -> None:
    clients = job(3, window_bytes="1MiB", chunk_bytes="64KiB")
    works = [
        [client.all_reduce(np.full(i, r + 1.0), op="sum") for i in range(300)]
        for r, client in enumerate(clients)
    ]
    for of_rank in works:
        for i, work in enumerate(of_rank):
            assert (work.wait(20) == np.full(i, 6.0)).all()
            assert work.done()

    def call(client: Client, results: list) -> None:
        results.extend(client.all_reduce(ones(), op="sum").wait(10)[0] for _ in range(50))

    results: list[float] = []
    threads = [threading.Thread(target=call, args=(c, results)) for c in clients for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == [3.0] * 300


def test_shutdown_ends_what_is_in_flight(job: Callable[..., list[Client]]) -> None:
    clients = job(2)
    called = threading.Event()
    work = clients[0].all_reduce(ones())
    work.future().add_done_callback(lambda _: called.set())
    with pytest.raises(ReductionTimeout, match="still in progress"):
        work.wait(0.05)
    clients[0].shutdown()
    clients[0].shutdown()
    (error,) = errors_of([work])
    assert isinstance(error, LocalProtocolError)
    assert called.wait(1)
    with pytest.raises(LocalProtocolError, match="init"):
        clients[0].all_reduce(ones())


def test_misuse_is_refused_at_once(job: Callable[..., list[Client]]) -> None:
    (client,) = job(1)
    for wrong, match in (
        ({"data": ones(), "op": "median"}, "median"),
        ({"data": np.ones(3, np.int64), "op": "mean"}, "op='sum'"),
        ({"data": [1.0, 2.0]}, "NumPy array"),
    ):
        with pytest.raises(ConfigError, match=match):
            client.all_reduce(**wrong)
    all_reduce([client])


def _in_child(client: Client, answers: multiprocessing.Queue) -> None:
    try:
        client.all_reduce(ones())
    except LocalProtocolError as error:
        answers.put(str(error))
    client.shutdown()


def test_a_forked_child_cannot_use_the_client(job: Callable[..., list[Client]]) -> None:
    clients = job(2)
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=_in_child, args=(clients[0], answers))
    child.start()
    assert "forked child" in answers.get(timeout=10)
    child.join(10)
    assert child.exitcode == 0
    all_reduce(clients)


def test_init_is_idempotent(servers: list[str]) -> None:
    arguments = {"servers": servers, "rank": 0, "world_size": 1, "job": "idempotent"}
    client = worker_client.init(**arguments)
    assert worker_client.init() is client
    assert worker_client.init(**arguments) is client
    with pytest.raises(ConfigError, match="other arguments"):
        worker_client.init(**{**arguments, "job": "another"})
    client.shutdown()
    again = worker_client.init(**arguments)
    assert again is not client
    again.shutdown()


def test_without_reducers_or_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="REDUCTION_SERVERS"):
        connect(rank=0, world_size=2)
    with pytest.raises(ConfigError, match="torchrun"):
        connect(servers="127.0.0.1:1")
