"""Members, rounds and slots over the structs of `slots.h`: what a reducer holds of all-reduces.

The compiled loop works on the structs. What it leaves to the engine, the engine does through these
classes: a `Round` is a view that is made when somebody asks for one. `tests/twins` has an oracle.
"""

cimport cython
from cpython.bytes cimport PyBytes_AsString
from cpython.memoryview cimport PyMemoryView_FromMemory

from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from itertools import islice

from reducer.engine.lateness import BUCKETS, Waits
from reducer.engine.slots import MAX_MISSING, MOST_TIMES, RoundTimes, check_agreement, check_size
from reducer.engine.traffic import BUCKETS as TRAFFIC_BUCKETS, Traffic
from reducer.wire.constants import NO_SEQUENCE
from reducer.wire.header import Header
from reducer.wire.layout import cost
from reducer.wire.states import LinkState


cdef extern from "Python.h":
    const int PyBUF_READ

cdef class Member:
    """One rank of a job, as the peer that speaks for it.

    Attributes:
        peer: the transport's name for its connection.
        window: bytes it may have in flight here.
        held: bytes of its window taken by contributions in open slots.
        watermark: every all-reduce below this number is finished at the worker.
        state: state of the link (`reducer.wire.states`).
    """

    def __cinit__(self, bytes peer, header):
        self.peer = peer
        self.c.peer = peer_key(PyBytes_AsString(peer), len(peer))
        self.c.rank = header.rank
        self.c.window = header.window
        self.c.watermark = header.watermark
        self.state = LinkState.MEMBER

    @property
    def rank(self):
        """Its rank."""
        return self.c.rank

    @property
    def window(self):
        return self.c.window

    @window.setter
    def window(self, value):
        self.c.window = value

    @property
    def held(self):
        return self.c.held

    @held.setter
    def held(self, value):
        self.c.held = value

    @property
    def watermark(self):
        return self.c.watermark

    @watermark.setter
    def watermark(self, value):
        self.c.watermark = value

    @property
    def state(self):
        return self._state

    @state.setter
    def state(self, value):
        self._state = value
        self.c.regular = value is LinkState.MEMBER


cdef class Slot:
    """Contributions to one chunk, by rank, until all of them are in: a view, until that is so.

    A rank that holds the result already, from a reducer that is lost, cannot contribute any more:
    it claims so, and is asked for the result if others need it.

    Attributes:
        holders: ranks that hold the result.
        asked: the one that was asked for it, or None.
    """

    cdef slot *c
    cdef rounds *within

    @property
    def nbytes(self):
        """Size of the chunk."""
        return self.c.nbytes

    @property
    def first_rank(self):
        """Rank of the first message about it."""
        return self.c.first_rank

    @property
    def missing(self):
        """Number of contributions that are not here yet."""
        return self.c.missing

    @property
    def payloads(self):
        """Contributions by rank, None for those that are missing. Gone when the slot is."""
        cdef block *held
        found = []
        for rank in range(self.within.world_size):
            if self.c.payloads.present[rank] != PRESENT:
                found.append(None)
                continue
            held = self.c.payloads.blocks[rank]
            found.append(PyMemoryView_FromMemory(<char *>held.data, held.nbytes, PyBUF_READ))
        return found

    @property
    def holders(self):
        return self.with_state(CLAIMED)

    @property
    def asked(self):
        return self.c.asked if self.c.is_asked else None

    def ranks(self):
        """Return the ranks whose contribution is here."""
        return self.with_state(PRESENT)

    cdef list with_state(self, int state):
        return [
            rank for rank in range(self.within.world_size)
            if self.c.payloads.present[rank] == state
        ]


