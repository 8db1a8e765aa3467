"""A whole job and its pool in one thread, on a virtual clock, with everything that can go wrong.

A seed decides everything: how many ranks and reducers, what they reduce, what fails and when. The
sessions and engines are those of production; the network, the clock and the processes are not.
What must hold is checked with every all-reduce that ends, and when all is over.
"""

import math
import random
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, pairwise
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from reducer import kernels
from reducer.clock import SPARE_ROUND_TRIPS
from reducer.engine.actions import Close, GiveUp, MarkJoined, Resume
from reducer.errors import LocalProtocolError, MismatchError, RankLostError, ReducerLostError
from reducer.wire.constants import PLACES, RESUME_S, DType, MessageType, ReduceOp
from reducer.wire.header import Header
from reducer.wire.layout import mixed_weights
from reducer.wire.leaves import Share
from reducer.wire.states import LinkState
from tests.engine.twins import IMPLEMENTATIONS, Served
from tests.sim.clock import Clock
from tests.sim.connection import Connection, Message
from worker_client.protocol import _flight, agreement, flow_control
from worker_client.protocol.agreement import EVERY, FIRST_CALL
from worker_client.protocol.flight import (
    AddStreams,
    Connect,
    Finish,
    HandOver,
    MakeResumable,
    Reset,
)
from worker_client.protocol.lifecycle import gaps, merge
from worker_client.protocol.operation import Operation, Unfinished, refused
from worker_client.protocol.session import Session
from worker_client.protocol.spec import JobSpec

TICK_S = 0.1


class Process:
    """What can be stopped and can die. What happens to it while it is stopped waits."""

    def __init__(self, world):
        self.world = world
        self.alive = True
        self.stopped = False
        self._waiting = []

    def do(self, work):
        """Do something now, or when it goes on."""
        if self.stopped and self.alive:
            self._waiting.append(work)
        elif self.alive:
            work()

    def stop(self, seconds):
        if self.alive and not self.stopped:
            self.stopped = True
            self.world.clock.after(seconds, self._go_on)

    def _go_on(self):
        self.stopped = False
        waiting, self._waiting = self._waiting, []
        for at, work in enumerate(waiting):
            if self.stopped:
                self._waiting += waiting[at:]
                return
            self.do(work)


class Reducer(Process):
    """One start of a reducer: an engine for each of its lanes, and the connections to them.

    Far away it has the compiled loop, which tells the engine of each connection that ends, has
    those go on over others that break, and sends results over all that a link has. Else it has
    libzmq, which tells only when something is sent there.
    """

    def __init__(self, world, index, address):
        super().__init__(world)
        self.index = index
        ports = tuple(range(2, world.lanes + 1))
        secret = SECRET if world.far and index in world.hosts else b""
        made = partial(
            Served,
            world.implementation,
            secret=secret,
            process=f"{Served.starts:x}",  # all lanes are threads of it
        )
        host = address.rpartition(":")[0]
        self.lanes = [made(address=f"{host}:{port}", lanes=ports) for port in (1, *ports)]
        for lane in self.lanes:
            lane.engine.tick(world.clock.now)
        self.connections = {}
        self.dies_after = None  # so many more sends
        self._busy_until = 0.0  # until then it does nothing but what needs no interpreter
        self._busy_s = 0.0  # altogether: its engine's clock stands still meanwhile
        self._tick()

    def arrived(self, connection, message):
        """Take a message; a HELLO later, while this process is busy."""
        now, hello = self.world.clock.now, Header.unpack(message.header).type is MessageType.HELLO
        if hello and (busy_s := self.world.busy_s(self.index)):
            self.world.note(f"reducer {self.index} is busy for {busy_s:.1f} s")
            until = max(self._busy_until, now + busy_s)
            self._busy_s += until - max(self._busy_until, now)
            self._busy_until = until
        if hello and now < self._busy_until:
            self.world.clock.at(self._busy_until, lambda: self._take(connection, message))
        else:
            self._take(connection, message)

    def _take(self, connection, message):
        lane = self.lanes[connection.lane]
        self.do(lambda: self._send(lane, lane.take(connection.name, *message)))

    @property
    def lines(self):
        return list(self.connections.values())

    def broken(self, connection):
        self.connections.pop(connection.name, None)
        if self.world.far:
            self.do(lambda: self._end(connection))

    def _end(self, connection):
        """Tell the engine of a connection that has ended; a link's first one takes others along."""
        lane = self.lanes[connection.lane]
        beside = [
            self.connections.get(peer) for peer in lane.engine.members.streams(connection.name)
        ]
        self._send(lane, lane.engine.unreachable(connection.name))
        for stream in filter(None, beside):
            stream.close(1)
            self.broken(stream)

    def suspended(self, connection):
        """Hear that a connection's socket has broken; wait until it goes on over another one."""
        socket = connection.socket

        def expire():
            if connection.suspended[1] and connection.socket == socket:
                connection.give_up(1)

        self.world.clock.after(self.world.resume_s, lambda: self.do(expire))

    def _perform(self, action):
        """Do what concerns connections that may go on over others."""
        connection = self.connections.get(action.peer)
        if isinstance(action, Resume):
            over = self.connections.pop(action.fresh, None)
            if over is not None and connection is None:
                over.close(1)
            elif over is not None:
                assert over.resumes is connection, f"{over.resumes.name!r} goes on as {action}"
                connection.go_on(over, action.read)
        elif connection is not None and isinstance(action, MarkJoined):
            connection.kept[1] = action.resumes
        elif connection is not None and connection.suspended[1]:
            connection.give_up(1)

    def _choose(self, lane, peer, header):
        """Return over which connection something is sent: a result goes over any of the link's."""
        kind = Header.unpack(header).type
        if kind is MessageType.STREAM and peer in self.connections:
            mains = [one for one in self.lines if peer in lane.engine.members.streams(one.name)]
            self.connections[peer].kept[1] = any(one.kept[1] for one in mains)
        streams = lane.engine.members.streams(peer) if kind is MessageType.RESULT else ()
        if not streams:
            return self.connections.get(peer)
        here = [self.connections[name] for name in (peer, *streams) if name in self.connections]
        return self.world.rng.choice(here) if here else None

    def die(self):
        if self.alive:
            self.alive = False
            self.world.note(f"reducer {self.index} dies")
            if not any(reducer.alive for reducer in self.world.reducers):
                self.world.all_died_at = self.world.clock.now
            for connection in self.lines:
                connection.close(1)

    def _send(self, lane, actions):
        sends = lane.perform(actions)
        others = lane.asked_for(object)
        for action in others if self.world.far else ():
            if isinstance(action, (MarkJoined, Resume, GiveUp)):
                self._perform(action)
        assert not any(isinstance(action, Close) for action in others), "who broke the protocol?"
        for peer, header, payload in sends:
            if self.dies_after is not None:
                self.dies_after -= 1
                if self.dies_after < 0:
                    self.die()
            if not self.alive:
                return
            connection = self._choose(lane, peer, header)
            if connection is None:
                self._send(lane, lane.engine.unreachable(peer))
            else:
                body = None if payload is None else bytes(payload)
                connection.send(1, Message(header, body))

    def _tick(self):
        now = self.world.clock.now - self._busy_s
        for lane in self.lanes if self.world.clock.now >= self._busy_until else ():
            self.do(lambda lane=lane: self._send(lane, lane.engine.tick(now)))
        if self.alive:
            self.world.clock.after(TICK_S, self._tick)


