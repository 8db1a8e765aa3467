"""What goes wrong says who, at every rank, in seconds; everybody else goes on."""

import contextlib
import http.server
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from harness.pool import Pool
from reducer.errors import (
    MismatchError,
    ReducerLostError,
    ReductionTimeout,
)
from reducer.wire.constants import ReduceOp
from tests import inside
from tests.commands import free_ports
from tests.conftest import joined, local_pool, reducer_here
from tests.integration.calls import all_reduce, errors_of, ones, process_of
from tests.ranks import Loopback
from tests.waits import eventually, within_s
from worker_client.client.bootstrap import connect
from worker_client.commands.demo.ranks import free_port
from worker_client.protocol.failover import ADOPT_S
from worker_client.protocol.operation import Operation
from worker_client.staging.host_buffer import host_buffer

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.parametrize(
    ("field", "calls", "values"),
    [
        ("total_bytes", [{}, {}, {"data": ones(1001)}], (4000, 4004)),
        ("dtype", [{}, {}, {"data": ones(1000, np.int32), "op": "sum"}], ("float32", "int32")),
        ("op", [{}, {}, {"op": "max"}], ("sum", "max")),
    ],
)
def test_disagreement_is_named_at_every_rank(job, field, calls, values):
    clients = job(3)
    with_defaults = [{"data": ones(), "op": "sum", **call} for call in calls]
    works = [client.all_reduce(**call) for client, call in zip(clients, with_defaults, strict=True)]
    for error in errors_of(works):
        assert isinstance(error, MismatchError)
        assert error.field == field
        assert 2 in {error.rank, error.other_rank}
        for rank, value in ((error.rank, error.expected), (error.other_rank, error.got)):
            assert value == values[rank == 2]
            assert f"rank {rank} says {value}" in str(error)
    all_reduce(clients)


def test_another_order_is_named(job):
    clients = job(2)

    def in_order(*orders):
        operations = []
        for client, order in zip(clients, orders, strict=True):
            channel = inside.communicator(client)
            for name in order:
                view, dtype, _ = host_buffer(ones())
                one = Operation(view, dtype, ReduceOp.SUM, name, 10.0, lead=channel.wait)
                channel.submit(one)
                operations.append(one)
        return operations

    # A rank knows those names alone that it has used itself.
    for work in in_order(("weights", "bias"), ("weights", "bias")):
        work.wait(10)
    for error in errors_of(in_order(("weights", "bias"), ("bias", "weights"))):
        assert isinstance(error, MismatchError)
        assert {error.expected, error.got} == {"weights", "bias"}
    all_reduce(clients)


@pytest.fixture
def names(monkeypatch):
    """Addresses of host names that end with ``.pool``; a name without one cannot be resolved."""
    known, look_up = {}, socket.getaddrinfo

    def resolve(host, *arguments, **others):
        if host.endswith(".pool") and host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(known.get(host, host), *arguments, **others)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


def test_a_killed_reducer_costs_nothing_and_the_last_one_is_named():
    with local_pool(3) as servers, joined(2, servers=servers, job="reducer killed") as clients:
        all_reduce(clients)
        for server in servers[1:]:
            work = clients[0].all_reduce(ones(70_000), op="sum")  # in flight when it dies
            process_of(server).kill()
            assert (clients[1].all_reduce(ones(70_000), op="sum").wait(2) == 2).all()
            assert (work.wait(2) == 2).all()
        all_reduce(clients)
        work = clients[0].all_reduce(ones(70_000))
        process_of(servers[0]).kill()
        with pytest.raises(ReducerLostError) as last:  # when none has answered for two seconds
            work.wait(8)
        assert last.value.reducer == servers[0]
        (error,) = errors_of([clients[1].all_reduce(ones(70_000))])
        assert isinstance(error, ReducerLostError)


@pytest.mark.extended_cases("2")
@pytest.mark.parametrize("count", [1, 2])
def test_a_call_waits_for_a_pool_that_is_gone(monkeypatch, count):
    monkeypatch.setenv("REDUCTION_WAIT_FOR_REDUCERS", "60s")
    with Loopback(count) as lab, contextlib.ExitStack() as stack:
        pool = Pool(lab.hosts)
        stack.callback(pool.stop)
        clients = stack.enter_context(joined(2, servers=pool.addresses, job="restarted"))
        for call in range(count):
            data = [np.full(100_000, rank + call, np.float32) for rank in range(2)]
            first = clients[0].all_reduce(data[0], "sum")
            for reducer in range(count):
                pool.end(reducer, signal.SIGKILL)
            with pytest.raises(ReductionTimeout, match="still in progress"):
                first.wait(ADOPT_S + 1)
            second = clients[1].all_reduce(data[1], "sum")
            pool.start(count - 1)
            assert (first.wait(20) == 1 + 2 * call).all()
            assert (second.wait(20) == 1 + 2 * call).all()
            for reducer in range(count - 1):
                pool.start(reducer)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_job_begins_with_the_reducers_that_answer(servers, caplog, host):
    address = f"{host}:{free_port()}"
    with joined(2, servers=[servers[0], address], connect_timeout="1s") as clients:
        assert [client.in_use for client in clients] == [[True, False]] * 2
        all_reduce(clients)
    said = "has never answered this worker (check its address in REDUCTION_SERVERS)"
    assert f"reducer {address} {said}: going on without it" in caplog.text


