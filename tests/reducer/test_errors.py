"""Errors of a job that is a part of another one."""

from reducer.errors import (
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionTimeout,
    renumbered,
)


def test_nodes_become_ranks():
    across = (2, 6, 10)
    lost = renumbered(RankLostError("rank 1 is gone", rank=1), across, "between nodes")
    assert lost.rank == 6
    assert str(lost) == "rank 1 is gone (between nodes, where rank 1 is rank 6 of the job)"
    late = renumbered(ReductionTimeout("late", missing=(0, 2)), across, "between nodes")
    assert late.missing == (2, 10)
    mismatch = MismatchError.between("they", "dtype", (0, "FLOAT32"), (1, "INT8"))
    differ = renumbered(mismatch, across, "between nodes")
    assert (differ.rank, differ.other_rank, mismatch.rank) == (2, 6, 0)  # others may hold that one
    gone = ReducerLostError("gone", reducer="a:1")
    assert str(renumbered(gone, across, "between nodes")) == "gone"
