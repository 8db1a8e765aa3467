"""What is asked for, and what a worker has in flight, over the structs of `flight.h`."""

from cpython.bytes cimport PyBytes_AsString
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITE, PyBuffer_Release, PyObject_GetBuffer
from cpython.memoryview cimport PyMemoryView_FromMemory

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset, strncpy

from reducer.zmtp.net cimport block_drop, block_take

from threading import Lock

from reducer.errors import LocalProtocolError
from reducer.wire.constants import MAX_CHUNK_BYTES, PLACES, DType, MessageType, ReduceOp
from reducer.wire.header import fingerprint
from reducer.wire.layout import MEASURED_BYTES
from worker_client.protocol.flight import Carried, LinkStats, Send

STRAGGLER_S = of_c_STRAGGLER_S
LAST_S = of_c_LAST_S
cdef uint64_t _calls = 0


cdef uint64_t nanoseconds(double now) noexcept:
    return <uint64_t>(now * 1e9)


cdef class Call:
    """What all-reduces have in common that follow each other under one number."""

    def __cinit__(self):
        global _calls
        _calls += 1
        self.number = _calls


cdef class Durations:
    """How long things have taken, in seconds: their number, and quantiles.

    It keeps a histogram of 2 KB: eight buckets an octave from 1.024 us to 1100 s, and the last one
    has what took longer. So a quantile is off by a sixteenth at most, and by 64 ns below 1.024 us.
    """

    @property
    def count(self):
        return self.c.count

    def add(self, double seconds):
        durations_add(&self.c, nanoseconds(seconds))

    def merge(self, Durations others not None):
        """Count what others have as well."""
        durations_merge(&self.c, &others.c)

    def quantile(self, double share):
        """Return the shortest that `share` of them, 0 to 1, have not exceeded; 0.0: none."""
        return durations_quantile(&self.c, share) / 1e9


cdef class CallMeter:
    """What has become of a client's calls.

    Attributes:
        durations: of those that have ended well, each from its call to its end.
        calls: how many were made.
        pending: how many have not ended.
        bytes_reduced: of those that have ended well.
        waited_s: for how long any was pending, while none is.
        since: when the latest of them began, or ended.
        failure: what the latest one that has ended has failed with; empty if it has not.
    """

    def __init__(self):
        self.durations = Durations()
        self.failure = ""


cdef class MeteredCall(Call):
    """One of them: `begin` is to be called first, then this with its error or None at its end.

    Attributes:
        pending: whether it has begun and not ended.
        nbytes: of what is reduced, as far as that is known.
    """

    def __init__(self, CallMeter meter):
        self._meter = meter

    def begin(self):
        cdef CallMeter meter = self._meter
        meter.calls += 1
        meter.pending += 1
        self._begun_ns = now_ns()
        meter.since = self._begun_ns / 1e9
        self.pending = True

    def __call__(self, error):
        cdef CallMeter meter = self._meter
        cdef uint64_t now = now_ns()
        cdef double since
        if not self.pending:
            return
        self.pending = False
        meter.pending -= 1
        meter.failure = "" if error is None else f"{type(error).__name__}: {error}"
        if error is None:
            meter.bytes_reduced += self.nbytes
            durations_add(&meter.durations.c, now - self._begun_ns)
        if not meter.pending:
            since, meter.since = meter.since, now / 1e9
            meter.waited_s += meter.since - since