def test_a_pool_that_is_gone_is_waited_for_if_the_job_says_so(monkeypatch, caplog):
    monkeypatch.setenv("REDUCTION_WAIT_FOR_REDUCERS", "20s")
    ports = free_ports(2)
    common = {"servers": [f"127.0.0.1:{port}" for port in ports], "job": "early", "world_size": 2}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        joining = [
            pool.submit(connect, rank=rank, connect_timeout="1s", **common) for rank in range(2)
        ]
        time.sleep(1.5)
        assert not any(one.done() for one in joining)
        stack.enter_context(reducer_here(bind=f"tcp://127.0.0.1:{ports[1]}"))
        clients = [stack.enter_context(one.result(10)) for one in joining]
        assert [client.in_use for client in clients] == [[False, True]] * 2
        all_reduce(clients)
    assert "no reducer answers yet: waiting for one for up to" in caplog.text


def test_two_addresses_of_one_reducer_are_named(servers):
    given = [servers[0], servers[0].replace("127.0.0.1", "localhost")]
    with pytest.raises(MismatchError, match=r"\(numbers 0 and 1, from 0 on\) are one reducer"):
        connect(rank=0, world_size=1, servers=given)


def test_a_name_that_gets_an_address_later_and_then_another_one(servers, names):
    """As that of a pod does that comes back."""
    (port,) = free_ports(1)
    given = [servers[0], f"reducer-1.pool:{port}"]
    with joined(2, servers=given, connect_timeout="1s", job="moving") as clients:
        without = [[True, False]] * 2
        for address in ("127.0.0.2", "127.0.0.3"):
            eventually(lambda: all_reduce(clients) or [one.in_use for one in clients] == without)
            names["reducer-1.pool"] = address
            with reducer_here(bind=f"tcp://{address}:{port}"):
                eventually(lambda: all_reduce(clients) or all(all(one.in_use) for one in clients))


def test_names_that_a_cluster_does_not_know_yet_are_asked_for_again(monkeypatch, names):
    monkeypatch.setenv("REDUCTION_WAIT_FOR_REDUCERS", "1s")
    known = threading.Timer(0.5, names.update, ({"reducer-0.pool": "127.0.0.1"},))
    known.start()
    servers = f"reducer-0.pool:{free_port()}"
    with pytest.raises(ReducerLostError, match=r"reducer-0\.pool:\d+ cannot be reached"):
        connect(rank=0, world_size=1, servers=servers, connect_timeout="100ms")
    assert known.finished.is_set()


@pytest.mark.parametrize("answers", [True, False])
def test_a_name_server_that_does_not_answer_is_named(monkeypatch, answers):
    look_up, asked = socket.getaddrinfo, threading.Event()

    def resolve(name, *arguments, **others):
        if name == "reducer-0.pool" and not others.get("flags"):
            asked.wait(0 if answers else 20)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return look_up(name, *arguments, **others)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    start, why = time.monotonic(), "Temporary failure" if answers else "the name server does not"
    try:
        with pytest.raises(ReducerLostError, match=f"could not be resolved: {why}") as error:
            connect(rank=0, world_size=1, servers="reducer-0.pool:5555", connect_timeout="1.5s")
    finally:
        asked.set()
    assert "getent hosts reducer-0.pool" in str(error.value)
    assert "reducer serve" not in str(error.value)
    within_s(8, start)


def test_why_a_reducer_cannot_be_used():
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for address, why in (
        (f"127.0.0.1:{free_port()}", "refused"),
        (f"127.0.0.1:{server.server_port}", "does not speak this protocol"),
        ("no-such-host.invalid:5555", "cannot be reached: "),
    ):
        start = time.monotonic()
        with pytest.raises(ReducerLostError, match=why) as error:
            connect(rank=0, world_size=1, servers=address, connect_timeout="1s")
        assert error.value.reducer == address
        assert address in str(error.value)
        within_s(8, start)
    server.shutdown()
    server.server_close()
