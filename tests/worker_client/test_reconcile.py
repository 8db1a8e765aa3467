"""Ranks that meet in a new membership: who has what of earlier calls, and who is present."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reducer.errors import RankLostError, ReducerLostError, ReductionTimeout
from reducer.wire.constants import MAX_JOB_NAME_BYTES, DType, ReduceOp
from worker_client.communicators.membership import Membership
from worker_client.communicators.reconcile import Reconciliation
from worker_client.communicators.replay_log import ReplayEntry, ReplayLog
from worker_client.protocol.link import Link
from worker_client.protocol.operation import Operation
from worker_client.protocol.spec import JobSpec

NBYTES = 24
LOST = RankLostError("rank 7 died", rank=7)
UNDONE, DONE, FAILED = "undone", "done", "failed"
TYPES = {DType.INT64: np.int64, DType.UINT8: np.uint8}
OPS = {ReduceOp.MAX: np.max, ReduceOp.MIN: np.min, ReduceOp.SUM: np.sum}


class Table:
    """Where ranks meet: an all-reduce among threads."""

    def __init__(self, ranks):
        self.asked = []
        self._arrays = [None] * ranks
        self._barrier = threading.Barrier(ranks, self._reduce, timeout=10)

    def ask(self, rank, question):
        question.sequence = len(self.asked)
        self._arrays[rank] = question
        self._barrier.wait()

    def _reduce(self):
        first = self._arrays[0]
        assert first is not None
        assert len({(one.name, one.view.nbytes, one.op) for one in self._arrays}) == 1
        inputs = [np.frombuffer(one.view, TYPES[one.dtype]) for one in self._arrays]
        result = OPS[first.op](inputs, axis=0).astype(inputs[0].dtype)
        for array in inputs:
            array[:] = result
        self.asked.append(first.name)


def contribution(number, rank):
    return bytes([1 + number, 1 + rank] * (NBYTES // 2))


def result(number):
    return bytes([128 + number] * NBYTES)


def enter(known, number, rank):
    """A rank makes its next call."""
    buffer = bytearray(contribution(number, rank))
    entry = ReplayEntry(Operation(memoryview(buffer), DType.UINT8, ReduceOp.SUM, None, 1.0))
    known.add(entry)
    return entry


def get(known, number):
    ((entry, _),) = known.calls(number, number + 1)
    return entry


def journal(rank, states):
    """What a rank knows of calls 0, 1, ..."""
    known = ReplayLog()
    for number, state in enumerate(states):
        entry = enter(known, number, rank)
        entry.begin(lambda _: None).sequence = number
        entry.operation.view[: NBYTES // 2] = bytes(NBYTES // 2)  # some chunks were overwritten
        if state == DONE:
            entry.finish(result(number), None)
        if state == FAILED:
            entry.finish(None, ReductionTimeout("too late"))
    return known


def meet(states):
    """Let ranks meet that know calls to be in these states."""
    ranks = len(states)
    table = Table(ranks)
    journals = [journal(rank, mine) for rank, mine in enumerate(states)]
    return journals, gather(table, journals), table.asked


def gather(table, journals):
    """Run every rank's side of a meeting."""
    spec = JobSpec("job", 0, 0, len(journals), ("r:1",), 1 << 20)
    meetings = [
        Reconciliation(replace(spec, rank=rank), partial(table.ask, rank), LOST)
        for rank in range(len(journals))
    ]
    with ThreadPoolExecutor(len(journals)) as pool:
        pairs = zip(meetings, journals, strict=True)
        for future in [pool.submit(meeting.run, mine, 5.0) for meeting, mine in pairs]:
            future.result()
    assert all(meeting.last == len(table.asked) - 1 for meeting in meetings)
    return meetings


