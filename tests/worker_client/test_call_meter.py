"""What a client has gone through is counted alike by both twins."""

import pytest

from worker_client.protocol import _state, plain_state


@pytest.mark.parametrize("twin", [_state, plain_state])
def test_calls_are_counted_once_each(twin):
    meter = twin.CallMeter()
    assert (meter.calls, meter.pending, meter.bytes_reduced, meter.waited_s) == (0, 0, 0, 0)
    one, other = twin.MeteredCall(meter), twin.MeteredCall(meter)
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
