"""A step by each way to average: cases that were worked out by hand, and what is advised."""

import pytest

from reducer.errors import ConfigError
from reducer.planning.network_model import Network, Times
from reducer.planning.step_model import (
    Bucket,
    Prediction,
    Step,
    TrainingJob,
    Way,
    advised,
    last_end_s,
    predict,
    ways,
)

MB = 10**6
# A second for 100 MB: 4 ranks' ring takes 1.5 s of it, a pool of four 1 s.
NETWORK = Network(100.0 * MB, 100.0 * MB)


def job(*buckets, compute_s=10.0, **others):
    step = Step(compute_s, tuple(Bucket(*one) for one in buckets))
    return TrainingJob(step, 4, others.pop("nodes", 4), NETWORK, **others)


def test_buckets_travel_one_after_another():
    # From 2 to 5, from 5 (it is ready at 4) to 7, from 20 to 21; the last rests for 4 s after that.
    buckets = [(2.0, Times(3.0, 1.0)), (4.0, Times(2.0, 1.0)), (20.0, Times(1.0, 4.0))]
    assert last_end_s(buckets) == 25.0
    # The rest of one that ends late is longer than all that comes after it.
    assert last_end_s([(0.0, Times(1.0, 9.0)), (2.0, Times(1.0, 0.0))]) == 10.0


@pytest.mark.parametrize(
    ("sizes_mb", "step_s"),
    [
        ((100, 100, 200), 13.0),  # 2 to 3.5, 4 to 5.5, 9 to 12, and 1 s after the backward pass
        ((1000, 1000, 200), 36.0),  # 2 to 17, to 32, to 35
        ((1, 1, 0.01), 10.0),  # what is left after the last bucket is hidden by nothing
    ],
)
def test_a_ring_beside_a_backward_pass(sizes_mb, step_s):
    ready_s = (2.0, 4.0, 9.0)
    buckets = [(at, int(size * MB), 0) for at, size in zip(ready_s, sizes_mb, strict=True)]
    found = predict(job(*buckets), Way("gloo"))
    assert found.step_s == pytest.approx(step_s, rel=1e-3)
    assert found.all_reduce_s == pytest.approx(sum(sizes_mb) * 0.015)


def test_ranks_of_one_node_pass_a_ring_on_and_share_a_card():
    flat = job((0.0, 800 * MB, 0), compute_s=0.0)
    nodes = job((0.0, 800 * MB, 0), compute_s=0.0, nodes=2)
    assert predict(nodes, Way("gloo")).step_s == predict(flat, Way("gloo")).step_s == 12.0
    # Two nodes reduce among themselves first: each card carries the buffer once.
    assert predict(nodes, Way("reducers", 0)).step_s == pytest.approx(8.0, rel=0.01)


@pytest.mark.parametrize(
    ("way", "step_s"),
    [
        (Way("reducers", 0), 12.0),
        (Way("reducers", 4), 8.0),
        (Way("reducers", 4, "bf16"), 4.2),  # of 760 MB a half, of 40 MB all
        (Way("reducers", 4, "int8"), 2.33),  # 256 bytes for 252 values
        (Way("none"), 0.0),
    ],
)
def test_fewer_bytes_take_less_time(way, step_s):
    found = predict(job((0.0, 800 * MB, 760 * MB), compute_s=0.0), way)
    assert found.step_s == found.all_reduce_s == pytest.approx(step_s, rel=0.01)


def test_a_cast_takes_what_no_link_hides():
    bucket = (0.0, 800 * MB, 800 * MB)
    slow = job(bucket, compute_s=0.0, cast_s={"int8": 5e-9})  # 4 s, longer than the 2.03 of links
    assert predict(slow, Way("reducers", 4, "int8")).step_s == pytest.approx(4.04, rel=0.01)
    quick = job(bucket, compute_s=0.0, cast_s={"int8": 1e-9})
    assert predict(quick, Way("reducers", 4, "int8")).step_s == pytest.approx(2.04, rel=0.01)


def test_many_small_calls_take_what_no_link_hides():
    bucket = (0.0, 8 * MB, 8 * MB, 400)  # 0.02 s of links
    slow = job(bucket, compute_s=0.0, call_s=1e-3)
    assert predict(slow, Way("reducers", 4, "int8")).step_s == pytest.approx(0.4, rel=0.02)
    assert predict(slow, Way("reducers", 4)).step_s == pytest.approx(0.08, rel=0.1)


def test_outer_steps_are_shared_by_the_steps_between_them():
    found = job((0.0, 800 * MB, 0), compute_s=3.0, every=20, outer_s=1e-8)
    # 8 s of an all-reduce and 8 of memory, every 20 steps.
    assert predict(found, Way("diloco", 4)).step_s == pytest.approx(3.8, rel=0.01)


@pytest.mark.parametrize(
    ("steps_s", "taken"),
    [
        # none: 1 s. Gloo, embedded, 2 reducers, 4 reducers, their bf16, int8, DiLoCo.
        ((1.01, 1.01, 1.0, 1.0, 1.0, 1.0, 1.0), Way("gloo")),
        ((1.5, 1.5, 1.09, 1.08, 1.0, 1.0, 1.0), Way("reducers", 2)),
        ((1.5, 1.5, 1.5, 1.05, 1.0, 1.0, 1.0), Way("reducers", 4)),
        ((3.0, 3.0, 2.5, 2.0, 1.05, 1.0, 1.0), Way("reducers", 4, "bf16")),
        ((9.0, 9.0, 7.0, 6.0, 3.0, 1.9, 1.0), Way("reducers", 4, "int8")),
        ((40.0, 40.0, 30.0, 25.0, 12.0, 6.0, 1.5), Way("diloco", 4, "int8")),
        ((1.05, 1.05, 1.05, 1.04, 1.04, 1.04, 1.0), Way("gloo")),  # nothing gains enough
    ],
)
def test_what_changes_least_and_gains_enough_is_advised(steps_s, taken):
    compared = [
        *(Way("gloo"), Way("reducers", 0), Way("reducers", 2), Way("reducers", 4)),
        *(Way("reducers", 4, "bf16"), Way("reducers", 4, "int8"), Way("diloco", 4, "int8")),
    ]
    found = [Prediction(way, 0.0, one) for way, one in zip(compared, steps_s, strict=True)]
    assert advised([*found, Prediction(Way("none"), 0.0, 1.0)]).way == taken


def test_ways_that_are_compared():
    names = [(way.kind, way.reducers, way.wire) for way in ways([2, 4])]
    assert names[:4] == [("gloo", 0, ""), ("reducers", 0, ""), *_rounded(0)]
    assert names[4:] == [
        *(("reducers", 2, ""), ("reducers", 4, ""), *_rounded(4)),
        *(("diloco", 0, "int8"), ("diloco", 4, "int8"), ("none", 0, "")),
    ]


def _rounded(pool):
    return ("reducers", pool, "bf16"), ("reducers", pool, "int8")


@pytest.mark.parametrize(("wrong", "says"), [({"nodes": 1}, "2 workers"), ({"every": 0}, "every")])
def test_jobs_that_there_are_not(wrong, says):
    with pytest.raises(ConfigError, match=says):
        job((0.0, 1, 0), **wrong)