cdef class Round:
    """A view of one all-reduce: what its first contribution settled, its open slots, its outcome.

    Attributes:
        first: header of the contribution that opened the round, None if an ABORT did.
        error: why the round failed, or None.
        open: number of slots that wait for contributions.
    """

    cdef Rounds _of  # keeps the structs alive
    cdef round *c
    cdef readonly object error
    cdef dict _again  # when ranks have said something since they left: first, last, in exits
    cdef dict _error_sent  # ranks that were sent the error: when

    cdef round *it(self) except NULL:
        if self.c == NULL:
            raise ReferenceError("the loop has this round again: ask the rounds for a new view")
        return self.c

    @property
    def first(self):
        if not self.it().has_first:
            return None
        return Header.unpack((<char *>&self.it().first)[:HEADER_BYTES])

    @property
    def open(self):
        return self.it().open

    def is_open(self, offset):
        cdef slot *at = <slot *>map_get(&self.it().slots, offset)
        return at != NULL and not at.done

    def holds(self, offset, uint32_t rank):
        """Whether this rank's contribution to the chunk at `offset` was counted before."""
        cdef slot *at = <slot *>map_get(&self.it().slots, offset)
        return at != NULL and (at.done or at.payloads.present[rank])

    def place(self, header, payload):
        """Put a contribution, the first of its rank to this chunk, into its slot.

        Args:
            header: the message's.
            payload: its elements; None if the rank claims to hold the result.

        Raises:
            MismatchError: it contradicts what another rank contributed to this all-reduce.
        """
        check_agreement(header, self.first)
        cdef slot *at = <slot *>map_get(&self.it().slots, header.offset)
        if at != NULL:
            check_size(header, at.first_rank, at.nbytes)
        cdef bytes frame = header.pack()
        cdef const header_t *contribution = <const header_t *>PyBytes_AsString(frame)
        cdef const unsigned char[::1] source
        cdef block *message
        if payload is None:
            at = round_place(&self._of.c, self.it(), contribution, NULL)
            if at == NULL:
                raise MemoryError
            return self._slot(at)
        source = payload
        message = block_take(self._of.c.pool, len(payload))
        if message == NULL:
            raise MemoryError
        if len(payload):
            memcpy(message.data, &source[0], len(payload))
        at = round_place(&self._of.c, self.it(), contribution, message)
        if at == NULL:
            block_drop(self._of.c.pool, message)
        if at == NULL:
            raise MemoryError
        return self._slot(at)

    def ask(self, offset, uint32_t rank):
        """Record that a holder was asked for the result of the chunk at `offset`."""
        cdef slot *at = <slot *>map_get(&self.it().slots, offset)
        at.is_asked = True
        at.asked = rank
        round_touch(&self._of.c, self.it())

    def asked(self, offset):
        """Return the slot at `offset` if its result was asked for."""
        cdef slot *at = <slot *>map_get(&self.it().slots, offset)
        return self._slot(at) if at != NULL and not at.done and at.is_asked else None

    def finish(self, offset, uint64_t receivers):
        """Forget a slot whose result is on its way, to so many ranks."""
        cdef slot *at = <slot *>map_get(&self.it().slots, offset)
        self.it().timestamps.done_us = self._of.c.now_us
        self._of.c.traffic.bytes_out += receivers * at.nbytes
        round_finish(&self._of.c, self.it(), at)

    def fail(self, error):
        """Mark the round as failed, and `drop` its slots."""
        self.error = error
        error.__traceback__ = None  # its frames would keep the payloads
        round_settle(&self._of.c, self.it())
        return self.drop()

    def drop(self):
        """Drop the open slots.

        Returns:
            ``(rank, bytes)`` that each dropped contribution took of its rank's window.
        """
        taken = []
        cdef Slot at
        for at in self._open_slots():
            for rank in range(self._of.c.world_size):
                if at.c.payloads.present[rank] == PRESENT:
                    taken.append((rank, cost(at.c.payloads.blocks[rank].nbytes)))
            round_drop(&self._of.c, self.it(), at.c)
        return taken

    def missing_ranks(self):
        """Return the ranks that the first open slot waits for, 1024 at most.

        One that lacks in a later slot alone may itself wait, with a full window, for results.
        """
        cdef Slot at
        slots = self._open_slots()
        first = min([at.c.offset for at in slots], default=None)
        slots = [at for at in slots if at.c.offset == first]
        missing = (rank for rank in range(self._of.c.world_size) if waits_for(slots, rank))
        return tuple(islice(missing, MAX_MISSING))

    def waits_for(self, uint32_t rank):
        return waits_for(self._open_slots(), rank)

    def left_since(self, rank):
        """Return why a rank has gone, if it has since it said something about this round.

        What it gave stays, but nothing more is taken from it, not even when it comes back.
        """
        at, reason = self._of.latest_exit(rank)
        if at <= self.it().born:
            return None
        return reason if self.it().spoke[rank] or self._again.get(rank, (at, at))[0] < at else None

    def note_message(self, uint32_t rank):
        """Record that a rank has said something about this round."""
        left, _ = self._of.latest_exit(rank)
        if left <= self.it().born:
            self.it().spoke[rank] = 1
        else:
            now = self._of.c.exits
            self._again[rank] = self._again.get(rank, (now, now))[0], now

    def has_begun(self, uint32_t rank):
        """Whether a rank has said something about this round since it came, or came back."""
        left, _ = self._of.latest_exit(rank)
        if left <= self.it().born:
            return self.it().spoke[rank] != 0
        return self._again.get(rank, (-1, -1))[1] >= left

    def without_error(self):
        """Return ranks that know of this round, but not of its error.

        A rank that came back knows of neither.
        """
        ranks = filter(self.has_begun, range(self._of.c.world_size))
        sent = self._error_sent
        return {rank for rank in ranks if sent.get(rank, -1) < self._of.latest_exit(rank)[0]}

    def note_error_sent(self, rank):
        """Record that a rank was sent the error."""
        self._error_sent[rank] = self._of.c.exits

    cdef Slot _slot(self, slot *at):
        cdef Slot found = Slot.__new__(Slot)
        found.c = at
        found.within = &self._of.c
        return found

    cdef list _open_slots(self):
        cdef map *slots = &self.it().slots
        cdef slot *at
        found = []
        if slots.count and self.it().open:
            for place in range(slots.mask + 1):
                at = <slot *>slots.entries[place].value
                if at != NULL and not at.done:
                    found.append(self._slot(at))
        return found


