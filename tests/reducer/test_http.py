"""A reducer's HTTP port: what it answers, and what bad clients cost."""

import http.client
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from subprocess import PIPE, STDOUT, Popen

import numpy as np
import psutil
import pytest

from reducer.config import load
from reducer.engine.lateness import BUCKETS, RankWaits, Waits
from reducer.engine.traffic import Traffic
from reducer.errors import ConfigError
from reducer.monitoring import http_port, metrics, status
from reducer.monitoring.http_port import HttpPort
from reducer.monitoring.observer import Observer, StatusInbox, merge_jobs
from reducer.server import Server
from reducer.wire.messages import Straggler
from tests.commands import free_ports, serving
from tests.conftest import joined
from tests.reducer.asked import ask, port_of
from tests.twins.lateness import bucket_of
from tests.waits import eventually, within_s
from worker_client.client.bootstrap import connect

pytestmark = pytest.mark.usefixtures("no_settings")

PATHS = ["/", "/healthz", "/readyz", "/metrics", "/status.json", "/history.json", "/ras.json"]
LARGE = b"x" * (16 << 20)  # more than fits between a port and a client that reads nothing


def connected(address):
    host, _, number = address.rpartition(":")
    return socket.create_connection((host, int(number)), 10)


def reduce_once(*clients, elements=100_000):
    """Make an all-reduce of ones, and return the first element of each result."""
    works = [client.all_reduce(np.ones(elements, np.float32)) for client in clients]
    return [float(work.wait(20)[0]) for work in works]


