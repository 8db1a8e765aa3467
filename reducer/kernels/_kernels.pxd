"""The compiled kernels, for the compiled loops: `fold.h` declared once."""

from libc.stdint cimport uint8_t, uint64_t


cdef extern from "reducer/kernels/fold.h" nogil:
    ctypedef void (*fold_fn)(
        void *out, const void *const *inputs, size_t n, size_t count
    ) noexcept nogil
    ctypedef void (*fold_leaves_fn)(
        void *out, const void *const *inputs, const uint8_t *depths, size_t n, size_t leaves,
        size_t count
    ) noexcept nogil
    ctypedef uint64_t (*read_fn)(
        const void *const *inputs, size_t n, size_t nbytes
    ) noexcept nogil

    const size_t FOLD_TABLES
    const int FOLD_DTYPES
    const int FOLD_OPS

    struct fold_table:
        const char *name
        read_fn read
        fold_fn fold[9][6]
        fold_leaves_fn leaves[9][6]

    size_t fold_usable(const fold_table **usable) noexcept
    void fold_run(
        fold_fn fold, void *out, const void *const *inputs, size_t n, size_t count
    ) noexcept
    void fold_leaves_run(
        fold_leaves_fn fold, void *out, const void *const *inputs, const uint8_t *depths, size_t n,
        size_t leaves, size_t count
    ) noexcept


cdef class CompiledKernels:
    cdef const fold_table *table
    # The kernel for a pair of codes, or NULL where there is none.
    cdef fold_fn find(self, int dtype, int op) noexcept nogil
