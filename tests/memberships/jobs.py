"""Jobs in memory: what an elastic communicator sees of reducers, with delays and deaths by a seed.

All that reducers promise to an elastic job's session is here, and no more: an all-reduce to which
every rank has contributed gives all of them one result, which each gets at a time of its own, or
never, if it hears of a lost rank before. Then all that is in progress at that rank fails, and so
does what it asks for later.
"""

import heapq
import itertools
import random
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np

from reducer.errors import LocalProtocolError, RankLostError
from reducer.wire.constants import DType, ReduceOp
from worker_client.communicators.communicator import Communicator, Counters

DTYPES = {DType.INT64: np.int64, DType.UINT8: np.uint8}
FOLDS = {ReduceOp.SUM: np.add, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum}
DELAY_S = 0.004


class World:
    """Makes everything happen later, in an order that the seed has a part in, on one thread."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.jobs = defaultdict(Job)
        self._due = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def later(self, action):
        """Have something happen within `DELAY_S`, mostly at once."""
        with self._changed:
            delay = DELAY_S * self.random.random() ** 3
            due = time.monotonic() + delay
            heapq.heappush(self._due, (due, next(self._numbers), action))
            self._changed.notify()

    def stop(self):
        """Let nothing happen any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def kill(self, process):
        """Let a process be gone, now: nothing of what it does has an effect any more."""
        with self.lock:
            for job in list(self.jobs.values()):
                for member in list(job.members.values()):
                    if member.process == process:
                        member.gone()

    def _run(self):
        while True:
            with self._changed:
                while not self._stopped and (not self._due or self._due[0][0] > time.monotonic()):
                    wait_s = self._due[0][0] - time.monotonic() if self._due else None
                    self._changed.wait(wait_s)
                if self._stopped:
                    return
                _, _, action = heapq.heappop(self._due)
            action()


class Job:
    """What its reducers know."""

    def __init__(self):
        self.members = {}
        self.lost = set()
        self.asked = defaultdict(dict)  # by number and rank
        self.given = defaultdict(dict)  # what they held then
        self.ended = defaultdict(set)  # by rank, numbers

    def watermark(self, rank):
        """Return the number of the first all-reduce that a rank has not finished."""
        return next(number for number in itertools.count() if number not in self.ended[rank])


class Member(Communicator):
    """A flat communicator of one rank in one job.

    Args:
        world: that it is in.
        process: whose it is.
        spec: of the job.
        left: called once, after it has stopped.
    """

    def __init__(self, world, process, spec, left):
        self.process = process
        self._world, self._spec, self._left = world, spec, left
        self._job = world.jobs[spec.job]
        self._open = {}
        self._number = 0
        self._final = None
        self._stopped = self._dead = False
        self.session = SimpleNamespace(
            links=(), lost_ranks=set(), handed_over=False, flight=self, calls=self
        )
        self.driver = self
        with world.lock:
            self._job.members[spec.rank] = self
            for rank in self._job.lost:
                world.later(lambda rank=rank: self.hear(rank))

    # -- what an elastic communicator asks a flat one --------------------------------------------

    @property
    def flat(self):
        return self

    @property
    def spec(self):
        return self._spec

    @property
    def counters(self):
        return Counters()

    @property
    def closing(self):
        return self._stopped

    @property
    def busy(self):
        return bool(self._open)

    @property
    def in_callback(self):
        return False

    @property
    def final(self):
        return self._final

    @property
    def reached(self):
        """Number of the first all-reduce that some rank has not finished, as far as it said so."""
        with self._world.lock:
            return min(self._job.watermark(rank) for rank in range(self._spec.world_size))

    def join(self, timeout_s):
        del timeout_s  # reducers answer at once
        if self._stopped:
            raise LocalProtocolError("this client was shut down")

    def submit(self, operation):
        with self._world.lock:
            if self._stopped:
                raise LocalProtocolError("this client was shut down")
            number, self._number = self._number, self._number + 1
            operation.sequence = number
            self._open[number] = operation
            if self._final is not None:
                self._world.later(lambda: self.end(number, self._final))
            elif not self._dead:
                self._contribute(number, operation)

    def wait(self, done, until):
        del done, until

    def stop(self):
        with self._world.lock:
            first, self._stopped = not self._stopped, True
            if not first:
                return
            self.gone()
            numbers = list(self._open)
        for number in numbers:
            self.end(number, LocalProtocolError("this client was shut down"))
        self._left()

    def fail(self, error):
        """What `Driver.fail` does: the others of the job hear it, too."""
        with self._world.lock:
            members = list(self._job.members.values()) if not self._dead else [self]
        for member in members:
            self._world.later(lambda member=member: member.give_up(error))

    # -- what happens -----------------------------------------------------------------------------

    def _contribute(self, number, operation):
        asked, given = self._job.asked[number], self._job.given[number]
        asked[self._spec.rank], given[self._spec.rank] = operation, bytes(operation.view)
        size = self._spec.world_size
        for mine in asked.values():
            mine.missing = tuple(rank for rank in range(size) if rank not in asked)
        if len(asked) < size:
            return
        rows = [np.frombuffer(given[rank], DTYPES[operation.dtype]) for rank in range(size)]
        kinds = {(one.dtype, one.op, one.view.nbytes) for one in asked.values()}
        assert len(kinds) == 1, f"ranks make different calls: {kinds}"
        result = rows[0]
        for row in rows[1:]:
            result = FOLDS[operation.op](result, row)
        for rank, member in self._job.members.items():
            assert rank in asked
            self._world.later(lambda member=member: member.receive(number, result.tobytes()))

    def receive(self, number, result):
        with self._world.lock:
            if self._dead or self._final is not None or number not in self._open:
                return
            self._open[number].view[:] = result
            self._job.ended[self._spec.rank].add(number)
        self.end(number, None)

    def gone(self):
        """Be lost to the others, who hear of it one after another."""
        if self._dead:
            return
        self._dead = True
        self._job.lost.add(self._spec.rank)
        for member in self._job.members.values():
            self._world.later(lambda member=member: member.hear(self._spec.rank))

    def hear(self, rank):
        if rank != self._spec.rank:
            self.session.lost_ranks.add(rank)
            self.give_up(RankLostError(f"rank {rank} died", rank=rank))

    def give_up(self, error):
        with self._world.lock:
            if self._dead or self._final is not None:
                return
            self._final = error
            numbers = list(self._open)
        for number in numbers:
            self.end(number, error)

    def end(self, number, error):
        with self._world.lock:
            operation = self._open.pop(number, None)
        if operation is not None:
            operation.end(error)
