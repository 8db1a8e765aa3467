"""Garbage on the port, and clients that are used in ways they are not made for."""

import contextlib
import multiprocessing
import socket
import threading

import numpy as np
import pytest
import zmq

import worker_client
from reducer.errors import ConfigError, LocalProtocolError, MismatchError, ReductionTimeout
from reducer.wire.constants import MessageType
from reducer.wire.header import Header
from tests.integration.calls import all_reduce, errors_of, ones, process_of
from tests.ranks import environments, ranks
from worker_client.client.bootstrap import connect

pytestmark = [
    pytest.mark.usefixtures("impl"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


# -- strangers --------------------------------------------------------------------------------


def test_garbage_disturbs_nobody(job, servers):
    clients = job(2)
    all_reduce(clients)
    host, port = servers[0].split(":")
    rng = np.random.default_rng(0)
    with contextlib.ExitStack() as stack, zmq.Context() as context:
        for said in (b"GET / HTTP/1.1\r\n\r\n", rng.bytes(5000), b"\xff" * 100, b""):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(said)
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
            with context.socket(zmq.DEALER) as peer:  # each is dropped when it was told why
                peer.linger = 0
                peer.connect(f"tcp://{servers[0]}")
                peer.send_multipart(frames)
                all_reduce(clients)
                reply = peer.recv_multipart()  # told what is wrong
                assert Header.unpack(reply[0]).type is MessageType.ERROR


def test_slots_are_freed(job, servers):
    clients = job(2)
    reducers = [process_of(server) for server in servers]
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


def test_many_in_flight_and_many_threads(job):
    clients = job(3, window_bytes="1MiB", chunk_bytes="64KiB")
    works = [
        [client.all_reduce(np.full(i, r + 1.0), op="sum") for i in range(300)]
        for r, client in enumerate(clients)
    ]
    for of_rank in works:
        for i, work in enumerate(of_rank):
            assert (work.wait(20) == np.full(i, 6.0)).all()
            assert work.done()

    def call(client, results):
        results.extend(client.all_reduce(ones(), op="sum").wait(10)[0] for _ in range(50))

    results = []
    threads = [threading.Thread(target=call, args=(c, results)) for c in clients for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == [3.0] * 300


def test_a_shape_goes_with_a_name(job):
    clients = job(2)
    for client in clients:
        with pytest.raises(ConfigError, match="give name= as well"):
            client.all_reduce(np.zeros(6, np.float32), shape="(2, 3)")
        with pytest.raises(ConfigError, match=r"str\(array\.shape\)"):
            client.all_reduce(np.zeros(6, np.float32), name="m", shape=(2, 3))
    works = [
        client.all_reduce(np.zeros(6, np.float32), name="n", shape=f"({rank + 1}, 3)")
        for rank, client in enumerate(clients)
    ]
    for work in works:
        with pytest.raises(MismatchError, match=r"on shape: rank 0 says \(1, 3\), rank 1 says"):
            work.wait()
    works = [
        client.all_reduce(np.ones(6, np.float32), "sum", name="n", shape="(2, 3)")
        for client in clients
    ]
    for work in works:
        work.wait()


def test_shutdown_ends_what_is_in_flight(job):
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


def _in_child(client, answers):
    try:
        client.all_reduce(ones())
    except LocalProtocolError as error:
        answers.put(str(error))
    client.shutdown()


def test_a_forked_child_cannot_use_the_client(job):
    clients = job(2)
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=_in_child, args=(clients[0], answers))
    child.start()
    assert "forked child" in answers.get(timeout=10)
    child.join(10)
    assert child.exitcode == 0
    all_reduce(clients)


def test_init_is_idempotent(servers):
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


def test_without_reducers_or_a_process_group_it_says_what_to_do():
    with pytest.raises(ConfigError, match="REDUCTION_SERVERS"):
        connect(rank=0, world_size=2)
    with pytest.raises(ConfigError, match="torchrun"):
        connect(servers="127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"=1 needs init_process_group.* or unset"):
        connect(servers="127.0.0.1:1", embedded=True, rank=0, world_size=2)


def test_a_process_that_was_started_with_others_is_no_job_of_one():
    code = """
import worker_client, worker_client.horovod.torch as hvd
from reducer.errors import ConfigError
for start in (worker_client.init, hvd.init):
    try:
        start()
    except ConfigError as error:
        print(str(error).partition(":")[0])
"""
    environment = environments(1)[0]
    for name in ("RANK", "WORLD_SIZE"):
        del environment[name]
    environment |= {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4", "TF_CONFIG": "{}"}
    with ranks([environment], "-c", code) as job:
        assert job.outputs() == ["FLUX_JOB_SIZE='4' of Flux\n" * 2]
