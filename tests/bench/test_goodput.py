"""What `bench.goodput` counts."""

import pytest

pytest.importorskip("torch", reason="needs torch")

from bench.goodput import Done, Kill, kept, recoveries


def steps(*numbers, rank=0, since=0.0):
    """Steps of a second each."""
    return [
        Done(pid=1, rank=rank, number=number, begun=since + at, ended=since + at + 0.9, share=1.0)
        for at, number in enumerate(numbers)
    ]


def test_steps_of_the_time_count_once_whoever_says_them():
    said = steps(1, 2, 3, 4, 5, 6) + steps(1, 2, 3, 4, 5, 6, rank=1)
    assert sorted(step.number for step in kept(said, 1, 4)) == [2, 3, 4]


def test_a_step_that_is_made_again_counts_once_and_where_it_was_made_last():
    said = steps(1, 2, 3, 2, 3, 4, 5)
    assert sorted(step.number for step in kept(said, 0, 5.95)) == [1, 2, 3, 4]
    assert sorted(step.number for step in kept(said, 0, 2)) == [1]


def test_what_a_restart_after_the_end_makes_again_does_not_count():
    said = steps(1, 2, 3, 4) + steps(3, 4, since=9)
    assert sorted(step.number for step in kept(said, 0, 5)) == [1, 2]


def test_a_recovery_ends_with_the_last_of_the_others_that_has_begun_after_the_kill():
    said = steps(1, 2, 3, 4) + steps(1, 2, 2.5, 3, rank=1, since=0.5) + steps(1, rank=2)
    kill = Kill(at=0.2, rank=2, others=frozenset({0, 1}))
    assert recoveries(said, [kill], 10) == [pytest.approx(1.9 - 0.2)]


def test_others_that_are_killed_meanwhile_are_not_waited_for_and_the_end_ends_a_recovery():
    said = steps(1, 2, 3) + steps(1, rank=1) + steps(1, rank=2)
    first, second = Kill(0.5, 2, frozenset({0, 1})), Kill(1.2, 1, frozenset({0}))
    assert recoveries(said, [first, second], 2.5) == [
        pytest.approx(1.9 - 0.5),
        pytest.approx(2.5 - 1.2),
    ]
