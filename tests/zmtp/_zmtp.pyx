"""One side of a connection of ZMTP, as bytes and events; see `zmtp.h`.

The loops use the struct. This class is for what looks at the protocol from outside: tests and the
fuzzer.
"""

from cpython.bytearray cimport PyByteArray_AsString
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint16_t, uint64_t
from libc.string cimport memcpy

from reducer.zmtp.curve cimport CURVE_KEY_BYTES, copy_keys, curve_keys, explicit_bzero
from reducer.zmtp.net cimport (
    ZMTP_DIFFERS,
    ZMTP_FOREIGN,
    ZMTP_MALFORMED,
    ZMTP_REFUSED,
    ZMTP_TOO_LARGE,
    ZMTP_UNKNOWN_KEY,
    ZMTP_WRONG_KEY,
    zmtp_t,
)


cdef extern from "reducer/zmtp/zmtp.h" nogil:
    enum zmtp_event:
        ZMTP_MORE
        ZMTP_ADMIT
        ZMTP_READY
        ZMTP_FRAME
        ZMTP_FAILED

    bint zmtp_init(
        zmtp_t *zmtp, bint server, const curve_keys *keys, uint64_t max_frame_bytes
    ) noexcept
    void zmtp_free(zmtp_t *zmtp) noexcept
    zmtp_event zmtp_take(zmtp_t *zmtp, const uint8_t **at, const uint8_t *end) noexcept
    zmtp_event zmtp_admit(zmtp_t *zmtp, bint admitted) noexcept
    uint8_t *zmtp_open(zmtp_t *zmtp, uint8_t *body) noexcept
    zmtp_event zmtp_command(zmtp_t *zmtp, const uint8_t *body, size_t nbytes) noexcept
    size_t zmtp_frame_header(uint8_t *out, uint64_t nbytes, bint more) noexcept
    uint64_t zmtp_wire_bytes(const zmtp_t *zmtp, uint64_t nbytes) noexcept
    size_t zmtp_seal(
        zmtp_t *zmtp, uint8_t *out, const void *body, size_t nbytes, bint more
    ) noexcept
    size_t zmtp_ping(zmtp_t *zmtp, uint8_t *out, uint16_t ttl_ds) noexcept


cdef dict FAULTS = {
    ZMTP_FOREIGN: "foreign",
    ZMTP_DIFFERS: "differs",
    ZMTP_REFUSED: "refused",
    ZMTP_WRONG_KEY: "wrong-key",
    ZMTP_UNKNOWN_KEY: "unknown-key",
    ZMTP_MALFORMED: "malformed",
    ZMTP_TOO_LARGE: "too-large",
}