cdef class OperationState(Call):
    """The attributes of an all-reduce; see `worker_client.protocol.operation.Operation`.

    What is read and written in every call is in the struct, which any thread may read.
    """

    def __cinit__(self):
        self.c = &self.own

    def __init__(
        self, view, dtype, op, name, double timeout_s, *, Call call=None, refusal=None,
        bint more=False, bint rounded=False, residual=None, data=None, write_back=None, lead=None,
        ended=None, leaves=None,
    ):
        self.view, self.dtype, self.op, self.name = view, dtype, op, name
        self.own.timeout_s, self.own.tag = timeout_s, fingerprint(name) if name else 0
        self.call, self.refusal, self.more = call, refusal, more
        self.rounded, self.residual, self.leaves = rounded, residual, leaves
        self.data, self.write_back, self.ended = data, write_back, ended
        self.own.sequence = -1
        self.own.owner = <void *>self
        self.pieces, self._missing = {}, ()
        self._lead, self._lock = lead, Lock()

    cdef void adopt(self, all_reduce *foreign):
        """Be what another thread has asked for, which then hears of the end from the struct."""
        foreign.owner = <void *>self
        self.c = foreign

    cdef aim(self):
        """Say in the struct what is asked for now."""
        cdef Py_buffer memory
        if self.c != &self.own:
            return
        PyObject_GetBuffer(self.view, &memory, PyBUF_SIMPLE)
        PyBuffer_Release(&memory)  # this holds the view
        self.own.data, self.own.nbytes = memory.buf, self.nbytes
        if self.leaves is not None:
            self.own.leaves, self.own.parts = self.leaves.count, len(self.leaves.parts)
        self.own.dtype, self.own.op = self.dtype, self.op
        self.own.call = 0 if self.call is None else (<Call>self.call).number
        self.own.unready = (
            memory.readonly
            or self.fill is not None
            or self.refusal is not None
            or self.name is not None
            or self.cuts_apart
        )

    @property
    def nbytes(self):
        """Bytes of the result, with which `view` begins."""
        cdef Py_ssize_t nbytes = self.view.nbytes
        return nbytes if self.leaves is None else nbytes // len(self.leaves.parts)

    @property
    def cuts_apart(self):
        """Whether its chunks are smaller than others', for the sake of several subtrees in each."""
        return self.leaves is not None and self.leaves.most_parts > 1

    @property
    def _ended(self):
        return self.c.state != ALL_REDUCE_PENDING

    @_ended.setter
    def _ended(self, bint ended):
        cdef int state = ALL_REDUCE_PENDING
        cdef all_reduce *foreign = self.c
        if ended:
            state = ALL_REDUCE_DONE if self.error is None else ALL_REDUCE_FAILED
        self.own = foreign[0]
        self.c = &self.own
        self.own.state = state
        if foreign != &self.own:
            if state == ALL_REDUCE_FAILED and foreign.why_bytes:
                words = f"{type(self.error).__name__}: {self.error}".encode()
                strncpy(foreign.why, PyBytes_AsString(words), foreign.why_bytes - 1)
            foreign.owner = NULL
            foreign.state = state  # last: who hears of it may free the struct

    @property
    def timeout_s(self):
        return self.c.timeout_s

    @timeout_s.setter
    def timeout_s(self, double value):
        self.c.timeout_s = value

    @property
    def sequence(self):
        return self.c.sequence

    @sequence.setter
    def sequence(self, int64_t value):
        self.c.sequence = value

    @property
    def tag(self):
        return self.c.tag

    @tag.setter
    def tag(self, uint64_t value):
        self.c.tag = value

    @property
    def since(self):
        return self.c.since

    @since.setter
    def since(self, uint64_t value):
        self.c.since = value

    @property
    def history(self):
        return self.c.history

    @history.setter
    def history(self, uint64_t value):
        self.c.history = value

    @property
    def begun(self):
        return self.c.begun

    @begun.setter
    def begun(self, double value):
        self.c.begun = value

    @property
    def deadline(self):
        return self.c.deadline

    @deadline.setter
    def deadline(self, double value):
        self.c.deadline = value

    @property
    def ask_at(self):
        return self.c.ask_at

    @ask_at.setter
    def ask_at(self, double value):
        self.c.ask_at = value

    @property
    def ask_last_at(self):
        return self.c.ask_last_at

    @ask_last_at.setter
    def ask_last_at(self, double value):
        self.c.ask_last_at = value

    @property
    def sent(self):
        return self.c.sent

    @sent.setter
    def sent(self, double value):
        self.c.sent = value

    @property
    def answered(self):
        return self.c.answered

    @answered.setter
    def answered(self, double value):
        self.c.answered = value


