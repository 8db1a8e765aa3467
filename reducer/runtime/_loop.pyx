"""The loop of a reducer's thread: what arrives goes to the engine, what it answers is sent.

`loop.c` takes healthy contributions by itself and without the GIL; see `loop.h`.
"""

cimport cython
from cpython.bytes cimport PyBytes_AsString
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from libc.errno cimport errno
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from reducer.engine._slots cimport (
    HEADER_BYTES,
    Member,
    Rounds,
    block,
    block_drop,
    block_pool,
    block_take,
    header_t,
    map,
    map_free,
    map_get,
    map_put,
    map_remove,
    member_t,
    peer_key,
    rounds,
)
from reducer.kernels._kernels cimport CompiledKernels, fold_table
from reducer.zmtp.curve cimport copy_keys, curve_keys, explicit_bzero
from reducer.zmtp.net cimport (
    ZMTP_DIFFERS,
    ZMTP_NO_FAULT,
    ZMTP_UNKNOWN_KEY,
    ZMTP_WRONG_KEY,
    connection,
    message as message_t,
    channel,
    channel_close,
    zmtp_t,
)

import sys
import time

from reducer.clock import ServingTime
from reducer.engine.actions import Attach, Close, Dismiss, Resume, Send, Serve, MarkJoined
from reducer.engine.allow_list import LOCAL
from reducer.engine.limits import TAKEN_PER_LOOK
from reducer.wire.constants import TYPE_AT, MessageType
from reducer.wire.header import Header


cdef extern from "reducer/engine/slots.h" nogil:
    enum verdict:
        IRREGULAR
        PLACED
        COMPLETE
        OUT_OF_MEMORY


cdef extern from "reducer/runtime/loop.h" nogil:
    enum loop_event:
        LOOP_TIMEOUT
        LOOP_MESSAGE
        LOOP_ADMIT
        LOOP_ENDED
        LOOP_UNREACHABLE
        LOOP_FAILED
        LOOP_OUT_OF_MEMORY

    struct peer:
        uint64_t number
        connection connection

    struct load:
        uint64_t read, unread, unsent
        bint waits

    struct change:
        uint64_t number
        int fd
        bint came

    ctypedef struct loop_t "struct loop":
        const fold_table *kernels
        map members
        map rounds
        peer *peer
        change *changes
        size_t change_count
        const curve_keys *keys
        uint64_t max_frame_bytes, handshake_ns
        size_t max_first, max_open
        uint64_t *lost
        size_t lost_count
        uint64_t contributions, results, bytes_in, bytes_out, unfinished, crowded_out
        int error
        block_pool pool

    bint loop_listen(loop_t *self, int listener, uint64_t every_ns) noexcept
    channel *loop_connect_inproc(loop_t *self) noexcept
    void loop_end(loop_t *self, long linger_ms) noexcept
    loop_event loop_run(loop_t *self, long timeout_ms) noexcept
    void loop_next(loop_t *self) noexcept
    void loop_admit(loop_t *self, bint admitted) noexcept
    void loop_mark_joined(loop_t *self, uint64_t peer) noexcept
    void loop_attach_stream(loop_t *self, uint64_t peer, uint64_t stream) noexcept
    void loop_make_resumable(loop_t *self, uint64_t peer, uint64_t resume_ns) noexcept
    bint loop_is_suspended(loop_t *self, uint64_t peer) noexcept
    int loop_socket(loop_t *self, uint64_t peer) noexcept
    void loop_resume_over(loop_t *self, uint64_t peer, uint64_t successor, uint64_t peer_read,
                          const header_t *header) noexcept
    void loop_give_up(loop_t *self, uint64_t peer) noexcept
    void loop_forget(loop_t *self) noexcept
    void loop_release_memory(loop_t *self) noexcept
    bint loop_send(loop_t *self, uint64_t peer, const void *header, const void *payload,
                   size_t nbytes) noexcept
    bint loop_load(loop_t *self, uint64_t peer, load *load) noexcept
    bint loop_hang_up(loop_t *self, uint64_t peer) noexcept
    verdict loop_offer(
        loop_t *self, uint64_t peer, const void *frame, size_t frame_bytes, block *payload,
        uint64_t now_us, header_t *header, block **result, rounds **within
    ) noexcept


# Of whose senders the engine asks the key.
_BEFORE_JOINING = {MessageType.HELLO, MessageType.STREAM, MessageType.RESUME}
_RESUMED = Header(MessageType.RESUME).pack()
ID_BYTES = 7  # of a peer: the number of its connection, little-endian
SPARE_BYTES = 32 << 20  # of memory that payloads have had, kept for the next ones


