"""What the all-reduces of a job have moved, and how long they took."""

import logging
import math
import random

import pytest

from reducer.engine import _slots
from reducer.engine.traffic import BUCKETS, OCTAVES, Traffic
from reducer.errors import RankLostError
from reducer.wire.constants import PLACES
from reducer.wire.header import Header
from tests.engine.words import M, number, with_ranks

NBYTES = 64


def over(rounds, sequence, begun_us, took_us, error=None):
    """Make an all-reduce of two ranks, of one chunk."""
    found = None
    for rank, at_us in enumerate((begun_us, begun_us + took_us)):
        header = Header(
            M.CONTRIBUTION, sequence=sequence, nbytes=NBYTES, total_bytes=NBYTES, rank=rank
        )
        rounds.now_us = at_us
        found = found or rounds.open(sequence, header)
        found.place(header, bytes(NBYTES))
    if error is None:
        found.finish(0, 2)
    else:
        found.fail(error)
    rounds.discard_oldest()


def test_times_are_those_of_a_list_of_them():
    generator = random.Random(5)
    took = [round(10 ** generator.uniform(0.5, 7.5)) for _ in range(3000)]
    rounds = _slots.Rounds(2)
    for call, us in enumerate(took):
        over(rounds, number(call), 1 + 10**9 * call, us)
    found = rounds.traffic()
    assert (found.all_reduces, found.us) == (len(took), sum(took))
    assert (found.bytes_in, found.bytes_out) == (2 * NBYTES * len(took),) * 2
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        nearest_s = sorted(took)[math.ceil(share * len(took)) - 1] / 1e6
        assert found.quantile_s(share) == pytest.approx(nearest_s, rel=1 / 15), share
    for octave in range(OCTAVES):
        assert found.within(octave) == sum(us < 2**octave for us in took)
    half = rounds.traffic()
    for call, us in enumerate(took, len(took)):
        over(rounds, number(call), 1 + 10**9 * call, us)
    assert rounds.traffic().since(half) == found
    assert Traffic().quantile_s(0.5) == 0.0


@pytest.mark.parametrize(
    ("us", "bucket"),
    [(0, 0), (1, 0), (2, 8), (3, 12), (8, 24), (9, 25), (15, 31), (16, 32), (10**12, BUCKETS - 1)],
)
def test_the_bucket_of_a_time(us, bucket):
    rounds = _slots.Rounds(2)
    over(rounds, number(0), 1, us)
    assert rounds.traffic().buckets == {bucket: 1}


def test_what_failed_and_what_ranks_ask_each_other_is_not_counted():
    rounds = _slots.Rounds(2)
    over(rounds, number(0), 1, 10, RankLostError("rank 1 died", rank=1))
    over(rounds, PLACES, 1, 10)  # a question
    found = rounds.traffic()
    assert (found.all_reduces, found.buckets) == (0, {})
    assert found.bytes_in == 4 * NBYTES


def test_bytes_are_those_of_all_that_came_and_went(implementation):
    reducer = with_ranks(implementation, 3)
    for call in range(4):
        for rank in range(3):
            reducer.contribute(rank, number(call))
    reducer.contribute(0, number(4))
    (job,) = reducer.engine.jobs
    found = job.rounds.traffic()
    assert (found.bytes_in, found.bytes_out) == (13 * 64, 12 * 64)


def test_failed_all_reduces_are_in_the_log_once_with_their_job(reducer, caplog):
    caplog.set_level(logging.INFO)
    reducer.engine.tick(1.0)
    caplog.clear()
    for call in range(3):
        reducer.contribute(0, number(call))
        reducer.contribute(1, number(call), op=2)
    assert caplog.messages == []
    reducer.engine.tick(2.0)
    (text,) = caplog.messages
    assert text.startswith("job 'job': 3 all-reduces failed, number 0 first: ")
    assert "op" in text
    assert (caplog.records[0].job, caplog.records[0].failed) == ("job", 3)
    reducer.engine.tick(3.0)
    assert len(caplog.messages) == 1
