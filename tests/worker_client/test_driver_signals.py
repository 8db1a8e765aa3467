"""Signals while a caller leads: Ctrl-C at any instant, and handlers that shut the client down."""

from __future__ import annotations

import random
import signal
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reducer.errors import LocalProtocolError, ReductionTimeout
from tests.ranks import environments, ranks
from tests.waits import within_s
from tests.worker_client.waits import break_here, half_a_job, one_after_another

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.client.client import Client
    from worker_client.work import Work


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
    break_here(monkeypatch, client._ordered.flat.session, "completed", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        one_after_another(client)
    other = threading.Thread(target=client.shutdown)  # it ends by itself
    other.start()
    other.join(10)
    assert not other.is_alive()
    with pytest.raises(LocalProtocolError):
        client.all_reduce(np.ones(4))
    assert not client._ordered.busy


STORM = """
import signal, sys, threading
import numpy as np
from reducer.errors import LocalProtocolError
from worker_client.client import bootstrap

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
    client = bootstrap.connect(servers=sys.argv[1], rank=0, world_size=1, job=f"storm {clients}")
    clients += 1
    try:
        work(client)
    except (KeyboardInterrupt, LocalProtocolError):
        pass
    calm = True
    ended = threading.Thread(target=client.shutdown, daemon=True)
    ended.start()
    ended.join(60)
    if ended.is_alive():
        print("somebody still leads", flush=True)
        break
print(clients, flush=True)
"""


def test_interrupts_at_any_instant_leave_the_lead_free(pool: list[str]) -> None:
    given = environments(1, REDUCTION_IMPL="compiled")
    with ranks(given, "-c", STORM, ",".join(pool), talk=True) as (storm,):
        assert storm.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 120.0
        while storm.poll() is None and time.monotonic() < deadline:
            storm.send_signal(signal.SIGINT)
            time.sleep(random.uniform(0.001, 0.01))
        storm.kill()
        said = storm.stdout.read()
        assert said.strip().isdigit(), said + storm.err
    assert int(said) > 1, "no interrupt came in the middle of a step"


def test_every_call_ends_although_a_completion_was_interrupted(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_after_another(client)
    break_here(monkeypatch, client._ordered.flat.session, "completed", KeyboardInterrupt)
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
    assert not client._ordered.busy


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
            within_s(10.0, start)
            assert not client._ordered.busy
    finally:
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.usefixtures("eager")
def test_a_signal_is_handled_at_once_while_its_thread_leads(make: Callable[..., Client]) -> None:
    ours, _ = half_a_job(make)
    previous = signal.getsignal(signal.SIGALRM)
    late: list[float] = []
    try:
        for _ in range(6):
            due = time.monotonic() + 0.03
            signal.signal(signal.SIGALRM, lambda *_, due=due: late.append(time.monotonic() - due))
            signal.setitimer(signal.ITIMER_REAL, 0.03)
            with pytest.raises(ReductionTimeout):
                ours.all_reduce(np.ones(4), op="sum").wait(0.6)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert sorted(late)[3] < 0.2  # not when the leader looks at its clock
