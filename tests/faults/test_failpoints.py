"""Failpoints: what is written is read, and every place of a real process is one."""

import re
import signal
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from reducer.errors import RankLostError, ReducerLostError, ReductionError, ReductionTimeout
from reducer.pool import READY
from tests.integration.calls import ones, until_stopped
from tests.ranks import environments, ranks
from torture.failpoints import (
    LEAVE_S,
    REDUCER_LOOP,
    WORKER_LOOP,
    Action,
    Failpoint,
    Place,
    arm,
    arm_module,
    parse,
)
from worker_client.client.bootstrap import connect

ROOT = Path(__file__).parents[2]
TWINS = ["plain", "reducer", "worker"]
ARMS = [arm, *(partial(arm_module, module) for module in (REDUCER_LOOP, WORKER_LOOP))]
RUN = ("-m", "torture.failpoints")
SERVE = ["reducer", "serve", "--bind", "tcp://127.0.0.1:0", "--log-level", "error"]


@contextmanager
def reducer(failpoints):
    """A running `reducer serve`, and its address."""
    with ranks(environments(1), *RUN, failpoints, *SERVE, talk=True) as (running,):
        yield running, running.stdout.readline().removeprefix(READY).strip()


@contextmanager
def worker(failpoints, servers, job):
    """A worker that makes an all-reduce for each line that it is sent, and says its first sum."""
    settings = {"REDUCTION_JOB": job, "REDUCTION_CHUNK_BYTES": "64KiB"}
    given = environments(1, servers, **settings)
    with ranks(given, *RUN, failpoints, "tests.faults.sums", talk=True) as (running,):
        yield running


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", []),
        ("reducer.before_sum=stop@3", [Failpoint(Place.REDUCER_BEFORE_SUM, Action.STOP, 0.0, 3)]),
        ("reducer.tick=delay:50ms", [Failpoint(Place.REDUCER_TICK, Action.DELAY, 0.05, 0)]),
        ("worker.copied=delay:1.5s@2", [Failpoint(Place.WORKER_COPIED, Action.DELAY, 1.5, 2)]),
        ("worker.received=drop@10", [Failpoint(Place.WORKER_RECEIVED, Action.DROP, 0.0, 10)]),
        # What was handed to libzmq leaves first.
        (
            "reducer.between_results=kill, worker.after_send=stop@2",
            [
                Failpoint(Place.REDUCER_BETWEEN_RESULTS, Action.KILL, LEAVE_S, 1),
                Failpoint(Place.WORKER_AFTER_SEND, Action.STOP, LEAVE_S, 2),
            ],
        ),
    ],
)
def test_what_is_read(text, read):
    assert parse(text) == tuple(read)
    assert parse(",".join(place.text + "=kill" for place in Place))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("reducer.sum=kill", r"no failpoint is called 'reducer.sum'.*reducer\.received, .*hello$"),
        ("reducer.tick=die", "'die' is no action of reducer.tick: known are kill, stop, "),
        ("reducer.tick=delay:soon", "write a duration such as .* got 'soon'"),
        ("reducer.tick=drop", r"nothing to drop at reducer.tick, only at .*hello$"),
        ("reducer.tick", "write NAME=ACTION or NAME=ACTION@N"),
        ("reducer.tick=kill@0", "with N from 1"),
        ("reducer.tick=kill,reducer.tick=stop", "reducer.tick is given twice"),
    ],
)
def test_what_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        parse(text)


def test_c_has_the_same_places_and_actions():
    header = (ROOT / "torture" / "failpoints" / "failpoints.h").read_text()
    places = re.search(r"enum failpoint \{(.*?)\}", header, re.DOTALL)
    actions = re.search(r"enum action \{(.*?)\}", header, re.DOTALL)
    assert places
    assert actions
    assert re.findall(r"\w+", places[1]) == [place.name for place in Place] + ["FAILPOINTS"]
    assert re.findall(r"\w+", actions[1]) == ["NOTHING"] + [action.name for action in Action]


@pytest.mark.parametrize("arm", ARMS, ids=TWINS)
def test_which_pass_counts(arm):
    try:
        hit = arm(parse("worker.received=drop@2,reducer.welcome=drop,reducer.tick=delay:20ms@2"))
        assert [hit(Place.WORKER_RECEIVED) for _ in range(4)] == [False, True, False, False]
        assert [hit(Place.REDUCER_WELCOME) for _ in range(3)] == [True] * 3
        assert not hit(Place.WORKER_HELLO)
        took = []
        for _ in range(3):
            started = time.perf_counter()
            assert not hit(Place.REDUCER_TICK)
            took.append(time.perf_counter() - started)
        assert max(took) == took[1] >= 0.02
        hit = arm(parse("worker.received=drop@2"))
        assert [hit(Place.WORKER_RECEIVED) for _ in range(2)] == [False, True]
    finally:
        hit = arm(())
    assert not any(hit(place) for place in Place)


@contextmanager
def job(address, *, late=False, timeout="2s"):
    """Two ranks of a job, and their first all-reduces; rank 0's is perhaps before rank 1 comes."""
    with ExitStack() as stack:
        arguments = {"job": "a job", "world_size": 2, "servers": [address], "timeout": timeout}
        clients = [stack.enter_context(connect(rank=0, **arguments))]
        works = [ask(clients[0])] if late else []
        if late:
            time.sleep(0.05)  # so that it has arrived
        clients.append(stack.enter_context(connect(rank=1, **arguments)))
        yield clients, works + [ask(client) for client in clients[len(works) :]]


def ask(client, **arguments):
    return client.all_reduce(ones(), op="sum", **arguments)


