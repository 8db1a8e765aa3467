"""What a worker has in flight, over the structs of `flight.h`."""

from cpython.bytes cimport PyBytes_AsString
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from reducer.zmtp.net cimport block_drop, block_take

from reducer.wire.constants import MAX_CHUNK_BYTES, MessageType
from worker_client.protocol.flight import Carried, LinkStats, Send


cdef uint64_t nanoseconds(double now) noexcept:
    return <uint64_t>(now * 1e9)


cdef class CompiledFlight:
    """All all-reduces and links of a worker; see `worker_client.protocol.flight.Flight`."""

    def __cinit__(self, identity):
        cdef bytes frame = identity._replace(type=MessageType.CONTRIBUTION).pack()
        self._operations = {}
        if not flight_init(&self.its, PyBytes_AsString(frame), MAX_CHUNK_BYTES):
            raise MemoryError

    def __dealloc__(self):
        flight_free(&self.its)

    @property
    def watermark(self):
        return self.its.watermark

    @property
    def reached(self):
        return self.its.reached

    @property
    def kept_bytes(self):
        return self.its.kept_bytes

    def add_link(self, uint64_t window, bint keep, bint in_place=False):
        if not flight_add_link(&self.its, window, keep, in_place):
            raise MemoryError

    cpdef submit(self, OperationState operation, shards, uint64_t chunk_bytes, uint32_t epoch):
        cdef header_t said = self.its.identity
        said.sequence = operation.sequence
        said.epoch = epoch
        said.dtype = said.wire_dtype = operation.dtype
        said.op = operation.op
        said.tag = operation.tag
        said.since = operation.since
        said.history = operation.history
        cdef range_t *wanted = <range_t *>calloc(len(shards), sizeof(range_t))
        if wanted == NULL:
            raise MemoryError
        cdef operation_t *submitted
        cdef Py_buffer memory
        try:
            for at, (link, start, end) in enumerate(shards):
                wanted[at].link = self.check(link)
                wanted[at].start = start
                wanted[at].end = end
            PyObject_GetBuffer(operation.view, &memory, PyBUF_WRITABLE)
            PyBuffer_Release(&memory)  # the operation holds the view
            submitted = flight_submit(
                &self.its, memory.buf, memory.len, &said, chunk_bytes, wanted, len(shards)
            )
        finally:
            free(wanted)
        if submitted == NULL:
            raise MemoryError
        self._operations[submitted.header.sequence] = operation

    def open(self, link):
        cdef flight_link *its = &self.its.links[self.check(link)]
        its.open, its.calm = True, False

    def set_calm(self, link, calm):
        self.its.links[self.check(link)].calm = calm

    def set_window(self, link, nbytes):
        self.its.links[self.check(link)].window = nbytes

    def measure_anew(self, link):
        self.its.links[self.check(link)].min_rtt_ns = 0

    def stats(self, link):
        cdef flight_link *its = &self.its.links[self.check(link)]
        return LinkStats(
            its.window, its.in_flight, its.bytes_sent, its.bytes_received, its.results,
            its.rtt_ns / 1e9, its.min_rtt_ns / 1e9,
        )

    def refill(self, double now):
        cdef uint64_t now_ns = nanoseconds(now)
        cdef turn_t turn = turn_t(0, 0)
        cdef contribution next
        sends = []
        while flight_next_in_turn(&self.its, &turn, now_ns, &next):
            view = self._operations[next.header.sequence].view
            payload = view[next.header.offset:next.header.offset + next.header.nbytes]
            sends.append(Send(next.chunk.link, (<char *>&next.header)[:HEADER_BYTES], payload))
        return sends

    def take(self, link, frame, payload, double now):
        cdef const unsigned char[::1] head = frame
        cdef const unsigned char[::1] body = payload
        cdef block *message = block_take(&self.its.pool, body.shape[0])
        if message == NULL:
            raise MemoryError
        if body.shape[0]:
            memcpy(message.data, &body[0], body.shape[0])
        cdef bint taken = flight_take(
            &self.its, self.check(link), &head[0] if head.shape[0] else NULL, head.shape[0],
            message, 0, nanoseconds(now),
        )
        block_drop(&self.its.pool, message)
        return self.completed() if taken else None

    cdef list completed(self):
        """Return the numbers of the all-reduces that have ended well, once each."""
        cdef uint64_t sequence
        cdef operation_t *latest
        cdef OperationState operation
        sequences = []
        while (latest := self.its.completed) != NULL:
            sent_s, answered_s = latest.sent_ns / 1e9, latest.answered_ns / 1e9
            flight_completed(&self.its, &sequence)
            sequences.append(sequence)
            operation = <OperationState>self._operations.pop(sequence)
            operation.sent, operation.answered = sent_s, answered_s
        sequences.reverse()
        return sequences

    def expects(self, link, sequence, offset):
        return flight_expects(&self.its, self.check(link), sequence, offset)

    def waits_for(self, link, sequence):
        return flight_waits_for(&self.its, self.check(link), sequence)

    def forget(self, link, sequence):
        flight_forget(&self.its, self.check(link), sequence)

    def end(self, sequence):
        flight_end(&self.its, sequence)
        self._operations.pop(sequence, None)

    def needs(self, link):
        cdef uint32_t at = self.check(link)
        cdef uint64_t sequence
        cdef operation_t *found
        needed = []
        for sequence in range(self.its.watermark, self.its.next):
            found = flight_find(&self.its, sequence)
            if found != NULL and operation_needs(found, at):
                needed.append(sequence)
        return needed

    def shut(self, link):
        flight_shut(&self.its, self.check(link))

    def carried(self, link, sequence=None):
        cdef walk at
        cdef chunk_t *one
        cdef operation_t *of
        memset(&at, 0, sizeof(at))
        found = []
        while (one := flight_walk(&self.its, &at, self.check(link))) != NULL:
            of = one.of.of
            if sequence is None or of.header.sequence == sequence:
                found.append(Carried(
                    of.header.sequence, of.header.epoch, chunk_offset(one), one.of.home,
                    one - one.of.chunks, one.state == CHUNK_DONE,
                ))
        return found

    def move(self, sequence, offset, link):
        cdef chunk_t *moved = flight_chunk(&self.its, sequence, offset)
        if moved == NULL:
            raise KeyError(sequence, offset)
        flight_move(&self.its, moved, self.check(link))

    def kept(self, sequence, offset):
        cdef chunk_t *of = flight_chunk(&self.its, sequence, offset)
        if of == NULL or of.result == NULL:
            return None
        cdef header_t header = of.of.of.header
        header.type = MessageType.RETAINED
        header.watermark = self.its.watermark
        header.offset = chunk_offset(of)
        header.nbytes = chunk_nbytes(of)
        return (
            (<char *>&header)[:HEADER_BYTES],
            (<char *>of.result.data)[:header.nbytes],
        )

    def confirm(self, reached):
        flight_confirm(&self.its, reached)

    cdef uint32_t check(self, link) except? 0:
        if not 0 <= link < self.its.link_count:
            raise IndexError(link)
        return link