def test_a_call_that_is_made_during_a_meeting_ends_as_the_others_have():
    """It has failed at rank 0, so it fails at rank 1: at once, or as soon as it is made."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            late = ReplayLog()
            made = []
            caller = threading.Thread(
                target=lambda made=made, late=late: made.append(enter(late, 0, 1))
            )
            caller.start()
            gather(Table(2), [journal(0, [FAILED]), late])
            caller.join()
            assert made[0].over
            assert late.unfinished() == 1
    finally:
        sys.setswitchinterval(interval)


def test_ranks_that_forgot_what_all_have_and_ranks_that_have_begun_less():
    journals, _, _ = meet([[DONE, DONE, DONE, UNDONE], [DONE, DONE, UNDONE]])
    journals[0].prune(2)
    assert [entry.result for entry in journals[1]][2] == result(2)
    states = [[DONE] * 6, [DONE] * 6 + [UNDONE]]
    table = Table(2)
    both = [journal(rank, mine) for rank, mine in enumerate(states)]
    both[0].prune(6)  # all of them
    gather(table, both)
    assert not get(both[1], 6).over


@given(st.data())
def test_whatever_they_have(data):
    ranks = data.draw(st.integers(2, 4))
    made = [data.draw(st.integers(0, 5)) for _ in range(ranks)]
    states = []
    for mine in made:
        # What some rank has yet to make, none can have the result of.
        first = [data.draw(st.sampled_from([UNDONE, DONE, FAILED])) for _ in range(min(made))]
        rest = [data.draw(st.sampled_from([UNDONE, FAILED])) for _ in range(mine - min(made))]
        states.append(first + rest)
    journals, meetings, asked = meet(states)
    assert len(asked) == 1 or any({*mine} - {UNDONE} for mine in states), (
        "there is nothing to supply"
    )
    for number in range(max(made)):
        found = {mine[number] for mine in states if number < len(mine)}
        for rank, known in enumerate(journals):
            if number >= made[rank]:
                entry = enter(known, number, rank)
                assert (entry.error is LOST) == (FAILED in found), "it is made or fails at all"
                continue
            entry = get(known, number)
            if states[rank][number] != UNDONE:
                assert entry not in meetings[rank].ends
                assert entry.result == (result(number) if states[rank][number] == DONE else None)
            elif FAILED in found:
                assert entry.error is LOST
            elif DONE in found:
                assert entry.result == bytes(entry.operation.view) == result(number)
                assert entry in meetings[rank].ends
            else:
                assert not entry.over
                entry.begin(lambda _: None)  # again
                assert bytes(entry.operation.view) == contribution(number, rank)


# -- who is present -------------------------------------------------------------------------------

POOL = JobSpec("job", 3, 1, 4, ("a:1", "b:1"), 1 << 20)
LINKS = [Link(0, 0, 0, "a:1"), Link(1, 1, 0, "b:1"), Link(2, 0, 1, "a:2")]


def test_a_membership_is_named_by_who_is_in_it():
    whole = Membership.whole(POOL)
    without = whole.without({0}, LINKS)
    assert without.present == (1, 2, 3)
    spec = without.spec
    assert (spec.rank, spec.world_size, spec.generation) == (0, 3, 3)
    assert spec.reducers == POOL.reducers
    assert spec.lanes == {0: ["a:2"], 1: []}
    other = Membership.whole(replace(POOL, rank=2)).without({0}, LINKS)
    assert other.spec.job == spec.job
    names = {POOL.job, spec.job, whole.without({2}, LINKS).spec.job}
    assert len(names | {without.without({0, 2}, LINKS).spec.job}) == 4
    long = replace(POOL, job="ü" * (MAX_JOB_NAME_BYTES // 2))
    assert len(Membership.whole(long).without({0}, []).spec.job.encode()) <= MAX_JOB_NAME_BYTES


def test_the_reducers_of_lost_hosts_are_left_out():
    mixed = replace(
        POOL,
        reducers=("a:1", "h0:1", "h1:1", "h2:1", "h3:1"),
        hosts={1: 0, 2: 1, 3: 2, 4: 3},
        weights=(6, 3, 3, 3, 3),
    )
    spec = Membership.whole(mixed).without({0, 3}, []).spec
    assert spec.reducers == ("a:1", "h1:1", "h2:1")
    assert spec.hosts == {1: 0, 2: 1}
    assert spec.weights == (2, 1, 1)


@pytest.mark.parametrize(
    ("lost", "may"),
    [({0}, True), ({3}, True), ({2, 3}, True), ({0, 2}, False), ({0, 2, 3}, False)],
)
def test_no_two_groups_go_on_beside_each_other(lost, may):
    whole = Membership.whole(POOL)
    assert whole.without(lost, []).may_follow(whole) is may
    if len(lost) < 4 and 1 not in lost:
        rest = set(range(4)) - lost
        others = Membership.whole(replace(POOL, rank=min(lost))).without(rest, [])
        assert not (may and others.may_follow(whole))


def test_a_rank_that_is_lost_itself_is_told_so():
    with pytest.raises(RankLostError) as error:
        Membership.whole(POOL).without({1}, [])
    assert error.value.rank == 1


def test_errors_name_the_ranks_as_the_job_numbers_them():
    whole = Membership.whole(POOL)
    present = whole.without({0}, [])
    lost = RankLostError("rank 2 died", rank=2)
    assert whole.renumbered(lost) is lost
    told = present.renumbered(lost)
    assert told.rank == 3
    assert "rank 2 is rank 3 of the job" in str(told)
    assert lost.rank == 2, "the original is another rank's as well"
    gone = present.renumbered(ReducerLostError("gone", reducer="a:1"))
    assert isinstance(gone, ReducerLostError)
    assert "numbering the ranks (1, 2, 3) from 0 on" in str(gone), "its text may name one"