def samples(text):
    """The metrics of a text, by name and labels."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def total(found, name):
    return sum(value for key, value in found.items() if key.startswith(name + "{"))


def test_what_a_job_does_is_told(server, port):
    with joined(3, servers=server.address, job="visible") as clients:
        for _ in range(4):
            reduce_once(*clients, elements=300_000)
        time.sleep(2 * 0.2)
        found = ask(port, "/status.json").json
        assert (found["state"], found["jobs_total"]) == ("serving", 1)
        assert found["address"] == server.address
        (job,) = found["jobs"]
        assert (job["name"], job["generation"], job["world_size"]) == ("visible", 0, 3)
        assert (job["present"], job["ranks_present"], job["ranks_absent"]) == (3, "0-2", "")
        assert 0 < job["reserved"] == found["memory"]["reserved"] < found["memory"]["limit"]
        assert [lane["answers"] for lane in found["lanes"]] == [True, True]
        counters = found["counters"]
        assert counters["bytes_in"] >= 3 * 4 * 4 * 300_000
        assert counters["contributions"] == counters["results"] > 0
        assert job["traffic"]["bytes_in"] == counters["bytes_in"]  # there is no other job
        assert job["traffic"]["bytes_out"] == counters["bytes_out"]
        assert 3 <= job["traffic"]["all_reduces"] <= 4  # the latest is over when the next begins
        assert job["hosts"] == {socket.gethostname(): "0-2"}
        assert counters["results"] == sum(lane["counters"]["results"] for lane in found["lanes"])
        text = samples(ask(port, "/metrics").text)
        assert total(text, "reducer_contributions_total") == counters["contributions"]
        assert total(text, "reducer_members") == 6  # at both threads
        assert total(text, "reducer_connections") == 6
        assert text['reducer_job_ranks_present{job="visible"}'] == 3
        assert text['reducer_job_bytes_in_total{job="visible"}'] == counters["bytes_in"]
        parts = text['reducer_job_all_reduce_seconds_bucket{job="visible",le="+Inf"}']
        assert 2 * 3 <= parts <= 2 * 4  # each thread has one of each
        assert text["reducer_serving"] == text['reducer_state{state="serving"}'] == 1
    eventually(lambda: ask(port, "/status.json").json["jobs_total"] == 0)


def job_of(port, name):
    """Return what is told of a job; None if there is none."""
    jobs = ask(port, "/status.json").json["jobs"]
    return next((job for job in jobs if job["name"] == name), None)


def test_how_long_all_reduces_take_lies_between_what_ranks_see(server, port):
    """From the first contribution to the result: less than the first rank waits, and not much."""
    late_s, began, ended = 0.05, [], []
    with joined(2, servers=server.address, job="timed") as clients, ThreadPoolExecutor(1) as thread:
        for _ in range(9):
            began.append(time.perf_counter())
            first = thread.submit(reduce_once, clients[0], elements=300_000)
            time.sleep(late_s)
            reduce_once(clients[1], elements=300_000)
            first.result()
            ended.append(time.perf_counter())
        eventually(lambda: job_of(port, "timed")["traffic"]["all_reduces"] >= 8)
        found = job_of(port, "timed")
    took = [until - since for since, until in zip(began, ended, strict=True)]
    traffic, lately = found["traffic"], found["lately"]
    parts = traffic["buckets"][-1]
    assert late_s / 2 < traffic["seconds"] / parts < max(took)
    assert late_s / 2 < lately["median_s"] <= lately["p99_s"] < max(took) * 1.07
    assert lately["bytes_in"] <= traffic["bytes_in"]


def test_an_absent_rank_is_named(server, port):
    arguments = {"servers": server.address, "world_size": 3, "job": "partial"}
    with connect(rank=0, **arguments), connect(rank=2, **arguments) as third:
        third.all_reduce(np.ones(1000))
        eventually(lambda: (job_of(port, "partial") or {}).get("rounds") == 1)
        job = job_of(port, "partial")
    assert (job["present"], job["ranks_present"], job["ranks_absent"]) == (2, "0,2", "1")
    assert job["held"] > 0


def test_it_only_reads_what_there_is_and_tells_no_secret(port):
    for path in PATHS:
        answer = ask(port, path)
        assert answer.code == 200
        assert not re.search(rb"key|secret|token|password", answer.body, re.IGNORECASE)
        head = ask(port, path, "HEAD")
        assert (head.code, head.body) == (200, b"")
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "X"):
            assert ask(port, path, method).code == 501
    for path in ("/index.html", "/status", "/../etc/passwd", "/metrics/", "/page", "http://x/"):
        answer = ask(port, path)
        assert answer.code == 404
        assert b"/status.json" in answer.body


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"GET /healthz HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /healthz?verbose HTTP/1.1\nHost: x\n\n", b"200"),
        (b"GET /" + b"x" * (1 << 20), b"431"),
        (b"GET /healthz HTTP/1.0\r\n" + b"X: y\r\n" * 1000 + b"\r\n", b"431"),
        (b"GET /healthz HTTP/9.0\r\n\r\n", b"505"),
        (b"GET\r\n\r\n", b"400"),
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\n\r\n", b"400"),
    ],
)
def test_odd_requests_are_answered(port, said, code):
    with connected(port) as client:
        client.sendall(said[: http_port.MAX_HEAD_BYTES + 100])
        answer = b""
        while more := _receive(client):
            answer += more
        assert code in answer.split(b"\n")[0]


def _receive(client):
    try:
        return client.recv(4096)
    except ConnectionResetError:  # it had not read all that was sent
        return b""


def test_clients_that_write_slowly_or_read_nothing_hold_no_place(monkeypatch, server):
    # One byte at a time resets any timeout of a single read.
    monkeypatch.setattr(http_port, "CONNECTION_S", 0.5)
    monkeypatch.setattr(status, "dump", lambda _: LARGE)
    files = psutil.Process().num_fds()
    with port_of(server.observer) as address, connected(address) as deaf:
        deaf.sendall(b"GET /status.json HTTP/1.0\r\n\r\n")
        assert deaf.recv(8) == b"HTTP/1.0"
        slow = [connected(address) for _ in range(4)]
        eventually(lambda: sum(_is_ended(client) for client in slow) == len(slow))
        for client in slow:
            client.close()
        eventually(lambda: psutil.Process().num_fds() <= files + 3)  # two of the port, and deaf


def _is_ended(client):
    try:
        client.sendall(b"G")
        client.setblocking(False)
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        client.settimeout(10)


def test_many_clients_cost_neither_probes_nor_all_reduces(port, server):
    with joined(2, servers=server.address, job="beside") as clients:
        reduce_once(*clients)
        files, threads = psutil.Process().num_fds(), threading.active_count()
        idle = [connected(port) for _ in range(200)]  # more than there is room for
        for client in idle:
            with suppress(OSError):  # of one that has made way
                client.sendall(b"GET /healthz HTTP/1.0\r\nX: ")
        for path in PATHS * 3:
            assert ask(port, path).code == 200
        assert reduce_once(*clients) == [1.0, 1.0]
        assert threading.active_count() < threads + 10  # none for who waits
        for client in idle:
            client.close()
        eventually(lambda: psutil.Process().num_fds() <= files + 4)


def test_the_oldest_makes_way(server):
    with port_of(server.observer, 4) as address:
        clients = [connected(address) for _ in range(5)]
        eventually(lambda: _is_ended(clients[0]))
        assert not any(_is_ended(client) for client in clients[1:])
        for client in clients:
            client.close()


def test_answers_that_nobody_reads_make_way(monkeypatch, server):
    monkeypatch.setattr(http_port, "ANSWER_S", 0.1)
    monkeypatch.setattr(status, "dump", lambda _: LARGE)
    with port_of(server.observer) as address:
        deaf = [connected(address) for _ in range(2 * http_port.MAX_ANSWERS)]
        for client in deaf:
            client.sendall(b"GET /status.json HTTP/1.0\r\n\r\n")
        before = time.monotonic()
        assert ask(address, "/healthz").code == 200
        within_s(http_port.CONNECTION_S, before)  # else all had their time
        for client in deaf:
            client.close()


def test_what_fails_in_an_answer_is_said_and_ends_nothing(monkeypatch, port, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(status, "dump", {}.__getitem__)
        assert ask(port, "/status.json").code == 500
    assert "no answer to /status.json" in caplog.text
    assert ask(port, "/status.json").code == 200


def test_answers_get_no_more_than_a_part_of_a_core(monkeypatch, port):
    took_s = 2 * http_port.BUSY_S  # so that each answer is paused for
    monkeypatch.setattr(status, "dump", lambda _: work_for(took_s))
    monkeypatch.setattr(http_port, "TIMES", 20)
    monkeypatch.setattr(http_port, "CONNECTION_S", 60.0)  # however busy the machine is
    began = time.monotonic()
    with ThreadPoolExecutor(8) as askers:
        for answer in askers.map(lambda _: ask(port, "/status.json"), range(8)):
            assert answer.code == 200
    assert time.monotonic() - began > http_port.TIMES * took_s * 7  # all but the last


def work_for(seconds):
    """Take so much of a core, and return something to answer with."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass
    return b"{}"