cdef class Zmtp:
    """One side of a connection.

    `take` and `admit` return events: ``("ready",)``, ``("message", frames)``, ``("admit", key)``
    and ``("failed", fault, reason)``, which is the last one. After ``admit`` nothing more is looked
    at before the call of `admit`. `reply` has what is to be sent before anything else.

    Args:
        server: whether this side is the ROUTER that was connected to, or else a DEALER.
        keys: for CURVE: public, secret and the server's public key, 32 bytes each; None: NULL.
        max_frame_bytes: the longest frame that is taken.

    Raises:
        OSError: libsodium cannot be used.
        ValueError: a key has another length.
    """

    cdef zmtp_t c
    cdef bytearray _said  # what is to be sent
    cdef bytearray _rest  # what came and was not looked at
    cdef bytearray _body  # of the frame that has begun
    cdef bint _in_body
    cdef bint _asks  # whether to admit the peer
    cdef bint _told  # of a failure
    cdef list _frames  # of the message that has begun

    def __cinit__(self, bint server, keys, uint64_t max_frame_bytes):
        cdef curve_keys pair
        self._said = bytearray()
        self._rest = bytearray()
        self._body = bytearray()
        self._frames = []
        if keys is None:
            zmtp_init(&self.c, server, NULL, max_frame_bytes)
            return
        if len(keys) != 3:
            raise ValueError(f"keys are three of {CURVE_KEY_BYTES} bytes each")
        copy_keys(&pair, keys)
        cdef bint begun = zmtp_init(&self.c, server, &pair, max_frame_bytes)
        explicit_bzero(&pair, sizeof(pair))
        if not begun:
            raise MemoryError

    def __dealloc__(self):
        zmtp_free(&self.c)

    @property
    def ready(self):
        """Whether the handshake is done."""
        return self.c.ready

    @property
    def sealed(self):
        """Whether frames are encrypted."""
        return self.c.sealed

    def take(self, data):
        """Take bytes of the peer, however they were cut, and return the events."""
        self._rest += data
        return self._take()

    def admit(self, bint admitted):
        """Answer the event ``admit``, go on, and return the events."""
        events = []
        self._asks = False
        self._add(events, zmtp_admit(&self.c, admitted))
        return events + self._take()

    def reply(self):
        """Return what is to be sent, and forget it."""
        self._keep_reply()
        said = bytes(self._said)
        self._said.clear()
        return said

    def send(self, frames):
        """Return the bytes of a message."""
        self._check()
        return b"".join(
            self._frame(bytes(frame), number < len(frames))
            for number, frame in enumerate(frames, start=1)
        )

    def ping(self, uint16_t ttl_ds):
        """Return the bytes of a PING."""
        cdef uint8_t out[64]
        self._check()
        return PyBytes_FromStringAndSize(<char *>out, zmtp_ping(&self.c, out, ttl_ds))

    def close(self):
        """Wipe the keys; nothing can be taken or sent any more."""
        zmtp_free(&self.c)
        self.c.ready = False
        self._told = True

    cdef int _check(self) except -1:
        if not self.c.ready:
            raise ValueError("messages follow the handshake")
        return 0

    cdef bytes _frame(self, bytes body, bint more):
        cdef size_t nbytes = len(body), header_bytes
        cdef bytes out = PyBytes_FromStringAndSize(NULL, zmtp_wire_bytes(&self.c, nbytes))
        cdef uint8_t *place = <uint8_t *>PyBytes_AsString(out)
        if self.c.sealed:
            zmtp_seal(&self.c, place, PyBytes_AsString(body), nbytes, more)
        else:
            header_bytes = zmtp_frame_header(place, nbytes, more)
            memcpy(place + header_bytes, PyBytes_AsString(body), nbytes)
        return out

    cdef list _take(self):
        """Look at what is there, until it is not enough, or a question or a failure ends it."""
        cdef const uint8_t *begin
        cdef const uint8_t *at
        cdef zmtp_event event
        events = []
        while not self._asks and not self._told:
            if self._in_body:
                if not self._fill():
                    break
                self._end_frame(events)
                continue
            if not self._rest:
                break
            begin = at = <const uint8_t *>PyByteArray_AsString(self._rest)
            event = zmtp_take(&self.c, &at, begin + len(self._rest))
            del self._rest[:at - begin]
            if event == ZMTP_FRAME:
                self._in_body = True
            else:
                self._add(events, event)
        return events

    cdef bint _fill(self):
        """Take what is there of a frame's body; whether it is whole."""
        cdef uint64_t missing = self.c.frame.wire_bytes - len(self._body)
        if missing > <uint64_t>len(self._rest):
            self._body += self._rest
            self._rest.clear()
            return False
        self._body += self._rest[:missing]
        del self._rest[:missing]
        return True

    cdef int _end_frame(self, list events) except -1:
        cdef uint8_t *body = <uint8_t *>PyByteArray_AsString(self._body)
        if self.c.sealed:
            body = zmtp_open(&self.c, body)
        if body == NULL:
            self._add(events, ZMTP_FAILED)
        elif self.c.frame.command:
            self._add(events, zmtp_command(&self.c, body, self.c.frame.nbytes))
        else:
            self._frames.append(PyBytes_FromStringAndSize(<char *>body, self.c.frame.nbytes))
            if not self.c.frame.more:
                events.append(("message", self._frames))
                self._frames = []
        self._body.clear()
        self._in_body = False
        return 0

    cdef int _keep_reply(self) except -1:
        """Make room for the next reply, as a loop does that sends them."""
        self._said += PyBytes_FromStringAndSize(<char *>self.c.reply, self.c.reply_bytes)
        self.c.reply_bytes = 0
        return 0

    cdef int _add(self, list events, zmtp_event event) except -1:
        """Tell of an event, if there is anything to tell."""
        self._keep_reply()
        if event == ZMTP_READY:
            events.append(("ready",))
        elif event == ZMTP_ADMIT:
            self._asks = True
            events.append(("admit", self.c.peer_key[:CURVE_KEY_BYTES]))
        elif event == ZMTP_FAILED and not self._told:
            self._told = True
            self._rest.clear()
            said = self.c.peer_mechanism if self.c.fault == ZMTP_DIFFERS else self.c.reason
            events.append(("failed", FAULTS[self.c.fault], said.decode("ascii")))
        return 0
