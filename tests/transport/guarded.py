"""A reducer's guard on duty, and what its tests ask of peers."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from hostile.intruder import Worker
from hostile.lines import Bare
from hostile.zmtp import GREETING, HANDSHAKE, dial, frame
from reducer import kernels
from reducer.engine import _slots
from reducer.engine.admission import ReducerIdentity
from reducer.engine.engine import Engine
from reducer.engine.limits import ConnectionLimits
from reducer.runtime._loop import Loop
from reducer.runtime.guard import UNJOINED_BYTES, Guard
from reducer.runtime.transport import Transport
from reducer.wire.constants import COMPILED_FEATURES, LONGEST_PEER_TIMEOUT_MS, MessageType
from reducer.wire.header import Header
from reducer.wire.messages import Stream, Welcome, decode, encode
from tests.transport.scripted import HOST

WAIT_S = 60.0
PATIENCE = ConnectionLimits(max_connections=1000, hello_s=10.0)
M = MessageType
MIB = 1 << 20
PING = b"\4PING\0\0"
FLOOD = frame(bytes(MIB))[: 2 * UNJOINED_BYTES]  # more than a stranger may say


class Post:
    """A transport, an engine and a guard on duty, for which it is `now`, seconds."""

    def __init__(self, patience, stack):
        self.now = 0.0
        self.transport = Transport(f"tcp://{HOST}:0")
        stack.callback(self.transport.close)
        identity = ReducerIdentity("1", "here:1", features=COMPILED_FEATURES)
        self.engine = Engine(kernels.select(None), _slots, identity, memory_limit=256 * MIB)
        self.guard = Guard(self.engine, self.transport, patience)
        self.loop = Loop(self.engine, self.transport, self.guard)
        self.stack = stack
        self.address = f"{HOST}:{self.transport.port}"

    def step(self):
        """Serve for a moment, and let the guard look."""
        self.loop.step(0.005)
        self.loop.do(self.guard.look(self.now))

    def until(self, holds):
        """Go on until something is so."""
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, "it never came to that"
            self.step()

    def meanwhile(self, act):
        """Serve while something is done that waits for that."""
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(act)
            self.until(done.done)
            return done.result()

    def stranger(self, *, greets=True):
        """Connect, shake hands, and be known to the guard."""
        here = self.guard.connections
        peer = self.stack.enter_context(dial(self.address))

        def greet():
            peer.sendall(HANDSHAKE)
            received = b""
            while len(received) <= len(GREETING):  # and the READY after it
                received += peer.recv(1000)

        if greets:
            self.meanwhile(greet)
        self.until(lambda: self.guard.connections == here + 1)
        return peer

    def member(self, job, **settings):
        """Join a job."""
        here = settings.pop("came", self.members.get(job, 0) + 1) - 1
        settings.setdefault("patience_ms", LONGEST_PEER_TIMEOUT_MS)  # it says nothing by itself
        worker = self.meanwhile(lambda: Worker(self.address, job, **settings))
        self.stack.enter_context(closing(worker))
        self.until(lambda: self.members.get(job, 0) > here)
        worker.ticket = decode(Welcome, answer(worker, M.WELCOME)).ticket
        return worker

    def stream(self, worker, number=1):
        """Give a member another stream."""
        line = self.meanwhile(lambda: Bare(self.address))
        self.stack.enter_context(closing(line))
        line.say(Header(M.STREAM).pack(), encode(Stream(worker.ticket, number)))
        header, _ = self.meanwhile(line.hear)
        assert Header.unpack(header).type is M.STREAM
        return line

    @property
    def members(self):
        """Number of members by job."""
        return {job.name: len(job.members) for job in self.engine.jobs}

    @property
    def closed(self):
        """How many connections the guard has ended."""
        return self.engine.counters.closed


def ended(peer):
    """Whether the other side has hung up; what it said before is passed over."""
    peer.settimeout(0.001)
    try:
        return not peer.recv(1 << 16)
    except TimeoutError:
        return False
    except OSError:
        return True


def answer(worker, kind):
    """Hear the next message but for PINGs, which is to be of this kind; return its body."""
    header, body = worker.hear()
    while header.type is M.PING:
        header, body = worker.hear()
    assert header.type is kind
    return body


def rounds(post, number=20):
    """Let some time pass in which nothing should happen."""
    for _ in range(number):
        post.step()
