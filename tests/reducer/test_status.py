"""`reducer status` and `reducer top`, with real reducers and with ports that are none."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from reducer.commands.status import Found, Rates, addresses, rates_between, read, read_all, render
from reducer.errors import ConfigError, ReducerLostError, RemoteProtocolError
from reducer.monitoring import status
from reducer.wire.messages import Straggler
from tests.commands import run_here, serving
from tests.conftest import joined
from tests.golden import check_golden
from worker_client.commands.demo.ranks import free_port

pytestmark = pytest.mark.usefixtures("no_settings")


@pytest.fixture(scope="module")
def pool():
    with serving("--http", 0) as first, serving("--http", 0, "--threads", 2) as second:
        yield [first, second]


@contextmanager
def answering(code, body):
    """A web server that is no reducer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever, 0.05)
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_pool_and_its_jobs(pool):
    ports = ",".join(each.http for each in pool)
    with joined(2, servers=[each.address for each in pool], job="told") as clients:
        works = [client.all_reduce(np.ones(500_000, np.float32)) for client in clients]
        for work in works:
            work.wait(20)
        shown = run_here(f"reducer status {ports}")
        assert shown.returncode == 0, shown.stderr
        found = json.loads(run_here(f"reducer status {ports} --json").stdout)
    for word in (*(each.http for each in pool), "serving", "told", "2 of 2", "none"):
        assert word in shown.stdout
    assert [each["http"] for each in found] == [each.http for each in pool]
    assert [each["jobs"][0]["name"] for each in found] == ["told", "told"]
    assert sum(each["counters"]["bytes_in"] for each in found) >= 2 * 2_000_000
    assert [len(each["lanes"]) for each in found] == [1, 2]


def test_top_tells_rates(pool):
    with (
        joined(2, servers=[pool[0].address], job="busy") as clients,
        ThreadPoolExecutor(1) as thread,
    ):
        top = thread.submit(run_here, f"reducer top {pool[0].http} --interval 0.5 --count 3")
        while not top.done():
            works = [client.all_reduce(np.ones(100_000, np.float32)) for client in clients]
            for work in works:
                work.wait(20)
    assert top.result().returncode == 0
    pictures = top.result().stdout
    assert pictures.count("contributions/s") == 3
    assert "MB" in pictures.rpartition("Reducers")[2]


def test_one_that_is_not_there_is_named_beside_the_others(pool):
    nobody = f"127.0.0.1:{free_port()}"
    done = run_here(f"reducer status {pool[0].http},{nobody}")
    assert done.returncode == 1
    assert "serving" in done.stdout
    assert f"nothing listens at {nobody}" in done.stdout
    done = run_here(f"reducer status {nobody},no-such-host.invalid:1 --json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert [set(one) for one in found] == [{"http", "error"}] * 2
    assert "no-such-host.invalid could not be resolved" in found[1]["error"]


def test_health_is_a_code_and_a_reason(pool, monkeypatch):
    monkeypatch.setenv("REDUCTION_HTTP", pool[0].http)
    done = run_here("reducer health")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with answering(503, b"the thread at port 5555 hangs\x1b[31m\nand so on") as port:
        done = run_here(f"reducer health --http {port}")
    said = f"reducer: {port} answers: the thread at port 5555 hangs\\x1b[31m\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_the_workers_port_is_not_the_one(pool):
    with pytest.raises(RemoteProtocolError, match="name the port of --http, not the one that work"):
        read(pool[0].address)


@pytest.mark.parametrize(
    ("code", "body", "says"),
    [
        (404, b"{}\n\n", r"with status 404 and '\{\}': is it the HTTP port of a reducer"),
        (421, b"421 ask \x1b[31m by", r"with status 421 and '421 ask \\x1b\[31m by'"),
        (200, b"<html>", "no status of a reducer: the whole: Invalid JSON"),
        (200, b'{"version": 1}', "no status of a reducer: version: "),
        (200, b" " * (5 << 20), "more than 4194304 bytes"),
    ],
)
def test_what_is_no_reducer(code, body, says):
    with answering(code, body) as port, pytest.raises(RemoteProtocolError, match=says):
        read(port)


def test_who_hangs_up_is_no_reducer():
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listening.accept)
        accepted.add_done_callback(lambda done: done.result()[0].close())
        with pytest.raises(RemoteProtocolError, match="does not answer HTTP"):
            read(f"127.0.0.1:{listening.getsockname()[1]}")


