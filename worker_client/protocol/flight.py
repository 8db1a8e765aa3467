"""What a session asks for, and what it hears of its flight (sans I/O).

The rules are those of `docs/protocol.md`, section 5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from reducer.wire.authentication import prove_resume
from reducer.wire.messages import Stream, encode

if TYPE_CHECKING:
    from reducer.errors import ReductionError
    from reducer.wire.header import Buffer, Header
    from worker_client.protocol.operation import Operation, Unfinished


class Send(NamedTuple):
    """Hand a message to the reducer at the other end of a link."""

    link: int
    header: bytes
    payload: Buffer | None


class LinkShard(NamedTuple):
    """A part of a buffer that travels over one link: a shard.

    Attributes:
        link: index of the link.
        start, end: within the buffer, bytes.
    """

    link: int
    start: int
    end: int


class Carried(NamedTuple):
    """A chunk that was assigned to a link, of an all-reduce that some rank may not have finished.

    Attributes:
        sequence, epoch: of the all-reduce.
        offset: of the chunk within the buffer, bytes.
        home: the link that the plan gave it to.
        number: of the chunk within its shard.
        done: whether its result is here.
    """

    sequence: int
    epoch: int
    offset: int
    home: int
    number: int
    done: bool


class LinkStats(NamedTuple):
    """What is known about a link.

    Attributes:
        window: bytes that may be in flight.
        in_flight: bytes of the window that contributions without a result take.
        bytes_sent, bytes_received: of contributions and of results, all in all.
        results: how many came.
        rtt_s: time from sending a contribution to its result, smoothed as TCP does; 0: unknown.
        min_rtt_s: the shortest such time since `measure_anew`; 0: unknown.
        measured: bytes received since then.
    """

    window: int
    in_flight: int
    bytes_sent: int
    bytes_received: int
    results: int
    rtt_s: float
    min_rtt_s: float
    measured: int = 0


class Finish(NamedTuple):
    """End an all-reduce: its buffer holds the result, or `error` says why not."""

    operation: Operation
    error: ReductionError | None


class Connect(NamedTuple):
    """Add a connection; the link that it is of counts them in order."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a worker says of a link's connection that is to go on over another one.

    Attributes:
        header: of the RESUME, but for the bytes read.
        ticket: of the link.
        secret: of the job, if the reducer demands a proof.
    """

    header: Header
    ticket: str
    secret: bytes = field(repr=False)

    def message(self, number: int, attempt: int, read: int) -> tuple[bytes, bytes]:
        """Return the header and the payload of a RESUME.

        Args:
            number: of the stream; 0 is the link's first connection.
            attempt: which RESUME for that connection this is, from 1.
            read: bytes that were read over it.
        """
        proof = ""
        if self.secret:
            proof = prove_resume(self.secret, self.ticket, number, attempt, read)
        body = encode(Stream(self.ticket, number, proof, attempt))
        return self.header._replace(offset=read).pack(), body


class MakeResumable(NamedTuple):
    """Have a link's connections go on over others when they break.

    Attributes:
        link: which.
        resumption: what the others begin with.
    """

    link: int
    resumption: Resumption


class AddStreams(NamedTuple):
    """Give a link further streams: connections that begin with a message, and carry chunks.

    Attributes:
        link: which.
        header: of all of these messages.
        payloads: of each.
    """

    link: int
    header: bytes
    payloads: tuple[bytes, ...]


class Reset(NamedTuple):
    """Close a link's connections with all that they have yet to send, and connect anew.

    Nothing reads the callers' memory for it from then on.
    """

    link: int


class HandOver(NamedTuple):
    """Have these calls brought to their end by other means, in this order: no reducer is left."""

    calls: list[Unfinished]


Action = Send | Finish | Connect | MakeResumable | AddStreams | Reset | HandOver
