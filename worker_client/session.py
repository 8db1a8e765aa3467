"""The worker's protocol logic: join, window, results, failures, deadlines (sans I/O).

Events and `now` go in, actions come out; the rules are those of `reducer/wire/README.md`.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import (
    MismatchError,
    ReducerLostError,
    ReductionError,
    ReductionTimeout,
    RemoteProtocolError,
)
from reducer.wire.constants import MAX_CHUNK_BYTES, MAX_ROUNDS_AHEAD, NO_SEQUENCE, MessageType
from reducer.wire.header import Buffer, Header, check_chunk, fingerprint
from reducer.wire.layout import auto_chunk_bytes, auto_chunk_limit, charge, chunks
from reducer.wire.messages import (
    Hello,
    Welcome,
    decode,
    decode_error,
    encode,
    encode_error,
)
from reducer.wire.states import LinkState, Role, after
from worker_client.link import Link

if TYPE_CHECKING:
    from collections.abc import Callable

    from reducer.wire.layout import Chunk
    from worker_client.operation import Operation

GRACE_S = 1.0  # after a deadline: time for a reducer to say who is missing
_NAMES_KEPT = 4096

log = logging.getLogger(__name__)


class Send(NamedTuple):
    """Hand a message to the reducer at the other end of a link."""

    link: int
    header: bytes
    payload: Buffer | None


class Finish(NamedTuple):
    """An all-reduce has ended: its buffer holds the result, or `error` says why not."""

    operation: Operation
    error: ReductionError | None


Action = Send | Finish


@dataclass(frozen=True)
class Settings:
    """What a session must know; every rank of a job gives the same but for `rank`.

    Attributes:
        job, generation, rank, world_size: who we are.
        reducers: addresses, ``host:port``, in the same order at every rank.
        window_bytes: bytes in flight over all reducers.
        chunk_bytes: forced chunk size, 0 for the rule of the protocol.
    """

    job: str
    generation: int
    rank: int
    world_size: int
    reducers: tuple[str, ...]
    window_bytes: int
    chunk_bytes: int = 0

    def window_per_reducer(self) -> int:
        """Share of one reducer: never below two chunks, so that sending and reducing overlap."""
        chunk = self.chunk_bytes or auto_chunk_limit(len(self.reducers))
        return max(self.window_bytes // len(self.reducers), 2 * charge(chunk))


class Session:
    """One worker's part in one job."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        window = settings.window_per_reducer()
        self.links = [
            Link(index, address, window) for index, address in enumerate(settings.reducers)
        ]
        # Ranks start at different reducers, so that no reducer is hit by all of them at once.
        start = settings.rank % len(self.links)
        self._rotated = self.links[start:] + self.links[:start]
        self._active: dict[int, Operation] = {}  # in the order of their sequence numbers
        self._next_sequence = 0
        self._names: dict[str, str] = {}  # of the latest all-reduces, by tag as errors print it
        self._identity = Header(
            MessageType.HELLO,
            job=fingerprint(settings.job),
            generation=settings.generation,
            rank=settings.rank,
        )
        self._handlers: dict[MessageType, Callable[[Link, Header, Buffer], list[Action]]] = {
            MessageType.WELCOME: self._welcome,
            MessageType.RESULT: self._result,
            MessageType.ERROR: self._error,
            MessageType.GOODBYE: self._goodbye,
            MessageType.PING: lambda _link, _header, _payload: [],
        }

    # -- what the client asks -----------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """Whether every reducer has welcomed this worker."""
        return all(link.member for link in self.links)

    @property
    def refusal(self) -> ReductionError | None:
        """Why a reducer refused this worker, if one did."""
        return next((link.refusal for link in self.links if link.refusal is not None), None)

    @property
    def active(self) -> int:
        """Number of all-reduces in progress."""
        return len(self._active)

    @property
    def watermark(self) -> int:
        """Every all-reduce below this number is finished here."""
        return next(iter(self._active), self._next_sequence)

    @property
    def _limit(self) -> int:
        """Sequence number from which on nothing may be said yet."""
        return self.watermark + MAX_ROUNDS_AHEAD

    def next_deadline(self) -> float | None:
        """Time of the next `tick` that matters, in seconds of the caller's clock."""
        return min((operation.deadline for operation in self._active.values()), default=None)

    # -- events -------------------------------------------------------------------------------

    def connected(self, index: int) -> list[Action]:
        """Introduce ourselves to a reducer that the transport has reached."""
        link, s = self.links[index], self.settings
        actions = self.disconnected(index, "was connected anew") if link.up else []
        link.up = True
        link.refusal = None
        link.state = LinkState.JOINING
        body = Hello(
            job=s.job,
            world_size=s.world_size,
            reducers=len(self.links),
            reducer_index=index,
            chunk_bytes=s.chunk_bytes,
        )
        header = self._identity._replace(watermark=self.watermark, window=s.window_per_reducer())
        return [*actions, Send(index, header.pack(), encode(body))]

    def disconnected(self, index: int, reason: str) -> list[Action]:
        """Fail every all-reduce that needs a reducer which the transport has lost."""
        link = self.links[index]
        needed = {operation.sequence for operation, _ in link.queue}
        needed.update(sequence for sequence, _ in link.sent)
        link.reset()
        actions: list[Action] = []
        for sequence in sorted(needed & self._active.keys()):
            operation = self._active[sequence]
            actions += self._fail(operation, self._lost(link, reason), told_by=link)
        return actions + self._pump()

    def submit(self, operation: Operation, now: float) -> list[Action]:
        """Start an all-reduce; the order of calls must be the same at every rank."""
        operation.sequence = self._next_sequence
        self._next_sequence += 1
        operation.deadline = now + operation.timeout_s
        self._active[operation.sequence] = operation
        if operation.name:
            self._remember(operation)
        total = operation.view.nbytes
        chunk_bytes = self.settings.chunk_bytes or auto_chunk_bytes(total, len(self.links))
        plan = list(chunks(total, len(self.links), chunk_bytes))
        for index in sorted({chunk.reducer for chunk in plan}):
            link = self.links[index]
            if link.state is not LinkState.MEMBER:
                why = "is shutting down" if link.state is LinkState.DRAINING else "is not connected"
                return self._fail(operation, link.refusal or self._lost(link, why))
        operation.remaining = len(plan)
        for chunk in plan:
            self.links[chunk.reducer].queue.append((operation, chunk))
        return self._pump()

    def receive(self, index: int, frame: Buffer, payload: Buffer) -> list[Action]:
        """Take one message from a reducer."""
        link = self.links[index]
        try:
            header = Header.unpack(frame)
            state = after(link.state, Role.REDUCER, header.type)
            if state is None:
                raise RemoteProtocolError(f"{header.type.name} is not allowed in {link.state.name}")
            actions = self._handlers[header.type](link, header, payload)
        except ReductionError as error:
            log.warning("reducer %s: %s", link.address, error)
            if not link.member:
                link.state = LinkState.STRANGER
                link.refusal = error
            return self._fail_all(error)
        link.state = state
        return actions + self._pump()

    def tick(self, now: float) -> list[Action]:
        """Do what is due at `now`, in seconds of the same clock as for `submit`."""
        actions: list[Action] = []
        for operation in list(self._active.values()):
            if now >= operation.deadline:
                actions += self._expire(operation, now)
        return actions + self._pump()

    def close(self, error: ReductionError) -> list[Action]:
        """Leave the job; whatever is in progress fails with `error`."""
        active = list(self._active.values())
        actions: list[Action] = [self._finish(operation, error) for operation in active]
        goodbye = self._header(MessageType.GOODBYE).pack()
        for link in self.links:
            if link.member:
                link.state = LinkState.LEFT
                actions.append(Send(link.index, goodbye, None))
        return actions

    # -- messages -----------------------------------------------------------------------------

    def _welcome(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        decode(Welcome, payload)
        link.window = header.window
        owed, link.owed = link.owed, {}
        return [self._abort(link, sequence, error) for sequence, error in owed.items()]

    def _result(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        check_chunk(header, len(payload), MAX_CHUNK_BYTES)
        operation = self._active.get(header.sequence)
        chunk = link.settle(header.sequence, header.offset)
        if operation is None or chunk is None:
            log.debug("dropped a result of all-reduce %d, which is over", header.sequence)
            return []
        expected = (operation.view.nbytes, chunk.nbytes, operation.dtype, operation.op)
        if (header.total_bytes, header.nbytes, header.dtype, header.op) != expected:
            raise RemoteProtocolError(f"the result does not fit {operation}")
        operation.view[chunk.offset : chunk.offset + chunk.nbytes] = payload
        operation.remaining -= 1
        return [] if operation.remaining else [self._finish(operation, None)]

    def _error(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        error = self._in_own_words(decode_error(payload, header.sequence))
        if link.state is LinkState.JOINING:
            link.refusal = error
        if header.sequence == NO_SEQUENCE:
            return self._fail_all(error)
        operation = self._active.get(header.sequence)
        if operation is None:
            return []
        link.forget(header.sequence)
        unknown = isinstance(error, ReductionTimeout) and not error.missing
        if (
            operation.overdue
            and unknown
            and any(other.waits_for(header.sequence) for other in self.links)
        ):
            return []  # this reducer does not know who is missing; another one may
        return self._fail(operation, error, told_by=link)

    def _goodbye(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        del header, payload
        log.warning("reducer %s is shutting down", link.address)
        return []

    # -- ends ---------------------------------------------------------------------------------

    def _expire(self, operation: Operation, now: float) -> list[Action]:
        error = ReductionTimeout(
            f"{operation}: not done after {operation.timeout_s:g} s at rank {self.settings.rank}",
            sequence=operation.sequence,
        )
        waiting = [link for link in self.links if link.waits_for(operation.sequence)]
        if operation.overdue or not waiting:
            return self._fail(operation, error)
        operation.overdue = True
        operation.deadline = now + GRACE_S
        return [self._abort(link, operation.sequence, error) for link in waiting]

    def _fail_all(self, error: ReductionError) -> list[Action]:
        actions: list[Action] = []
        for operation in list(self._active.values()):
            actions += self._fail(operation, error)
        return actions

    def _fail(
        self, operation: Operation, error: ReductionError, told_by: Link | None = None
    ) -> list[Action]:
        """End an all-reduce badly, and tell the other reducers that it cannot be finished."""
        actions: list[Action] = [self._finish(operation, error)]
        sequence = operation.sequence
        if sequence >= self._limit:
            return actions  # too far ahead for a reducer to know; our watermark tells it in time
        for link in self.links:
            link.forget(sequence)
            if not link.member:
                link.owed = {s: e for s, e in link.owed.items() if s >= self.watermark}
                link.owed[sequence] = error
            elif link is not told_by:
                actions.append(self._abort(link, sequence, error))
        return actions

    def _finish(self, operation: Operation, error: ReductionError | None) -> Finish:
        operation.finished = True
        del self._active[operation.sequence]
        if error is not None:
            error = copy.copy(error)
            error.name = operation.name
            error.sequence = operation.sequence
        return Finish(operation, error)

    def _pump(self) -> list[Action]:
        """Send what the windows have room for."""
        actions: list[Action] = []
        for link in self._rotated:
            while (item := link.next_chunk(self._limit)) is not None:
                actions.append(self._contribution(link, *item))
        return actions

    def _contribution(self, link: Link, operation: Operation, chunk: Chunk) -> Send:
        header = self._header(MessageType.CONTRIBUTION)._replace(
            sequence=operation.sequence,
            total_bytes=operation.view.nbytes,
            offset=chunk.offset,
            nbytes=chunk.nbytes,
            dtype=operation.dtype,
            op=operation.op,
            wire_dtype=operation.dtype,
            tag=operation.tag,
        )
        view = operation.view[chunk.offset : chunk.offset + chunk.nbytes]
        return Send(link.index, header.pack(), view)

    def _abort(self, link: Link, sequence: int, error: ReductionError) -> Send:
        header = self._header(MessageType.ABORT)._replace(sequence=sequence)
        return Send(link.index, header.pack(), encode_error(error))

    def _header(self, kind: MessageType) -> Header:
        return self._identity._replace(type=kind, watermark=self.watermark)

    # -- errors in the caller's words ---------------------------------------------------------

    def _lost(self, link: Link, why: str) -> ReducerLostError:
        return ReducerLostError(f"reducer {link.address} {why}", reducer=link.address)

    def _in_own_words(self, error: ReductionError) -> ReductionError:
        """Put the caller's names for all-reduces in place of the tags that a reducer saw."""
        if isinstance(error, MismatchError) and error.field == "name":
            expected = self._names.get(str(error.expected), error.expected)
            got = self._names.get(str(error.got), error.got)
            return MismatchError(
                f"all-reduce {error.sequence}: ranks call it by different names, so their order "
                f"differs: rank {error.rank} says {expected!r}, "
                f"rank {error.other_rank} says {got!r}",
                field=error.field,
                rank=error.rank,
                other_rank=error.other_rank,
                expected=expected,
                got=got,
                sequence=error.sequence,
            )
        return error

    def _remember(self, operation: Operation) -> None:
        self._names[f"#{operation.tag:016x}"] = str(operation.name)
        if len(self._names) > _NAMES_KEPT:
            del self._names[next(iter(self._names))]