def test_addresses():
    assert addresses("a:1, 9090,[::1]:2") == ["a:1", "127.0.0.1:9090", "[::1]:2"]
    for wrong in (" , ", "a:1,b", "http://a:1"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            addresses(wrong)


MEMORY = status.Memory(1 << 30, 1 << 20, 1 << 10)
COUNTERS = {"contributions": 10, "bytes_in": 4000, "bytes_out": 4000, "refused": 0}
LANE = status.LaneStatus(1, True, 3, 1, MEMORY, COUNTERS)
TRAFFIC = status.JobTraffic(10**9, 10**9, 500, 4.0, (*range(20), 500))
LATELY = status.Lately(60.0, 60 * 10**8, 60 * 9 * 10**7, 600, 0.0123, 0.31)
JOB = status.JobStatus(
    *("job", 0, 4, 3, "0-2", "3", 1 << 20, 1 << 10, 2),
    traffic=TRAFFIC,
    lately=LATELY,
    hosts={"node-a": "0-1,3", "node-b": "2"},
)
STATUS = status.ReducerStatus(
    "1", "i", "a:1", "serving", 10.0, MEMORY, COUNTERS, (JOB,), 1, (LANE,)
)


def shown(found, earlier=None, width=120):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render(found, earlier))
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def with_job(**changes):
    return replace(STATUS, jobs=(replace(JOB, **changes),))


def test_json_there_and_back():
    assert status.load(status.dump(STATUS)) == STATUS
    later = json.loads(status.dump(STATUS)) | {"what_a_later_version_adds": 1}
    assert status.load(json.dumps(later).encode()) == STATUS


def test_what_is_shown_of_a_pool():
    """A job of several reducers is one row, the rank that most of them name one sentence."""
    late, slow = Straggler(3, "late", 0.9, 0.042), Straggler(1, "slow", 1.0, 0.5)
    quick = replace(LATELY, median_s=0.0001, p99_s=0.5)
    found = [
        Found("a:1", with_job(straggler=late), None),
        Found("b:1", with_job(present=2, ranks_absent="2-3", lately=quick), None),
        Found("c:1", with_job(straggler=replace(late, share=0.91)), None),
        Found("d:1", with_job(straggler=slow), None),
        Found("e:1", with_job(name="x\x1b]0;y\x07[red]", ranks_absent="\x9b3", lately=None), None),
        Found("f:1", None, ReducerLostError("nothing listens", reducer="f:1")),
    ]
    moved = replace(TRAFFIC, bytes_in=10**9 + 10**7, all_reduces=505)
    later = replace(with_job(traffic=moved), uptime_s=12.0)
    later = replace(later, counters={**COUNTERS, "bytes_in": 10_004_000})
    before, after = [Found("a:1", STATUS, None)], [Found("a:1", later, None)]
    assert rates_between(before, after) == {"a:1": Rates(0.0, 5e6, 0.0)}
    text = shown(found) + shown(after, before) + shown(after, before, width=80)
    check_golden(Path(__file__).with_name("status.txt"), text)
    assert not any(each in text for each in "\x1b\x07\x9b")
    again = [Found("a:1", replace(later, incarnation="j"), None)]
    assert rates_between(before, again) == rates_between([Found("a:1", None, None)], after) == {}


def test_at_80_columns_what_is_looked_at_first_is_together():
    top = shown([Found("127.0.0.1:40383", STATUS, None)], [], width=80)
    assert max(map(len, top.splitlines())) <= 80
    first = {}
    for title in ("Reducers", "Jobs"):
        first[title] = top.partition(title)[2].strip().splitlines()[0].split()
    assert {"state", "up", "in/s", "out/s"} < set(first["Reducers"])
    assert {"in/s", "out/s", "all-reduce", "p99", "straggler"} < set(first["Jobs"])
    wide = shown([Found("127.0.0.1:40383", STATUS, None)], [], width=200)
    assert (wide.count("127.0.0.1:40383"), top.count("127.0.0.1:40383")) == (1, 2)


def test_very_many_jobs_are_cut():
    jobs = tuple(replace(JOB, name=f"job-{number}") for number in range(100))
    text = shown([Found("a:1", replace(STATUS, jobs=jobs, jobs_total=1000), None)], width=200)
    assert text.count("job-") == 40
    assert "and further jobs" in text


def test_many_are_read_at_once(pool):
    found = read_all([one.http for one in pool] * 20)  # each has room for 16 at once
    assert len(found) == 40
    assert all(each.status for each in found)