def test_a_costly_answer_costs_nobody_an_answer(monkeypatch, port):
    monkeypatch.setattr(http_port, "CONNECTION_S", 2.0)
    very_long_s = 1.5 * http_port.CONNECTION_S / http_port.TIMES
    monkeypatch.setattr(status, "dump", lambda _: work_for(very_long_s))
    assert ask(port, "/status.json").code == 200
    assert ask(port, "/healthz").code == 200


def test_a_client_that_does_not_wait_for_the_answer_costs_no_sigpipe(port, broken_pipes):
    for request in (b"GET / HTTP/1.0\r\n\r\n", b"x" * (http_port.MAX_HEAD_BYTES + 1)):
        for _ in range(3):
            with connected(port) as hasty:
                hasty.sendall(request)
    assert ask(port, "/healthz").code == 200  # those before have had their answers
    assert broken_pipes == []


def test_a_lane_is_asked_by_all_askers_together(server, monkeypatch):
    asked, ask_inbox = [], StatusInbox.ask
    monkeypatch.setattr(StatusInbox, "ask", lambda *given: asked.append(1) or ask_inbox(*given))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: server.observer.status(), range(200)))
    assert {each.incarnation for each in found} == {found[0].incarnation}
    assert len(asked) < 20


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_is_seen(monkeypatch):
    answer, others = StatusInbox.answer, set(threading.enumerate())
    server = Server(load(bind="tcp://127.0.0.1:0"))
    assert "starting" in server.observer.unready()
    assert server.observer.unhealthy() == ""
    assert server.observer.status().state == "starting"
    server.start()
    eventually(lambda: not server.observer.unready())

    def fail(inbox):
        if threading.current_thread() in others:  # of another test's server
            return answer(inbox)
        raise MemoryError

    monkeypatch.setattr(StatusInbox, "answer", fail)
    eventually(lambda: "has ended" in server.observer.unhealthy())
    assert "has ended" in server.observer.unready()
    time.sleep(0.25)  # until the earlier answer is too old
    assert server.observer.status().state == "failing"
    with pytest.raises(MemoryError):
        server.stop()