cdef bint waits_for(list slots, uint32_t rank):
    cdef Slot at
    for at in slots:
        if at.c.payloads.present[rank] == ABSENT:
            return True
        if at.c.is_asked and at.c.asked == rank:
            return True
    return False


cdef waits_of(const waits_t *found):
    return Waits(found.us, tuple([found.buckets[at] for at in range(BUCKETS)]))


cdef class Lateness:
    """How long the others have waited for each rank of a job."""

    cdef Rounds _of

    def turn(self):
        """Begin a new span."""
        lateness_turn(&self._of.c.lateness, self._of.c.world_size)

    def all(self, int span, int cause):
        """Return the waits for all ranks."""
        return waits_of(&self._of.c.lateness.all[span][cause])

    def waits(self, uint32_t rank, int span, int cause):
        """Return the waits for one rank."""
        if self._of.c.lateness.ranks == NULL:
            return Waits()
        return waits_of(&self._of.c.lateness.ranks[rank].waits[span][cause])

    def us(self, bint lately):
        """Return how long the others have waited for each rank, in microseconds.

        Args:
            lately: in the latest two spans; otherwise since the job began.
        """
        cdef lateness_t *known = &self._of.c.lateness
        cdef uint32_t rank
        if known.ranks == NULL:
            return []
        return [lateness_us(known, rank, lately) for rank in range(self._of.c.world_size)]


