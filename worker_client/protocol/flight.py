"""What a worker has in flight: the interface of `CompiledFlight`, and what a session asks for.

The rules are those of `reducer/wire/README.md`, section 5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reducer.wire.authentication import prove_resume
from reducer.wire.messages import Stream, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class Flight(Protocol):
    """All all-reduces and links of a worker.

    A result is kept after its all-reduce has ended here, until every rank has it: should its
    reducer be lost, another rank may need it from us, and the caller has its buffer back.

    Args:
        identity: header with the job, the generation and the rank of every contribution.

    Times are in seconds of the caller's clock.
    """

    def __init__(self, identity: Header) -> None: ...

    def add_link(self, window: int, keep: bool, in_place: bool = False) -> None:
        """Add a link, shut until `open`.

        Args:
            window: bytes that may be in flight.
            keep: whether to keep the results that come there.
            in_place: whether every all-reduce that needs the link ends with it. Then a transport
                may read its results straight into the buffers: nobody needs what was there.
        """

    @property
    def watermark(self) -> int:
        """Every all-reduce below this number is finished here."""

    @property
    def reached(self) -> int:
        """Every all-reduce below this number is finished at every rank, as far as is known."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of results that are kept."""

    def submit(
        self, operation: Operation, shards: Sequence[LinkShard], chunk_bytes: int, epoch: int
    ) -> None:
        """Queue an all-reduce.

        Args:
            operation: what is asked for, with a number above all before; some are left out.
            shards: what travels over which link: ascending, disjoint, together the whole buffer.
            chunk_bytes: size of every chunk but the last of each shard.
            epoch: version of the shard map.
        """

    def open(self, link: int) -> None:
        """Let contributions be sent to a reducer."""

    def set_calm(self, link: int, calm: bool) -> None:
        """Take PINGs without a body from a reducer whose latest one had none, or leave them."""

    def set_window(self, link: int, nbytes: int) -> None:
        """Change how many bytes may be in flight on a link."""

    def measure_anew(self, link: int) -> None:
        """Forget the shortest round trip of a link."""

    def stats(self, link: int) -> LinkStats:
        """Return what is known about a link."""

    def refill(self, now: float) -> list[Send]:
        """Return the contributions that the windows have room for.

        Every link gets a chunk before any gets a second one, so that all reducers have work early;
        another one is first for every rank, so that no reducer is hit by all of them at once.
        """

    def take(self, link: int, frame: Buffer, payload: Buffer, now: float) -> list[int] | None:
        """Take a message if it is a healthy result or a PING without news; else change nothing.

        Returns:
            Sequence numbers of the all-reduces that are now done; None if it is anything else.
        """

    def expects(self, link: int, sequence: int, offset: int) -> bool:
        """Whether the chunk at this offset is in flight on a link."""

    def waits_for(self, link: int, sequence: int) -> bool:
        """Whether any chunk of an all-reduce is in flight on a link."""

    def forget(self, link: int, sequence: int) -> None:
        """Expect and send nothing more of an all-reduce on a link."""

    def end(self, sequence: int) -> None:
        """End an all-reduce that has failed."""

    def needs(self, link: int) -> list[int]:
        """Return the all-reduces that lack a result of this link."""

    def shut(self, link: int) -> None:
        """Send nothing more over a link and expect nothing there, until it is opened anew.

        Its chunks wait to be moved.
        """

    def carried(self, link: int, sequence: int | None = None) -> list[Carried]:
        """Return the chunks of a link, of one all-reduce or all, with and without results."""

    def move(self, sequence: int, offset: int, link: int) -> None:
        """Assign a chunk to another link; it is sent there if its result is not here."""

    def kept(self, sequence: int, offset: int) -> tuple[bytes, Buffer] | None:
        """Return a result that is kept, as a header and the elements; None if it is not."""

    def confirm(self, reached: int) -> None:
        """Learn that every all-reduce below a number is finished at every rank."""


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


class Keep(NamedTuple):
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


Action = Send | Finish | Connect | Keep | AddStreams | Reset | HandOver
