"""A client from the specification alone: standard-library Python that imports nothing of ours.

It was written by `docs/protocol.md`, whose sections stand in brackets, and by ZMTP's own
specification, RFC 37. It is one rank of a job with one reducer and without keys: it joins, sums
FLOAT32 buffers of several sizes, checks them and leaves.

    export WORLD_SIZE=2 REDUCTION_JOB=sums REDUCTION_SERVERS=HOST:PORT
    RANK=0 python examples/stranger.py   (and RANK=1)

It sets the size of chunks, so that no rank asks what links carry [8].
"""

import array
import contextlib
import hashlib
import json
import os
import select
import socket
import struct
import sys
import time

HELLO, WELCOME, CONTRIBUTION, RESULT, ABORT, ERROR, GOODBYE, PING = range(1, 9)  # [3]
STRAGGLERS, SHARD_MAP, RETAINED, CREDIT = range(9, 13)
HEADER = struct.Struct("<4sBBHQIIQQQQIIBBBxIQQQ")  # [2]
NAMES = (
    "type flags job generation epoch sequence watermark total_bytes offset nbytes rank dtype op "
)
NAMES += "wire_dtype since tag window history"
FIELDS = NAMES.split()
NO_SEQUENCE = (1 << 64) - 1
FLOAT32, SUM = 1, 1  # [4]
CHUNK, PLACES, PATIENCE_S, HEARTBEAT_S = 64 << 10, 128, 1.0, 0.2
MORE, LONG, COMMAND = 1, 2, 4  # ZMTP's flags
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


class JobError(Exception):
    """What ends this rank's part in the job."""


