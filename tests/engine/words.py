"""An engine, and what its workers say to it."""

from dataclasses import replace

import numpy as np

from reducer.engine.actions import Close
from reducer.engine.allow_list import AllowList
from reducer.engine.engine import UNREACHABLE_S
from reducer.engine.limits import NO_LIMITS
from reducer.wire import authentication
from reducer.wire.constants import PLACES, DType, MessageType, ReduceOp
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import Challenge, Hello, decode, decode_error, encode
from reducer.wire.states import Role
from tests.engine.twins import Served
from worker_client.protocol.lifecycle import FIRST_PLACE

M = MessageType
WINDOW = 1 << 16
ADDRESS = "here:1"
TWO_KEYS = AllowList({name: frozenset({"*"}) for name in ("key-1", "key-2")})


def number(call, place=FIRST_PLACE):
    """Return the sequence number of a call's first all-reduce, or of another one."""
    return call * PLACES + place


class Reducer:
    """An engine, and the words of its workers."""

    def __init__(self, implementation, secret=b"", **settings):
        self.compiled = implementation == "compiled"
        self.secret = secret
        self.served = Served(implementation, address=ADDRESS, secret=secret, **settings)
        self.engine = self.served.engine
        self.now = 0.0

    def hello(self, rank, key="", peer=b"", **change):
        """Join with a key; ``claims`` is the job of the header, if not that of the body."""
        fields = {"generation": 0, "watermark": 0, "window": WINDOW}
        fields |= {name: change.pop(name) for name in list(change) if name in fields}
        settings = {"world_size": 2, "reducers": 1, "reducer_index": 0}
        settings |= {"job": "job", **change}
        claims = settings.pop("claims", settings["job"])
        header = Header(M.HELLO, job=fingerprint(claims), rank=rank, **fields)
        peer, hello = peer or b"%d" % rank, Hello(**settings)
        if self.secret:
            hello = replace(hello, auth=authentication.nonce())
            (asked,) = self.served.receive(peer, header.pack(), encode(hello), key)
            nonce = decode(Challenge, asked.payload).nonce
            proof = authentication.prove(self.secret, Role.WORKER, header, hello, nonce, ADDRESS)
            hello = replace(hello, auth=hello.auth + proof)
        return self.served.receive(peer, header.pack(), encode(hello), key)

    def contribute(self, rank, sequence=0, value=1.0, **change):
        payload = change.pop("payload", np.full(16, value, np.float32).tobytes())
        peer, at = change.pop("peer", b"%d" % rank), change.pop("at", 0.0)
        header = Header(
            M.CONTRIBUTION,
            job=fingerprint("job"),
            sequence=sequence,
            total_bytes=len(payload),
            nbytes=len(payload),
            rank=rank,
            dtype=DType.FLOAT32,
            op=ReduceOp.SUM,
            wire_dtype=DType.FLOAT32,
        )._replace(**change)
        return self.served.receive(peer, header.pack(), payload, at=at)

    def contribute_both(self, sequence=0, **change):
        return [send for rank in range(2) for send in self.contribute(rank, sequence, **change)]

    def retain(self, rank, sequence=0, payload=b"", **change):
        """Claim a chunk of 64 bytes, or send its result."""
        common = {"type": M.RETAINED, "total_bytes": 64, "nbytes": 64}
        return self.contribute(rank, sequence, payload=payload, **{**common, **change})

    def lose(self, peer):
        """A peer goes and does not come back in time."""
        sends = self.unreachable(peer)
        self.now += UNREACHABLE_S
        return sends + self.tick()

    def do(self, actions):
        return self.served.perform(actions)

    def unreachable(self, peer):
        return self.do(self.engine.unreachable(peer))

    def dropped(self):
        """Peers that were dropped since this was asked last."""
        return [action.peer for action in self.served.asked_for(Close)]

    def tick(self):
        """What is said as time passes, without PINGs."""
        sends = self.do(self.engine.tick(self.now))
        return [send for send in sends if kinds([send]) != [M.PING]]

    def say(self, rank, kind, sequence, body=b"", peer=b"", **change):
        header = Header(kind, job=fingerprint("job"), rank=rank, sequence=sequence, **change)
        return self.served.receive(peer or b"%d" % rank, header.pack(), body)

    def rounds(self):
        return {sequence for job in self.engine.jobs for sequence in job.rounds}


def with_ranks(implementation, ranks, limits=NO_LIMITS, **settings):
    """A reducer that so many ranks have joined, all of their job unless it says otherwise."""
    reducer = Reducer(implementation, limits=limits)
    for rank in range(ranks):
        assert kinds(reducer.hello(rank, **{"world_size": ranks, **settings})) == [M.WELCOME]
    return reducer


def told(sends):
    found = {}
    for send in sends:
        header = Header.unpack(send.header)
        if header.type is M.ERROR:
            assert send.peer not in found
            found[send.peer] = decode_error(send.payload, header.sequence)
    return found


def kinds(sends):
    return [Header.unpack(send.header).type for send in sends]