def test_a_thread_that_hangs_is_seen(monkeypatch):
    monkeypatch.setattr("reducer.monitoring.observer.ANSWER_S", 0.2)
    inbox = StatusInbox(engine=None, guard=None, port=1)  # nobody answers
    inbox.ticked = time.monotonic()
    about = {"version": "0.1", "address": "a:1", "incarnation": "i"}
    observer = Observer([inbox], [threading.main_thread()], threading.Event(), **about)
    assert observer.unhealthy() == ""
    found = observer.status()
    assert found.state == "failing"
    assert not found.lanes[0].answers
    inbox.ticked -= 60
    assert "hangs" in observer.unhealthy()
    text = samples(_text(found))
    assert text['reducer_lane_up{port="1"}'] == text["reducer_serving"] == 0
    assert text['reducer_state{state="failing"}'] == total(text, "reducer_state") == 1


def test_an_error_while_looking_is_the_askers():
    inbox = StatusInbox(engine=None, guard=None, port=1)
    asked = inbox.ask()
    inbox.answer()
    with pytest.raises(AttributeError):
        asked.result(0)


def _text(found):
    return metrics.Metrics(lambda: found).text().decode()


def view(name, *ranks, **others):
    """What one thread knows of a job."""
    values = {"generation": 0, "world_size": 4, "reserved": 10, "held": 1, "rounds": 1, **others}
    values |= {"present": len(ranks), "ranks_present": "", "ranks_absent": ""}
    return status.JobStatus(name=name, ranks=frozenset(ranks), **values)


def test_what_several_threads_know_of_jobs_is_joined():
    def waits(rank, *lasted_ms):
        buckets = [sum(bucket_of(1000 * ms) == at for ms in lasted_ms) for at in range(BUCKETS)]
        return RankWaits(rank, Waits(1000 * sum(lasted_ms), tuple(buckets)), Waits())

    often, seldom = (Straggler(rank, "slow", share, 0.01) for rank, share in ((2, 0.9), (1, 0.5)))
    views = [
        view("a", 0, 1, 2, rounds=3, waits=(waits(1, 30), waits(2, 10, 10)), straggler=seldom),
        view("b", 0, 1, 2, 3, reserved=99),
        view("a", 0, 2, waits=(waits(2, 20, 20),), straggler=often),
        view("a", 0, 2),
    ]
    views[0] = replace(views[0], host_names={0: "x", 1: "y", 2: "x"}, moved=Traffic(1, 2, 3, 4))
    views[2] = replace(views[2], moved=Traffic(10, 20, 2, 400, {100: 1}))
    first, second = merge_jobs(views)
    assert (first.name, first.present, first.ranks_absent) == ("b", 4, "")
    assert (second.name, second.ranks_present, second.ranks_absent) == ("a", "0,2", "1,3")
    assert (second.reserved, second.held, second.rounds) == (30, 3, 3)
    told = [(one.rank, one.late_waits, one.late_s) for one in second.costliest_ranks]
    assert told == [(2, 4, 0.06), (1, 1, 0.03)]
    assert [one.late_buckets[4:7] for one in second.costliest_ranks] == [(2, 2, 0), (0, 1, 0)]
    assert second.straggler == often
    assert second.hosts == {"x": "0,2", "y": "1"}
    assert [second.host_of(rank) for rank in range(4)] == ["x", "y", "x", ""]
    assert (second.traffic.bytes_in, second.traffic.bytes_out) == (11, 22)
    assert (second.traffic.all_reduces, second.traffic.seconds) == (3, 404e-6)
    assert second.traffic.buckets == (*(0,) * 7, *(1,) * 14)  # from 2**13 us on
    text = samples(_text(status_of(views)))
    assert text['reducer_job_straggler_share{cause="slow",job="a",rank="2"}'] == 0.9