cdef void leave(object met) noexcept:
    """Have the worker's end of a channel go that nobody has joined."""
    if PyCapsule_IsValid(met, b"channel"):
        channel_close(<channel *>PyCapsule_GetPointer(met, b"channel"), 1)


cdef uint64_t key_of(bytes peer):
    return peer_key(PyBytes_AsString(peer), len(peer))


cdef class Sockets:
    """The connections of one thread, and what is read from them and sent; one thread uses it.

    Args:
        listener: descriptor of a socket that listens, and does not block; None for tests without
            a network.
        every_s: time between two heartbeats.
        handshake_s: time for a handshake.
        max_frame_bytes: of a message's frames; who sends a longer one is disconnected.
        keys: the reducer's public and secret key, 32 bytes each, if peers must have some.

    Raises:
        OSError: no files or threads are left.
    """

    cdef loop_t c
    cdef curve_keys _keys

    def __cinit__(self, listener=None, double every_s=1.0, double handshake_s=1.0,
                  uint64_t max_frame_bytes=0, keys=None):
        self.c.pool.most_spare_bytes = SPARE_BYTES
        self.c.max_frame_bytes = max_frame_bytes
        self.c.handshake_ns = <uint64_t>(handshake_s * 1e9)
        self.limit(sys.maxsize, sys.maxsize)
        if keys is not None:
            copy_keys(&self._keys, keys)
            self.c.keys = &self._keys
        if listener is not None and not loop_listen(&self.c, listener, <uint64_t>(every_s * 1e9)):
            raise OSError(errno, "the loop cannot be set up")

    def __dealloc__(self):
        loop_end(&self.c, 0)
        explicit_bzero(&self._keys, sizeof(self._keys))

    def limit(self, size_t max_first, size_t max_open):
        """Say how many connections are accepted, but for further streams, and with these."""
        self.c.max_first = max_first
        self.c.max_open = max_open

    def end(self, long linger_ms):
        """Give what has yet to be sent so much time, and close all connections."""
        with nogil:
            loop_end(&self.c, linger_ms)

    def meet(self):
        """Make a peer of a worker of this process.

        Any thread may call this before `end`.

        Returns:
            The other end of their channel, a capsule; it leaves the channel unless it was joined.

        Raises:
            OSError: no files are left, or no memory.
        """
        cdef channel *made
        with nogil:  # the thread of these may have to end its turn first
            made = loop_connect_inproc(&self.c)
        if made == NULL:
            raise OSError(errno, "no channel can be made")
        try:
            return PyCapsule_New(made, b"channel", leave)
        except MemoryError:
            channel_close(made, 1)
            raise

    def send(self, bytes peer, bytes header, payload):
        """Send a message; False if that peer has no connection any more."""
        cdef const unsigned char[::1] body
        cdef uint64_t key = key_of(peer)
        if payload is None:
            return loop_send(&self.c, key, PyBytes_AsString(header), NULL, 0)
        body = memoryview(payload).cast("B")
        return loop_send(&self.c, key, PyBytes_AsString(header),
                         &body[0] if body.shape[0] else <const void *>b"", body.shape[0])

    def changes(self):
        """Return which connections came or went, as ``(came, descriptor, number)``, once each."""
        found = [
            (self.c.changes[at].came, self.c.changes[at].fd, self.c.changes[at].number)
            for at in range(self.c.change_count)
        ]
        self.c.change_count = 0
        return found

    def load(self, uint64_t number):
        """Return bytes read, unread and unsent of a connection, and whether more may wait.

        None if it is gone; see `transport.Load`.
        """
        cdef load found
        if not loop_load(&self.c, peer_key(<const char *>&number, ID_BYTES), &found):
            return None
        return found.read, found.unread, found.unsent, found.waits

    def is_suspended(self, uint64_t number):
        """Whether a connection has broken, and may go on over another one."""
        return loop_is_suspended(&self.c, peer_key(<const char *>&number, ID_BYTES))

    def hang_up(self, uint64_t number):
        """End a connection; False if it is gone."""
        return loop_hang_up(&self.c, peer_key(<const char *>&number, ID_BYTES))

    def unfinished(self):
        """Return how many handshakes took too long since the last call."""
        found, self.c.unfinished = self.c.unfinished, 0
        return found


