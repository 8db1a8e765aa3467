"""What a client has gone through is counted."""

import time

import pytest

from worker_client.protocol._flight import CallMeter, MeteredCall


def test_calls_are_counted_once_each():
    meter = CallMeter()
    assert (meter.calls, meter.pending, meter.bytes_reduced, meter.waited_s) == (0, 0, 0, 0)
    one, other = MeteredCall(meter), MeteredCall(meter)
    one.nbytes = other.nbytes = 8
    one.begin()
    other.begin()
    one(None)
    one(None)  # it may be told twice, after an interrupt
    assert (meter.calls, meter.pending, meter.bytes_reduced, meter.waited_s) == (2, 1, 8, 0)
    other(ValueError("why"))
    assert (meter.calls, meter.pending, meter.bytes_reduced) == (2, 0, 8)
    assert meter.waited_s > 0
    assert meter.failure == "ValueError: why"
    assert meter.durations.count == 1, "of those that ended well"
    assert 0 < meter.durations.quantile(1.0) <= meter.waited_s + 1


def test_a_call_takes_from_its_beginning_to_its_end():
    meter = CallMeter()
    for seconds in (0.02, 0.08):
        call = MeteredCall(meter)
        call.begin()
        begun_s = time.monotonic()
        time.sleep(seconds)
        call(None)
        took_s = time.monotonic() - begun_s
        assert meter.durations.quantile(1.0) == pytest.approx(took_s, rel=1 / 8)
