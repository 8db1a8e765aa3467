"""What goes wrong says who, at every rank, in seconds; everybody else goes on."""

import contextlib
import http.server
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from harness.pool import Pool
from reducer.errors import (
    CapacityError,
    DuplicateRankError,
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionTimeout,
    StaleGenerationError,
)
from reducer.wire.constants import ReduceOp
from tests import inside
from tests.commands import free_ports
from tests.conftest import joined, local_pool, reducer_here
from tests.integration.calls import all_reduce, errors_of, ones, process_of
from tests.ranks import Loopback, environments, ranks
from tests.waits import eventually, within_s
from worker_client.client.bootstrap import connect
from worker_client.commands.demo.ranks import free_port
from worker_client.protocol.failover import ADOPT_S
from worker_client.protocol.operation import Operation
from worker_client.staging.host_buffer import host_buffer

pytestmark = [
    pytest.mark.usefixtures("impl"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


# -- ranks that disagree ----------------------------------------------------------------------


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
        assert error.rank != error.other_rank
        assert {error.expected, error.got} == set(values)
        assert all(str(value) in str(error) for value in values)
        assert f"rank {error.rank}" in str(error)
        assert f"rank {error.other_rank}" in str(error)
    all_reduce(clients)


def test_a_weight_of_one_rank_alone_is_a_mismatch(job):
    clients = job(3)
    weights = (None, 2.0, None)
    works = [one.all_reduce(ones(), weight=weights[one.rank]) for one in clients]
    assert all(isinstance(error, MismatchError) for error in errors_of(works))
    all_reduce(clients)


def in_order(client, name):
    view, dtype, _ = host_buffer(ones())
    channel = inside.communicator(client)
    operation = Operation(view, dtype, ReduceOp.SUM, name, 10.0, lead=channel.wait)
    channel.submit(operation)
    return operation


def test_another_order_is_named(job):
    clients = job(2)
    for name in ("weights", "bias"):  # a rank knows those names alone that it has used itself
        for work in [in_order(client, name) for client in clients]:
            work.wait(10)
    orders = [("weights", "bias"), ("bias", "weights")]
    works = [
        in_order(client, name)
        for client, order in zip(clients, orders, strict=True)
        for name in order
    ]
    for error in errors_of(works):
        assert isinstance(error, MismatchError)
        assert {error.expected, error.got} == {"weights", "bias"}
    all_reduce(clients)


def test_another_job_does_not_notice(job):
    quarrelling, working = job(2), job(3, job="the other job")
    done = threading.Event()

    def quarrel():
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


# -- ranks that are missing, or die -----------------------------------------------------------


def test_a_rank_that_does_not_come_is_named(job):
    clients = job(3, timeout="500ms")
    works = [client.all_reduce(ones(70_000)) for client in clients[:2]]
    for error in errors_of(works, within_s=1.5):  # 0.65 s, and what a busy machine takes
        assert isinstance(error, ReductionTimeout)
        assert error.missing == (2,)
        assert "rank 2" in str(error)


def test_a_rank_that_never_joined_is_named(servers):
    with connect(rank=0, world_size=2, servers=servers, job="alone", timeout="500ms") as alone:
        (error,) = errors_of([alone.all_reduce(ones())], within_s=2.5)
    assert isinstance(error, ReductionTimeout)
    assert error.missing == (1,)
    assert "rank 1" in str(error)


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
def worker(**arguments):
    """A rank in a process of its own; it ends when its standard input does."""
    code = WORKER.format(**{"count": 0, "size": 1000, **arguments})
    with ranks(environments(1, MASTER_PORT="1"), "-c", code, talk=True) as (rank,):
        assert rank.stdout.readline() == "joined\n"
        yield rank


def test_a_killed_worker_is_named_and_the_job_can_start_again(servers):
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


def test_a_whole_job_killed_can_start_again_at_once(servers):
    common = {"servers": servers, "job": "all killed", "world_size": 2}
    with worker(rank=0, **common) as first, worker(rank=1, **common) as second:
        first.kill()
        second.kill()
    with joined(**common) as clients:
        all_reduce(clients)


def test_a_rank_that_leaves_is_named(job):
    clients = job(2)
    all_reduce(clients)
    work = clients[0].all_reduce(ones())
    clients[1].shutdown()
    (error,) = errors_of([work])
    assert isinstance(error, RankLostError)
    assert "left the job" in str(error)


def test_a_contested_rank_is_refused(job, servers):
    job(2, job="twice")
    with pytest.raises(DuplicateRankError, match="rank 1"):
        connect(rank=1, world_size=2, servers=servers, job="twice")


def test_a_later_generation_ends_the_earlier_one(job, servers):
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


@pytest.fixture
def names(monkeypatch):
    """Addresses of names that end with ``.pool``; those that have none are not known."""
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


@pytest.mark.extended_cases("compiled-2-60s")
@pytest.mark.parametrize(("count", "waits"), [(2, None), (1, "60s"), (2, "60s")])
def test_a_call_waits_while_every_reducer_is_killed_and_replaced(monkeypatch, count, waits):
    """One after the other; or all at once, if the job waits for a pool that is gone."""
    if waits:
        monkeypatch.setenv("REDUCTION_WAIT_FOR_REDUCERS", waits)
    with Loopback(count) as lab, contextlib.ExitStack() as stack:
        pool = Pool(lab.hosts)
        stack.callback(pool.stop)
        clients = stack.enter_context(joined(2, servers=pool.addresses, job="restarted"))
        for call in range(count if waits else 3):
            data = [np.full(100_000, rank + call, np.float32) for rank in range(2)]
            first = clients[0].all_reduce(data[0], "sum")
            for reducer in range(count):
                pool.end(reducer, signal.SIGKILL)
                if not waits:
                    pool.start(reducer)
            if waits:
                with pytest.raises(ReductionTimeout, match="still in progress"):
                    first.wait(ADOPT_S + 1)
            second = clients[1].all_reduce(data[1], "sum")
            if waits:
                pool.start(count - 1)
            assert (first.wait(20) == 1 + 2 * call).all()
            assert (second.wait(20) == 1 + 2 * call).all()
            for reducer in range(count - 1 if waits else 0):
                pool.start(reducer)


def test_a_job_begins_with_the_reducers_that_answer(servers, caplog):
    address = f"127.0.0.1:{free_port()}"
    with connect(
        rank=0, world_size=1, servers=[servers[0], address], connect_timeout="4s"
    ) as client:
        assert client.in_use == [True, False]
        all_reduce([client])
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


def test_a_name_without_an_address_is_a_reducer_that_does_not_answer(servers):
    given = [servers[0], "no-such-host.invalid:5555"]
    with joined(2, servers=given, connect_timeout="1s", job="pending") as clients:
        assert [client.in_use for client in clients] == [[True, False]] * 2
        all_reduce(clients)


def test_two_addresses_of_one_reducer_are_named(servers):
    given = [servers[0], servers[0].replace("127.0.0.1", "localhost")]
    with pytest.raises(MismatchError, match=r"\(numbers 0 and 1, from 0 on\) are one reducer"):
        connect(rank=0, world_size=1, servers=given)


def test_a_name_that_gets_an_address_later_and_then_another_one(servers, names, impl):
    """As that of a pod does that comes back."""
    if impl == "plain":
        pytest.skip("libzmq does not ask Python for addresses")
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


def test_nobody_listens():
    address = f"127.0.0.1:{free_port()}"
    start = time.monotonic()
    with pytest.raises(ReducerLostError, match="refused") as error:
        connect(rank=0, world_size=1, servers=[address], connect_timeout="1s")
    assert error.value.reducer == address
    assert address in str(error.value)
    within_s(4, start)


def test_somebody_else_listens():
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    with pytest.raises(ReducerLostError, match="does not speak this protocol") as error:
        connect(rank=0, world_size=1, servers=address, connect_timeout="1s")
    assert address in str(error.value)
    server.shutdown()
    server.server_close()


def test_a_name_that_does_not_resolve():
    with pytest.raises(ReducerLostError, match=r"no-such-host\.invalid:5555 cannot be reached: "):
        connect(rank=0, world_size=1, servers="no-such-host.invalid:5555", connect_timeout="100ms")


def test_a_job_that_does_not_fit_is_refused():
    with (
        local_pool(1, memory_limit="1MiB") as servers,
        pytest.raises(CapacityError, match="--memory-limit") as error,
    ):
        connect(rank=0, world_size=8, servers=servers, job="large")
    assert "REDUCTION_WINDOW_BYTES" in str(error.value)
    assert error.value.limit == "memory_limit"