@cython.no_gc_clear  # a collector leaves it its sockets and rounds until it has let go of them
cdef class Core:
    """The struct and what its pointers point to, over one engine."""

    cdef Sockets _sockets
    cdef loop_t *c
    cdef CompiledKernels _kernels
    cdef object _engine
    cdef dict _served  # (rounds, members) by the job that is served
    cdef object _transport

    def __cinit__(self, engine, transport=None):
        self._engine = engine
        self._transport = transport
        self._kernels = engine.kernels
        self._served = {}
        self._sockets = Sockets() if transport is None else transport.sockets
        self.c = &self._sockets.c
        self.c.kernels = self._kernels.table

    def __dealloc__(self):
        cdef Rounds within
        if self._sockets is None:
            return
        for within, _ in self._served.values():
            within.dismiss()
        map_free(&self.c.members)
        map_free(&self.c.rounds)

    def perform(self, action):
        """Do what the engine asks for, but to send and to close."""
        if isinstance(action, Serve):
            return self.serve(action.job)
        if isinstance(action, Dismiss):
            return self.dismiss(action.job)
        cdef uint64_t key = key_of(action.peer)
        if isinstance(action, MarkJoined):
            loop_mark_joined(self.c, key)
            if action.resumes:
                self.make_resumable(key)
        elif isinstance(action, Attach):
            self.attach(key, key_of(action.stream))
        elif isinstance(action, Resume):
            loop_resume_over(self.c, key, key_of(action.fresh), action.read,
                             <const header_t *>PyBytes_AsString(_RESUMED))
        else:
            loop_give_up(self.c, key)

    cdef serve(self, job):
        """Take a job's contributions: every rank is here."""
        cdef Rounds within = job.rounds
        cdef Member member
        members = list(job.members.values())
        self._served[job] = within, members
        within.rest()
        within.admit(members, job, &self.c.pool, self._sockets)
        for member in members:
            for peer in (member.peer, *self._engine.members.streams(member.peer)):
                self.put(key_of(peer), &member.c, &within.c)

    cdef dismiss(self, job):
        """Leave a job's contributions to the engine again."""
        cdef Rounds within = self._served.pop(job)[0]
        cdef map *found = &self.c.rounds
        within.dismiss()
        keys = [
            found.entries[at].key
            for at in range(found.mask + 1 if found.count else 0)
            if found.entries[at].value == &within.c
        ]
        for key in keys:
            map_remove(&self.c.members, key)
            map_remove(found, key)
        loop_release_memory(self.c)

    cdef attach(self, uint64_t key, uint64_t stream):
        """Have a further stream be served as its member is."""
        loop_attach_stream(self.c, key, stream)
        cdef member_t *member = <member_t *>map_get(&self.c.members, key)
        if member != NULL:
            self.put(stream, member, <rounds *>map_get(&self.c.rounds, key))

    cdef put(self, uint64_t key, member_t *member, rounds *within):
        if key and not (
            map_put(&self.c.members, key, member) and map_put(&self.c.rounds, key, within)
        ):
            raise MemoryError

    cdef rest(self):
        """Let go of what the engine has looked at."""
        cdef Rounds within
        for within, _ in self._served.values():
            within.rest()

    cdef make_resumable(self, uint64_t key):
        """Keep a member's connection when its socket breaks, for a while."""
        cdef int descriptor = loop_socket(self.c, key)
        if descriptor >= 0:
            loop_make_resumable(self.c, key, <uint64_t>(self._transport.resume_s(descriptor) * 1e9))

    def offer(self, bytes peer, bytes frame, bytes payload, double at=0.0):
        """Take one contribution as the loop would, for tests without a network.

        Returns:
            What is to be sent, or None if the message is for the engine.
        """
        cdef header_t header
        cdef block *result
        cdef rounds *within
        self.rest()
        cdef block *message = block_take(&self.c.pool, len(payload))
        if message == NULL:
            raise MemoryError
        memcpy(message.data, PyBytes_AsString(payload), len(payload))
        cdef verdict found = loop_offer(
            self.c, key_of(peer), PyBytes_AsString(frame),
            len(frame), message, <uint64_t>(at * 1e6), &header, &result, &within,
        )
        self.count()
        if found == IRREGULAR:
            block_drop(&self.c.pool, message)
            return None
        if found == OUT_OF_MEMORY:
            raise MemoryError
        if found == PLACED:
            return []
        reduction = (<char *>result.data)[:result.nbytes]
        block_drop(&self.c.pool, result)
        header_frame = (<char *>&header)[:HEADER_BYTES]
        return [
            Send(member.peer, header_frame, reduction)
            for served, members in self._served.values()
            for member in members
            if &(<Rounds>served).c is within
        ]

    cdef message(self):
        """Take the message that the loop has left: peer, header, payload, sender's key."""
        cdef peer *sender = self.c.peer
        cdef message_t *found = &sender.connection.message
        cdef bytes name = sender.number.to_bytes(ID_BYTES, "little")
        header = payload = b""
        if not found.foreign:
            header = (<char *>found.header)[:HEADER_BYTES]
        if not found.foreign and found.payload != NULL:
            payload = (<char *>found.payload.data)[:found.payload.nbytes]
        loop_next(self.c)
        keyed = len(header) > TYPE_AT and header[TYPE_AT] in _BEFORE_JOINING
        return name, header, payload, self.key(sender) if keyed else ""

    cdef str key(self, peer *sender):
        """Return the public key that a peer has shown; nothing if none is demanded."""
        if sender.connection.channel != NULL:
            return LOCAL
        if not sender.connection.zmtp.sealed:
            return ""
        return self._transport.text((<char *>sender.connection.zmtp.peer_key)[:32])

    cdef end(self):
        """Forget the peer whose connection has ended; return its name."""
        cdef zmtp_t *zmtp = &self.c.peer.connection.zmtp
        cdef bytes name = self.c.peer.number.to_bytes(ID_BYTES, "little")
        if not zmtp.ready:
            self._transport.refuse(
                "with a key that is not on the allow-list" if zmtp.fault == ZMTP_UNKNOWN_KEY
                else "without a key" if zmtp.fault == ZMTP_DIFFERS
                else "with another pool's public key" if zmtp.fault == ZMTP_WRONG_KEY
                else "that hung up during the handshake" if zmtp.fault == ZMTP_NO_FAULT
                else "that do not speak this protocol"
            )
        loop_forget(self.c)
        return name

    cdef list unreachable(self):
        """Take the peers that could not be sent to; the engine may not know some any more."""
        lost = {self.c.lost[place] for place in range(self.c.lost_count)}
        self.c.lost_count = 0
        return [key.to_bytes(8, "little")[:ID_BYTES] for key in sorted(lost)]

    def run(self, timeout_s):
        """Serve for some time; yield what the engine asks for."""
        cdef loop_event event
        cdef long timeout_ms = <long>(timeout_s * 1000)
        until = time.monotonic() + timeout_s
        while timeout_ms >= 0:
            self.rest()
            with nogil:
                event = loop_run(self.c, timeout_ms)
            self.count()
            if event == LOOP_TIMEOUT:
                return
            if event == LOOP_MESSAGE:
                yield self._engine.receive(*self.message(), at=time.monotonic())
            elif event == LOOP_ADMIT:
                shown = (<char *>self.c.peer.connection.zmtp.peer_key)[:32]
                loop_admit(self.c, self._transport.admits(shown))
            elif event == LOOP_ENDED:
                yield self._engine.unreachable(self.end())
            elif event == LOOP_UNREACHABLE:
                for peer in self.unreachable():
                    yield self._engine.unreachable(peer)
            elif event == LOOP_OUT_OF_MEMORY:
                # A contribution is gone, of which its rank will never hear: all jobs of this lane
                # hear that their reducer has ended, and go on with another one.
                raise MemoryError
            else:
                raise OSError(self.c.error, "the sockets cannot be polled")
            timeout_ms = <long>((until - time.monotonic()) * 1000)

    cdef count(self):
        counters = self._engine.counters
        counters.contributions += self.c.contributions
        counters.results += self.c.results
        counters.bytes_in += self.c.bytes_in
        counters.bytes_out += self.c.bytes_out
        counters.closed += self.c.crowded_out
        self.c.contributions = self.c.results = self.c.bytes_in = self.c.bytes_out = 0
        self.c.crowded_out = 0


class Loop:
    """Joins one engine, one transport and its guard. One thread uses it.

    Attributes:
        clock: by which peers are late.
    """

    def __init__(self, engine, transport, guard):
        self._engine = engine
        self._transport = transport
        self._guard = guard
        self._core = Core(engine, transport)
        self.clock = ServingTime(time.monotonic)

    def step(self, timeout_s):
        """Serve for `timeout_s` seconds at most, or until a peer is to be closed.

        Until then some messages are taken all the same: the guard counts on that. Then the engine
        sees the clock.
        """
        for number, actions in enumerate(self._core.run(timeout_s), 1):
            self.do(actions)
            if self._guard.closing and number >= TAKEN_PER_LOOK:
                break
        self.do(self._engine.tick(self.clock.now()))

    def do(self, actions):
        """Do what the engine asks for; it hears of peers that turn out to be gone."""
        # In the engine's order, also when a thousand ranks turn out to be gone at once.
        while actions:
            further = []
            for action in actions:
                if isinstance(action, Close):
                    self._guard.close(action.peer)
                elif not isinstance(action, Send):
                    self._core.perform(action)
                elif not self._transport.send(*action):
                    further += self._engine.unreachable(action.peer)
            actions = further