cdef class CompiledFlight:
    """All all-reduces and links of a worker.

    A result is kept after its all-reduce has ended here, until every rank has it: should its
    reducer be lost, another rank may need it from us, and the caller has its buffer back.

    Args:
        identity: header with the job, the generation and the rank of every contribution.

    Times are in seconds of the caller's clock.
    """

    def __cinit__(self, identity, uint64_t large_bytes=MEASURED_BYTES):
        cdef bytes frame = identity._replace(type=MessageType.CONTRIBUTION).pack()
        self._held = {}
        if not flight_init(&self.c, PyBytes_AsString(frame), MAX_CHUNK_BYTES, large_bytes):
            raise MemoryError

    def __dealloc__(self):
        flight_free(&self.c)

    @property
    def watermark(self):
        """Every all-reduce below this number is finished here."""
        return self.c.watermark

    @property
    def reached(self):
        """Every all-reduce below this number is finished at every rank, as far as is known."""
        return self.c.reached

    @property
    def retained_bytes(self):
        """Bytes of results that are kept."""
        return self.c.retained_bytes

    @property
    def active(self):
        return self.c.active

    @property
    def busy_s(self):
        """Seconds during which any was, but for stretches that ended with a failure; any thread
        may ask."""
        return self.c.busy_ns / 1e9

    @property
    def unowned(self):
        """Durations of C's own that have ended well, each from its call to its end."""
        cdef Durations durations = Durations()
        durations.c = self.c.unowned
        return durations

    @property
    def large(self):
        return self.c.large

    @property
    def measured_since(self):
        return self.c.measured_since

    @measured_since.setter
    def measured_since(self, double when):
        self.c.measured_since = when

    @property
    def large_ended(self):
        return self.c.large_ended

    @large_ended.setter
    def large_ended(self, double when):
        self.c.large_ended = when

    @property
    def earliest(self):
        return self.c.earliest

    @earliest.setter
    def earliest(self, double when):
        self.c.earliest = when

    @property
    def lacks_leaves(self):
        return self.c.lacks_leaves

    @lacks_leaves.setter
    def lacks_leaves(self, bint lacks):
        self.c.lacks_leaves = lacks

    @property
    def fast_path_limit(self):
        return self.c.fast_path_limit

    def set_steady(self, double until, uint32_t epoch=0):
        self.c.fast_path_limit, self.c.epoch = until, epoch

    @property
    def end_of_numbers(self):
        return self.c.numbering.number * PLACES + self.c.numbering.place + 1

    def number(self, OperationState operation):
        operation.aim()
        if not numbering_give(&self.c.numbering, operation.c):
            raise LocalProtocolError(f"a call has at most {PLACES - 1} all-reduces")

    def forget_history(self, OperationState failed):
        numbering_forget(&self.c.numbering, failed.c)

    def forget_cuts(self, uint64_t turns):
        cuts_forget(&self.c.cuts, turns)

    def add_link(self, uint64_t window, bint retain, bint in_place=False):
        """Add a link, shut until `open`.

        Args:
            window: bytes that may be in flight.
            retain: whether to keep the results that come there.
            in_place: whether every all-reduce that needs the link ends with it. Then a transport
                may read its results straight into the buffers: nobody needs what was there.
        """
        if not flight_add_link(&self.c, window, retain, in_place):
            raise MemoryError

    cpdef bint begin(self, OperationState operation, double now) except -1:
        operation.aim()
        if not flight_begin(&self.c, operation.c, now):
            return False
        self._held[operation] = None
        return True

    cpdef submit(self, OperationState operation, shards, uint64_t chunk_bytes, uint32_t epoch,
                 double now=0.0):
        """Queue an all-reduce.

        Args:
            operation: what is asked for, with a number above all before; some are left out.
            shards: what travels over which link: ascending, disjoint, together the whole buffer.
            chunk_bytes: size of every chunk but the last of each shard.
            epoch: version of the shard map.
        """
        cdef range_t *wanted = <range_t *>calloc(len(shards), sizeof(range_t))
        cdef all_reduce *asked = operation.c
        cdef bint begun
        if wanted == NULL:
            raise MemoryError
        try:
            for at, (link, start, end) in enumerate(shards):
                wanted[at].link = self.check(link)
                wanted[at].start = start
                wanted[at].end = end
            operation.aim()
            if operation.view.readonly:
                raise BufferError("the result cannot be written to its buffer")
            begun = flight_submit(
                &self.c, asked, chunk_bytes, epoch, wanted, len(shards), now
            ) and (operation.cuts_apart or cuts_remember(
                &self.c.cuts, asked.nbytes, asked.sequence, asked.dtype, chunk_bytes, wanted,
                len(shards),
            ))
        finally:
            free(wanted)
        if not begun:
            raise MemoryError
        self._held[operation] = None

    def open(self, link):
        """Let contributions be sent to a reducer."""
        cdef flight_link *c = &self.c.links[self.check(link)]
        c.open, c.pings_suppressed = True, False

    def suppress_pings(self, link, pings_suppressed):
        """Take PINGs without a body from a reducer whose latest one had none, or leave them."""
        self.c.links[self.check(link)].pings_suppressed = pings_suppressed

    def set_window(self, link, nbytes):
        """Change how many bytes may be in flight on a link."""
        self.c.links[self.check(link)].window = nbytes

    def measure_anew(self, link):
        """Forget the shortest round trip of a link."""
        flight_measure(&self.c, self.check(link))

    def stats(self, link):
        """Return what is known about a link."""
        cdef flight_link *c = &self.c.links[self.check(link)]
        return LinkStats(
            c.window, c.in_flight, c.bytes_sent, c.bytes_received, c.results,
            c.rtt_ns / 1e9, c.min_rtt_ns / 1e9, c.bytes_received - c.bytes_before,
        )

    def link_bytes(self, link):
        """Return how many bytes a link has sent and received; any thread may ask."""
        cdef flight_link *c = &self.c.links[self.check(link)]
        return c.bytes_sent, c.bytes_received

    def refill(self, double now):
        """Return the contributions that the windows have room for.

        Every link gets a chunk before any gets a second one, so that all reducers have work early;
        another one is first for every rank, so that no reducer is hit by all of them at once.
        """
        cdef uint64_t now_ns = nanoseconds(now)
        cdef turn_t turn = turn_t(0, 0)
        cdef contribution next
        sends = []
        while flight_next_in_turn(&self.c, &turn, now_ns, &next):
            operation = self.owner(next.chunk.of.of.asked)
            start, nbytes = next.header.offset, next.header.nbytes
            parts = [operation.view[at + start:at + start + nbytes]
                     for at in range(0, max(operation.view.nbytes, 1), max(operation.nbytes, 1))]
            payload = parts[0] if len(parts) == 1 else b"".join(parts)
            sends.append(Send(next.chunk.link, (<char *>&next.header)[:HEADER_BYTES], payload))
        return sends

    def take(self, link, frame, payload, double now):
        """Take a message if it is a healthy result or a PING without news; else change nothing.

        Returns:
            Sequence numbers of the all-reduces that are now done; None if it is anything else.
        """
        cdef const unsigned char[::1] head = frame
        cdef const unsigned char[::1] body = payload
        cdef block *message = block_take(&self.c.pool, body.shape[0])
        if message == NULL:
            raise MemoryError
        if body.shape[0]:
            memcpy(message.data, &body[0], body.shape[0])
        cdef bint taken = flight_take(
            &self.c, self.check(link), &head[0] if head.shape[0] else NULL, head.shape[0],
            message, 0, nanoseconds(now),
        )
        block_drop(&self.c.pool, message)
        return self.completed() if taken else None

    def take_placed(self, link, bytes frame, size_t nbytes, double now):
        """Take a healthy result as `take` does, of which the elements are in their place."""
        cdef bint taken = flight_take(
            &self.c, self.check(link), PyBytes_AsString(frame), len(frame), NULL, nbytes,
            nanoseconds(now),
        )
        return self.completed() if taken else None

    cpdef list completed(self):
        """Return the all-reduces that have ended well, once each."""
        cdef all_reduce *asked
        operations = []
        while (asked := flight_completed(&self.c)) != NULL:
            operation = self.owner(asked)
            self._held.pop(operation, None)
            operations.append(operation)
        operations.reverse()
        return operations

    cdef OperationState owner(self, all_reduce *asked):
        """Return what Python knows an all-reduce by."""
        return self.wrapped(asked) if asked.owner == NULL else <OperationState>asked.owner

    cdef OperationState wrapped(self, all_reduce *asked):
        """Return an object for an all-reduce that another thread has asked for."""
        from worker_client.protocol.operation import Operation

        view = PyMemoryView_FromMemory(<char *>asked.data, asked.nbytes, PyBUF_WRITE)
        cdef OperationState operation = Operation(
            view, DType(asked.dtype), ReduceOp(asked.op), None, asked.timeout_s
        )
        operation.adopt(asked)
        self._held[operation] = None
        return operation

    cdef let_go(self, OperationState operation):
        """Keep an all-reduce no more that another thread has asked for and that is not begun."""
        self._held.pop(operation, None)

    def find(self, uint64_t sequence):
        cdef operation_t *found = flight_find(&self.c, sequence)
        return None if found == NULL else self.owner(found.asked)

    def all(self):
        cdef uint64_t sequence
        cdef operation_t *found
        operations = []
        for sequence in range(self.c.watermark, self.c.next):
            found = flight_find(&self.c, sequence)
            if found != NULL:
                operations.append(self.owner(found.asked))
        return operations

    def expects(self, link, sequence, offset):
        """Whether the chunk at this offset is in flight on a link."""
        return flight_expects(&self.c, self.check(link), sequence, offset)

    def waits_for(self, link, sequence):
        """Whether any chunk of an all-reduce is in flight on a link."""
        return flight_waits_for(&self.c, self.check(link), sequence)

    def forget(self, link, sequence):
        """Expect and send nothing more of an all-reduce on a link."""
        flight_forget(&self.c, self.check(link), sequence)

    def end(self, sequence):
        """End an all-reduce that has failed."""
        operation = self.find(sequence)
        flight_end(&self.c, sequence)
        self._held.pop(operation, None)

    def needs(self, link):
        """Return the all-reduces that lack a result of this link."""
        cdef uint32_t at = self.check(link)
        cdef uint64_t sequence
        cdef operation_t *found
        needed = []
        for sequence in range(self.c.watermark, self.c.next):
            found = flight_find(&self.c, sequence)
            if found != NULL and operation_needs(found, at):
                needed.append(sequence)
        return needed

    def shut(self, link):
        """Send nothing more over a link and expect nothing there, until it is opened anew.

        Its chunks wait to be moved.
        """
        flight_shut(&self.c, self.check(link))

    def carried(self, link, sequence=None):
        """Return the chunks of a link, of one all-reduce or all, with and without results."""
        cdef walk at
        cdef chunk_t *one
        cdef operation_t *of
        memset(&at, 0, sizeof(at))
        found = []
        while (one := flight_walk(&self.c, &at, self.check(link))) != NULL:
            of = one.of.of
            if sequence is None or of.header.sequence == sequence:
                found.append(Carried(
                    of.header.sequence, of.header.epoch, chunk_offset(one), one.of.home,
                    one - one.of.chunks, one.state == CHUNK_DONE,
                ))
        return found

    def move(self, sequence, offset, link):
        """Assign a chunk to another link; it is sent there if its result is not here."""
        cdef chunk_t *moved = flight_chunk(&self.c, sequence, offset)
        if moved == NULL:
            raise KeyError(sequence, offset)
        flight_move(&self.c, moved, self.check(link))

    def retained(self, sequence, offset):
        """Return a result that is kept, as a header and the elements; None if it is not."""
        cdef chunk_t *of = flight_chunk(&self.c, sequence, offset)
        if of == NULL or of.result == NULL:
            return None
        cdef header_t header = of.of.of.header
        header.type = MessageType.RETAINED
        header.watermark = self.c.watermark
        header.offset = chunk_offset(of)
        header.nbytes = chunk_nbytes(of)
        return (
            (<char *>&header)[:HEADER_BYTES],
            (<char *>of.result.data)[:header.nbytes],
        )

    def confirm(self, reached):
        """Learn that every all-reduce below a number is finished at every rank."""
        flight_confirm(&self.c, reached)

    cdef uint32_t check(self, link) except? 0:
        if not 0 <= link < self.c.link_count:
            raise IndexError(link)
        return link
