"""What callers' threads read and write in every all-reduce, in C's types.

An attribute of a Python object costs them several cold cache lines, one in here hardly one.
"""

from threading import Lock
from time import monotonic

from reducer.wire.header import fingerprint


cdef class OperationState:
    """The attributes of an all-reduce; see `worker_client.protocol.operation.Operation`."""

    def __init__(
        self, view, dtype, op, name, double timeout_s, *, call=None, refusal=None, bint more=False,
        bint rounded=False, residual=None, data=None, write_back=None, lead=None, ended=None,
    ):
        self.view, self.dtype, self.op, self.name, self.timeout_s = view, dtype, op, name, timeout_s
        self.tag = fingerprint(name) if name else 0
        self.call, self.refusal, self.more = call, refusal, more
        self.rounded, self.residual = rounded, residual
        self.data, self.write_back, self.ended = data, write_back, ended
        self.sequence = -1
        self.pieces, self._missing = {}, ()
        self._lead, self._lock = lead, Lock()


cdef class CallMeter:
    """What a client's calls have come to so far; threads may share it.

    Attributes:
        calls: how many have begun.
        pending: how many of them have not ended.
        bytes_reduced: of the buffers of those that have ended well.
        since: the latest beginning, or end of the last pending one, in seconds of `time.monotonic`.
        waited_s: seconds from the latest beginning to when none was pending, in all.
        failure: class and text of the error of the call that has ended last; "" for none. Not the
            error itself, which refers to where it was raised, and so to that call's buffer.
    """

    def __init__(self):
        self.failure = ""


cdef class MeteredCall:
    """One call: what all its operations have in common, and what is called with its end.

    Attributes:
        pending: whether it has begun, and not ended.
        nbytes: of its buffer.
    """

    def __init__(self, CallMeter meter):
        self._meter = meter

    def begin(self):
        """Count it."""
        cdef CallMeter meter = self._meter
        meter.calls += 1
        meter.pending += 1
        meter.since = monotonic()
        self.pending = True

    def __call__(self, error):
        """Take note of its end, once."""
        cdef CallMeter meter = self._meter
        cdef double since
        if not self.pending:
            return
        self.pending = False
        meter.pending -= 1
        meter.failure = "" if error is None else f"{type(error).__name__}: {error}"
        if error is None:
            meter.bytes_reduced += self.nbytes
        if not meter.pending:
            since, meter.since = meter.since, monotonic()
            meter.waited_s += meter.since - since


cdef class NumberingState:
    """See `worker_client.protocol.lifecycle.Numbering`."""


cdef class PendingState:
    """See `worker_client.protocol.operation.Pending`."""


cdef class PlanState:
    """See `worker_client.protocol.shard_map.Plan`."""


cdef class SessionState:
    """See `worker_client.protocol.session.Session`."""


cdef class DriverState:
    """See `worker_client.runtime.driver.Driver`."""
