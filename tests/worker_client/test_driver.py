"""Who leads: the driver's own thread, or one that waits for one all-reduce after another."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reducer import local_pool
from reducer.errors import LocalProtocolError, ReductionTimeout
from worker_client import driver, startup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from worker_client.client import Client
    from worker_client.work import Work


@pytest.fixture(scope="module")
def pool() -> Iterator[list[str]]:
    with local_pool(2) as servers:
        yield servers


@pytest.fixture
def make(
    request: pytest.FixtureRequest, pool: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int, int], Client]]:
    monkeypatch.setenv("REDUCTION_IMPL", "compiled")
    made: list[Client] = []

    def one(rank: int = 0, world_size: int = 1) -> Client:
        job = f"{request.node.name}-{time.monotonic_ns() if world_size == 1 else ''}"
        made.append(
            startup.connect(servers=pool, rank=rank, world_size=world_size, job=job, timeout=20)
        )
        return made[-1]

    yield one
    for client in made:
        client.shutdown()


@pytest.fixture
def client(make: Callable[..., Client]) -> Client:
    """A job of one rank: its all-reduces end as soon as the reducer has answered."""
    return make()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits asks to lead, until it does."""
    monkeypatch.setattr(driver, "OFTEN_S", math.inf)
    monkeypatch.setattr(driver, "ASKING_S", 10.0)


def one_after_another(client: Client, calls: int = 30) -> None:
    for call in range(calls):
        data = np.full(100, call, np.int32)
        assert (client.all_reduce(data, op="sum").wait(10) == call).all()


def half_a_job(make: Callable[..., Client]) -> tuple[Client, Client]:
    """Two ranks in this process."""
    first: list[Client] = []
    thread = threading.Thread(target=lambda: first.append(make(0, 2)))
    thread.start()
    second = make(1, 2)
    thread.join()
    return first[0], second


def test_who_waits_again_and_again_leads(client: Client) -> None:
    one_after_another(client)
    assert client._driver._waits >= 2 * 20


