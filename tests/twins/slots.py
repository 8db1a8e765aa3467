"""Members, rounds and slots in Python: the oracle of `reducer.engine._slots`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from reducer.engine.slots import (
    LATENESS_BYTES,
    MAX_MISSING,
    MOST_TIMES,
    PLACE_BYTES,
    RANK_BYTES,
    ROUND_BYTES,
    SLOT_BYTES,
    RoundTimes,
    check_agreement,
    check_size,
)
from reducer.engine.traffic import BUCKETS, Traffic
from reducer.errors import RankLostError, ReductionError
from reducer.wire.constants import NO_SEQUENCE, PLACES
from reducer.wire.header import Buffer, Header
from reducer.wire.layout import cost
from reducer.wire.states import LinkState
from tests.twins.lateness import Lateness

# Bytes of the records, as `slots.h` has them: of a chunk that is done, and of a record of payloads
# that waits for the next slot, alone and for each rank.
DONE_BYTES = 192
SPARE_RECORD_BYTES, SPARE_RANK_BYTES = 48, 9
NOTHING = RoundTimes(-1, 0, 0, 0, 0, 0, 0, 0, 0)


class Member:
    """One rank of a job, as the peer that speaks for it.

    Attributes:
        peer: the transport's name for its connection.
        window: bytes it may have in flight here.
        held: bytes of its window taken by contributions in open slots.
        watermark: every all-reduce below this number is finished at the worker.
        state: state of the link (`reducer.wire.states`).
    """

    __slots__ = ("held", "peer", "rank", "state", "watermark", "window")

    def __init__(self, peer: bytes, header: Header) -> None:
        self.peer = peer
        self.rank = header.rank
        self.window = header.window
        self.held = 0
        self.watermark = header.watermark
        self.state = LinkState.MEMBER


class Slot:
    """Contributions to one chunk, by rank, until all of them are in.

    A rank that holds the result already, from a reducer that is lost, cannot contribute any more:
    it claims so, and is asked for the result if others need it.

    Attributes:
        holders: ranks that hold the result.
        asked: the one that was asked for it, or None.
        alone_us: since when it waits for one rank alone, 0 for not yet.
    """

    __slots__ = ("alone_us", "asked", "first_rank", "holders", "missing", "nbytes", "payloads")

    def __init__(self, header: Header, world_size: int) -> None:
        self.nbytes = header.nbytes
        self.first_rank = header.rank
        self.missing = world_size
        self.payloads: list[Buffer | None] = [None] * world_size
        self.holders: list[int] = []
        self.asked: int | None = None
        self.alone_us = 0

    def ranks(self) -> Iterator[int]:
        return (rank for rank, payload in enumerate(self.payloads) if payload is not None)

    def lacks(self, rank: int) -> bool:
        return self.asked == rank or _waits(self, rank)


@dataclass(slots=True)
class Tally:
    """What the rounds of a job hold in all.

    Attributes:
        open: slots that wait for contributions.
        most: of these, at a time.
        missing: contributions that these wait for.
        done: slots whose result is on its way, until their round is forgotten.
    """

    open: int = 0
    most: int = 0
    missing: int = 0
    done: int = 0


class Round:
    """One all-reduce: what its first contribution settled, its open slots, its outcome.

    Attributes:
        first: header of the contribution that opened the round, None if an ABORT did.
        error: why the round failed, or None.
        times: when what happened to it so far, if that is kept.
        touched: which change of a round was the latest that could make this one lack a rank.
    """

    __slots__ = (
        *("_done", "_of", "_sequence", "_slots", "_spoke", "_tally", "_error_sent"),
        *("_world_size", "error", "first", "times", "touched"),
    )

    def __init__(self, sequence: int, first: Header | None, of: Rounds) -> None:
        self.first = first
        self.error: ReductionError | None = None
        self.touched = 0
        self.times = NOTHING
        self._sequence = sequence
        self._of = of
        self._tally = of.tally
        self._world_size = of.world_size
        self._slots: dict[int, Slot] = {}
        self._done: set[int] = set()  # offsets whose result was sent
        # In exits: when ranks have said something, first and last, and were sent the error.
        self._spoke: dict[int, tuple[int, int]] = {}
        self._error_sent: dict[int, int] = {}

    @property
    def open(self) -> int:
        return len(self._slots)

    def is_open(self, offset: int) -> bool:
        return offset in self._slots

    def place(self, header: Header, payload: Buffer | None) -> Slot:
        check_agreement(header, self.first)
        slot = self._slots.get(header.offset)
        if slot is None:
            slot = self._slots[header.offset] = Slot(header, self._world_size)
            self._tally.open += 1
            self._tally.most = max(self._tally.most, self._tally.open)
            self._tally.missing += self._world_size
            self._of.touch(self._sequence)
        check_size(header, slot.first_rank, slot.nbytes)
        if payload is None:
            slot.holders.append(header.rank)
        else:
            slot.payloads[header.rank] = payload
        slot.missing -= 1
        self._tally.missing -= 1
        if payload is not None:
            alone_us = slot.alone_us if slot.missing == 0 and not slot.holders else 0
            now_us = self._of.now_us
            self._of.lateness.record(header.rank, self._sequence, now_us, alone_us)
            self._of.bytes_in += len(payload)
            self.times = _noted(self.times, slot, header.rank, now_us)
            if slot.missing == 1:
                slot.alone_us = now_us
        return slot

    def ask(self, offset: int, rank: int) -> None:
        self._slots[offset].asked = rank
        self._of.touch(self._sequence)

    def asked(self, offset: int) -> Slot | None:
        slot = self._slots.get(offset)
        return None if slot is None or slot.asked is None else slot

    def holds(self, offset: int, rank: int) -> bool:
        slot = self._slots.get(offset)
        return offset in self._done or (slot is not None and not _waits(slot, rank))

    def finish(self, offset: int, receivers: int) -> None:
        self._of.bytes_out += receivers * self._slots[offset].nbytes
        self._close(self._slots.pop(offset))
        self.times = self.times._replace(done_us=self._of.now_us)
        self._done.add(offset)
        self._tally.done += 1

    def fail(self, error: ReductionError) -> Iterator[tuple[int, int]]:
        self.error = error
        error.__traceback__ = None  # its frames would keep the payloads
        self._of.settle(self._sequence)
        return self.drop()

    def drop(self) -> Iterator[tuple[int, int]]:
        slots, self._slots = self._slots, {}
        for slot in slots.values():
            self._close(slot)
        return (
            (rank, cost(len(slot.payloads[rank] or b"")))
            for slot in slots.values()
            for rank in slot.ranks()
        )

    def _close(self, slot: Slot) -> None:
        self._tally.open -= 1
        self._tally.missing -= slot.missing

    def forget(self) -> None:
        self.drop()
        self._tally.done -= len(self._done)

    def missing_ranks(self) -> tuple[int, ...]:
        first = [self._slots[at] for at in sorted(self._slots)[:1]]
        ranks = range(self._world_size)
        missing = (rank for rank in ranks if any(slot.lacks(rank) for slot in first))
        return tuple(islice(missing, MAX_MISSING))

    def waits_for(self, rank: int) -> bool:
        return any(slot.lacks(rank) for slot in self._slots.values())

    def left_since(self, rank: int) -> RankLostError | None:
        at, reason = self._of.latest_exit(rank)
        return reason if self._spoke.get(rank, (at, at))[0] < at else None

    def note_message(self, rank: int) -> None:
        now = self._of.exits
        self._spoke[rank] = self._spoke.get(rank, (now, now))[0], now

    def has_begun(self, rank: int) -> bool:
        return rank in self._spoke and self._spoke[rank][1] >= self._of.latest_exit(rank)[0]

    def without_error(self) -> set[int]:
        begun = filter(self.has_begun, self._spoke)
        sent = self._error_sent
        return {rank for rank in begun if sent.get(rank, -1) < self._of.latest_exit(rank)[0]}

    def note_error_sent(self, rank: int) -> None:
        self._error_sent[rank] = self._of.exits


class Rounds:
    """The rounds of one job, by sequence number.

    Args:
        world_size: number of ranks of the job.

    Attributes:
        reserved: bytes that contributions and records of the job may take.
        limit: rounds that there may be.
        exits: how often a rank has left the job.
        now_us: when what is placed next has come, in microseconds of a monotonic clock.
        keeps_times: whether `take_times` is asked.
        bytes_in, bytes_out: of contributions, and of results to all ranks.
        took_us: how long each all-reduce took that is over and did not fail.
        lateness: of the ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.reserved = 0
        self.now_us = 0
        self.lateness = Lateness(world_size)
        self.limit = NO_SEQUENCE
        self.exits = 0
        self.world_size = world_size
        self.tally = Tally()
        self._rounds: dict[int, Round] = {}
        self._order: list[int] = []  # a heap of their sequence numbers
        self._live: dict[int, Round] = {}  # those that have not failed, the latest touched last
        self._touches = 0
        self._left: dict[int, tuple[int, RankLostError]] = {}  # by rank, when it left last, and why
        self._swept: dict[int, int] = {}  # by rank, the latest touch that `waiting_for` has seen
        self.keeps_times = False
        self._ended: list[RoundTimes] = []
        self.bytes_in = self.bytes_out = 0
        self.took_us: list[int] = []

    def keep_times(self) -> None:
        self.keeps_times = True

    def take_times(self) -> list[RoundTimes]:
        ended, self._ended = self._ended, []
        return ended

    def traffic(self) -> Traffic:
        buckets = Counter(_bucket(us) for us in self.took_us)
        number, us = len(self.took_us), sum(self.took_us)
        return Traffic(self.bytes_in, self.bytes_out, number, us, buckets)

    def used(self) -> int:
        rounds = len(self._rounds) * (ROUND_BYTES + self.world_size * RANK_BYTES)
        waiting = self.tally.open * SLOT_BYTES + self.tally.missing * PLACE_BYTES
        lateness = self.world_size * LATENESS_BYTES if self._touches else 0
        # The structs keep as many records of payloads as they have needed at a time.
        spare = (self.tally.most - self.tally.open) * (
            SPARE_RECORD_BYTES + self.world_size * SPARE_RANK_BYTES
        )
        return lateness + rounds + waiting + self.tally.done * DONE_BYTES + spare

    @property
    def oldest(self) -> int | None:
        return self._order[0] if self._order else None

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._rounds))

    def __len__(self) -> int:
        return len(self._rounds)

    def get(self, sequence: int) -> Round | None:
        return self._rounds.get(sequence)

    def live(self) -> list[tuple[int, Round]]:
        return sorted(self._live.items())

    def between(self, low: int, high: int) -> list[tuple[int, Round]]:
        if high - low < len(self._live):
            numbers = range(low, high + 1)
            return [(at, found) for at in numbers if (found := self._live.get(at)) is not None]
        return [(at, found) for at, found in self.live() if low <= at <= high]

    def waiting_for(self, rank: int) -> list[tuple[int, Round]]:
        since, self._swept[rank] = self._swept.get(rank, 0), self._touches
        found = []
        for sequence, round_ in reversed(self._live.items()):
            if round_.touched <= since:
                break
            if round_.waits_for(rank):
                found.append((sequence, round_))
        return sorted(found)

    def leave(self, rank: int, reason: RankLostError) -> None:
        self.exits += 1
        self._left[rank] = self.exits, reason

    def latest_exit(self, rank: int) -> tuple[int, RankLostError | None]:
        return self._left.get(rank, (0, None))

    def touch(self, sequence: int) -> None:
        self._touches += 1
        round_ = self._live.pop(sequence)
        round_.touched = self._touches
        self._live[sequence] = round_

    def settle(self, sequence: int) -> None:
        self._live.pop(sequence, None)

    def open(self, sequence: int, first: Header | None) -> Round:
        round_ = self._rounds[sequence] = self._live[sequence] = Round(sequence, first, self)
        self.touch(sequence)
        heappush(self._order, sequence)
        return round_

    def discard_oldest(self) -> None:
        sequence = heappop(self._order)
        self.settle(sequence)
        round_ = self._rounds.pop(sequence)
        if self.keeps_times and len(self._ended) < MOST_TIMES and round_.times.begun_us:
            self._ended.append(round_.times._replace(sequence=sequence))
        if round_.error is None and round_.times.done_us and sequence % PLACES:
            self.took_us.append(round_.times.done_us - round_.times.begun_us)
        round_.forget()


def _bucket(us: int) -> int:
    """Return the eighth of an octave that a duration is in."""
    octave = 0
    while us >= 1 << octave + 1:
        octave += 1
    eighth = sum(8 * us >= (8 + n) << octave for n in range(1, 8))
    return min(8 * octave + eighth, BUCKETS - 1)


def _noted(times: RoundTimes, slot: Slot, rank: int, now_us: int) -> RoundTimes:
    """Return a round's times once a contribution has come, of which the slot knows already."""
    if not times.begun_us:
        times = times._replace(begun_us=now_us, first_rank=rank)
    if slot.missing or slot.holders:
        return times
    times = times._replace(chunks=times.chunks + 1, nbytes=times.nbytes + slot.nbytes)
    alone_us = slot.alone_us or now_us
    if times.complete_us and now_us - alone_us <= times.complete_us - times.alone_us:
        return times
    return times._replace(alone_us=alone_us, complete_us=now_us, last_rank=rank)


def _waits(slot: Slot, rank: int) -> bool:
    return slot.payloads[rank] is None and rank not in slot.holders