def status_of(views):
    memory = status.Memory(1, 1, 1)
    lane = status.LaneStatus(1, True, 1, 1, memory, {"contributions": 1, "novel": 2})
    jobs = tuple(merge_jobs(views))
    return status.ReducerStatus(
        "1", "i", "a:1", "serving", 1.0, memory, lane.counters, jobs, len(jobs), (lane,)
    )


def test_labels_are_bounded_and_no_series_is_told_twice():
    views = [view(f"job {number}", 0, reserved=number) for number in range(100)]
    views += [view("job 99", 0, 1, generation=generation, reserved=999) for generation in (4, 5)]
    text = _text(status_of(views))
    names = set(re.findall(r'job="([^"]*)"', text))
    assert len(names) == metrics.MAX_LABELLED_JOBS
    assert {"job 99", "job 98"} < names
    assert 'reducer_job_generation{job="job 99"} 5.0' in text
    assert 'reducer_novel_total{port="1"} 2.0' in text
    keys = [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(keys) == len(set(keys))


def test_ranges_are_short():
    assert [status.ranges(ranks) for ranks in ([], [0, 2, 3, 7])] == ["", "0,2-3,7"]
    text = status.ranges(range(0, 10_000, 2))
    assert text.endswith(",126,...")
    assert text.count(",") == status.MAX_RANGES


def test_it_drains_before_it_ends():
    with serving("--http", 0, "--drain-timeout", "1s") as reducer:
        with connect(servers=reducer.address, rank=0, world_size=1, job="last"):
            assert ask(reducer.http, "/readyz").body == b"ok\n"
            reducer.process.send_signal(signal.SIGTERM)
            answers = []
            with suppress(OSError, http.client.HTTPException):  # closed last, amid an answer too
                while reducer.process.poll() is None:
                    ready, health = ask(reducer.http, "/readyz"), ask(reducer.http, "/healthz")
                    answers.append((ready.code, health.code, health.body))
        assert reducer.process.wait(10) == 0
    assert (503, 200, b"ok\n") in answers


def test_it_is_off_unless_it_is_asked_for(monkeypatch):
    from reducer import local_pool  # noqa: PLC0415

    assert load().http is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # A port that the environment names is nothing to a pool of several reducers.
        monkeypatch.setenv("REDUCTION_HTTP", str(taken.getsockname()[1]))
        with local_pool(2) as servers:
            assert len(servers) == 2


def test_a_taken_port_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"cannot answer HTTP on .*the port is taken"):
            HttpPort(address)
    with pytest.raises(ConfigError, match="no such address"):
        HttpPort("192.0.2.1:0")


def test_it_listens_where_it_was_told():
    with closing(HttpPort("127.0.0.1:0")) as port:
        connections = psutil.Process().net_connections()
        listening = {each.laddr for each in connections if each.status == psutil.CONN_LISTEN}
        number = int(port.address.rpartition(":")[2])
        assert [host for host, at in listening if at == number] == ["127.0.0.1"]


def test_who_is_told_to_stop_when_its_first_port_is_open_stops_well():
    (http,) = free_ports(1)
    command = [sys.executable, "-m", "reducer", "serve", "--bind", "tcp://127.0.0.1:0"]
    with Popen(
        [*command, "--http", f"127.0.0.1:{http}"], stdout=PIPE, stderr=STDOUT, text=True
    ) as reducer:
        while reducer.poll() is None:
            with suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", http)).close()
                break
        reducer.terminate()
        said, _ = reducer.communicate(timeout=20)
    assert reducer.returncode == 0
    assert "stopped" in said
