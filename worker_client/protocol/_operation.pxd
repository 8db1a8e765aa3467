"""The state of an all-reduce, in C's types."""

from libc.stdint cimport int64_t, uint64_t


cdef class OperationState:
    cdef public object view, dtype, op, name, call, refusal, residual, data, write_back, ended
    cdef public object error, pieces, prepare
    cdef public object _lead, _missing, _future, _waiters, _lock, _release, _claims
    cdef public double timeout_s, deadline, begun, ask_at, ask_last_at, sent, answered
    cdef public int64_t sequence
    cdef public uint64_t tag, since, history
    cdef public bint more, rounded, over, overdue, quiet, cut, _ended