class Flight(_flight.CompiledFlight):
    """That of all sessions, of which a mutation can replace a rule."""


class Worker(Process):
    """One rank: a session, its connections, and how each of its all-reduces ended.

    A reducer that it hosts is stopped and dies with it.
    """

    def __init__(self, world, spec):
        super().__init__(world)
        self.rank = spec.rank
        self.session = Session(spec, Flight)
        self.links = {}  # the connections of each, the first one and further streams
        self._resumptions = {}  # of links whose connections go on when they break
        self.ended = {}
        self.open = {}  # calls, and their ends
        self.started = 0
        self.begun = False  # it has joined, and makes calls
        self._links = len(self.session.links)  # lanes that are told of follow
        for link in self.session.links:
            self._connect(link.index, 0.0)
        self._tick()

    @property
    def map(self):
        """Between which reducers this rank cuts buffers, and which it uses."""
        shards = self.session.failover.map
        return shards.epoch, shards.base, shards.used(), self.session.plan.turns

    def member_of(self, reducer):
        """Whether a reducer has welcomed this rank, and is not lost for it."""
        return all(link.member for link in self.session.links if link.reducer == reducer)

    def submit(self, operation):
        self._act(self.session.submit(operation, self.world.clock.now))

    @property
    def lines(self):
        """All connections, those as well over which others are to go on."""
        lines = [line for lines in self.links.values() for line in lines]
        return lines + [line.fresh for line in lines if line.fresh is not None]

    def leave(self):
        self._act(self.session.close(LocalProtocolError("left")))
        for line in self.lines:
            if self.session.links[line.link].state is not LinkState.LEFT:
                line.close(0)
        self.alive = False

    def die(self):
        if self.alive:
            self.alive = False
            self.world.note(f"rank {self.rank} dies")
            for line in self.lines:
                line.close(0)
            for reducer in self.world.hosted_by(self.rank):
                reducer.die()
            if self.world.group:
                self.world.group.go_on()

    def arrived(self, connection, message):
        self.do(lambda: self._arrived(connection, message))

    def _arrived(self, line, message):
        if line.resumes is not None:
            self._answered(line, line.resumes, Header.unpack(message.header))
        elif line in self.links.get(line.link, ()) and line.carries:
            now = self.world.clock.now
            self._act(self.session.receive(line.link, *message, now))
        elif line in self.links.get(line.link, ()):
            if Header.unpack(message.header).type is MessageType.STREAM:
                line.carries, line.kept[0] = True, line.link in self._resumptions
            else:
                self.links[line.link].remove(line)
                line.close(0)

    def broken(self, connection):
        self.do(lambda: self._broken(connection))

    def _broken(self, line):
        if line.resumes is not None and line.resumes.fresh is line:
            line.resumes.fresh = None
            self._connect_anew(line.resumes)
        elif line in self.links.get(line.link, ()):
            self._lose(line.link)

    def _lose(self, link):
        self._close(link)
        actions = self.session.disconnected(link, "was cut")
        self._act(actions)
        if Reset(link) not in actions:
            self._connect(link, 0.05)

    def _close(self, link):
        self._resumptions.pop(link, None)
        for line in self.links.pop(link, ()):
            line.close(0)
            if line.fresh is not None:
                line.fresh.close(0)

    def _connect(self, link, seconds):
        seconds += self.world.rng.uniform(0.0, 0.1)
        self.world.clock.after(seconds, lambda: self.do(lambda: self._reach(link)))

    def _reach(self, link):
        if link in self.links:
            return
        connection = self.world.connect(self, link)
        if connection is None:
            self._connect(link, 0.1)
            return
        self.links[link] = [connection]
        self._act(self.session.connected(link, self.world.faults.far_s))

    def _reset(self, link):
        self._close(link)
        self._connect(link, 0.05)

    def _add_streams(self, link, header, payloads):
        for number, payload in enumerate(payloads, 1):
            stream = self.world.connect(self, link)
            if stream is not None:
                stream.number, stream.carries = number, False
                self.links[link].append(stream)
                stream.send(0, Message(header, payload))

    def _keep(self, link, resumption):
        self._resumptions[link] = resumption
        self.links[link][0].kept[0] = True

    def suspended(self, line):
        """Hear that a connection's socket has broken; have it go on over another one."""
        line.until = self.world.clock.now + self.world.resume_s
        self.do(lambda: self._connect_anew(line))
        self.world.clock.at(line.until, lambda: self.do(lambda: self._connect_anew(line)))

    def _connect_anew(self, line):
        """Ask for a connection to go on over another one, unless that takes too long already."""
        if line not in self.links.get(line.link, ()) or not line.suspended[0]:
            return
        refused = not self.world.reducers[line.reducer].alive
        if refused or self.world.clock.now >= line.until:
            self._lose(line.link)
            return
        if line.fresh is not None:
            return
        line.fresh = fresh = self.world.connect(self, line.link)
        if fresh is None:
            self.world.clock.after(0.05, lambda: self.do(lambda: self._connect_anew(line)))
            return
        fresh.resumes = line
        line.attempts += 1
        resumption = self._resumptions[line.link]
        said = resumption.message(line.number, line.attempts, line.arrived[1])
        fresh.send(0, Message(*said))

    def _answered(self, fresh, line, header):
        """Take a reducer's answer to a RESUME: it agrees if it still waits for that."""
        if line.fresh is not fresh:
            return
        line.fresh = None
        fresh.close(0)
        if header.type is MessageType.RESUME:
            self.world.outcome["resumed"] += 1
            line.send_again(0, header.offset)
            return
        waits = all(one.open[1] for one in self.links[line.link])
        assert not waits, f"{line.name!r} may not go on, though the reducer waits for that"
        self._lose(line.link)

    def _act(self, actions):
        for action in actions:
            if isinstance(action, Finish):
                self.finish(action)
            elif isinstance(action, Reset):
                self._reset(action.link)
            elif isinstance(action, HandOver):
                self.world.group.take(self, action.calls)
            elif isinstance(action, Connect):
                self._connect(self._links, 0.0)
                self._links += 1
            elif isinstance(action, MakeResumable):
                self._keep(*action)
            elif isinstance(action, AddStreams):
                self._add_streams(*action)
            else:
                self._send(action)
        for send in self.session.flight.refill(self.world.clock.now):
            self._send(send)

    def finish(self, finish):
        """Record the end of an all-reduce, after a look at who else uses its buffer."""
        number = self.world.number_of(finish.operation)
        assert number not in self.ended, f"rank {self.rank}: call {number} ended twice"
        if finish.error is None:
            reads = [one for line in self.lines for one in line.leaving]
            views = [leaving.message.payload for leaving in reads]
            mine = [view for view in views if getattr(view, "obj", 0) is finish.operation.view.obj]
            assert not mine, "a buffer is given back that is still read"
        else:  # as transports do
            for line in self.lines:
                line.detach(finish.operation.view.obj)
        lacking, ends = self.open[number]
        lacking.remove(finish.operation)
        ends.append(finish)
        if not lacking:
            del self.open[number]
            self.ended[number] = next((end.error for end in ends if end.error is not None), None)
            self.world.ended(self, number, ends)

    def _send(self, send):
        lines = self.links.get(send.link)
        if lines is None:
            return
        line, header = lines[0], Header.unpack(send.header)
        if len(lines) > 1 and header.type is MessageType.CONTRIBUTION:
            line = self.world.rng.choice([one for one in lines if one.carries])
        self.world.outcome["asked"] += header.type is MessageType.CREDIT
        line.send(0, Message(send.header, send.payload))

    def _tick(self):
        self.do(lambda: self._act(self.session.tick(self.world.clock.now)))
        if self.alive:
            self.world.clock.after(TICK_S, self._tick)


