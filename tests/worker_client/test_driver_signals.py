"""Signals while a caller leads: exceptions at any instant, and handlers that shut it down."""

import random
import signal
import threading
import time

import numpy as np
import pytest

from reducer.errors import LocalProtocolError, ReductionTimeout
from tests.ranks import environments, ranks
from tests.waits import eventually, within_s
from tests.worker_client.waits import half_a_job, one_after_another
from worker_client.runtime import driver


@pytest.mark.usefixtures("eager")
def test_an_interrupt_while_waiting_loses_nothing(make, monkeypatch):
    ours, theirs = half_a_job(make)
    monkeypatch.setattr(driver, "REST_S", 30.0)  # the driver's own thread rests until it is called
    main = threading.get_ident()
    for _ in range(5):
        work = ours.all_reduce(np.ones(8), op="sum")
        timer = threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            work.wait(10)
        timer.join()
        theirs.all_reduce(np.ones(8), op="sum")
        eventually(work.done)
        assert (work.wait(10) == 2).all()


# Rank 0's timer raises in nearly every call; rank 1 makes the same calls. Both end with the same
# number of calls; nothing but the interrupted calls' own numbers is refused, and no sum is wrong.
INTERRUPTED = """
import random, signal, sys
import numpy as np
import worker_client
from reducer.errors import MismatchError
from tests.ranks import write_result

class Alarm(Exception):
    pass

armed = False

def handler(*_):
    if armed:
        raise Alarm

def call(number, data):
    if number % len(SIZES) == 4:  # its result is written back, and a callback hears
        work = client.all_reduce(data[::2], "sum")
        work.future().add_done_callback(lambda _: sum(range(100)))
        return work
    if number % len(SIZES) == 5:
        return client.all_reduce(data, weight=1.0)
    return client.all_reduce(data, "sum")

SIZES = (1, 100, 5000, 400_000, 2000, 3000)  # the fourth is one that only the session begins
wanted = int(sys.argv[1])
signal.signal(signal.SIGALRM, handler)
client = worker_client.init(timeout=20)
stop = np.zeros(1)  # 1 when rank 0 has had enough
interrupted = number = 0
errors = []
while not stop:
    data = np.full(SIZES[number % len(SIZES)], number % 64 * 2.0 + client.rank, np.float32)
    expected = number % 64 * 4.0 + 1
    try:
        if client.rank == 0:
            armed = True
            again_s = random.choice((0, 3e-5, 3e-4))  # into what follows the first, too
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3), again_s)
        call(number, data).wait()
        armed = False
        if number % len(SIZES) == 4:
            data = data[::2]
        elif number % len(SIZES) == 5:
            expected /= 2
        assert (data == expected).all(), (number, data, expected)
    except Alarm:
        armed = False
        interrupted += 1
    except MismatchError as error:
        armed = False
        errors.append(str(error))
    if client.calls > number:  # else it has not begun
        number = client.calls
    if number % 20 == 19 and client.calls == number:
        signal.setitimer(signal.ITIMER_REAL, 0)
        stop[0] = client.rank == 0 and interrupted >= wanted
        client.all_reduce(stop, "max").wait()
        number = client.calls
write_result({"calls": number, "interrupted": interrupted, "errors": errors})
"""


def test_after_interrupts_at_any_instant_the_next_call_matches(pool):
    given = environments(2, pool, REDUCTION_IMPL="compiled", REDUCTION_JOB="interrupted")
    with ranks(given, "-c", INTERRUPTED, "1000") as job:
        ours, theirs = job.results()
    assert ours["interrupted"] >= 1000
    assert theirs["calls"] == ours["calls"]
    assert not ours["errors"], "its own calls end with the interrupt, or well"
    assert all("Alarm" in error for error in theirs["errors"])


@pytest.mark.extended("test_after_interrupts_at_any_instant")
def test_a_signal_handler_may_shut_down_at_any_instant(make):
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
    finally:
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.usefixtures("eager")
def test_a_signal_is_handled_at_once_while_its_thread_leads(make):
    ours, _ = half_a_job(make)
    previous = signal.getsignal(signal.SIGALRM)
    late = []
    try:
        for _ in range(6):
            due = time.monotonic() + 0.03
            signal.signal(signal.SIGALRM, lambda *_, due=due: late.append(time.monotonic() - due))
            signal.setitimer(signal.ITIMER_REAL, 0.03)
            with pytest.raises(ReductionTimeout):
                ours.all_reduce(np.ones(4), op="sum").wait(0.3)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert sorted(late)[3] < 0.2  # not when the leader looks at its clock
