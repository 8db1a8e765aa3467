"""What callers' threads read and write in every all-reduce, in C's types."""

from libc.stdint cimport int64_t, uint64_t


cdef class OperationState:
    cdef public object view, dtype, op, name, call, refusal, residual, data, write_back, ended
    cdef public object error, pieces, prepare
    cdef public object _lead, _missing, _future, _waiters, _lock, _release, _claims
    cdef public double timeout_s, deadline, begun, ask_at, ask_last_at, sent, answered
    cdef public int64_t sequence
    cdef public uint64_t tag, since, history
    cdef public bint more, rounded, over, overdue, quiet, cut, _ended


cdef class CallMeter:
    cdef public int64_t calls, pending, bytes_reduced
    cdef public double since, waited_s
    cdef public str failure


cdef class MeteredCall:
    cdef CallMeter _meter
    cdef public bint pending
    cdef public uint64_t nbytes


cdef class NumberingState:
    cdef public object call, failure
    cdef public int64_t number
    cdef public int place
    cdef public uint64_t since, history


cdef class PendingState:
    cdef public double earliest
    cdef public dict operations


cdef class PlanState:
    cdef public int turns
    cdef public dict known


cdef class SessionState:
    cdef public double looks_at, steady_until
    cdef public bint handed_over


cdef class DriverState:
    cdef public object _queue, _failing, _failure, _lead, _trace
    cdef public uint64_t _leader, _forks
    cdef public double _listened, _waited_at, _wanted_until
    cdef public bint closing
