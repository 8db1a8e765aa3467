"""A worker that breaks the rules, or strangers, until its standard input ends.

    python -m hostile.intruder flood 127.0.0.1:5555 [KEYS]

It prints ``ready``, and at the end, as JSON, how often it did what it does.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

from hostile.lines import Bare, Encrypted, Line
from hostile.zmtp import STRANGERS, mutated
from reducer.wire.constants import PEER_TIMEOUT_MS, DType, MessageType, ReduceOp
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import Hello, encode

CHUNK = 256 << 10
LARGEST_CHUNK = 1 << 20  # that its HELLO asks for, and tests send
WINDOW = 4 << 20
JOB = "intruder"
_HELD = 256  # connections of a crowd at a time
# Its multiples are close together times the golden ratio, modulo 2^64.
_CLOSE = min(range(1, 1 << 16), key=lambda at: at * 0x9E3779B97F4A7C15 % (1 << 64))


class Worker:
    """A worker that says anything: what the reducer says is read only if asked for."""

    def __init__(
        self,
        address: str,
        job: str,
        rank: int = 0,
        *,
        world_size: int = 2,
        window: int = WINDOW,
        patience_ms: int = PEER_TIMEOUT_MS,
        features: int = 0,
        keys: Path | None = None,
    ) -> None:
        self.line: Line = Bare(address) if keys is None else Encrypted(address, keys)
        self.common = Header(MessageType.HELLO, job=fingerprint(job), rank=rank)
        body = Hello(
            job=job,
            world_size=world_size,
            reducers=1,
            reducer_index=0,
            chunk_bytes=LARGEST_CHUNK,
            patience_ms=patience_ms,
            features=features,
        )
        self.say(self.common._replace(window=window).pack(), encode(body))

    def hear(self) -> tuple[Header, bytes]:
        """Return the next message."""
        header, payload = self.line.hear()
        return Header.unpack(header), payload

    def say(self, header: bytes, payload: bytes = b"") -> None:
        """Send a message; OSError: nobody takes it any more."""
        self.line.say(header, payload)

    def contribute(self, sequence: int, payload: bytes, offset: int = 0) -> None:
        """Send a chunk of a buffer of two to the 40th bytes."""
        header = self.common._replace(
            type=MessageType.CONTRIBUTION,
            sequence=sequence,
            total_bytes=1 << 40,
            offset=offset,
            nbytes=len(payload),
            dtype=DType.UINT8,
            op=ReduceOp.SUM,
            wire_dtype=DType.UINT8,
        )
        self.say(header.pack(), payload)

    def close(self) -> None:
        """Go without a word."""
        self.line.close()


@contextmanager
def _worker(address: str, keys: Path | None, world_size: int = 2) -> Iterator[Worker]:
    with closing(Worker(address, JOB, world_size=world_size, keys=keys)) as worker:
        worker.hear()
        yield worker


def _contribute(
    address: str,
    keys: Path | None = None,
    *,
    world_size: int = 1,
    times: int = 1,
    nbytes: int = CHUNK,
    apart: int = 0,
) -> None:
    """Join, contribute so many chunks, so far apart, read nothing, and go."""
    with _worker(address, keys, world_size) as worker:
        for chunk in range(times):
            worker.contribute(1, bytes(nbytes), chunk * apart)


def garbage(address: str, keys: Path | None = None) -> None:
    """Send headers of random bytes, random fields, and bodies that are none."""
    with _worker(address, keys) as worker:
        for _ in range(100):
            worker.say(os.urandom(96), os.urandom(1000))
            forged = worker.common.pack()[:5] + os.urandom(1) + b"\0\0" + os.urandom(88)
            worker.say(forged, os.urandom(1000))


Act: TypeAlias = "Callable[[str, Path | None], None] | partial[None]"
TENANTS: dict[str, Act] = {
    # Far beyond the window, to chunks that never get complete.
    "flood": partial(_contribute, world_size=2, times=1000, apart=CHUNK),
    # Alone, so that each chunk has a result at once.
    "stall": partial(_contribute, times=1000, apart=CHUNK),
    "disconnect": partial(_contribute, world_size=2, nbytes=1024),
    "garbage": garbage,
    "repeat": partial(_contribute, world_size=2, times=10_000, nbytes=64),
    # At the offsets of chunks, which `collide` compares with.
    "spread": partial(_contribute, times=2000, nbytes=1, apart=1 << 18),
    # At offsets that a map with the golden ratio's multiplier keeps close.
    "collide": partial(_contribute, times=2000, nbytes=1, apart=_CLOSE),
}


def mutate(address: str, keys: Path | None = None) -> None:
    """Come as a stranger who has half learned to speak, and go."""
    del keys
    mutated(address)


def spin(address: str, keys: Path | None = None) -> None:
    """Take processor time, and nothing of the reducer's."""
    del address, keys
    sum(range(10_000))


HASTY: dict[str, Act] = {"mutate": mutate, "spin": spin}


def _crowd(kind: str, address: str, stop: threading.Event) -> int:
    """Keep many connections of strangers, and make new ones when they are full."""
    count = 0
    held: list[socket.socket] = []
    while not stop.is_set():
        if len(held) >= _HELD:
            held.pop(0).close()
        with suppress(OSError):
            held.append(STRANGERS[kind](address))
            count += 1
        time.sleep(0.001)
    return count


def _wait(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


def main() -> None:
    kind, address, *keys = sys.argv[1:]
    stop = threading.Event()
    threading.Thread(target=_wait, args=[stop], daemon=True).start()
    print("ready", flush=True)
    if kind in STRANGERS:
        count = _crowd(kind, address, stop)
    else:
        count = 0
        while not stop.is_set():
            with suppress(OSError):  # it was dropped, or did not get in
                (TENANTS | HASTY)[kind](address, Path(*keys) if keys else None)
            count += 1
    print(json.dumps({"kind": kind, "count": count}), flush=True)


if __name__ == "__main__":
    main()
