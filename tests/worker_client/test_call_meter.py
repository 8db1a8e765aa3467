"""What a client has gone through is counted."""

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
