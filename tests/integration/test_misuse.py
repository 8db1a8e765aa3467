"""Garbage on the port, and clients that are used in ways they are not made for.

Ranks that are refused a call, interrupted in it, or ask for something else: the next one matches.
"""

import contextlib
import socket
import sys
import threading
import time
import traceback

import numpy as np
import pytest
import zmq

import worker_client
from reducer.errors import ConfigError, LocalProtocolError, MismatchError, ReductionTimeout
from reducer.wire.constants import MessageType
from reducer.wire.header import Header
from tests.conftest import joined, local_pool
from tests.integration.calls import all_reduce, errors_of, ones, process_of
from tests.interrupts import BoomError, boom_at
from tests.ranks import environments, ranks
from tests.waits import within_s
from worker_client.client.bootstrap import connect

pytestmark = pytest.mark.usefixtures("impl")


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


def test_without_reducers_or_a_process_group_it_says_what_to_do(servers, monkeypatch):
    with pytest.raises(ConfigError, match="REDUCTION_SERVERS"):
        connect(rank=0, world_size=2)
    with pytest.raises(ConfigError, match="torchrun"):
        connect(servers="127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"=1 needs init_process_group.* or unset"):
        connect(servers="127.0.0.1:1", embedded=True, rank=0, world_size=2)
    monkeypatch.setenv("REDUCTION_FALLBACK", "process-group")
    with pytest.raises(ConfigError, match="init_process_group"):
        connect(servers=servers, rank=0, world_size=1)


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


# -- calls that not all ranks make ------------------------------------------------------------


@pytest.fixture(scope="module")
def three(impl):
    with local_pool(2) as servers, joined(3, servers=servers, timeout="5s") as clients:
        yield clients


def check(clients, calls=20):
    for call in range(calls):
        works = [
            client.all_reduce(np.full(1000, 10.0 * call + client.rank), "sum") for client in clients
        ]
        for work in works:
            assert (work.wait(5) == sum(10.0 * call + client.rank for client in clients)).all()


@pytest.mark.parametrize(
    ("data", "arguments", "says"),
    [
        (np.ones(4, np.int32), {"op": "mean"}, "op='sum'"),
        (np.ones(4, np.complex64), {}, "complex64"),
        (np.ones(4), {"op": "median"}, "median"),
        (np.ones(4), {"timeout": "soon"}, "timeout"),
        (np.ones(4), {"weight": -1.0}, "weight"),
        (np.ones(4), {"residual": np.zeros(4)}, "residual"),
        ("no array", {}, "NumPy array"),
        ([1.0, 2.0], {}, "NumPy array"),
    ],
)
def test_a_call_that_one_rank_is_refused(three, data, arguments, says):
    with pytest.raises(ConfigError, match=says) as refused:
        three[1].all_reduce(data, **arguments)
    begun = time.monotonic()
    works = [three[rank].all_reduce(np.ones(4), "sum") for rank in (0, 2)]
    for error in errors_of(works, within_s=4.0):
        assert isinstance(error, MismatchError)
        assert (error.field, error.rank) == ("call", 1)
        assert str(refused.value)[:40] in str(error)
    within_s(4.0, begun, "not when the calls time out")
    check(three)


def test_calls_in_flight_around_a_refused_one(three):
    works = [[], [], []]
    for call in range(30):
        for client in three:
            if call == 11 and client.rank == 2:
                client.decline(ValueError("it has no batch left"))
                continue
            data = np.full(100, float(call))
            works[client.rank].append((call, client.all_reduce(data, "sum")))
    for call, work in (one for mine in works for one in mine):
        if call == 11:
            with pytest.raises(MismatchError, match="it has no batch left"):
                work.wait(5)
        else:
            assert (work.wait(5) == 3.0 * call).all()


def test_an_exception_out_of_a_trace_at_any_line_of_a_call(three):
    """Wherever it comes in `all_reduce`: the others hear of it, or it counts at no rank."""
    for line in range(1, 400):
        work, interrupted, before = None, None, three[1].calls
        sys.settrace(boom_at(line, after="all_reduce", never_in="none"))
        try:
            work = three[1].all_reduce(np.full(8, 1.0), "sum")
        except BoomError as error:
            interrupted = traceback.extract_tb(error.__traceback__)[-2].name
        finally:
            sys.settrace(None)
        if three[1].calls == before:  # nothing of it has begun, nor has it called anything
            assert interrupted in {"all_reduce", "__init__", "begin"}
            continue
        others = [three[rank].all_reduce(np.full(8, 1.0), "sum") for rank in (0, 2)]
        if not interrupted:
            assert work is not None
            assert [one.wait(5)[0] for one in (work, *others)] == [3.0] * 3
            break
        for other in others:
            ended = other.future().exception(5)  # or it was on its way in whole
            assert ended is None or "BoomError" in str(ended)
        check(three, 1)
    else:
        pytest.fail("the call has more lines than were tried")


def test_an_exception_at_any_line_of_a_call_with_a_name(three):
    """It is made, or the others hear that it is not; the next call of the name matches."""
    for line in range(1, 200):
        interrupted = False
        array = np.full(8, 1.0)
        sys.settrace(boom_at(line, after="_check_named", never_in="decline"))
        try:
            three[1].all_reduce(array, "sum", name="it")
        except BoomError:
            interrupted = True
        finally:
            sys.settrace(None)
        others = [three[rank].all_reduce(np.full(8, 1.0), "sum", name="it") for rank in (0, 2)]
        for other in others:
            ended = other.future().exception(5)  # or it was accepted already
            assert ended is None or "BoomError" in str(ended)
        while (array == 1.0).all() and ended is None:
            time.sleep(0.001)  # its own handle is lost
        works = [client.all_reduce(np.full(8, 2.0), "sum", name="it") for client in three]
        assert [work.wait(5)[0] for work in works] == [6.0] * 3
        if not interrupted:
            break
    else:
        pytest.fail("the call has more lines than were tried")