class Group:
    """Does what `communicators.fallback` does, all at once, with the production's arithmetic.

    It checks what is handed over: that ranks number calls alike, that every result is right, and
    that together they have all that a rank has which is done with a call.
    """

    def __init__(self, world):
        self._world = world
        self._calls = {}  # by rank and number
        self._next = 0
        self._shares = None  # when all ranks have come

    def take(self, worker, calls):
        mine = self._calls.setdefault(worker.rank, {})
        for one in calls:
            call = replace(one, number=one.number // PLACES)
            self._check(worker, call)
            mine[call.number] = call
        self.go_on()

    def _check(self, worker, call):
        if call.operation is not None:
            number = self._world.number_of(call.operation)
            assert number == call.number, f"rank {worker.rank} numbers {number} as {call.number}"
        else:
            failed = worker.ended[call.number] is not None
            assert call.failed == failed, f"rank {worker.rank}, call {call.number}: failed {failed}"
        right = self._world.expected(call.number)
        for offset, result in call.results.items():
            assert right[offset : offset + len(result)] == result, f"call {call.number}: wrong"

    def go_on(self):
        """Do what can be done with what all ranks have handed over, or that a rank is gone."""
        ranks = self._world.world_size
        if not all(worker.alive for worker in self._world.workers):
            self._fail()
            return
        if len(self._calls) < ranks or not all(self._calls.values()):
            return
        if self._shares is None:
            told = [
                [Unfinished(*call.told) for call in self._calls[rank].values()]
                for rank in range(ranks)
            ]
            self._next, self._shares = merge(told)
            for rank in range(ranks):
                late = [at for at in self._calls[rank] if at < self._next]
                calls = [self._calls[rank].pop(number) for number in late]
                assert all(call.operation is None for call in calls), f"rank {rank} lacks {late}"
        while all(self._next in self._calls[rank] for rank in range(ranks)):
            number, self._next = self._next, self._next + 1
            self._end([self._calls[rank].pop(number) for rank in range(ranks)])

    def _end(self, calls):
        assert self._shares is not None
        number, right = calls[0].number, self._world.expected(calls[0].number)
        shares = self._shares.get(number, [])
        error = None
        if any(share.failed for share in shares):
            error = ReducerLostError("no reducer is left", reducer="")
        elif any(share.done for share in shares):
            known = {low: high for share in shares for low, high in share.chunks}
            assert gaps(known, len(right)) == [], f"nobody has all of call {number}"
        for call, worker in zip(calls, self._world.workers, strict=True):
            if call.operation is None:
                continue
            if error is None:
                self._world.outcome["fallbacks"] += 1
                call.operation.view[:] = right
            worker.do(partial(worker.finish, Finish(call.operation, error)))

    def _fail(self):
        """End everything: a process group does not survive the death of a rank."""
        error = ReducerLostError("no reducer is left, and a rank is gone", reducer="")
        for rank, calls in self._calls.items():
            worker = self._world.workers[rank]
            ended, self._calls[rank] = list(calls.values()), {}
            for call in ended:
                if call.operation is not None and worker.alive:
                    worker.do(partial(worker.finish, Finish(call.operation, error)))


CHUNK_BYTES = 64
TIMEOUT_S = 300.0
LIMIT_S = 1000.0
REACHED_S = 0.5  # by then all ranks have found a reducer that was restarted
STALL_S = 3.0  # the longest that an all-reduce may take while some reducer is well
ODD = 0.03  # of all calls, in worlds without a process group
HOSTED = 0.3  # of all worlds: ranks host reducers, besides those of a pool or alone
LATE = 0.4  # of all worlds: reducers may be busy when ranks join, and these begin one by one
BUSY = 0.3  # of HELLOs there
TWO_LANES = 0.2  # of all worlds
FAR = 0.25  # of all worlds: reducers are far away
FAR_CALLS = 30  # there, at most: each takes long
SECRET = b"s" * 32  # of hosted reducers there
BUSY_S = 8.0
BEGIN_WITHOUT_S = 3.0
JOINING_S = 0.01  # between two looks whether a rank has joined
LOOK_S = 0.5  # between two looks at the ranks' maps
MEET_S = 5.0  # so long after all reducers have died the ranks may fail to agree on a restarted one
AGREED_S = 5.0  # the longest that two ranks may go on with different maps
ROLLING = 0.15  # of all worlds: reducers are restarted one after the other, each of them
ODD_KINDS = ("refused", "larger", "cut")
HARMLESS = ("kill_reducer", "break_connection")  # where there is a process group to fall back to
DTYPES = (DType.FLOAT32, DType.INT32, DType.UINT8, DType.BFLOAT16)
_SUM = kernels.select()


class Far(NamedTuple):
    """What links to reducers have that are far away.

    Attributes:
        streams: connections; 0 for what the distance asks for.
        resumes: a connection that breaks may go on over another one.
        grows: windows begin small, and ranks ask for larger ones.
    """

    streams: int
    resumes: bool
    grows: bool


class GaveUpError(AssertionError):
    """All reducers had died at once, and a rank could use none of those that were restarted.

    Each rank goes on with the first reducer that it reaches, and cannot contribute again to one
    that it has left in the middle of an all-reduce.
    """


class Odd(NamedTuple):
    """A call that one rank makes differently, or not at all; later ones match again."""

    kind: str
    rank: int


@dataclass
class Faults:
    process_s: float = 0.001  # at most this long a message lies in its sender's memory
    latency_s: float = 0.002
    far_s: float = 0.0  # the shortest round trip, where reducers are far away
    repeat: float = 0.0
    swap: float = 0.0
    every_s: float = 0.1  # one event of those below, on average
    kinds: tuple[str, ...] = ()
    spare: bool = True  # nothing ever happens to the last reducer, nor to any rank
    rolling: bool = False  # each is restarted in its turn, or all, when those before are back


@contextmanager
def small_windows():
    """Have flow control's sizes be as small as the buffers here: a chunk counts as 1 KiB."""
    sizes = {"MOST_BYTES": 1, "BUSY_BYTES": 1, "FAR_ROUND_TRIPS": 5 * 1024 // CHUNK_BYTES}
    measured = "worker_client.protocol.session.MEASURED_BYTES"
    with patch.multiple(flow_control, **sizes), patch(measured, 512):
        yield


class World:
    """One run.

    Args:
        seed: decides everything.
        implementation: of rounds and slots; every other seed has the other one.

    Attributes:
        outcome: what has happened, and how often.
        trace: the story of it.
    """

    def __init__(self, seed, implementation=None):
        self.rng = rng = random.Random(seed)
        self.implementation = implementation or IMPLEMENTATIONS[seed % len(IMPLEMENTATIONS)]
        self.clock = Clock()
        self.outcome = Counter()
        self.trace = []
        self.faults = _choose_faults(rng)
        # Not from `rng`: all other worlds are what they were.
        roll = random.Random(f"rolling {seed}").random() < ROLLING
        self.faults.rolling = self.faults.spare and roll
        self.world_size = rng.choice((1, 2, 2, 3, 3, 4))
        self.pool = rng.choice((2, 2, 3, 3, 4)) if self.faults.spare else rng.choice((1, 2, 3))
        self.calls = rng.choice((10, 30, 60, 120))
        self.depth = rng.choice((1, 2, 5, 8))
        self.hosts = self._choose_hosts(random.Random(f"hosts {seed}"))
        self.late = random.Random(f"late {seed}").random() < LATE and not self.faults.rolling
        self.lanes = 1 + (random.Random(f"lanes {seed}").random() < TWO_LANES)  # of each reducer
        self.far = self._choose_far(random.Random(f"far {seed}"))
        # When all ranks had begun, and when all reducers were dead last.
        self.joined_at, self.all_died_at = math.inf, -math.inf
        self.agree_often = rng.random() < 0.5
        self._plan = [self._draw_call() for _ in range(self.calls)]
        self._plan.append((DType.UINT8, ReduceOp.SUM, 1))
        self._pieces = [1] * (self.calls + 1)  # all-reduces of each call
        self.odd, self._began = {}, {}
        self._leaves_rng = random.Random(f"leaves {seed}")
        self._amid = defaultdict(set)  # in flight with each call
        self._numbers = {}
        self.partitioned = set()  # (rank, reducer)
        count = self.pool + len(self.hosts)
        self.addresses = tuple(f"reducer-{index}:1" for index in range(count))
        self.reducers = [Reducer(self, i, address) for i, address in enumerate(self.addresses)]
        window = rng.choice((1, 8192, 1 << 20))
        if self.far and self.far.grows:
            window = 0
        self.group = Group(self) if not self.faults.spare and rng.random() < 0.5 else None
        if self.hosts:  # with a process group they lose nothing else
            self.group = None
        if self.group and rng.random() < 0.5:
            self.faults.kinds = tuple(rng.sample(HARMLESS, rng.randint(1, 2)))
        if self.group is None:  # it counts one all-reduce for each call
            self._pieces[:-1] = [rng.choice((1, 1, 2, 3)) for _ in range(self.calls)]
            odd = (number for number in range(self.calls) if rng.random() < ODD)
            rank = rng.randrange(self.world_size)
            self.odd = {number: Odd(rng.choice(ODD_KINDS), rank) for number in odd}
        if self.world_size == 1:
            self.odd.clear()  # with whom it could disagree
        common = (self.world_size, self.addresses, window, CHUNK_BYTES, self.group is not None)
        spec = JobSpec(
            "job",
            0,
            0,
            *common,
            begin_without_s=BEGIN_WITHOUT_S,
            hosts=self.hosts,
            weights=mixed_weights(self.world_size, self.pool) if self.hosts else (),
            secret=SECRET if self.far else b"",
            streams=self.far.streams if self.far else 1,
            resumes=bool(self.far and self.far.resumes),
        )
        every = FIRST_CALL if self.agree_often else EVERY
        with small_windows(), patch.object(agreement, "EVERY", every):
            self.workers = [Worker(self, replace(spec, rank=r)) for r in range(self.world_size)]
        self._apart = {}  # ranks with two maps: since when

    def _choose_hosts(self, rng):
        if self.world_size == 1 or rng.random() >= HOSTED:
            return {}
        self.pool = rng.randrange(self.world_size)
        if self.pool == 0 and self.faults.spare:
            self.faults.kinds, self.faults.rolling = (), False  # nothing may happen to a rank
        return {self.pool + rank: rank for rank in range(self.world_size)}

    def _choose_far(self, rng):
        if rng.random() >= FAR:
            return None
        self.calls = min(self.calls, FAR_CALLS)
        self.faults.far_s = rng.choice((0.01, 0.03, 0.1))
        self.faults.every_s = max(self.faults.every_s, 0.3)
        far = Far(rng.choice((0, 1, 2, 3)), rng.random() < 0.7, rng.random() < 0.5)
        if far.resumes and "break_connection" not in self.faults.kinds:
            self.faults.kinds += ("break_connection",)
        return far

    @property
    def resume_s(self):
        """How long a connection may go on after its socket broke, seconds."""
        return RESUME_S + SPARE_ROUND_TRIPS * self.faults.far_s

    def hosted_by(self, rank):
        return [self.reducers[at] for at, host in self.hosts.items() if host == rank]

    # -- what ranks ask for -------------------------------------------------------------------

    def _draw_call(self):
        dtype = self.rng.choice(DTYPES)
        op = self.rng.choice((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN))
        return dtype, op, self.rng.choice((0, 1, 16, 33, 100, 257, 700))

    @cached_property
    def _leaves(self):
        """Of each call: how many leaves it sums, 0 if it is no such."""
        rng = self._leaves_rng
        if self.group is not None:
            return [0] * len(self._plan)
        counts = [rng.choice((0, rng.randint(1, 4))) * self.world_size for _ in self._plan]
        return [
            0 if count == 0 or number in self.odd else count + rng.randrange(self.world_size)
            for number, count in enumerate(counts)
        ]

    def values(self, rank, number):
        dtype, _, count = self._plan[number]
        rng = np.random.default_rng([rank, number])
        if dtype in {DType.UINT8, DType.INT32}:
            return rng.integers(0, 256, count * dtype.itemsize).astype(np.uint8)
        floats = rng.integers(-1000, 1000, count).astype(np.float32) / 8
        if dtype is DType.BFLOAT16:
            return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return floats.view(np.uint8)

    def expected(self, number):
        dtype, op, _ = self._plan[number]
        if self._leaves[number]:
            return self._tree(number, range(self._leaves[number])).tobytes()
        inputs = [self.values(rank, number) for rank in range(self.world_size)]
        result = np.empty(inputs[0].nbytes, np.uint8)
        _SUM.reduce([memoryview(one.tobytes()) for one in inputs], result, dtype, op)
        return result.tobytes()

    def _tree(self, number, leaves):
        """What a subtree over these leaves comes to: halves of a power of two, of two at a time."""
        dtype, op, _ = self._plan[number]
        if len(leaves) == 1:
            return self.values(1000 + leaves[0], number)
        half = 1 << (len(leaves) - 1).bit_length() - 1
        halves = self._tree(number, leaves[:half]), self._tree(number, leaves[half:])
        both = np.empty(halves[0].nbytes, np.uint8)
        _SUM.reduce([memoryview(one.tobytes()) for one in halves], both, dtype, op)
        return both

    def number_of(self, operation):
        return self._numbers[operation]

    def _operations(self, rank, number):
        dtype, op, _ = self._plan[number]
        rows, share = [self.values(rank, number)], None
        if self._leaves[number]:
            share = Share(self._leaves[number], tuple(range(self.world_size)), rank)
            rows = [self._tree(number, part) for part in share.parts]
        values = rows[0]
        pieces, odd, call = self._pieces[number], self.odd.get(number), _flight.Call()
        if odd is not None and odd.rank == rank:
            if odd.kind == "refused":
                why = refused(rank, "it is odd")
                nothing = memoryview(bytearray())
                return [Operation(nothing, dtype, op, None, TIMEOUT_S, call=call, refusal=why)]
            pieces += odd.kind == "cut"
            rows = [values := np.concatenate([values, np.ones(8 * dtype.itemsize, np.uint8)])]
        size = dtype.itemsize
        bounds = [values.size // size * at // pieces * size for at in range(pieces + 1)]
        return [
            Operation(
                memoryview(bytearray(b"".join(row[low:high].tobytes() for row in rows))),
                dtype,
                op,
                f"piece {at} of {pieces}",
                TIMEOUT_S,
                call=call,
                leaves=share,
            )
            for at, (low, high) in enumerate(pairwise(bounds))
        ]

    def _call(self, worker):
        if not worker.alive or worker.started == self.calls:
            return
        if worker.started - len(worker.ended) >= self.depth:
            return
        number, worker.started = worker.started, worker.started + 1
        operations = self._operations(worker.rank, number)
        self._numbers.update(dict.fromkeys(operations, number))
        self._began[worker.rank, number] = self.clock.now
        worker.open[number] = list(operations), []
        self._amid[number] |= worker.open.keys()
        for operation in operations:
            worker.do(partial(worker.submit, operation))
        slow = (0.02, 0.3, 2.0) if self.faults.rolling else ()
        thinks = self.rng.choice((0.0, 0.0, 0.003, 0.02, *slow))
        self.clock.after(thinks * self.rng.random(), lambda: self._call(worker))

    def ended(self, worker, number, finishes):
        """Check how a call ended at a rank, whose caller then writes to its buffers at once."""
        took = self.clock.now - max(self.joined_at, self._began[worker.rank, number])
        self.outcome["calls"] += 1
        finishes.sort(key=lambda finish: finish.operation.sequence)
        error = next((finish.error for finish in finishes if finish.error is not None), None)
        if error is None:
            got = b"".join(bytes(each.operation.view[: each.operation.nbytes]) for each in finishes)
            assert number not in self.odd, f"rank {worker.rank}: no error of call {number}"
            assert got == self.expected(number), f"rank {worker.rank}: wrong result of {number}"
            assert took < self._patience(), f"rank {worker.rank}: call {number} took {took:.2f} s"
        else:
            self._check_error(worker, number, error)
        for finish in finishes:
            finish.operation.view[:] = bytes(value ^ 0x5A for value in finish.operation.view)
        self.clock.after(0.0, lambda: self._call(worker))

    def _check_error(self, worker, number, error):
        if self._may_disagree(number) and isinstance(error, MismatchError):
            odd = next(iter(self.odd.values())).rank  # the same in all of them
            named = odd in {error.rank, error.other_rank} or error.field == "epoch"
            assert named, f"rank {odd} is not named: {error!r}"
            self.outcome["odd"] += 1
            return
        self.outcome["failed"] += 1
        self.note(f"rank {worker.rank}: call {number} failed: {error!r}")
        where = f"rank {worker.rank}, call {number}: {error!r}"
        just_now = self.faults.rolling and self.clock.now < self.all_died_at + MEET_S
        if just_now and isinstance(error, ReducerLostError):
            raise GaveUpError(where)
        assert not self.faults.spare, f"a step was lost although a reducer was left: {where}"
        harmless = self.group and {*self.faults.kinds} <= {*HARMLESS}
        assert not harmless, f"a step was lost although there was the process group: {where}"
        allowed = (RankLostError, ReducerLostError, LocalProtocolError, MismatchError)
        assert isinstance(error, allowed), f"an error of the wrong kind: {where}"
        if isinstance(error, MismatchError):
            assert error.field == "epoch", where

    def _may_disagree(self, number):
        """Whether ranks ask for different things in a call, or have in one that is in flight."""
        return not self._amid[number].isdisjoint(self.odd)

    # -- what goes wrong ----------------------------------------------------------------------

    def connect(self, worker, link):
        place = worker.session.links[link].reducer, worker.session.links[link].lane
        reducer = self.reducers[place[0]]
        cut = (worker.rank, reducer.index) in self.partitioned
        if cut or not reducer.alive or reducer.stopped:
            return None
        name = f"{worker.rank}/{link}/{self.rng.random()}".encode()
        ends = (worker, reducer)
        connection = Connection(self.clock, self.rng, ends, link, place, name, self.faults)
        reducer.connections[name] = connection
        return connection

    def busy_s(self, reducer):
        spared = self.faults.spare and not self.hosts and reducer == self.pool - 1
        spared |= self.group is not None and self.clock.now > self.joined_at  # ranks may be lost
        if not self.late or spared or self.rng.random() >= BUSY:
            return 0.0
        return self.rng.uniform(0.5, BUSY_S)

    def _restart_next(self, turn):
        """Restart one reducer after the other, or all at once, when what died before is back."""
        if self._over():
            return
        self.outcome["events"] += 1
        self.outcome["restart"] += 1
        all_at_once = self.rng.random() < 0.3
        pool = self.reducers[: self.pool]
        for reducer in pool if all_at_once else [pool[turn % self.pool]]:
            reducer.dies_after = self.rng.randrange(2 * self.world_size + 2)
            self.clock.after(0.05, reducer.die)
            away = self.rng.uniform(0.1, 1.0)
            self.clock.after(away, partial(self._restart, reducer))
        settled = 1.0 + REACHED_S + self.rng.expovariate(1 / self.faults.every_s)
        self.clock.after(settled, lambda: self._restart_next(turn + 1))

    def _something_happens(self):
        if self._over():
            return
        kind = self.rng.choice(self.faults.kinds)
        self.outcome["events"] += 1
        self.outcome[kind] += 1
        getattr(self, f"_{kind}")()
        wait = self.rng.expovariate(1 / self.faults.every_s)
        self.clock.after(wait, self._something_happens)

    def _spared(self):
        return len(self.hosts) or 1 if self.faults.spare else 0

    def _victim(self):
        return self.rng.randrange(len(self.reducers) - self._spared())

    def _kill_reducer(self):
        reducer = self.reducers[self._victim()]
        if reducer.index in self.hosts:
            self._kill(self.hosts[reducer.index])
            return
        reducer.dies_after = self.rng.randrange(2 * self.world_size + 2)
        self.clock.after(0.05, reducer.die)
        self.clock.after(self.rng.uniform(0.1, 1.0), lambda: self._restart(reducer))

    def _restart(self, reducer):
        reducer.die()
        if self.reducers[reducer.index] is reducer:
            self.note(f"reducer {reducer.index} starts")
            address = self.addresses[reducer.index]
            self.reducers[reducer.index] = Reducer(self, reducer.index, address)

    def _break_connection(self):
        # What is lost with a connection that goes on is nothing, also at a reducer that is spared.
        connections = [line for one in self.reducers for line in self._outer(one)]
        connections = [line for line in connections if all(line.kept) and not line.cut]
        spared = len(self.reducers) == self._spared()
        if not spared and not (connections and self.rng.random() < 0.5):
            connections = self._outer(self.reducers[self._victim()])
        if connections:
            connection = self.rng.choice(connections)
            self.note(f"connection {connection.name!r} breaks")
            connection.reset()

    def _outer(self, process):
        """Return the connections of a process to others."""
        return [
            connection
            for connection in process.lines
            if not connection.name.startswith(b"%d/" % self.hosts.get(connection.reducer, -1))
        ]

    def _stop_reducer(self):
        reducer = self.reducers[self._victim()]
        host = self.hosts.get(reducer.index)
        self._stop(reducer if host is None else self.workers[host])

    def _stop(self, process):
        seconds = self.rng.choice((0.05, 0.5, 2.5))
        self.note(f"{type(process).__name__} stops for {seconds} s")
        hosted = self.hosted_by(process.rank) if isinstance(process, Worker) else []
        for one in [process, *hosted]:
            one.stop(seconds)
            if seconds > 1.3:
                for connection in self._outer(one):
                    connection.partition()

    def _partition(self):
        victim = self._victim()
        rank = self.rng.randrange(self.world_size)
        pair = (rank, victim)
        if self.hosts.get(victim) == rank:
            return
        self.note(f"rank {rank} and reducer {victim} cannot reach each other")
        self.partitioned.add(pair)
        for connection in self.reducers[victim].lines:
            if connection.name.startswith(b"%d/" % rank):
                connection.partition()
        self.clock.after(self.rng.uniform(0.2, 3.0), lambda: self.partitioned.discard(pair))

    def _kill_rank(self):
        self._kill(self.rng.randrange(self.world_size))

    def _kill(self, rank):
        if self.rng.random() < 0.2:
            self.workers[rank].die()

    def _stop_rank(self):
        self._stop(self.workers[self.rng.randrange(self.world_size)])

    # -- a run --------------------------------------------------------------------------------

    @small_windows()
    def run(self):
        self.outcome["rolling"] += self.faults.rolling
        self._compare_maps()
        for worker in self.workers:
            self._begin(worker)
        self.clock.run(LIMIT_S, lambda: all(worker.begun for worker in self.workers))
        assert all(worker.begun for worker in self.workers), "ranks cannot join"
        self.joined_at = self.clock.now
        if self.faults.rolling:
            self._restart_next(self.rng.randrange(self.pool))
        elif self.faults.kinds:
            self._something_happens()
        self._watch()
        start = self.clock.now
        self.clock.run(start + LIMIT_S, self._over)
        self.check_end()
        return self.outcome

    def _begin(self, worker):
        """Let a rank make calls as soon as it has joined, or else all of them at once."""
        joined = [worker] if self.late else self.workers
        if not all(one.session.joined for one in joined):
            self.clock.after(JOINING_S, lambda: self._begin(worker))
            return
        worker.begun = True
        self._call(worker)

    def _compare_maps(self):
        """Check that no two ranks have different maps for longer than they need to agree."""
        for one, other in combinations(self.workers, 2):
            pair, maps = (one.rank, other.rank), (one.map, other.map)
            # Ranks agree by calls: between two of them, nothing brings maps together.
            waiting = one.session.active and other.session.active
            if maps[0] == maps[1] or not waiting or not self._may_talk(one, other):
                self._apart.pop(pair, None)
                continue
            apart_s = self.clock.now - self._apart.setdefault(pair, self.clock.now)
            assert apart_s < AGREED_S, f"ranks {pair} have two maps: {maps}"
        self.clock.after(LOOK_S, self._compare_maps)

    def _may_talk(self, *workers):
        """Whether ranks make calls, and are members at the same reducer that runs."""
        there = [one.alive and one.begun and not one.stopped for one in workers]
        return all(there) and any(
            reducer.alive and not reducer.stopped and all(one.member_of(at) for one in workers)
            for at, reducer in enumerate(self.reducers)
        )

    def _watch(self):
        """Look for calls that take too long, long before their deadline."""
        for rank, worker in enumerate(self.workers):
            waiting = set(range(worker.started)) - worker.ended.keys()
            for number in waiting if worker.alive and self.faults.spare else ():
                waited = self.clock.now - max(self.joined_at, self._began[rank, number])
                assert waited < self._patience(), f"rank {rank}: call {number} hangs"
        self.clock.after(1.0, self._watch)

    def _patience(self):
        """Return how long a call may take: its chunks may travel one by one."""
        if not self.faults.spare:
            return TIMEOUT_S
        chunks = self.depth * 44
        travels_s = self.faults.far_s + 2 * self.faults.latency_s
        return STALL_S + chunks * 2 * (travels_s + self.faults.process_s)

    def _over(self):
        return all(not worker.alive or len(worker.ended) == self.calls for worker in self.workers)

    def check_end(self):
        for worker in self.workers:
            missing = set(range(self.calls)) - worker.ended.keys()
            assert not worker.alive or not missing, f"rank {worker.rank} hangs in {sorted(missing)}"
        self._settle()  # everything heals
        if self.faults.spare:  # with one more call all ranks learn that all have the results before
            self.calls += 1
            for worker in self.workers:
                self._call(worker)
            self._settle()
        for worker in filter(lambda worker: worker.alive, self.workers):
            flight, failover = worker.session.flight, worker.session.failover
            links = range(len(worker.session.links))
            assert all(flight.stats(link).in_flight == 0 for link in links)
            assert worker.session.active == 0
            kept = flight.retained_bytes
            assert not self.faults.spare or kept <= 64, "results are kept that every rank has"
            self.outcome["losses"] += failover.losses
            self.outcome["moved"] += failover.moved
            self.outcome["claimed"] += failover.claimed
            self.outcome["supplied"] += failover.supplied
        for reducer, lane in self._all_lanes():
            self.outcome["duplicates"] += lane.engine.counters.duplicates
            assert not reducer.alive or lane.engine.held() == 0, "contributions are left over"
        for worker in self.workers:
            if worker.alive:
                worker.leave()
        self._settle()
        for reducer, lane in self._all_lanes():
            assert not reducer.alive or lane.engine.jobs == [], "a job is left over"

    def _all_lanes(self):
        return [(reducer, lane) for reducer in self.reducers for lane in reducer.lanes]

    def _settle(self):
        """Let a while pass in which no reducer is busy at the end."""
        self.clock.run(self.clock.now + 5.0 + BUSY_S * self.late, lambda: False)

    def describe(self):
        lines = list(self.trace)
        for worker in self.workers:
            session, missing = worker.session, set(range(worker.started)) - worker.ended.keys()
            lines.append(
                f"rank {worker.rank}: alive {worker.alive}, lacks {missing}, watermark "
                f"{session.watermark}, map {worker.map}, lost {session.failover.map.lost()}"
            )
            for link in session.links:
                carried = session.flight.carried(link.index)
                waits = [(c.sequence, c.epoch, c.offset) for c in carried if not c.done]
                lines.append(f"  {link.index}: {link.state.name} {link.refusal} {waits[:6]}")
        for reducer, lane in self._all_lanes():
            for job in lane.engine.jobs:
                found = ((at, job.rounds.get(at)) for at in job.rounds)
                rounds = {at: (it.missing_ranks(), it.error) for at, it in found if it}
                lines.append(
                    f"reducer {reducer.index}: alive {reducer.alive}, stopped {reducer.stopped}, "
                    f"ranks {list(job.members)}, gone {list(job.lost)}, rounds {rounds}"
                )
        return lines

    def note(self, what):
        self.trace.append(f"{self.clock.now:10.4f}  {what}")


def _choose_faults(rng):
    spare = rng.random() < 0.7
    kinds = ["kill_reducer", "break_connection", "stop_reducer", "partition"]
    kinds = rng.sample(kinds, rng.randint(0 if spare else 1, 4))
    if not spare:
        kinds += rng.sample(["kill_rank", "stop_rank"], rng.randint(0, 2))
    return Faults(
        process_s=rng.choice((0.0, 0.001, 0.02)),
        latency_s=rng.choice((0.0005, 0.005, 0.05)),
        repeat=rng.choice((0.0, 0.0, 0.1)),
        swap=rng.choice((0.0, 0.0, 0.1)),
        every_s=rng.choice((0.05, 0.3, 2.0)),
        kinds=tuple(kinds),
        spare=spare,
    )
