"""The Python edge of the compiled casts: checks, pointers, one call without the GIL."""

from reducer.wire.constants import DType


cdef extern from "<fenv.h>" nogil:
    ctypedef struct fenv_t:
        pass

cdef extern from "worker_client/staging/cast.h" nogil:
    enum: CAST_FLOAT16, CAST_BFLOAT16, CAST_BLOCK8, CAST_BLOCK8_E4M3, CAST_TABLES, CAST_TYPES

    ctypedef void (*cast_fn)(void *out, const void *values, size_t count) noexcept nogil
    ctypedef void (*keeping_fn)(
        void *out, const void *values, void *residual, size_t count
    ) noexcept nogil
    ctypedef void (*divide_f32_fn)(void *values, float by, size_t count) noexcept nogil
    ctypedef void (*divide_f64_fn)(void *values, double by, size_t count) noexcept nogil

    struct cast_table:
        const char *name
        cast_fn narrow[CAST_TYPES]
        keeping_fn narrow_keeping[CAST_TYPES]
        divide_f32_fn divide_f32
        divide_f64_fn divide_f64

    void cast_widen(
        const cast_table *table, int of, void *out, const void *values, size_t count
    ) noexcept
    size_t cast_usable(const cast_table **usable) noexcept
    void cast_begin(fenv_t *callers) noexcept
    void cast_end(const fenv_t *callers) noexcept

_TYPES = {
    DType.FLOAT16: CAST_FLOAT16,
    DType.BFLOAT16: CAST_BFLOAT16,
    DType.BLOCK8: CAST_BLOCK8,
    DType.BLOCK8_E4M3: CAST_BLOCK8_E4M3,
}


def usable():
    """Return the variants that this CPU can run, best first."""
    cdef const cast_table *tables[CAST_TABLES]
    return [CompiledCasts(place) for place in range(cast_usable(tables))]


cdef class CompiledCasts:
    """The variant at one place of `usable()`. It has no state; threads may share it.

    Buffers are contiguous views of bytes, at any alignment, that do not overlap; their lengths fit
    together. Nothing here holds the GIL while it casts.
    """

    cdef const cast_table *table

    def __cinit__(self, size_t place):
        cdef const cast_table *tables[CAST_TABLES]
        if place >= cast_usable(tables):
            raise IndexError(place)
        self.table = tables[place]

    @property
    def name(self):
        """One of ``avx512``, ``avx2``, ``neon`` and ``generic``."""
        return self.table.name.decode()

    def narrow(self, const unsigned char[::1] values, unsigned char[::1] out, dtype):
        """Round float32 `values` to FLOAT16, BFLOAT16 or blocks in `out`: to nearest even."""
        cdef size_t count = values.shape[0] // 4
        cdef int to = _TYPES[dtype]
        cdef fenv_t callers
        assert values.shape[0] == <Py_ssize_t>count * 4 and out.shape[0] == dtype.nbytes(count)
        if count:
            with nogil:
                cast_begin(&callers)
                self.table.narrow[to](&out[0], &values[0], count)
                cast_end(&callers)

    def narrow_keeping(
        self,
        const unsigned char[::1] values,
        unsigned char[::1] residual,
        unsigned char[::1] out,
        dtype,
    ):
        """Round `values + residual`, and keep in `residual` what rounding takes away, if finite."""
        cdef size_t count = values.shape[0] // 4
        cdef int to = _TYPES[dtype]
        cdef fenv_t callers
        assert values.shape[0] == <Py_ssize_t>count * 4 and out.shape[0] == dtype.nbytes(count)
        assert residual.shape[0] == values.shape[0]
        if count:
            with nogil:
                cast_begin(&callers)
                self.table.narrow_keeping[to](&out[0], &values[0], &residual[0], count)
                cast_end(&callers)

    def widen(self, const unsigned char[::1] values, unsigned char[::1] out, dtype):
        """Cast FLOAT16, BFLOAT16 or blocks, `values`, to float32 in `out`.

        Exactly, but for the multiplication by a block's scale.
        """
        cdef size_t count = out.shape[0] // 4
        cdef int of = _TYPES[dtype]
        cdef fenv_t callers
        assert out.shape[0] == <Py_ssize_t>count * 4 and values.shape[0] == dtype.nbytes(count)
        if count:
            with nogil:
                cast_begin(&callers)
                cast_widen(self.table, of, &out[0], &values[0], count)
                cast_end(&callers)

    def divide(self, unsigned char[::1] values, double by, dtype):
        """Divide FLOAT32 or FLOAT64 `values` in place by `by`, rounded to their type."""
        cdef size_t itemsize = dtype.itemsize
        cdef size_t count = values.shape[0] // itemsize
        cdef bint single = dtype is DType.FLOAT32
        cdef fenv_t callers
        assert single or dtype is DType.FLOAT64
        assert values.shape[0] == <Py_ssize_t>(count * itemsize)
        if count:
            with nogil:
                cast_begin(&callers)
                if single:
                    self.table.divide_f32(&values[0], <float>by, count)
                else:
                    self.table.divide_f64(&values[0], by, count)
                cast_end(&callers)
