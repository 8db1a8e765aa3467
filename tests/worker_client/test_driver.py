"""Who leads: the driver's own thread, or one that waits for one all-reduce after another."""

import gc
import os
import queue
import threading
import time
import weakref
from contextlib import suppress

import numpy as np
import pytest

from reducer.errors import LocalProtocolError, ReductionTimeout
from tests import inside
from tests.waits import eventually, within_s
from tests.worker_client.waits import (
    at_all,
    half_a_job,
    one_after_another,
    own_threads,
)
from worker_client.runtime import driver


def enders(ours, theirs):
    """Return the names of the threads that ended our calls, of which each was waited for."""
    found = []
    for _ in range(40):
        work = ours.all_reduce(np.ones(4), op="sum")
        work.future().add_done_callback(lambda _: found.append(threading.current_thread().name))
        theirs.all_reduce(np.ones(4), op="sum")  # only now can it end
        work.wait(10)
    return found


def test_who_waits_again_and_again_leads(make):
    ours, theirs = half_a_job(make)
    [(found, me)] = at_all(
        [ours], lambda ours: (enders(ours, theirs), threading.current_thread().name)
    )
    assert found.count(me) >= 20


def test_in_the_main_thread_no_callback_is_interrupted(make):
    assert set(enders(*half_a_job(make))) == {"worker-client"}


@pytest.mark.parametrize("count", [4, 1 << 18])
def test_all_reduces_go_on_while_nobody_waits(client, count):
    start = time.monotonic()
    for _ in range(50):
        one_after_another(client, 3)
        by = queue.SimpleQueue()
        client.all_reduce(np.ones(count), op="sum").future().add_done_callback(
            lambda _, by=by: by.put(threading.current_thread().name)
        )
        assert by.get(timeout=10) == "worker-client"
    within_s(5.0, start)  # it does not take until the driver looks at its clock


@pytest.mark.usefixtures("eager")
def test_a_leader_serves_the_others(make):
    ours, _ = half_a_job(make)
    first = ours.all_reduce(np.ones(8), op="sum")

    def wait():
        while not first.done():
            with suppress(ReductionTimeout, LocalProtocolError):
                first.wait(0.5)

    waiter = threading.Thread(target=wait)
    waiter.start()

    def ended_by():
        time.sleep(0.6)  # the waiter comes back meanwhile, and gets the lead: one call is active
        by = queue.SimpleQueue()
        late = ours.all_reduce(np.ones(8), op="sum", timeout=0.1)
        late.future().add_done_callback(lambda _: by.put(threading.current_thread().name))
        with pytest.raises(ReductionTimeout, match=r"not done after 0\.1 s|rank 1"):
            late.wait(10)
        return by.get(timeout=10)

    eventually(lambda: ended_by() == waiter.name)
    ours.shutdown()
    waiter.join(10)
    assert not waiter.is_alive()


@pytest.mark.usefixtures("eager")
def test_what_a_wait_has_left_is_not_left_alone(make, monkeypatch):
    ours, theirs = half_a_job(make)
    monkeypatch.setattr(driver, "REST_S", 30.0)  # the driver's own thread rests until it is called
    for calls in (1, 2):
        works = [ours.all_reduce(np.ones(8), op="sum") for _ in range(calls)]
        theirs.all_reduce(np.ones(8), op="sum")
        works[0].wait(10)
    theirs.all_reduce(np.ones(8), op="sum")
    eventually(works[1].done)


@pytest.mark.usefixtures("eager")
def test_a_wait_that_leads_keeps_its_own_timeout_and_ends_with_its_client(make):
    ours, _ = half_a_job(make)
    work = ours.all_reduce(np.ones(8), op="sum")
    start = time.monotonic()
    with pytest.raises(ReductionTimeout, match=r"still in progress after 0\.2 s"):
        work.wait(0.2)
    within_s(5.0, start)
    timer = threading.Timer(0.1, ours.shutdown)
    timer.start()
    with pytest.raises(LocalProtocolError, match="shut down"):
        work.wait(10)
    within_s(5.0, start)
    timer.join()


def test_a_callback_may_call_and_shut_down(client):
    one_after_another(client)
    second = []

    def first_done(_):
        second.append(client.all_reduce(np.ones(4), op="sum"))
        second[0].future().add_done_callback(lambda _: client.shutdown())

    work = client.all_reduce(np.ones(4), op="sum")
    work.future().add_done_callback(first_done)
    work.wait(10)
    assert (second[0].wait(10) == 1).all()
    eventually(lambda: not own_threads())


def test_a_forked_child_does_not_lead(client, monkeypatch):
    monkeypatch.setattr(driver, "REST_S", 10.0)  # so that the lead is there for the taking
    one_after_another(client)
    work = client.all_reduce(np.ones(8), op="sum")
    child = os.fork()
    if child == 0:
        try:
            work.wait(0.5)
        except ReductionTimeout:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (work.wait(10) == 1).all()


def test_an_error_in_a_step_is_raised_there_and_ends_every_other_call(client, monkeypatch):
    session = inside.flat(client).session
    tick = session.tick

    def broken(now):
        if threading.current_thread().name != "worker-client":
            raise BlockingIOError
        return tick(now)

    def break_a_step(client):
        with pytest.raises(BlockingIOError):
            one_after_another(client, 1_000_000)

    one_after_another(client)
    monkeypatch.setattr(session, "tick", broken)
    at_all([client], break_a_step)
    with pytest.raises(LocalProtocolError):
        one_after_another(client, 1_000_000)
    eventually(lambda: not own_threads())


def test_a_call_whose_client_ends_meanwhile_ends_too(client):
    """Another thread shuts it down at any instant of a call."""
    one_after_another(client)
    timer = threading.Timer(0.05, client.shutdown)
    timer.start()
    with pytest.raises(LocalProtocolError, match="shut down"):
        one_after_another(client, 1_000_000)
    timer.join()
    eventually(lambda: not own_threads())


def test_the_memory_of_a_call_is_freed_when_its_caller_lets_go(client):
    one_after_another(client)
    gc.disable()  # nothing refers to itself that would have to be found
    try:
        for how in ({}, {"weight": 2.0}, {"name": "one"}):
            array = np.ones(1000, np.float32)
            there = weakref.ref(array)
            client.all_reduce(array, "mean", **how).wait(10)
            del array
            eventually(lambda there=there: there() is None)
    finally:
        gc.enable()