@cython.no_gc_clear  # a collector leaves it whom its payloads' pool is of
cdef class Rounds:
    """The rounds of one job, by sequence number.

    Attributes:
        reserved: bytes that contributions and records of the job may take.
        limit: rounds that there may be.
        now_us: when what is placed next has come, in microseconds of a monotonic clock.
        lateness: of the ranks.
        oldest: the least sequence number of a round, None if there is no round.
    """

    def __cinit__(self, uint32_t world_size):
        self.c.pool = &self.c.own
        self.c.world_size = world_size
        self.c.limit = NO_SEQUENCE
        self._views = {}
        self._latest = {}  # of the views, those that were made since `rest`
        self._left = {}  # by rank, when it left last, and why
        self._swept = {}  # by rank, the latest touch that `waiting_for` has seen

    def __dealloc__(self):
        rounds_free(&self.c)

    @property
    def reserved(self):
        return self.c.reserved

    @reserved.setter
    def reserved(self, value):
        self.c.reserved = value

    @property
    def limit(self):
        return self.c.limit

    @limit.setter
    def limit(self, value):
        self.c.limit = value

    @property
    def now_us(self):
        return self.c.now_us

    @now_us.setter
    def now_us(self, value):
        self.c.now_us = value

    @property
    def lateness(self):
        cdef Lateness found = Lateness.__new__(Lateness)
        found._of = self
        return found

    @property
    def oldest(self):
        return heap_least(&self.c.order) if self.c.order.count else None

    def used(self):
        """Return the bytes that the records of all rounds take."""
        return rounds_used(&self.c)

    def traffic(self):
        """Return what the rounds have moved, and how long those took that are over."""
        cdef traffic_t *known = &self.c.traffic
        buckets = {at: known.buckets[at] for at in range(TRAFFIC_BUCKETS) if known.buckets[at]}
        return Traffic(known.bytes_in, known.bytes_out, sum(buckets.values()), known.us, buckets)

    def keep_times(self):
        """Keep the times of rounds that end from now on, the first `MOST_TIMES` until taken."""
        self.c.ended = <round_times *>calloc(MOST_TIMES, sizeof(round_times))
        if self.c.ended == NULL:
            raise MemoryError
        self.c.ended_room = MOST_TIMES

    def take_times(self):
        """Return the times of the rounds that have ended since the last call."""
        cdef timestamps *at
        found = []
        for place in range(self.c.ended_count):
            at = &self.c.ended[place].timestamps
            found.append(RoundTimes(
                self.c.ended[place].sequence, at.begun_us, at.alone_us, at.complete_us,
                at.done_us, at.bytes, at.chunks, at.first_rank, at.last_rank,
            ))
        self.c.ended_count = 0
        return found

    def __len__(self):
        return self.c.by_sequence.count

    def __iter__(self):
        cdef map *found = &self.c.by_sequence
        sequences = []
        if found.count:
            for place in range(found.mask + 1):
                if found.entries[place].value != NULL:
                    sequences.append(found.entries[place].key)
        return iter(sorted(sequences))

    def get(self, sequence):
        cdef round *found = <round *>map_get(&self.c.by_sequence, sequence)
        return None if found == NULL else self._view(found)

    def live(self):
        """Return the rounds that have not failed, by their sequence numbers."""
        found = []
        cdef round *at = self.c.latest
        while at != NULL:
            found.append((at.sequence, self._view(at)))
            at = at.before
        return sorted(found)

    def between(self, low, high):
        """Return those of them that have these numbers, or one in between."""
        found = []
        cdef uint64_t first = low, last = high, number
        cdef round *at
        if high - low < self.c.by_sequence.count:
            for number in range(first, last + 1):
                at = <round *>map_get(&self.c.by_sequence, number)
                if at != NULL and at.live:
                    found.append((number, self._view(at)))
            return found
        at = self.c.latest
        while at != NULL:
            if first <= at.sequence <= last:
                found.append((at.sequence, self._view(at)))
            at = at.before
        return sorted(found)

    def waiting_for(self, rank):
        """Return those that lack a rank and have not failed, though it has left.

        Each is looked at once for each thing that could have made it so: what a rank's leaving
        costs does not grow with what it leaves alone.
        """
        cdef uint64_t since = self._swept.get(rank, 0)
        self._swept[rank] = self.c.touches
        found = []
        cdef round *at = self.c.latest
        while at != NULL and at.touched > since:
            view = self._view(at)
            if view.waits_for(rank):
                found.append((at.sequence, view))
            at = at.before
        return sorted(found)

    def leave(self, rank, reason):
        """Record that a rank has left."""
        self.c.exits += 1
        self._left[rank] = self.c.exits, reason

    def latest_exit(self, rank):
        """Return when a rank has left last, in exits, and why; 0 if it never has."""
        return self._left.get(rank, (0, None))

    def open(self, sequence, first):
        """Begin a round, with the contribution that opens it if one does."""
        cdef bytes frame = b"" if first is None else first.pack()
        cdef const header_t *header = <const header_t *>PyBytes_AsString(frame) if frame else NULL
        cdef round *opened = rounds_open(&self.c, sequence, header)
        if opened == NULL:
            raise MemoryError
        return self._view(opened)

    def discard_oldest(self):
        """Forget the round with the least sequence number."""
        sequence = self.oldest
        if sequence is None:
            raise KeyError
        if sequence in self._views:
            self._release(sequence)
        rounds_discard_oldest(&self.c)

    cdef _view(self, round *found):
        cdef Round view = self._views.get(found.sequence)
        if view is None:
            view = Round.__new__(Round)
            view._of = self
            view.c = found
            view._again = {}
            view._error_sent = {}
            self._views[found.sequence] = self._latest[found.sequence] = view
            found.viewed = True
            self.c.viewed += 1
        return view

    cdef _release(self, sequence):
        cdef Round released = self._views.pop(sequence)
        self._latest.pop(sequence, None)
        released.c.viewed = False
        released.c = NULL
        self.c.viewed -= 1

    cdef rest(self):
        """Let go of the views of healthy rounds, so that the loop may have those rounds again."""
        cdef Round view
        for sequence, view in tuple(self._latest.items()):
            if view.error is None and not view._again:
                self._release(sequence)
        self._latest.clear()

    cdef admit(self, list members, job, block_pool *pool, owner):
        """Let the loop serve these members, one per rank, with payloads from its owner's pool."""
        cdef Member member
        if self.c.members == NULL:
            self.c.members = <member_t **>calloc(self.c.world_size, sizeof(member_t *))
            if self.c.members == NULL:
                raise MemoryError
        for member in members:
            self.c.members[member.c.rank] = &member.c
        self.c.pool, self._owner = pool, owner
        self.c.job = job.key
        self.c.generation = job.generation
        self.c.max_chunk_bytes = job.max_chunk_bytes
        self.c.reached = job.reached()

    cdef dismiss(self):
        """Leave every contribution to the engine."""
        self.c.pool, self._owner = &self.c.own, None
        free(self.c.members)
        self.c.members = NULL