def outcomes(works):
    return [outcome(work) for work in works]


def outcome(work):
    """The sum, or the error's type."""
    try:
        return float(work.wait(20)[0])
    except ReductionError as error:
        return type(error)


# Whether rank 1 is late: then Python takes the first contributions, too.
WAYS = pytest.mark.parametrize("late", [False, True], ids=["compiled", "compiled-late"])


@WAYS
@pytest.mark.parametrize(
    ("point", "with_sum"),
    [
        ("reducer.received=kill@2", (0, 0)),
        ("reducer.received=kill@3", (2, 0)),
        ("reducer.placed=kill@2", (0, 0)),
        ("reducer.placed=kill@3", (2, 0)),
        ("reducer.before_sum=kill@2", (2, 0)),
        ("reducer.after_sum=kill@2", (2, 0)),
        ("reducer.between_results=kill@2", (2, 1)),
        ("reducer.after_results=kill@2", (2, 2)),
    ],
)
def test_a_reducer_dies_at_the_nth_pass(point, late, with_sum):
    with reducer(point) as (process, address), job(address, late=late) as (clients, works):
        found = [outcomes(works), outcomes([ask(client) for client in clients])]
        assert process.wait(30) == -signal.SIGKILL
    assert tuple(call.count(2.0) for call in found) == with_sum
    assert {one for call in found for one in call} <= {2.0, ReducerLostError}


@pytest.mark.parametrize("point", ["reducer.tick=kill@3", "reducer.welcome=kill"])
def test_a_reducer_dies_without_an_all_reduce(point):
    with reducer(point) as (process, address):
        if "welcome" in point:
            with pytest.raises(ReducerLostError):
                connect(rank=0, world_size=1, servers=[address], connect_timeout="300ms")
        assert process.wait(30) == -signal.SIGKILL


def test_a_reducer_stops_and_goes_on():
    with reducer("reducer.before_sum=stop") as (process, address), job(address) as (_, works):
        until_stopped(process.pid)
        assert not any(work.done() for work in works)
        process.send_signal(signal.SIGCONT)
        assert outcomes(works) == [2.0, 2.0]


@WAYS
@pytest.mark.parametrize(
    ("place", "with_sum"),
    [("reducer.received", 0), ("reducer.after_sum", 0), ("reducer.between_results", 1)],
)
def test_a_reducer_drops(place, late, with_sum):
    with (
        reducer(f"{place}=drop@1") as (_, address),
        job(address, late=late, timeout="300ms") as (_, works),
    ):
        found = outcomes(works)
    assert found.count(2.0) == with_sum
    assert found.count(ReductionTimeout) == 2 - with_sum


def test_a_reducer_drops_a_welcome():
    with reducer("reducer.welcome=drop@1") as (_, address):
        # A PING may be the first that it hears, which ends the connection.
        with pytest.raises(ReductionError, match=r"not answer a HELLO|PING is not allowed"):
            connect(rank=0, world_size=1, servers=[address], connect_timeout="300ms")
        connect(rank=0, world_size=1, servers=[address], connect_timeout="5s").shutdown()


def line(process):
    return process.stdout.readline().strip()


@pytest.fixture
def both(servers, request):
    """Make a process that is rank 0, and rank 1 here."""
    common = {"servers": servers[:1], "job": request.node.name[:100]}

    @contextmanager
    def make(failpoints):
        with (
            worker(failpoints, **common) as process,
            connect(rank=1, world_size=2, chunk_bytes="64KiB", **common) as client,
        ):
            assert line(process) == "joined"
            yield process, client

    return make


def ask_both(process, client):
    """Begin an all-reduce of three chunks at both ranks."""
    process.stdin.write("go\n")
    process.stdin.flush()
    return client.all_reduce(ones(49152), op="sum")


@pytest.mark.parametrize(
    ("point", "sums", "others"),
    [
        ("worker.before_send=kill@4", 1, RankLostError),
        ("worker.after_send=kill@3", 0, 2.0),
        ("worker.after_send=kill@6", 1, 2.0),
        ("worker.received=kill@4", 1, None),
        ("worker.copied=kill@6", 1, 2.0),
        ("worker.completed=kill@2", 1, 2.0),
    ],
)
def test_a_worker_dies_at_the_nth_pass(both, point, sums, others):
    with both(point) as (process, client):
        for call in range(sums + 1):
            work = ask_both(process, client)
            assert line(process) == ("2.0" if call < sums else "")
        assert process.wait(30) == -signal.SIGKILL
        assert others is None or outcome(work) == others


@pytest.mark.parametrize(
    ("action", "ends", "why"), [("kill", -signal.SIGKILL, ""), ("drop", 1, "not answer a HELLO")]
)
def test_a_worker_does_not_say_hello(servers, action, ends, why):
    with worker(f"worker.hello={action}", servers, action) as process:
        assert not line(process)
        assert process.wait(30) == ends
        assert why in process.err


@pytest.mark.parametrize("place", ["worker.before_send", "worker.received"])
def test_a_worker_drops(both, place):
    with both(f"{place}=drop@2") as (process, client):
        found = outcome(ask_both(process, client))
        assert found == (2.0 if place == "worker.received" else ReductionTimeout)
        assert process.wait(30) == 1
        assert "reducer.errors.ReductionTimeout" in process.err


def test_a_wrong_name_ends_the_command_with_a_sentence():
    with reducer("reducer.sum=kill") as (process, address):
        assert process.wait(30) == 2
        assert not address
        assert "failpoints: no failpoint is called 'reducer.sum'" in process.err
