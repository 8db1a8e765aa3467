"""What is done with every named tensor, thousands of times in a step: it is accepted and packed.

The rest is in `fusion.tensor_queue`, whose classes are made of these.
"""

import threading
import time

import numpy as np

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from worker_client.protocol._flight cimport Durations, durations_add, now_ns

from reducer.wire.constants import DType
from worker_client.staging.arguments import parse
from worker_client.staging.host_buffer import host_buffer
from worker_client.fusion.negotiation import MOST_KNOWN, Tensor

cdef type _ARRAY = np.ndarray
cdef object _new_lock = threading.Lock
cdef object _now = time.monotonic
cdef Py_ssize_t _MOST_TENSORS = MOST_KNOWN

# By the one character that the buffer protocol has for a NumPy array's elements. What is not here,
# such as another byte order, goes the longer way, and finds its error there.
cdef list _DTYPES = [None] * 128
for _code, _dtype in {
    "f": DType.FLOAT32,
    "d": DType.FLOAT64,
    "e": DType.FLOAT16,
    "b": DType.INT8,
    "i": DType.INT32,
    "q": DType.INT64,
    "B": DType.UINT8,
    "l": DType.INT64 if np.dtype("l").itemsize == 8 else DType.INT32,
}.items():
    _DTYPES[ord(_code)] = _dtype


cdef class RequestState:
    """The attributes of a request; see `worker_client.fusion.tensor_queue.Request`."""

    cdef public object tensor, data, write_back, error, missing, residual
    cdef public Py_ssize_t call
    cdef public int warnings
    cdef public double begun, deadline
    cdef public object _lead, _future, _waiters, _lock
    cdef public bint _ended
    # No lent buffer is kept: a memoryview that has lent one cannot be collected with its borrower.
    cdef object _owner
    cdef unsigned char *_memory
    cdef Py_ssize_t _nbytes

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self._memory, self._nbytes, 0, flags)

    @property
    def view(self):
        """Its memory, bytes: as it was accepted, whatever becomes of `data` since."""
        return memoryview(self)


cdef class Known:
    """What a name stood for when it was last used: mostly it is the same again."""

    cdef object tensor
    cdef object op  # as the caller gave it
    cdef object dtype
    cdef Py_ssize_t nbytes
    cdef bint exact
    cdef object shape


cdef class QueueState:
    """The attributes of a queue; see `worker_client.fusion.tensor_queue.TensorQueue`."""

    cdef public dict requests, calls
    cdef public object refusal
    cdef public Py_ssize_t news_bytes
    cdef public object news_since
    cdef public double news_until
    cdef public object changed
    cdef dict _known
    cdef object _make, _lock, _lead
    cdef double _timeout_s
    cdef readonly Py_ssize_t threshold
    cdef readonly Durations durations

    def __init__(self, make, lead, double timeout_s, Py_ssize_t threshold):
        self.requests, self.calls, self._known = {}, {}, {}
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._make, self._lead = make, lead
        self._timeout_s, self.threshold = timeout_s, threshold
        self.durations = Durations()

    def submit(self, data, op, name, timeout, bint exact, shape="", residual=None):
        cdef object made = self._make()  # a variable of C's type could not hold the class
        cdef RequestState request = <RequestState>made
        cdef object dtype = borrow(request, data)
        cdef double timeout_s = self._timeout_s, now
        cdef Known known = self._known.get(name) if type(name) is str else None
        if (
            known is None
            or timeout is not None
            or known.op is not op
            or known.dtype is not dtype
            or known.nbytes != request._nbytes
            or known.exact != exact
            or known.shape != shape
        ):
            reduction, timeout_s = parse(dtype, op, name, timeout, self._timeout_s)
            tensor = Tensor(name, dtype, reduction, request._nbytes, exact, shape)
            known = self.learn(tensor, op)
        now = _now()
        request.tensor, request.data, request.missing = known.tensor, data, ()
        request.residual = residual
        request.begun, request.deadline = now, now + timeout_s
        request._lead, request._lock = self._lead, _new_lock()
        with self._lock:
            if self.refusal is not None or name in self.requests:
                raise self.refused(name)
            self.news_bytes += known.nbytes
            if self.news_since is None or self.news_bytes >= self.threshold:
                self.changed.notify_all()
            if self.news_since is None:
                self.news_since = now
            self.news_until = now
            request.call = self.calls.get(name, 0)
            # Last: an exception out of a signal handler finds it accepted, or not.
            self.requests[name], self.calls[name] = made, request.call + 1
        return made

    def ended_well(self, requests):
        """Count how long calls have taken that end now."""
        cdef double elapsed_s, now = now_ns() / 1e9
        for made in requests:
            elapsed_s = now - (<RequestState?>made).begun
            durations_add(&self.durations.c, <uint64_t>(1e9 * max(0.0, elapsed_s)))

    cdef Known learn(self, tensor, op):
        cdef Known known = Known()
        known.tensor, known.op = tensor, op
        _, known.dtype, _, known.nbytes, known.exact, known.shape = tensor
        if len(self._known) >= _MOST_TENSORS:
            self._known = {}
        self._known[tensor.name] = known
        return known


