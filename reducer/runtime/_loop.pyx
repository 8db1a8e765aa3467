"""The compiled loop of a reducer's thread; see `loop.py`, its plain twin, and `loop.h`."""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy

from reducer.failpoints._failpoints cimport arm_table, pass_place
from reducer.engine._slots cimport (
    HEADER_BYTES,
    Member,
    Rounds,
    functions,
    header_t,
    libzmq,
    map,
    map_free,
    map_put,
    member_t,
    peer_key,
    rounds,
    zmq_msg_t,
)
from reducer._libzmq cimport ZMQ_SRCFD
from reducer.kernels._kernels cimport CompiledKernels, fold_table

import time

from reducer.engine.allow_list import LOCAL
from reducer.engine.limits import TAKEN_PER_LOOK
from reducer.runtime.loop import Loop as PlainLoop
from reducer.engine.rounds import Send
from reducer.wire.constants import TYPE_AT, MessageType


cdef extern from "reducer/engine/slots.h" nogil:
    enum verdict:
        IRREGULAR
        PLACED
        COMPLETE
        OUT_OF_MEMORY


cdef extern from "reducer/runtime/malloc_tuning.h":
    void keep_large_blocks() noexcept


cdef extern from "reducer/runtime/loop.h" nogil:
    const int LOOP_FRAMES

    enum loop_event:
        LOOP_TIMEOUT
        LOOP_MESSAGE
        LOOP_UNREACHABLE
        LOOP_FAILED
        LOOP_OUT_OF_MEMORY

    ctypedef struct loop_t "struct loop":
        const libzmq *zmq
        void *socket
        int fd
        const fold_table *kernels
        map members
        map rounds
        zmq_msg_t frames[3]
        int received
        member_t **lost
        size_t lost_count
        const void **inputs
        size_t frame_extra
        uint64_t contributions, results, bytes_in, bytes_out

    loop_event loop_run(loop_t *self, long timeout_ms) noexcept
    void loop_close_message(loop_t *self) noexcept
    verdict loop_offer(
        loop_t *self, uint64_t peer, const void *frame, size_t frame_bytes, zmq_msg_t *payload,
        header_t *header, zmq_msg_t *result, rounds **within
    ) noexcept


