"""Keeps connections in bounds: how many, how long without a job, and what they make a reducer hold.

The guard looks at them several times a second, and ends those that go beyond what was agreed. The
rules are those of `docs/protocol.md`, section 5. How long a message may be, and what a stranger may
have under way, `loop.c` sees to at once. One guard belongs to one thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from reducer.clock import is_lost
from reducer.engine.actions import Close
from reducer.errors import CapacityError
from reducer.tcp_connections import Port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reducer.engine.actions import Action
    from reducer.engine.engine import Engine
    from reducer.engine.jobs import Job
    from reducer.engine.limits import ConnectionLimits
    from reducer.engine.slots import Member
    from reducer.runtime.transport import Line, Load, Transport

LOOK_S = 0.1
LOOK_SOON_S = 0.02  # while there are strangers, or much waits that is of somebody
FAREWELL_S = 1.0  # for a peer that was dropped to read why
UNJOINED_BYTES = 16 << 10  # a handshake, heartbeats, and a HELLO several times
SLACK_BYTES = 256 << 10  # of each member: control messages, and parts of frames
MEMBERS_PER_LOOK = 128  # of all jobs: where there are more, jobs take turns
UNJOINED_PER_LOOK = 64  # of those that hold nothing much, to look at thousands in turn


@dataclass(slots=True, eq=False)
class Connection:
    """What the guard knows of one connection.

    Attributes:
        line: to look at it, and to end it.
        since: when it was accepted, or seen to be a member's no longer.
        born: when it was accepted.
        base: bytes that had come over it when that was, and those that were under way.
        window: bytes that a member may have under way; 0 of a stranger's.
        further: it is a further stream of a member.
        ended: it was told to close, and is not closed yet.
        held: bytes that it made the reducer hold at the last look, besides slots.
    """

    line: Line
    since: float
    born: float
    base: int = 0
    window: int = 0
    further: bool = False
    ended: bool = False
    held: int = 0

    def weigh(self, now: float) -> Load | None:
        """Find out what a member's connection holds; None if it is gone."""
        load = self.line.load(now)
        if load is not None:
            self.held = load.unread + load.unsent
        return load


@dataclass(slots=True)
class JobConnections:
    """A job's connections, as they were when it was looked at.

    Attributes:
        job: it; a later generation is another one.
        changes: of its membership, until then.
        members: numbers of the connections.
        beside: the most that any of them makes this reducer hold besides slots, bytes.
    """

    job: Job
    changes: int = -1
    members: set[int] = field(default_factory=set)
    beside: int = 0


