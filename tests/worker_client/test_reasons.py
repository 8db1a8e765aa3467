"""Errors that cross from rank to rank keep class, facts and what they say."""

from __future__ import annotations

import json

import pytest

from reducer.errors import (
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionError,
    ReductionTimeout,
    renumbered,
)
from worker_client.communicators.node_sockets import MESSAGE_BYTES
from worker_client.communicators.reasons import describe, revive

MISMATCH = MismatchError(
    "they differ", field="dtype", rank=0, other_rank=1, expected="FLOAT32", got="INT8", sequence=7
)
ERRORS = [
    ReductionError("it failed"),
    ReducerLostError("gone", reducer="a:1"),
    RankLostError("gone", rank=1, sequence=3),
    ReductionTimeout("late", missing=(0, 1)),
    MISMATCH,
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_as_it_was_sent(error: ReductionError) -> None:
    error.name = "layer 1"
    came = revive(json.loads(json.dumps(describe(error))))
    assert type(came) is type(error)
    assert vars(came) == vars(error)
    assert str(came) == str(error)


def test_the_longest_error_fits_into_a_message() -> None:
    error = MismatchError(
        "\u20ac" * 9000,
        field="name",
        rank=0,
        other_rank=1,
        expected="\u20ac" * 9000,
        got="\u20ac" * 9000,
    )
    error.name = "\u20ac" * 9000
    assert len(json.dumps(describe(error)).encode()) < MESSAGE_BYTES


def test_nodes_become_ranks() -> None:
    across = (2, 6, 10)
    lost = renumbered(RankLostError("rank 1 is gone", rank=1), across, "between nodes")
    assert isinstance(lost, RankLostError)
    assert lost.rank == 6
    assert str(lost) == "rank 1 is gone (between nodes, where rank 1 is rank 6 of the job)"
    late = renumbered(ReductionTimeout("late", missing=(0, 2)), across, "between nodes")
    assert isinstance(late, ReductionTimeout)
    assert late.missing == (2, 10)
    differ = renumbered(MISMATCH, across, "between nodes")
    assert isinstance(differ, MismatchError)
    assert (differ.rank, differ.other_rank) == (2, 6)
    assert MISMATCH.rank == 0  # others may hold the same error
    gone = ReducerLostError("gone", reducer="a:1")
    assert str(renumbered(gone, across, "between nodes")) == "gone"