class Link:
    """A connection to the reducer, or to a further thread (lane) of it."""

    def __init__(self, host, port, worker, lane):
        self.socket = socket.create_connection((host, port), timeout=10)
        self.buffer, self.frames, self.greeted = bytearray(), [], False
        self.window = self.flying = 0  # bytes that may be, and are, in flight [5]
        self.chunks = []  # that are to be sent: offset and end
        self.heard_at, self.ping_at, self.worker = time.monotonic(), 0.0, worker
        self.socket.sendall(GREETING)
        self.write(b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER", COMMAND)
        self.ready = False
        self.hello = {"version": "1.0", "job": worker.job, "world_size": worker.size, "lane": lane}
        self.hello |= {"reducers": 1, "reducer_index": 0, "chunk_bytes": CHUNK}
        self.hello |= {"features": 0, "patience_ms": int(1000 * PATIENCE_S)}

    def write(self, body, flags=0):
        """Send a frame."""
        wide = len(body) > 255
        size = struct.pack(">BQ" if wide else ">BB", flags | LONG * wide, len(body))
        self.socket.sendall(size + body)

    def send(self, kind, payload=None, **fields):
        """Send a message with these fields of the header."""
        said = {"type": kind, "sequence": NO_SEQUENCE, "job": self.worker.key}
        said |= {"rank": self.worker.rank, "watermark": self.worker.watermark, **fields}
        values = [said.get(name, 0) for name in FIELDS]
        self.write(HEADER.pack(b"RDSV", 1, *values), MORE * (payload is not None))
        if payload is not None:
            self.write(payload)

    def read(self):
        """Yield the messages that have come, as a header's fields and a payload."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise JobError("the reducer has closed the connection")
        self.heard_at = time.monotonic()
        self.buffer += data
        if not self.greeted and len(self.buffer) >= len(GREETING):
            if self.buffer[0] != 0xFF or self.buffer[10] < 3 or self.buffer[12:17] != b"NULL\0":
                raise JobError("who answers speaks no ZMTP 3, or wants a key")
            self.greeted = True
            del self.buffer[: len(GREETING)]
        while self.greeted and (found := self.take_frame()):
            flags, body = found
            if flags & COMMAND:
                name, rest = body[1 : 1 + body[0]], body[1 + body[0] :]
                if name == b"READY":  # before that nothing may be said
                    self.ready = True
                    self.send(HELLO, json.dumps(self.hello).encode(), window=1 << 20)
                if name == b"PING":
                    self.write(b"\x04PONG" + rest[2:], COMMAND)
                continue
            self.frames.append(body)
            if not flags & MORE:
                frames, self.frames = self.frames, []
                yield unpacked(frames)

    def take_frame(self):
        """Return the flags and the body of the next frame, if it is complete."""
        wide = 9 if self.buffer and self.buffer[0] & LONG else 2
        if len(self.buffer) < wide:
            return None
        flags, size = struct.unpack_from(">BQ" if wide == 9 else ">BB", self.buffer)
        if size > CHUNK + 4096:
            raise JobError(f"a frame of {size} bytes")
        if len(self.buffer) < wide + size:
            return None
        body = bytes(self.buffer[wide : wide + size])
        del self.buffer[: wide + size]
        return flags, body


def unpacked(frames):
    """Check a message, and return its header's fields and its payload."""
    is_header = len(frames) <= 2 and len(frames[0]) == HEADER.size
    magic, major, *values = HEADER.unpack(frames[0]) if is_header else (b"", 0)
    if magic != b"RDSV" or major != 1 or values[1]:
        raise JobError("the reducer says what is no message of version 1.0")
    return dict(zip(FIELDS, values, strict=True)), b"".join(frames[1:])


class Worker:
    """One rank of a job."""

    def __init__(self, address, job, rank, size):
        self.job, self.rank, self.size, self.links = job, rank, size, []
        fingerprint = hashlib.blake2b(job.encode(), digest_size=8).digest()  # [8]
        self.key = int.from_bytes(fingerprint, "little")
        self.call = self.watermark = self.history = 0
        host, _, port = address.rpartition(":")
        self.links.append(Link(host, int(port), self, 0))
        for lane, further in enumerate(self.welcome(self.links[0]).get("lanes", []), 1):
            self.links.append(Link(host, further, self, lane))
            self.welcome(self.links[-1])

    def welcome(self, link):
        """Wait for the WELCOME of a link, and return its body."""
        while not link.window:
            for where, header, payload in self.messages():
                if where is not link or header["type"] != WELCOME:
                    self.other(header, payload)
                    continue
                body = json.loads(payload)
                if not str(body.get("version")).startswith("1."):
                    raise JobError(f"the reducer speaks version {body.get('version')}")
                link.window = header["window"]
        return body

    def messages(self):
        """Wait a little, and yield what comes: the link, the header's fields, the payload."""
        lines = {link.socket: link for link in self.links}
        ready = select.select(list(lines), [], [], HEARTBEAT_S / 2)[0]
        for link in (lines[line] for line in ready):
            for header, payload in link.read():
                yield link, header, payload
        now = time.monotonic()
        for link in self.links:
            if link.ready and now >= link.ping_at:
                link.ping_at = now + HEARTBEAT_S
                link.write(b"\x04PING\0\0", COMMAND)
            if now > link.heard_at + PATIENCE_S:
                raise JobError(f"nothing has come from the reducer for {PATIENCE_S} s")

    def other(self, header, payload):
        """Take a message that is neither WELCOME nor the RESULT that is waited for."""
        kind, sequence = header["type"], header["sequence"]
        if kind == ERROR and sequence in {NO_SEQUENCE, self.call * PLACES + 1}:
            raise JobError(f"the reducer says: {json.loads(payload)['message']}")
        # What is left is of calls that are over, or for workers that have another reducer.
        if kind not in {RESULT, ERROR, GOODBYE, PING, STRAGGLERS, SHARD_MAP, RETAINED, CREDIT}:
            raise JobError(f"the reducer says {kind}, which it may not")

    def all_reduce(self, buffer):
        """Replace FLOAT32 elements by their sums over all ranks."""
        view, total, number = memoryview(buffer).cast("B"), len(buffer) * 4, self.call * PLACES + 1
        common = {"sequence": number, "total_bytes": total, "dtype": FLOAT32, "op": SUM}
        common |= {"wire_dtype": FLOAT32, "history": self.history}
        asked = total * 256 + FLOAT32 * 16 + SUM
        self.history = (self.history * 0x9E3779B97F4A7C15 + asked) % (1 << 64)
        self.cut(total)
        missing = {chunk: link for link in self.links for chunk in link.chunks}
        while missing:
            for link in self.links:
                self.refill(link, view, common)
            for link, header, payload in self.messages():
                start = header["offset"]
                chunk = start, start + header["nbytes"]
                if header["type"] != RESULT or header["sequence"] != number:
                    self.other(header, payload)
                elif missing.get(chunk) is link and len(payload) == header["nbytes"]:
                    view[slice(*chunk)] = payload
                    del missing[chunk]
                    link.flying -= max(len(payload), 1024)
                else:
                    raise JobError(f"a RESULT at {start} fits no contribution")
        self.call += 1
        self.watermark = number + 1

    def cut(self, total):
        """Share a buffer out among the links, and cut each shard into chunks [8]."""
        turn, most = self.call % len(self.links), max(1, -(-total // (32 << 10)))
        owners = (self.links[turn:] + self.links[:turn])[:most]
        units = -(-total // 64)
        bounds = [min(total, 64 * -(-units * at // len(owners))) for at in range(len(owners) + 1)]
        for link, start, end in zip(owners, bounds, bounds[1:], strict=False):
            offsets = range(start, end, CHUNK)
            link.chunks = [(offset, min(offset + CHUNK, end)) for offset in offsets]
        if not total:
            owners[0].chunks = [(0, 0)]

    def refill(self, link, view, common):
        """Send as much as the window of a link has room for [5]."""
        while link.chunks:
            start, end = link.chunks[0]
            charge = max(end - start, 1024)
            if link.flying and link.flying + charge > link.window:
                break
            place = {"offset": start, "nbytes": end - start}
            link.send(CONTRIBUTION, view[start:end].tobytes(), **place, **common)
            link.flying += charge
            link.chunks.pop(0)

    def leave(self):
        """Say GOODBYE."""
        for link in self.links:
            with contextlib.suppress(OSError), link.socket:
                link.send(GOODBYE)


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
worker = None
try:
    worker = Worker(os.environ["REDUCTION_SERVERS"], os.environ["REDUCTION_JOB"], rank, size)
    for count in (1, 0, 1000, 300_000, 16):
        buffer = array.array("f", (at % 97 * (rank + 1) for at in range(count)))
        worker.all_reduce(buffer)
        if any(sum_ != at % 97 * size * (size + 1) // 2 for at, sum_ in enumerate(buffer)):
            raise JobError(f"the sums of {count} elements are wrong")
    print(f"rank {rank}: all sums are right")
except (JobError, OSError) as error:
    sys.exit(f"rank {rank}: {error}")
finally:
    if worker is not None:
        worker.leave()