class Guard:
    """Watches the connections of one transport.

    Args:
        engine: knows whose they are.
        transport: knows which there are.
        most_looks: what they may do.
    """

    def __init__(self, engine: Engine, transport: Transport, limits: ConnectionLimits) -> None:
        self._engine = engine
        self._transport = transport
        self._limits = limits
        transport.limit(limits.max_connections, limits.max_open)
        self._connections: dict[int, Connection] = {}  # by the transport's numbers
        self._leaving = 0  # of these: that were told to go
        self._unjoined: OrderedDict[int, Connection] = OrderedDict()  # to stay, by `since`
        self._turns: OrderedDict[int, None] = OrderedDict()  # theirs: whose load is asked for next
        self._by_job: dict[int, JobConnections] = {}  # by the keys of jobs
        self._closing: list[bytes] = []  # peers that were dropped since the last look
        self._farewells: dict[bytes, float] = {}  # earlier ones: when to close
        self._looks = 0
        self._soon = False
        self._log = logging.getLogger(__name__)

    @property
    def connections(self) -> int:
        """How many there are, but for those that were told to go."""
        return len(self._connections) - self._leaving

    @property
    def closing(self) -> bool:
        """Whether there are peers to close that it has yet to look at."""
        return bool(self._closing)

    def close(self, peer: bytes) -> None:
        """Close a peer's connections when it has had time to read why it was dropped."""
        self._closing.append(peer)

    @property
    def wait_s(self) -> float:
        """How long the reducer may serve before the next look."""
        return LOOK_SOON_S if self._soon else LOOK_S

    def look(self, now: float) -> list[Action]:
        """End what is out of bounds.

        Args:
            now: seconds of a monotonic clock that stands still while this thread does not run.

        Returns:
            What is to be done about that besides.
        """
        self._looks += 1
        came = self._follow_changes(now)
        jobs = self._engine.jobs
        every = 1 + len(self._connections) // MEMBERS_PER_LOOK
        left: set[int] = set()
        for key in self._by_job.keys() - {job.key for job in jobs}:
            left |= self._by_job.pop(key).members
        members: set[int] = set()
        actions: list[Action] = []
        for place, job in enumerate(jobs):
            known = self._by_job.setdefault(job.key, JobConnections(job))
            turn = (self._looks + place) % every == 0
            changes = self._engine.members.changes[job.key]
            same = known.job is job and known.changes == changes
            if turn or not same or not came.isdisjoint(known.members):
                left |= known.members
                actions += self._of_job(job, known, now, weighs=turn)
                members |= known.members
        self._closing += (action.peer for action in actions if isinstance(action, Close))
        self._part(members, left, now)
        self._share_port(jobs, every)
        self._dismiss(now)
        self._judge(now)
        most = max((known.beside for known in self._by_job.values()), default=0)
        self._soon = bool(self._unjoined) or most > 2 * SLACK_BYTES
        return [action for action in actions if not isinstance(action, Close)]

    def _follow_changes(self, now: float) -> set[int]:
        """Learn which connections have come and gone; return the numbers of those that came."""
        came: set[int] = set()
        for number, line in self._transport.changes(now):
            known = self._connections.pop(number, None)
            self._leaving -= known is not None and known.ended
            self._unsuspect(number)
            if line is not None:  # of one that goes on over another socket, too
                connection = Connection(line, now, known.born if known else now)
                self._connections[number] = connection
                self._suspect(number, connection)
                came.add(number)
        return came

    def _suspect(self, number: int, connection: Connection) -> None:
        """Watch a connection as a stranger's."""
        self._unjoined[number] = connection
        self._turns[number] = None

    def _unsuspect(self, number: int) -> None:
        """Watch it as a stranger's no longer, if that was so."""
        if self._unjoined.pop(number, None) is not None:
            del self._turns[number]

    def _part(self, members: set[int], left: set[int], now: float) -> None:
        """Tell strangers from the members of jobs that were looked at.

        Args:
            members: those.
            left: who were at the look before.
            now: the clock that `look` was given.
        """
        for number in members & self._unjoined.keys():
            self._unsuspect(number)
        for number in left - members:
            connection = self._connections.get(number)
            if connection is not None and not connection.ended:
                connection.since = now
                self._suspect(number, connection)

    def _share_port(self, jobs: list[Job], every: int) -> None:
        """Bound what members send at once to what the switch's port has room for.

        Args:
            jobs: all.
            every: in how many looks each member has its turn.
        """
        if not self._limits.port_bytes:
            return
        port = Port(self._limits.port_bytes, sum(job.world_size for job in jobs))
        members = [number for one in self._by_job.values() for number in one.members]
        window = port.window(len(members))
        for number in members:
            if (self._looks + number) % every == 0 and number in self._connections:
                self._connections[number].line.bound(window)

    def _of_job(self, job: Job, known: JobConnections, now: float, *, weighs: bool) -> list[Action]:
        """Find out what is held for a job; drop who has most if that is too much.

        Args:
            job: whose members are looked at.
            known: takes up what is found.
            now: the clock that `look` was given.
            weighs: it is the job's turn.

        Returns:
            What is to be done.
        """
        held: dict[bytes, int] = {}
        known.job, known.changes = job, self._engine.members.changes[job.key]
        known.members, known.beside = set(), 0
        timed_out: list[tuple[Member, Connection, float]] = []
        allowed = job.reserved + job.reserved // 8
        for number, connection, member in self._connected(job):
            known.members.add(number)
            connection.window = member.window + 2 * job.max_chunk_bytes
            if (
                weighs
                and (load := connection.weigh(now)) is not None
                and is_lost(load.idle_s, job.peer_timeout_s, load.round_trip_s)
                and not connection.ended
            ):
                timed_out.append((member, connection, load.idle_s))
            held[member.peer] = held.get(member.peer, member.held) + connection.held
            known.beside = max(known.beside, connection.held)
        allowed += len(held) * SLACK_BYTES
        actions: list[Action] = []
        for member, connection, idle_s in timed_out:
            self._hang_up(connection)
            actions += self._engine.peer_timed_out(member.peer, idle_s)
        if not timed_out and sum(held.values()) > allowed:
            worst = max(job.members.values(), key=lambda member: held.get(member.peer, 0))
            connections = [one for _, one, member in self._connected(job) if member is worst]
            # Once more: a figure is of several instants, and this thread may have rested meanwhile.
            for connection in connections:
                connection.weigh(now)
            held[worst.peer] = worst.held + sum(connection.held for connection in connections)
            if sum(held.values()) > allowed:
                error = _hoards(job, worst, held[worst.peer])
                self._log.warning("%s", error)
                actions += self._engine.drop(worst.peer, error)
        return actions

    def _connected(self, job: Job) -> Iterator[tuple[int, Connection, Member]]:
        """Return the connections of a job's members, those of further streams as well."""
        for member in job.members.values():
            for peer in (member.peer, *self._engine.members.streams(member.peer)):
                number = self._transport.connection(peer)
                connection = self._connections.get(number)
                if connection is not None:
                    connection.further = peer != member.peer
                    yield number, connection, member

    def _judge(self, now: float) -> None:
        """End connections of nobody that are too many, too old, or have sent too much."""
        while self._unjoined:
            number = next(iter(self._unjoined))
            if now - self._unjoined[number].since <= self._limits.hello_s:
                break
            self._end(number, "it joined no job in time")
        for number in list(islice(self._turns, UNJOINED_PER_LOOK)):
            self._turns.move_to_end(number)
            connection = self._unjoined[number]
            load = connection.line.load(now)
            if load is not None and connection.window:  # it was a member at the latest look
                connection.base, connection.window = load.read + connection.window, 0
            elif load is not None and load.read - connection.base > UNJOINED_BYTES:
                self._end(number, "it sent more than a HELLO, and belongs to no job")
        if self.connections > self._limits.max_connections:
            self._thin_out()

    def _thin_out(self) -> None:
        """End connections that are too many, as those that were suspended have come back."""
        here = {n: c for n, c in self._connections.items() if not c.ended}
        first = {n: c for n, c in here.items() if not c.further}
        limits = self._limits
        surplus = max(len(first) - limits.max_connections, len(here) - limits.max_open)
        if surplus > 0:  # who goes on needs another socket for a moment
            surplus -= sum(connection.line.suspended for connection in here.values())
        if surplus > 0:
            # The oldest strangers: who has just come may be about to say who it is. Then those
            # that joined last, so that nobody pushes out a job that was here before.
            waiting = list(islice(self._unjoined, surplus))
            if len(waiting) < surplus:
                others = sorted(first.keys() - self._unjoined.keys(), key=lambda n: -first[n].born)
                waiting += others[: surplus - len(waiting)]
            for number in waiting:
                self._end(number, "there are too many (REDUCTION_MAX_CONNECTIONS)")

    def _dismiss(self, now: float) -> None:
        """End the connections of peers that the engine has dropped and that know why."""
        closing, self._closing = self._closing, []
        for peer in closing:
            self._farewells[peer] = now + FAREWELL_S
            connection = self._connections.get(self._transport.connection(peer))
            load = connection and connection.line.load(now)
            if connection and load:
                # It may read why, but not go on as before.
                connection.base, connection.window = load.read, 0
        due = [peer for peer, at in self._farewells.items() if at <= now]
        for peer in due:
            del self._farewells[peer]
            number = self._transport.connection(peer)
            connection = self._connections.get(number)
            if connection is None:
                self._transport.hang_up(peer)
            elif not connection.ended:
                self._end(number, "it broke the protocol")

    def _hang_up(self, connection: Connection) -> bool:
        """End a connection; return whether it was still there."""
        self._leaving += not connection.ended
        connection.ended = True
        return connection.line.end()

    def _end(self, number: int, why: str) -> None:
        connection = self._connections[number]
        self._unsuspect(number)
        if self._hang_up(connection):
            self._engine.counters.closed += 1
            self._log.debug("closed a connection of %s: %s", connection.line.name[-2:], why)


def _hoards(job: Job, member: Member, nbytes: int) -> CapacityError:
    return CapacityError(
        f"rank {member.rank} of job {job.name!r} makes this reducer hold {nbytes} bytes: it sends "
        "beyond its window, or does not read its results",
        limit="window",
    )
