# What the extensions say to failpoints.h; each has a table of its own.

from libc.stdint cimport uint64_t


cdef extern from "reducer/failpoints/failpoints.h" nogil:
    void failpoints_disarm() noexcept
    void failpoint_arm(int place, int action, uint64_t delay_ns, uint64_t at) noexcept
    bint failpoint(int place) noexcept


cdef inline void arm_table(failpoints) except *:
    failpoints_disarm()
    for armed in failpoints:
        failpoint_arm(armed.place, armed.action, <uint64_t>(armed.delay_s * 1e9), armed.at)


cdef inline bint pass_place(int place) noexcept:
    with nogil:  # it may take its time
        return failpoint(place)
