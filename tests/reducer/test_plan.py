"""`reducer plan`: the seeds' examples, the formulas' corners, and what the command prints."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import composite

from reducer.commands import plan as plan_command
from reducer.errors import ConfigError
from reducer.planning import network_model, plan, vertex
from reducer.wire.layout import SMALLEST_CHUNK, mixed_weights, shards
from tests.commands import transcript
from tests.golden import check_golden

LINKS = network_model.Network(100.0, 100.0)


def card_s(n, k, kind, links=LINKS):
    """Seconds for which the busiest card sends a byte of n workers' all-reduce by k reducers."""
    return network_model.busiest_card_s(n, network_model.shares(n, k, kind), links)


@pytest.mark.parametrize(
    ("workers", "worker_gbps", "reducer_gbps", "needed"),
    [
        (8, 100, 32, 25),  # the rule's published examples
        (5, 100, 32, 16),
        (1, 100, 100, 1),
        (3, 0.1, 0.1, 3),  # in binary a little more than 3
        (7, 0.3, 0.7, 3),
        (2, 1, 100, 1),
    ],
)
def test_the_rule(workers, worker_gbps, reducer_gbps, needed):
    assert plan.reducers_needed(workers, worker_gbps, reducer_gbps) == needed


@given(st.integers(1, 500), st.integers(1, 400), st.integers(1, 400))
def test_the_rule_gives_the_fewest(workers, worker, reducer):
    needed = plan.reducers_needed(workers, worker, reducer)
    assert needed * reducer >= workers * worker > (needed - 1) * reducer


@composite
def pools(draw):
    workers = draw(st.integers(2, 64))
    return workers, draw(st.integers(1, workers - 1))


@given(pools())
def test_the_mixed_split_is_the_published_one(pool):
    n, k = pool
    owned = network_model.shares(n, k, "mixed")
    whole = n * n + k * n - 2 * k
    assert owned == (Fraction(2 * (n - 1), whole), Fraction(n - k, whole))
    assert k * owned.pool + n * owned.ranks == 1
    # With it all cards are busy for the same time, which is less than a ring's or the pool's.
    both = card_s(n, k, "mixed")
    assert both == pytest.approx(2 * n * (n - 1) / whole / 100)
    assert both <= network_model.ring_factor(n) / 100 * 1.000001
    assert both <= card_s(n, k, "pool") * 1.000001


@given(pools(), st.integers(1 << 20, 1 << 24))
def test_the_split_is_the_one_that_buffers_are_cut_by(pool, nbytes):
    n, k = pool
    owned = network_model.shares(n, k, "mixed")
    for shard in shards(nbytes, mixed_weights(n, k), 0):
        share = owned.pool if shard.reducer < k else owned.ranks
        if (shard.end - shard.start) > SMALLEST_CHUNK:
            assert (shard.end - shard.start) / nbytes == pytest.approx(float(share), rel=0.01)


@pytest.mark.parametrize("n", [2, 64])
def test_corners_of_the_cards(n):
    assert card_s(n, n, "pool") == pytest.approx(1 / 100)
    assert card_s(n, 2 * n, "pool") == pytest.approx(1 / 100)
    assert card_s(n, 0, "embedded") == pytest.approx(network_model.ring_factor(n) / 100)
    # A fast reducer does for several slow ones.
    one_fast = network_model.Network(100.0, 100.0 * n)
    assert card_s(n, 1, "pool", one_fast) == pytest.approx(1 / 100)


@pytest.mark.parametrize(
    ("nbytes", "latency_s", "pool_s", "ring_s"), [(1e11, 1e-4, 100, 175), (64, 1e-3, 1e-3, 7e-3)]
)
def test_large_buffers_take_what_cards_take_and_small_ones_a_round_trip(
    nbytes, latency_s, pool_s, ring_s
):
    network = network_model.Network(1e9, 1e9, latency_s)
    taken_s = network_model.all_reduce_s(nbytes, 8, 8, "pool", network)
    assert taken_s == pytest.approx(pool_s, rel=0.01)
    assert network_model.ring_s(nbytes, 8, network) == pytest.approx(ring_s, rel=0.01)


@pytest.mark.parametrize(
    ("job", "times_the_rate", "mib", "through_busiest"),
    [
        ((4, 4, "pool"), 1, 16, 16 + 1),  # 16 chunks of 256 KiB a shard, and a wave of 4
        ((64, 64, "pool"), 1, 16, 16 + 16),  # one chunk a shard: it comes when all have gone
        ((64, 16, "pool"), 4, 16, 16 + 4),  # four
        ((2, 8, "pool"), 1, 16, 16 + 2),  # workers' cards are the limit
        ((16, 4, "pool"), 1, 16, 64 + 2),  # reducers' are: chunks are of what they leave, 128 KiB
        ((4, 0, "embedded"), 1, 16, 24),  # the card rests for none
        ((4, 2, "mixed"), 1, 20, 24 + 1),  # 24 chunks of the pool's 6 MiB each
        ((8, 8, "pool"), 1, 1 / 16, 1 / 4 + 1 / 4),  # two reducers have 32 KiB each
    ],
)
def test_a_pool_takes_one_wave_of_chunks_more_than_its_bytes(
    job, times_the_rate, mib, through_busiest
):
    network = network_model.Network(1e9, times_the_rate * 1e9, 0.001)
    taken_s = network_model.all_reduce_s(mib * 2**20, *job, network)
    assert taken_s == pytest.approx(through_busiest * 2**20 / 1e9 + 0.001, rel=0.003)


