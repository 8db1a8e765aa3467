"""Jobs in memory: what an elastic communicator sees of reducers, with delays and deaths by a seed.

All that reducers promise to an elastic job's session is here, and no more: an all-reduce to which
every rank has contributed gives all of them one result, which each gets at a time of its own, or
never, if it hears of a lost rank before. Then all that is in progress at that rank fails, and so
does what it asks for later.
"""

import itertools
from collections import defaultdict
from functools import partial

import numpy as np

from reducer.errors import LocalProtocolError, RankLostError
from reducer.wire.constants import DType, ReduceOp
from worker_client.communicators.communicator import Counters, LinkTraffic

DTYPES = {DType.INT64: np.int64, DType.UINT8: np.uint8}
FOLDS = {ReduceOp.SUM: np.add, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum}


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


class Member:
    """What an elastic communicator asks of a flat one: that of one rank in one job.

    Args:
        world: the training.
        spec: of the job.
        left: called once, after it has stopped.
    """

    straggler = None
    links = ()
    in_callback = False
    counters, traffic = Counters(), LinkTraffic()

    def __init__(self, world, spec, left):
        self.spec = spec
        self.final = None
        self.lost_ranks = set()
        self._world, self._left = world, left
        self._job = world.jobs[spec.job]
        self._open = {}
        self._number = 0
        self._stopped = self._dead = False
        self._job.members[spec.rank] = self
        for rank in self._job.lost:
            world.later(partial(self.hear, rank))

    @property
    def reached(self):
        """Number of the first all-reduce that some rank has not finished, as far as it said so."""
        return min(self._job.watermark(rank) for rank in range(self.spec.world_size))

    def join(self, _):
        """Reducers answer at once."""
        self._check_open()

    def wait(self, done, until):
        """Others bring the end."""

    def submit(self, operation):
        self._check_open()
        number, self._number = self._number, self._number + 1
        operation.sequence = number
        self._open[number] = operation
        if self.final is not None:
            self._world.later(lambda: self._end(number, self.final))
        elif not self._dead:
            self._contribute(number, operation)

    def stop(self):
        if self._stopped:
            return
        self._stopped = True
        self.gone()
        self._end_all(LocalProtocolError("this client was shut down"))
        self._left()

    def fail(self, error):
        """What `Driver.fail` does: the others of the job hear it, too."""
        for member in [self] if self._dead else list(self._job.members.values()):
            self._world.later(partial(member.give_up, error))

    def _check_open(self):
        if self._stopped:
            raise LocalProtocolError("this client was shut down")

    def _contribute(self, number, operation):
        asked, given = self._job.asked[number], self._job.given[number]
        asked[self.spec.rank], given[self.spec.rank] = operation, bytes(operation.view)
        size = self.spec.world_size
        for mine in asked.values():
            mine.missing = tuple(rank for rank in range(size) if rank not in asked)
        if len(asked) < size:
            return
        rows = [
            row  # a subtree of leaves, or all of it
            for rank in range(size)
            for row in np.frombuffer(given[rank], np.uint8)
            .view(DTYPES[operation.dtype])
            .reshape(-1, operation.nbytes // DTYPES[operation.dtype]().itemsize)
        ]
        kinds = {
            (one.dtype, one.op, one.nbytes, one.leaves and one.leaves.present)
            for one in asked.values()
        }
        assert len(kinds) == 1, f"ranks make different calls: {kinds}"
        result = rows[0]
        for row in rows[1:]:
            result = FOLDS[operation.op](result, row)
        for member in self._job.members.values():
            self._world.later(partial(member.receive, number, result.tobytes()))

    def receive(self, number, result):
        if self._dead or self.final is not None or number not in self._open:
            return
        self._open[number].view[: len(result)] = result
        self._job.ended[self.spec.rank].add(number)
        self._end(number, None)

    def gone(self):
        """Be lost to the others, who hear of it one after another."""
        if self._dead:
            return
        self._dead = True
        self._job.lost.add(self.spec.rank)
        for member in self._job.members.values():
            self._world.later(partial(member.hear, self.spec.rank))

    def hear(self, rank):
        if rank != self.spec.rank:
            self.lost_ranks.add(rank)
            self.give_up(RankLostError(f"rank {rank} died", rank=rank))

    def give_up(self, error):
        if not self._dead and self.final is None:
            self.final = error
            self._end_all(error)

    def _end_all(self, error):
        for number in list(self._open):
            self._end(number, error)

    def _end(self, number, error):
        operation = self._open.pop(number, None)
        if operation is None:
            return
        if error is not None:  # a part of a result may have come
            operation.view[:1] = b"\x5a"
        operation.end(error)