def test_the_plain_transport_stays_with_its_thread(
    make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDUCTION_IMPL", "plain")
    client = make()
    one_after_another(client)
    assert client._driver._waits == 0


def test_all_reduces_go_on_while_nobody_waits(client: Client) -> None:
    for _ in range(20):
        one_after_another(client, 3)
        ended = threading.Event()
        client.all_reduce(np.ones(1 << 18), op="sum").future().add_done_callback(
            lambda _, ended=ended: ended.set()
        )
        assert ended.wait(10)
        assert client._driver._leader in {0, client._driver._thread.ident}


def test_calls_that_nobody_waits_for_are_not_left_alone(client: Client) -> None:
    one_after_another(client)
    start = time.monotonic()
    for _ in range(50):
        one_after_another(client, 2)
        work = client.all_reduce(np.ones(4), op="sum")
        while not work.done():
            time.sleep(driver.REST_S)
    assert time.monotonic() - start < 5.0  # it does not take until the driver looks at its clock


def test_threads_that_wait_side_by_side(client: Client) -> None:
    threads = [threading.Thread(target=one_after_another, args=(client, 100)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert client._session.active == 0
    assert not client._works


@pytest.mark.usefixtures("eager")
def test_a_leader_serves_the_others(make: Callable[..., Client]) -> None:
    ours, theirs = half_a_job(make)
    long = ours.all_reduce(np.ones(8), op="sum")
    waiter = threading.Thread(target=long.wait, args=(20,))
    waiter.start()
    deadline = time.monotonic() + 10.0
    while ours._driver._leader != waiter.ident:
        assert time.monotonic() < deadline
    with pytest.raises(ReductionTimeout, match=r"not done after 0\.1 s|rank 1"):
        ours.all_reduce(np.ones(8), op="sum", timeout=0.1).wait(10)
    assert ours._driver._leader == waiter.ident
    theirs.all_reduce(np.ones(8), op="sum").wait(10)
    waiter.join(10)
    assert not waiter.is_alive()


@pytest.mark.usefixtures("eager")
def test_an_interrupt_while_waiting_loses_nothing(make: Callable[..., Client]) -> None:
    ours, theirs = half_a_job(make)
    main = threading.get_ident()
    for _ in range(5):
        data = np.ones(8)
        work = ours.all_reduce(data, op="sum")
        timer = threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            work.wait(10)
        timer.join()
        theirs.all_reduce(np.ones(8), op="sum").wait(10)
        assert (work.wait(10) == 2).all()


def test_an_interrupt_in_the_middle_of_a_step_ends_the_client(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_after_another(client)
    main, tick = threading.get_ident(), client._session.tick

    def interrupted(now: float) -> list:
        if threading.get_ident() == main:
            raise KeyboardInterrupt
        return tick(now)

    monkeypatch.setattr(client._session, "tick", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one_after_another(client)
    other = threading.Thread(target=client.shutdown)  # it ends by itself
    other.start()
    other.join(10)
    assert not other.is_alive()
    with pytest.raises(LocalProtocolError):
        client.all_reduce(np.ones(4))
    assert not client._works


STORM = """
import signal, sys, threading
import numpy as np
from reducer.errors import LocalProtocolError
from worker_client import startup

calm = True

def interrupt(*_):
    if not calm:
        raise KeyboardInterrupt

def work(client):
    global calm, caught
    calm = False
    while caught < 400 and client.usable:
        try:
            client.all_reduce(np.ones(4), op="sum").wait(10)
        except KeyboardInterrupt:
            caught += 1

signal.signal(signal.SIGINT, interrupt)
print("ready", flush=True)
caught = clients = 0
while caught < 400:
    client = startup.connect(servers=sys.argv[1], rank=0, world_size=1, job=f"storm {clients}")
    clients += 1
    try:
        work(client)
    except (KeyboardInterrupt, LocalProtocolError):
        pass
    calm = True
    ended = threading.Thread(target=client.shutdown, daemon=True)
    ended.start()
    ended.join(10)
    if ended.is_alive():
        print("somebody still leads", flush=True)
        break
print(clients, flush=True)
"""


def test_interrupts_at_any_instant_leave_the_lead_free(pool: list[str], tmp_path: Path) -> None:
    script = tmp_path / "storm.py"
    script.write_text(STORM)
    storm = subprocess.Popen(
        [sys.executable, script, ",".join(pool)],
        env={**os.environ, "REDUCTION_IMPL": "compiled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert storm.stdout
        assert storm.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 40.0
        while storm.poll() is None and time.monotonic() < deadline:
            storm.send_signal(signal.SIGINT)
            time.sleep(random.uniform(0.001, 0.01))
    finally:
        storm.kill()
        said, complaints = storm.communicate()
    assert said.strip().isdigit(), said + complaints
    assert int(said) > 1, "no interrupt came in the middle of a step"


def test_every_call_ends_although_a_completion_was_interrupted(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_after_another(client)
    main, completed = threading.get_ident(), client._session.completed

    def interrupted(sequences: list[int], now: float) -> list:
        if threading.get_ident() == main:
            raise KeyboardInterrupt
        return completed(sequences, now)

    monkeypatch.setattr(client._session, "completed", interrupted)
    works: list[Work] = []

    def until_interrupted() -> None:
        while True:
            works.append(client.all_reduce(np.ones(4), op="sum"))
            works[-1].wait(10)

    with pytest.raises(KeyboardInterrupt):
        until_interrupted()
    for work in works[:-1]:
        assert (work.wait(10) == 1).all()
    with pytest.raises(LocalProtocolError, match="KeyboardInterrupt"):
        works[-1].wait(10)
    assert not client._works


def test_a_signal_handler_may_shut_down_at_any_instant(make: Callable[..., Client]) -> None:
    previous = signal.getsignal(signal.SIGALRM)
    try:
        for _ in range(30):
            client = make()
            signal.signal(signal.SIGALRM, lambda *_, client=client: client.shutdown())
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.005))
            start = time.monotonic()
            with pytest.raises(LocalProtocolError):
                one_after_another(client, 1_000_000)
            client.shutdown()
            assert time.monotonic() - start < 10.0
            assert not client._works
    finally:
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.usefixtures("eager")
def test_shutting_down_ends_a_wait_that_leads(make: Callable[..., Client]) -> None:
    ours, _ = half_a_job(make)
    timer = threading.Timer(0.1, ours.shutdown)
    timer.start()
    start = time.monotonic()
    with pytest.raises(LocalProtocolError, match="shut down"):
        ours.all_reduce(np.ones(8), op="sum").wait(10)
    assert time.monotonic() - start < 5.0
    timer.join()


def test_a_callback_may_call_and_shut_down(client: Client) -> None:
    one_after_another(client)
    second: list = []

    def first_done(_: object) -> None:
        second.append(client.all_reduce(np.ones(4), op="sum"))
        second[0].future().add_done_callback(lambda _: client.shutdown())

    work = client.all_reduce(np.ones(4), op="sum")
    work.future().add_done_callback(first_done)
    work.wait(10)
    assert (second[0].wait(10) == 1).all()
    deadline = time.monotonic() + 10.0
    while client._driver._thread.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.usefixtures("eager")
def test_a_wait_that_leads_keeps_its_own_timeout(make: Callable[..., Client]) -> None:
    ours, theirs = half_a_job(make)
    work = ours.all_reduce(np.ones(8), op="sum")
    start = time.monotonic()
    with pytest.raises(ReductionTimeout, match=r"still in progress after 0\.2 s"):
        work.wait(0.2)
    assert 0.2 <= time.monotonic() - start < 2.0
    theirs.all_reduce(np.ones(8), op="sum").wait(10)
    assert (work.wait(10) == 2).all()


def test_a_forked_child_does_not_lead(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "REST_S", 10.0)  # so that the lead is there for the taking
    one_after_another(client)
    work = client.all_reduce(np.ones(8), op="sum")
    waits = client._driver._waits
    child = os.fork()
    if child == 0:
        try:
            work.wait(0.5)
        except ReductionTimeout:
            os._exit(0 if client._driver._waits == waits else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (work.wait(10) == 1).all()


def test_waiting_where_nobody_could_end_it_is_refused(client: Client) -> None:
    one_after_another(client)
    refused: list[str] = []

    def wait_for_another(_: object) -> None:
        with pytest.raises(LocalProtocolError, match="for ever") as caught:
            client.all_reduce(np.ones(4), op="sum").wait(10)
        refused.append(str(caught.value))

    work = client.all_reduce(np.ones(4), op="sum")
    work.future().add_done_callback(wait_for_another)
    work.wait(10)
    deadline = time.monotonic() + 10.0
    while not refused:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.usefixtures("eager")
def test_a_signal_is_handled_at_once_while_its_thread_leads(make: Callable[..., Client]) -> None:
    ours, _ = half_a_job(make)
    previous = signal.getsignal(signal.SIGALRM)
    late: list[float] = []
    try:
        for _ in range(10):
            due = time.monotonic() + 0.03
            signal.signal(signal.SIGALRM, lambda *_, due=due: late.append(time.monotonic() - due))
            signal.setitimer(signal.ITIMER_REAL, 0.03)
            with pytest.raises(ReductionTimeout):
                ours.all_reduce(np.ones(4), op="sum").wait(0.6)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert sorted(late)[5] < 0.1  # it took up to half a second


def test_an_error_in_a_step_is_raised_there_and_ends_every_other_call(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, tick = threading.get_ident(), client._session.tick

    def broken(now: float) -> list:
        if threading.get_ident() == main:
            raise BlockingIOError(11, "libzmq refused")
        return tick(now)

    one_after_another(client)
    monkeypatch.setattr(client._session, "tick", broken)
    with pytest.raises(BlockingIOError):
        one_after_another(client, 1_000_000)
    with pytest.raises(LocalProtocolError):
        one_after_another(client, 1_000_000)
    client._driver._thread.join(10)
    assert not client._works


def test_a_call_whose_client_ends_meanwhile_ends_too(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_after_another(client)
    take = client._driver._take_lead

    def after_a_shutdown(*timeout_s: float) -> bool:
        other = threading.Thread(target=client.shutdown)
        other.start()
        other.join(10)
        return take(*timeout_s)

    monkeypatch.setattr(client._driver, "_take_lead", after_a_shutdown)
    begun: list[object] = []
    monkeypatch.setattr(client._session, "submit", lambda *call: begun.append(call) or [])
    work = client.all_reduce(np.ones(4), op="sum")
    with pytest.raises(LocalProtocolError, match="shut down"):
        work.wait(10)
    assert not begun, "nothing is begun after the end"