def pack(list requests, unsigned char[::1] into):
    """Copy the memory of requests, one after the other, into `into`, which has room for it."""
    move(requests, into, packing=True)


def unpack(list requests, unsigned char[::1] packed):
    """Copy results from `packed` to the requests, and end them well."""
    cdef RequestState request
    move(requests, packed, packing=False)
    for made in requests:
        request = <RequestState>made
        if request._future is None and request._waiters is None and request.write_back is None:
            # As `Work.finish`: the GIL stands for its lock, as nothing here gives it away. One
            # that has failed before keeps its error.
            request._ended = True
        else:
            made.end(None)


cdef borrow(RequestState request, data):
    """Take hold of an array's memory for a request, and return the type of its elements."""
    cdef Py_buffer c
    if type(data) is _ARRAY:
        try:
            PyObject_GetBuffer(data, &c, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
        except (BufferError, ValueError):
            pass  # what can be done about it, or not, is found out below
        else:
            code = c.format
            dtype = _DTYPES[<Py_ssize_t>code[0]] if code[0] > 0 and code[1] == 0 else None
            request._owner, request._nbytes = data, c.len
            request._memory = <unsigned char *>c.buf
            PyBuffer_Release(&c)
            if dtype is not None:
                return dtype
    buffer = host_buffer(data)
    request.write_back = buffer.write_back
    PyObject_GetBuffer(buffer.view, &c, PyBUF_WRITABLE)
    request._owner, request._nbytes = buffer.view, c.len
    request._memory = <unsigned char *>c.buf
    PyBuffer_Release(&c)
    return buffer.dtype


cdef struct Piece:
    unsigned char *data
    size_t nbytes


cdef move(list requests, unsigned char[::1] packed, bint packing):
    """Copy between requests and a fusion buffer, without the GIL."""
    cdef Py_ssize_t count = len(requests), at, left = packed.shape[0]
    cdef Piece *pieces = <Piece *>malloc(max(count, 1) * sizeof(Piece))
    cdef unsigned char *there = &packed[0] if left else NULL
    cdef RequestState request
    if pieces == NULL:
        raise MemoryError
    try:
        for at in range(count):
            request = <RequestState?>requests[at]
            pieces[at].data = request._memory
            pieces[at].nbytes = request._nbytes
            left -= request._nbytes
        assert left >= 0, "the fusion buffer has room for all"
        with nogil:
            for at in range(count):
                if pieces[at].nbytes == 0:
                    continue  # there may be no memory at all
                if packing:
                    memcpy(there, pieces[at].data, pieces[at].nbytes)
                else:
                    memcpy(pieces[at].data, there, pieces[at].nbytes)
                there += pieces[at].nbytes
    finally:
        free(pieces)
