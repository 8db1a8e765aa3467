"""Threads that serve a client: they start late and once, whatever interrupts the start."""

import threading

import pytest

from worker_client.runtime import service_thread
from worker_client.runtime.service_thread import ServiceThread


def test_it_serves_its_queue_from_the_first_start_on():
    got = []

    def run():
        assert thread.wait_for_end(), "a thread does not wait for its own end"
        while (item := thread.queue.get()) is not None:
            got.append((item, thread.is_current))

    thread = ServiceThread("of a test", run)
    assert thread.wait_for_end(), "it has not started"
    for item in (1, 2, None):
        thread.queue.put(item)
    thread.start()
    thread.start()
    assert not thread.is_current
    assert thread.wait_for_end()
    assert not thread.is_alive()
    assert got == [(1, True), (2, True)]


def test_a_start_that_was_interrupted_is_made_up_for(monkeypatch):
    started = threading.Event()
    thread = ServiceThread("of a test", started.set)

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread.start()
    assert not thread.is_alive()
    thread.start()
    assert started.wait(10)


def test_one_that_does_not_end_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(service_thread, "STOP_S", 0.01)
    end = threading.Event()
    thread = ServiceThread("of a test", end.wait)
    thread.start()
    assert not thread.wait_for_end()
    end.set()
