"""A TCP proxy with faults that are switched on and off while it runs.

Workers connect to `Proxy.address` instead of the reducer. "up" is from the worker to the reducer,
"down" from the reducer to the worker. A fault holds for the connections that exist and for those
that come. Every method may be called from any thread, and has taken effect when it returns; what
waits for its time, in a delay or at a rate, notices within 10 ms.
"""

import threading
from typing import Literal, NamedTuple

from tests.faults.relay import Relay
from tests.faults.stream import RECORD_BYTES, Shot

Way = Literal["up", "down"]
Direction = Literal["up", "down", "both"]


class Counts(NamedTuple):
    """What a proxy has done since its start.

    Attributes:
        connections: accepted from workers.
        up_bytes, down_bytes: passed on, duplicates included.
        cuts: connections that it has ended.
        flips: bits that it has flipped.
        duplicated_bytes: passed on twice.
    """

    connections: int
    up_bytes: int
    down_bytes: int
    cuts: int
    flips: int
    duplicated_bytes: int


class Proxy:
    """A proxy in front of one reducer, as a context manager; at its end all connections are reset.

    Args:
        target: the reducer's IPv4 ``host:port``.
        seed: of the jitter.

    Attributes:
        address: where workers connect, ``127.0.0.1:PORT``.
    """

    def __init__(self, target, seed=0):
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._seed = seed

    def __enter__(self):
        self._relay = Relay(self._target, self._seed)
        self.address = f"127.0.0.1:{self._relay.port}"
        self.restore()
        return self

    def __exit__(self, *exc_info):
        self._relay.close()

    @property
    def counts(self):
        """What it has done so far; what a peer has received is counted."""

        async def count():
            up, down = self._relay.lines["up"], self._relay.lines["down"]
            return Counts(
                connections=self._relay.accepted,
                up_bytes=up.passed,
                down_bytes=down.passed,
                cuts=self._relay.cuts + up.cuts + down.cuts,
                flips=up.flips + down.flips,
                duplicated_bytes=up.duplicated + down.duplicated,
            )

        return self._relay.call(count())

    def shares(self, direction):
        """Return how many bytes each connection has passed on, in the order in which they came."""

        async def count():
            return [pipe.passed for pipe in self._relay.lines[direction].pipes]

        return self._relay.call(count())

    # -- faults that last -----------------------------------------------------------------------

    def delay(self, direction, delay_s, jitter_s=0.0):
        """Pass bytes on later, in order.

        Args:
            direction: of the bytes.
            delay_s: by how many seconds; 0 ends the fault.
            jitter_s: up to how many seconds more, drawn evenly for each piece that is read.

        Raises:
            ValueError: a time is negative, or there is no such direction.
        """
        if delay_s < 0 or jitter_s < 0:
            raise ValueError(f"times are not negative, got {delay_s} and {jitter_s}")

        def change(line):
            line.delay_s, line.jitter_s = delay_s, jitter_s

        self._change(direction, change)

    def throttle(self, direction, bytes_per_s):
        """Read no faster than this, all connections of a direction together.

        Nothing is stored: what cannot pass stays with its sender.

        Args:
            direction: of the bytes.
            bytes_per_s: the rate; None ends the fault.

        Raises:
            ValueError: the rate is not above 0, or there is no such direction.
        """
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"a rate is above 0, got {bytes_per_s}")
        self._change(direction, lambda line: setattr(line, "bytes_per_s", bytes_per_s))

    def blackhole(self, direction):
        """Pass nothing on, neither bytes nor the end of a stream: a partition.

        Connections stay as they are; new ones are accepted, as a handshake that TCP goes on trying,
        but do not reach the reducer. What is held is passed on after `heal`, as TCP would send it
        again.

        Raises:
            ValueError: there is no such direction.
        """
        self._change(direction, lambda line: line.open.clear())

    def heal(self, direction="both"):
        """End a partition.

        Raises:
            ValueError: there is no such direction.
        """
        self._change(direction, lambda line: line.open.set())

    def refuse(self):
        """Refuse new connections, as a host does where nobody listens; others go on."""
        self._relay.call(self._relay.refuse())

    def restore(self):
        """Accept connections, and end every other fault; shots not yet fired never are."""
        self._relay.call(self._relay.restore())

    # -- faults that happen once ------------------------------------------------------------------

    def cut_latest(self):
        """Reset the connection that was accepted last, of those that are open."""
        self._relay.call(self._relay.cut(1))

    def cut(self, direction="up", *, mid_frame=None, after=b""):
        """Reset all connections now or, with `mid_frame`, one of them at a certain byte.

        Args:
            direction: of the bytes that are counted.
            mid_frame: exactly so many bytes more reach the peer first. The first connection to pass
                bytes is cut.
            after: count from the end of the next occurrence of these bytes.

        Returns:
            An event that is set when it has happened.

        Raises:
            ValueError: `mid_frame` is negative, or there is no such direction.
        """
        if mid_frame is not None:
            return self._arm(direction, Shot("cut", mid_frame, after))
        self._relay.call(self._relay.cut())
        done = threading.Event()
        done.set()
        return done

    def flip(self, direction, offset=0, bit=0, *, after=b""):
        """Flip one bit of one connection's stream.

        Args:
            direction: of the stream.
            offset: bytes that pass before the one that is hit, from now on. The first connection to
                pass bytes is hit.
            bit: which of its bits, 0 for the lowest to 7.
            after: count from the end of the next occurrence of these bytes.

        Returns:
            An event that is set when it has happened.

        Raises:
            ValueError: offset or bit cannot be, or there is no such direction.
        """
        if not 0 <= bit < 8:
            raise ValueError(f"a byte has bits 0 to 7, got {bit}")
        return self._arm(direction, Shot("flip", offset, after, bit))

    def duplicate(self, direction, nbytes, *, offset=0, after=b""):
        """Pass some bytes of one connection's stream on twice, the second time right after.

        Args:
            direction: of the stream.
            nbytes: how many, up to 64 KiB.
            offset: bytes that pass before them, from now on. The first connection to pass bytes is
                hit.
            after: count from the end of the next occurrence of these bytes.

        Returns:
            An event that is set when it has happened.

        Raises:
            ValueError: offset or nbytes cannot be, or there is no such direction.
        """
        if not 0 < nbytes <= RECORD_BYTES or offset < 0:
            raise ValueError(f"1 to {RECORD_BYTES} bytes can be repeated, got {nbytes}")
        return self._arm(direction, Shot("duplicate", offset + nbytes, after, nbytes))

    def _change(self, direction, change):
        if direction not in {"up", "down", "both"}:
            raise ValueError(f"directions are up, down and both, got {direction!r}")

        async def apply():
            for way, line in self._relay.lines.items():
                if direction in {way, "both"}:
                    change(line)

        self._relay.call(apply())

    def _arm(self, direction, shot):
        if direction not in self._relay.lines or shot.offset < 0:
            raise ValueError(f"bytes to come, up or down, got {shot.offset} and {direction!r}")
        self._change(direction, lambda line: line.shots.append(shot))
        return shot.fired