@given(st.integers(2, 32))
def test_more_reducers_never_slow_the_cards(workers):
    network = network_model.Network(1e8, 1e8)
    times = [card_s(workers, k, "pool", network) for k in range(1, 2 * workers)]
    assert times == sorted(times, reverse=True)


def job(**others):
    values = {"workers": 4, "worker_gbps": 10.0, "reducer_gbps": 10.0, "nbytes": 512 << 20}
    return plan.PlannedJob(**{**values, **others})


def test_steps_overlap_with_the_backward_pass():
    network = job().network
    all_s = network_model.all_reduce_s(512 << 20, 4, 4, "pool", network)
    long = job(backward_s=10.0, forward_s=3.0)
    last_s = network_model.all_reduce_s(64 << 20, 4, 4, "pool", network)
    assert plan.buckets(long) == 8
    # A long backward pass hides all but the last bucket; a short one hides next to nothing.
    assert plan.step_s(long, all_s, last_s) == pytest.approx(13.0 + last_s)
    short = job(backward_s=0.08)
    assert plan.step_s(short, all_s, last_s) == pytest.approx(0.01 + all_s)


def test_buckets_are_those_of_the_hook():
    ddp = pytest.importorskip("worker_client.ddp", reason="needs torch")
    assert plan.BUCKET_BYTES == ddp.DEFAULT_BUCKET_CAP_MB << 20


def test_rows_and_costs():
    found = plan.plan(job(worker_cost=4.0, reducer_cost=0.5))
    assert [(row.reducers, row.topology) for row in found.rows] == [
        *((0, "embedded"), (1, "mixed"), (2, "mixed"), (4, "pool"))
    ]
    last = found.rows[-1]
    assert found.reducers_needed == 4
    assert last.cost_per_hour == 18
    assert last.speedup == pytest.approx(1.5, rel=0.05)
    assert last.cost_saved == pytest.approx(1 - 18 / 16 / last.step_speedup)
    assert last.hours_gained_per_cost == pytest.approx((last.step_speedup - 1) / 2)
    assert found.rows[0].hours_gained_per_cost is None
    assert plan.plan(job()).rows[-1].cost_per_hour is None
    assert [row.reducers for row in plan.plan(job(), [8, 3, 3]).rows] == [3, 8]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"workers": 10**15}, "workers must be from 2 to 65536"),
        ({"reducer_gbps": 1e308}, "reducer_gbps must be from 0.001 to"),
        ({"reducer_gbps": float("nan")}, "reducer_gbps must be from 0.001 to"),
        ({"nbytes": 10**400}, "nbytes must be from 1 to"),
        ({"backward_s": -1.0}, "backward_s must be from 0 to"),
        ({"mtu": 52}, "mtu must be from 53 to 65536"),
    ],
)
def test_what_cannot_be_planned(wrong, says):
    with pytest.raises(ConfigError, match=says):
        job(**wrong)


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        ((None, None, "fp32"), 10**9),
        (("400MB", None, "fp32"), 400 * 10**6),
        ((None, "1.5B", "fp32"), 6 * 10**9),
        ((None, "1000", "fp64"), 8000),
        ((None, "1000", "int8"), 4 * 256),
    ],
)
def test_sizes_of_models(given, nbytes):
    assert plan_command.gradient_bytes(*given) == nbytes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1MB", "1M", "fp32"), "not both"),
        (("much", None, "fp32"), "model-bytes: write a size"),
        ((None, "many", "fp32"), "parameters: write a number"),
        ((None, "1M", "int4"), "dtype: 'int4' is none of fp32"),
        ((None, None, "float32"), "dtype: 'float32' is none of fp32"),
        (("1MB", None, "int8"), "--dtype goes with --parameters"),
    ],
)
def test_bad_sizes_of_models(arguments, says):
    with pytest.raises(ConfigError, match=says):
        plan_command.gradient_bytes(*arguments)


def test_durations():
    assert plan_command.seconds("backward", "0") == 0  # and otherwise as in settings
    with pytest.raises(ConfigError, match="backward: write a duration"):
        plan_command.seconds("backward", "2x")


MACHINES = "--worker-machine n1-highmem-96 --accelerator NVIDIA_TESLA_V100:8"
MACHINES = f"{MACHINES} --reducer-machine n1-highcpu-16"
RULE = "reducer plan --worker-gbps 100 --reducer-gbps 32"
LINES = [
    f"{RULE} --workers 8 --backward 200ms --reducer-cost 0.5 --worker-cost 4",
    f"{RULE} --workers 5 --json --reducers 8,16",
    "reducer plan --worker-gbps 1 --reducer-gbps 1 --workers 2",
    # The published example: 1 and 4 workers of 8 accelerators, 16 reducers.
    f"{RULE} --workers 5 --vertex {MACHINES} --image r/i:1 --train 't.py -e 3'",
]


def test_what_the_command_prints():
    check_golden(Path(__file__).with_name("plan.txt"), transcript(LINES))


def machines(**others):
    values = {"workers": 2, "reducers": 2, "worker_machine": "w", "reducer_machine": "r"}
    values |= {"worker_image": "wi", "reducer_image": "ri", "command": ("c",)}
    return vertex.Machines(**{**values, **others})


def test_pools_of_vertex():
    first, second, third = vertex.custom_job_spec(machines(workers=1, keys="/k"))["workerPoolSpecs"]
    assert second == {}
    assert third["containerSpec"]["imageUri"] == "ri"
    for pool in (first, third):
        assert pool["containerSpec"]["env"] == [{"name": "REDUCTION_KEYS", "value": "/k"}]
    for wrong in ({"workers": 0}, {"reducers": 0}, {"accelerator": "A"}, {"accelerator_count": 1}):
        with pytest.raises(ConfigError):
            machines(**wrong)
