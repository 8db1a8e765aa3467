"""Who leads: the driver's own thread, or one that waits for one all-reduce after another."""

import gc
import os
import queue
import signal
import threading
import time
import weakref

import numpy as np
import pytest

from reducer.errors import LocalProtocolError, ReductionTimeout
from tests import inside
from tests.waits import eventually, within_s
from tests.worker_client.waits import (
    at_all,
    break_here,
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
    ours, theirs = half_a_job(make)
    assert set(enders(ours, theirs)) == {"worker-client"}


def test_the_plain_transport_stays_with_its_thread(make, monkeypatch):
    monkeypatch.setenv("REDUCTION_IMPL", "plain")
    ours, theirs = half_a_job(make)
    assert set(enders(ours, theirs)) == {"worker-client"}


def test_all_reduces_go_on_while_nobody_waits(client):
    for _ in range(20):
        one_after_another(client, 3)
        by = queue.SimpleQueue()
        client.all_reduce(np.ones(1 << 18), op="sum").future().add_done_callback(
            lambda _, by=by: by.put(threading.current_thread().name)
        )
        assert by.get(timeout=10) == "worker-client"


def test_calls_that_nobody_waits_for_are_not_left_alone(client):
    one_after_another(client)
    start = time.monotonic()
    for _ in range(50):
        one_after_another(client, 2)
        work = client.all_reduce(np.ones(4), op="sum")
        while not work.done():
            time.sleep(driver.REST_S)
    within_s(5.0, start)  # it does not take until the driver looks at its clock


def test_threads_that_wait_side_by_side(client):
    threads = [threading.Thread(target=one_after_another, args=(client, 100)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    driver = inside.communicator(client).flat
    assert (driver.session.active, driver.busy) == (0, False)


class Lead:
    """The lead of a driver.

    Attributes:
        own: grows when the driver's own thread asks for the lead, or takes it.
        taken: that a caller's thread has taken it once.
    """

    def __init__(self, lead):
        self.release = lead.release
        self._lead = lead
        self.own = []
        self.taken = threading.Event()

    def acquire(self, **how):
        if got := self._lead.acquire(**how):
            self.taken.set()
        return got

    def __enter__(self):
        self.own.append(threading.get_ident())
        self._lead.acquire()

    def __exit__(self, *_):
        self._lead.release()


def watched_lead(patch, client):
    """Return the lead of a client's driver from now on."""
    made = []
    inside.replace_lead(patch, client, lambda lead: made.append(Lead(lead)) or made[0])
    return made[0]


@pytest.fixture
def led(eager, make, monkeypatch):
    """Two ranks, of which a thread leads the first while it waits for the second, and that lead."""
    ours, theirs = half_a_job(make)
    lead = watched_lead(monkeypatch, ours)
    waiter = threading.Thread(target=ours.all_reduce(np.ones(8), op="sum").wait, args=(20,))
    waiter.start()
    assert lead.taken.wait(20)
    yield ours, waiter, lead
    theirs.all_reduce(np.ones(8), op="sum").wait(10)
    waiter.join(10)
    assert not waiter.is_alive()
    eventually(lambda: lead.own)  # nobody leads any more


def test_a_leader_serves_the_others(led):
    ours, waiter, _ = led
    by = []
    late = ours.all_reduce(np.ones(8), op="sum", timeout=0.1)
    late.future().add_done_callback(lambda _: by.append(threading.current_thread().name))
    with pytest.raises(ReductionTimeout, match=r"not done after 0\.1 s|rank 1"):
        late.wait(10)
    eventually(lambda: by)
    assert by == [waiter.name]


def test_the_drivers_own_thread_rests_while_another_leads(led):
    _, _, lead = led
    lead.own.clear()
    time.sleep(20 * driver.LONGEST_REST_S)
    # It would get the lead as soon as the wait ends, and others had to ask for it.
    assert not lead.own


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
def test_the_drivers_own_thread_looks_soon_after_a_long_wait(make, monkeypatch):
    ours, theirs = half_a_job(make)
    transport, resumed = inside.transport(ours), []
    monkeypatch.setattr(transport, "resume", lambda *, at_once=True: resumed.append(at_once))
    work = ours.all_reduce(np.ones(8), op="sum")
    timer = threading.Timer(5 * driver.LONGEST_REST_S, theirs.all_reduce, (np.ones(8), "sum"))
    timer.start()
    at_all([ours], lambda _: work.wait(10))  # the main thread leads for no longer than a tick
    assert resumed == [False]
    monkeypatch.undo()


@pytest.mark.usefixtures("eager")
def test_the_drivers_own_thread_leads_after_an_interrupted_wait(make, monkeypatch):
    ours, theirs = half_a_job(make)
    transport, resumed = inside.transport(ours), []
    resume = transport.resume

    def note(*, at_once=True):
        resumed.append(at_once)
        resume(at_once=at_once)

    def interrupt(*_):
        raise InterruptedError

    work = ours.all_reduce(np.ones(8), op="sum")
    monkeypatch.setattr(transport, "resume", note)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 5 * driver.LONGEST_REST_S)
        with pytest.raises(InterruptedError):
            work.wait(10)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert resumed == [True]
    theirs.all_reduce(np.ones(8), op="sum")
    eventually(work.done)


@pytest.mark.usefixtures("eager")
def test_looking_soon_is_not_leading_at_once(make, monkeypatch):
    monkeypatch.setattr(driver, "REST_S", 30.0)
    client = make()
    transport = inside.transport(client)
    # Its own thread rests from the second call on, unless it stands in for a caller who was late.
    eventually(lambda: one_after_another(client) or time.sleep(0.2) or not inside.leader(client))
    lead = watched_lead(monkeypatch, client)
    transport.resume(at_once=False)
    time.sleep(0.1)
    assert not lead.own
    transport.resume()
    eventually(lambda: lead.own)


@pytest.mark.usefixtures("eager")
def test_shutting_down_ends_a_wait_that_leads(make):
    ours, _ = half_a_job(make)
    timer = threading.Timer(0.1, ours.shutdown)
    timer.start()
    start = time.monotonic()
    with pytest.raises(LocalProtocolError, match="shut down"):
        ours.all_reduce(np.ones(8), op="sum").wait(10)
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


@pytest.mark.usefixtures("eager")
def test_a_wait_that_leads_keeps_its_own_timeout(make):
    ours, theirs = half_a_job(make)
    work = ours.all_reduce(np.ones(8), op="sum")
    start = time.monotonic()
    with pytest.raises(ReductionTimeout, match=r"still in progress after 0\.2 s"):
        work.wait(0.2)
    assert 0.2 <= time.monotonic() - start < 5.0
    theirs.all_reduce(np.ones(8), op="sum").wait(10)
    assert (work.wait(10) == 2).all()


class Forbidden:
    """The lead in a process that is not to have it."""

    def __init__(self, _):
        self.acquire = lambda **_: os._exit(2)


def test_a_forked_child_does_not_lead(client, monkeypatch):
    monkeypatch.setattr(driver, "REST_S", 10.0)  # so that the lead is there for the taking
    one_after_another(client)
    work = client.all_reduce(np.ones(8), op="sum")
    child = os.fork()
    if child == 0:
        try:
            inside.replace_lead(monkeypatch, client, Forbidden)
            work.wait(0.5)
        except ReductionTimeout:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (work.wait(10) == 1).all()


def test_waiting_where_nobody_could_end_it_is_refused(client):
    one_after_another(client)
    refused = []

    def wait_for_another(_):
        with pytest.raises(LocalProtocolError, match="for ever") as caught:
            client.all_reduce(np.ones(4), op="sum").wait(10)
        refused.append(str(caught.value))

    work = client.all_reduce(np.ones(4), op="sum")
    work.future().add_done_callback(wait_for_another)
    work.wait(10)
    eventually(lambda: refused)


def test_an_error_in_a_step_is_raised_there_and_ends_every_other_call(client, monkeypatch):
    session = inside.communicator(client).flat.session

    def break_a_step(client):
        break_here(monkeypatch, session, "tick", BlockingIOError)
        with pytest.raises(BlockingIOError):
            one_after_another(client, 1_000_000)

    one_after_another(client)
    at_all([client], break_a_step)
    with pytest.raises(LocalProtocolError):
        one_after_another(client, 1_000_000)
    eventually(lambda: not own_threads())
    assert not inside.communicator(client).busy


def test_a_call_whose_client_ends_meanwhile_ends_too(client, monkeypatch):
    one_after_another(client)

    class Late(Lead):
        """The lead, which this thread gets when another one has shut the client down."""

        def acquire(self, **how):
            other = threading.Thread(target=client.shutdown)
            other.start()
            other.join(10)
            return super().acquire(**how)

    inside.replace_lead(monkeypatch, client, Late)
    ended = []  # whether the driver's thread had, when a call was begun

    def submit(*_call):
        ended.append(not own_threads())
        return []

    monkeypatch.setattr(inside.communicator(client).flat.session, "submit", submit)
    with pytest.raises(LocalProtocolError, match="shut down"):
        client.all_reduce(np.ones(4), op="sum").wait(10)
    assert not any(ended), "nothing is begun when the sockets are closed"


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