cdef class Core:
    """The struct and what its pointers point to, over one engine."""

    cdef loop_t its
    cdef CompiledKernels _kernels
    cdef object _engine
    cdef list _served  # (rounds, members, job) of the jobs in which every rank is here
    cdef object _arranged  # the engine's count of changes when that was found
    cdef object _transport

    def __cinit__(self, engine, transport=None):
        self._engine = engine
        self._transport = transport
        self._kernels = engine.kernels
        self._served = []
        self.its.zmq = functions()
        self.its.kernels = self._kernels.table
        if transport is not None:
            self.its.socket = <void *><uintptr_t>transport.underlying
            self.its.fd = transport.fd
            self.its.frame_extra = transport.frame_extra
        self.arrange()

    def __dealloc__(self):
        loop_close_message(&self.its)
        map_free(&self.its.members)
        map_free(&self.its.rounds)
        free(self.its.lost)
        free(self.its.inputs)

    cdef arrange(self):
        """Find out whom to serve; to be called whenever the engine has done something."""
        cdef Rounds within
        cdef Member member
        for within, _, _ in self._served:
            within.rest()
        if self._arranged == self._engine.changes:
            return
        for within, _, _ in self._served:
            within.dismiss()
        map_free(&self.its.members)
        map_free(&self.its.rounds)
        self._served = [
            (job.rounds, list(job.members.values()), job)
            for job in self._engine.jobs
            if job.healthy
        ]
        for within, members, job in self._served:
            within.rest()
            within.admit(members, job)
            for member in members:
                if member.its.peer and not (
                    map_put(&self.its.members, member.its.peer, &member.its)
                    and map_put(&self.its.rounds, member.its.peer, &within.its)
                ):
                    raise MemoryError
        self._arranged = self._engine.changes

    def offer(self, bytes peer, bytes frame, bytes payload):
        """Take one contribution as the loop would, for tests without a network.

        Returns:
            What is to be sent, or None if the message is for the engine.
        """
        cdef header_t header
        cdef zmq_msg_t message, result
        cdef rounds *within
        self.arrange()
        self.its.zmq.msg_init_size(&message, len(payload))
        memcpy(self.its.zmq.msg_data(&message), PyBytes_AS_STRING(payload), len(payload))
        cdef verdict found = loop_offer(
            &self.its, peer_key(PyBytes_AS_STRING(peer), len(peer)), PyBytes_AS_STRING(frame),
            len(frame), &message, &header, &result, &within,
        )
        self.its.zmq.msg_close(&message)
        self.count()
        if found == IRREGULAR:
            return None
        if found == OUT_OF_MEMORY:
            raise MemoryError
        if found == PLACED:
            return []
        reduction = self.take(&result)
        header_frame = (<char *>&header)[:HEADER_BYTES]
        return [
            Send(member.peer, header_frame, reduction)
            for served, members, _ in self._served
            for member in members
            if &(<Rounds>served).its is within
        ]

    cdef bytes take(self, zmq_msg_t *message):
        """Return what a message holds, and close it."""
        cdef char *data = <char *>self.its.zmq.msg_data(message)
        cdef bytes held = data[:self.its.zmq.msg_size(message)]
        self.its.zmq.msg_close(message)
        return held

    cdef message(self):
        """Take the message that the loop has left: routing id, header, payload, sender's key."""
        cdef int received = self.its.received
        cdef int source = self.its.zmq.msg_get(&self.its.frames[received > 1], ZMQ_SRCFD)
        cdef str key = self.key() if received > 1 else ""
        cdef bytes peer = self.take(&self.its.frames[0])
        cdef bytes header = self.take(&self.its.frames[1]) if received > 1 else b""
        cdef bytes payload = self.take(&self.its.frames[2]) if received > 2 else b""
        self.its.received = 0
        self._transport.note(peer, source, *(len(header), len(payload))[:received - 1])
        if received > LOOP_FRAMES:
            header = b""  # no message of ours has so many frames
        hello = len(header) > TYPE_AT and header[TYPE_AT] == MessageType.HELLO
        return peer, header, payload, key if hello else ""

    cdef str key(self):
        """Return what the sender of the message has shown; see `transport._key`."""
        cdef const char *found = self.its.zmq.msg_gets(&self.its.frames[1], b"User-Id")
        if found != NULL:
            return found.decode("ascii", "replace")
        found = self.its.zmq.msg_gets(&self.its.frames[1], b"Peer-Address")
        return LOCAL if found == NULL else ""

    cdef list unreachable(self):
        """Take the peers that could not be sent to."""
        cdef size_t count = self.its.lost_count
        self.its.lost_count = 0
        lost = {self.its.lost[place].peer for place in range(count)}
        return [
            member.peer
            for _, members, _ in self._served
            for member in members
            if (<Member>member).its.peer in lost
        ]

    def run(self, timeout_s):
        """Serve for some time; yield what is to be sent besides."""
        cdef loop_event event
        cdef long timeout_ms = <long>(timeout_s * 1000)
        until = time.monotonic() + timeout_s
        while timeout_ms >= 0:
            self.arrange()
            with nogil:
                event = loop_run(&self.its, timeout_ms)
            self.count()
            if event == LOOP_TIMEOUT:
                return
            if event == LOOP_MESSAGE:
                yield self._engine.receive(*self.message())
            elif event == LOOP_UNREACHABLE:
                for peer in self.unreachable():
                    yield self._engine.unreachable(peer)
            elif event == LOOP_OUT_OF_MEMORY:
                raise MemoryError
            else:
                raise OSError(self.its.zmq.last_errno(), "libzmq failed")
            timeout_ms = <long>((until - time.monotonic()) * 1000)

    cdef count(self):
        counters = self._engine.counters
        counters.contributions += self.its.contributions
        counters.results += self.its.results
        counters.bytes_in += self.its.bytes_in
        counters.bytes_out += self.its.bytes_out
        self.its.contributions = self.its.results = self.its.bytes_in = self.its.bytes_out = 0


def arm(failpoints):
    """Arm the table of `loop.c`; see `reducer.failpoints.arm`."""
    arm_table(failpoints)
    return hit


def hit(place):
    """Pass a place of that table; whether what is at hand is to be dropped."""
    return pass_place(place)


class Loop(PlainLoop):
    """Joins one engine and one transport; see `reducer.runtime.loop.Loop`."""

    def __init__(self, engine, transport):
        super().__init__(engine, transport)
        keep_large_blocks()
        self._core = Core(engine, transport)

    def step(self, timeout_s):
        for number, sends in enumerate(self._core.run(timeout_s), 1):
            self.send(sends)
            if self._engine.closing and number >= TAKEN_PER_LOOK:
                break
        self.send(self._engine.tick(self.clock.now()))
