"""The Python edge of the compiled kernels: checks, pointers, one call without the GIL."""

from cpython.bytes cimport PyBytes_AsString
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.mem cimport PyMem_Calloc, PyMem_Free

from libc.stdint cimport uint8_t, uint64_t

from reducer.kernels import refusals
from reducer.wire.constants import DType, ReduceOp
from reducer.wire.leaves import depths_of


def usable():
    """Return the variants that this CPU can run, best first."""
    cdef const fold_table *tables[FOLD_TABLES]
    return [CompiledKernels(place) for place in range(fold_usable(tables))]


cdef class _Buffers:
    """The memory of a reduction's buffers, inputs first; held for as long as this object lives."""

    cdef Py_buffer *views
    cdef const void **pointers
    cdef Py_ssize_t held

    def __cinit__(self, inputs):
        cdef Py_ssize_t n = len(inputs)
        self.views = <Py_buffer *>PyMem_Calloc(n + 1, sizeof(Py_buffer))
        self.pointers = <const void **>PyMem_Calloc(n + 1, sizeof(void *))
        if self.views == NULL or self.pointers == NULL:
            raise MemoryError
        for rank in range(n):
            self.take(inputs[rank], PyBUF_SIMPLE, "input")

    def __dealloc__(self):
        while self.held > 0:
            self.held -= 1
            PyBuffer_Release(&self.views[self.held])
        PyMem_Free(self.views)
        PyMem_Free(self.pointers)

    cdef Py_buffer *take(self, buffer, int flags, str role) except NULL:
        cdef Py_buffer *view = &self.views[self.held]
        try:
            PyObject_GetBuffer(buffer, view, flags)
        except (TypeError, ValueError, BufferError) as error:
            which = f"input {self.held}" if role == "input" else "the output"
            raise refusals.not_a_buffer(which, error) from error
        self.pointers[self.held] = view.buf
        self.held += 1
        return view

    cdef char *target(self, out) except NULL:
        """Take the output, which is no part of an input."""
        cdef Py_ssize_t n = self.held
        cdef Py_ssize_t rank
        cdef const char *source
        if n == 0:
            raise refusals.no_inputs()
        cdef Py_buffer *view = self.take(out, PyBUF_WRITABLE, "output")
        cdef char *target = <char *>view.buf
        cdef Py_ssize_t nbytes = self.common_length()
        for rank in range(n):
            source = <const char *>self.pointers[rank]
            if source != target and source < target + nbytes and target < source + nbytes:
                raise refusals.overlap(rank)
        return target

    cdef size_t elements(self, dtype) except? 0:
        """Return how many elements the output has."""
        cdef Py_ssize_t nbytes = self.views[self.held - 1].len
        cdef Py_ssize_t itemsize = dtype.itemsize
        if nbytes % itemsize:
            raise refusals.partial_element(nbytes, dtype)
        return nbytes // itemsize

    cdef size_t common_length(self) except? 0:
        """Return the bytes of each buffer, after checking that they are equally long."""
        cdef Py_ssize_t last = self.held - 1
        cdef Py_ssize_t nbytes = self.views[last].len
        cdef Py_ssize_t rank
        for rank in range(last):
            if self.views[rank].len != nbytes:
                raise refusals.wrong_length(rank, self.views[rank].len, nbytes)
        return nbytes


cdef codes(dtype, op):
    try:
        return DType(dtype), ReduceOp(op)
    except ValueError:
        raise refusals.unknown_code(dtype, op) from None


cdef class CompiledKernels:
    """The compiled kernels at one place of `usable()`; see `reducer.kernels.Kernels`."""

    def __cinit__(self, size_t place):
        cdef const fold_table *tables[FOLD_TABLES]
        if place >= fold_usable(tables):
            raise IndexError(place)
        self.table = tables[place]

    @property
    def name(self):
        return self.table.name.decode()

    cdef fold_fn find(self, int dtype, int op) noexcept nogil:
        if not (0 < dtype < FOLD_DTYPES and 0 < op < FOLD_OPS):
            return NULL
        return self.table.fold[dtype][op]

    def reduce(self, inputs, out, dtype, op):
        dtype, op = codes(dtype, op)
        cdef fold_fn fold = self.find(dtype, op)
        if fold == NULL:
            raise refusals.undefined(dtype, op)
        cdef _Buffers buffers = _Buffers(inputs)
        cdef size_t n = buffers.held
        cdef char *target = buffers.target(out)
        cdef size_t count = buffers.elements(dtype)
        with nogil:
            fold_run(fold, target, buffers.pointers, n, count)

    def reduce_leaves(self, inputs, ends, out, dtype, op):
        dtype, op = codes(dtype, op)
        if self.find(dtype, op) == NULL or dtype.is_block:
            raise refusals.undefined(dtype, op)
        cdef fold_leaves_fn fold = self.table.leaves[<int>dtype][<int>op]
        cdef _Buffers buffers = _Buffers(inputs)
        cdef size_t n = buffers.held
        cdef char *target = buffers.target(out)
        cdef size_t count = buffers.elements(dtype)
        cdef bytes depths = depths_of(tuple(ends), n)
        cdef const uint8_t *depth = <const uint8_t *>PyBytes_AsString(depths)
        cdef size_t leaves = ends[len(ends) - 1]
        with nogil:
            fold_leaves_run(fold, target, buffers.pointers, depth, n, leaves, count)

    def read_bytes(self, inputs):
        """Read `inputs` in the order in which a fold does, and do nothing else.

        The most that a fold can reach on this machine, for the benchmark. Returns the exclusive or
        of the 64-bit words.
        """
        cdef _Buffers buffers = _Buffers(inputs)
        cdef size_t n = buffers.held
        if n == 0:
            raise refusals.no_inputs()
        cdef size_t nbytes = buffers.common_length()
        cdef uint64_t words
        with nogil:
            words = self.table.read(buffers.pointers, n, nbytes)
        return words
