"""One job whose ranks use PyTorch, JAX, MLX and NumPy, while its reducers are killed."""

import random
import re
import signal
import time

import pytest

from harness.pool import Pool
from tests.frameworks.test_examples import need
from tests.frameworks.training import LINE, TOLERANCE
from tests.ranks import ROOT, Loopback, environments, ranks

pytestmark = pytest.mark.timeout(900)
FRAMEWORKS = ("torch", "jax", "mlx", "numpy")
EXAMPLE = ROOT / "examples/mixed_digits.py"
REST_S = 0.3  # at most, from when a reducer listens to the next kill


def kill_while(job, pool):
    """Kill reducers in turns that nobody can foresee, until a rank has ended; return how many."""
    chance, kills = random.Random(5), 0
    until = time.monotonic() + 200
    while not all("trains with" in rank.out for rank in job):
        assert {rank.poll() for rank in job} == {None}, job.report()
        assert time.monotonic() < until, job.report()
        time.sleep(0.05)
    while {rank.poll() for rank in job} == {None}:
        victim = chance.randrange(len(pool.reducers))
        pool.end(victim, signal.SIGKILL)
        pool.start(victim)
        kills += 1
        time.sleep(chance.uniform(0, REST_S))
    return kills


def train(steps):
    """Return what the ranks said at their ends, and how many kills there were meanwhile."""
    with Loopback(3) as lab:
        pool = Pool(lab.hosts)
        try:
            started = environments(4, pool.addresses, REDUCTION_WAIT_FOR_REDUCERS="60s")
            with ranks(started, EXAMPLE, "--steps", steps, fresh=True) as job:
                kills = kill_while(job, pool)
                said = job.outputs(600)
        finally:
            pool.stop()
    for framework, rank in zip(FRAMEWORKS, said, strict=True):
        assert f"trains with {framework}\n" in rank
    return said, kills


def check(said):
    """Check that all have the same results and the same weights; return the loss."""
    sums = {re.search(r"sums (\w{16})", rank)[1] for rank in said}
    ends = {LINE.search(rank).group(2, 3, 4) for rank in said}
    assert (len(sums), len(ends)) == (1, 1), said
    ((loss, _, _),) = ends
    return float(loss)


def test_all_ranks_have_the_same_sums_though_reducers_are_killed():
    need("sklearn", *FRAMEWORKS)
    said, kills = train(steps=400)
    assert kills >= 3
    loss = check(said)
    stock = environments(1, WORLD_SIZE="4")
    with ranks(stock, EXAMPLE, "--steps", 400, "--stock", fresh=True) as alone:
        (expected,) = alone.outputs()
    assert loss == pytest.approx(float(LINE.search(expected)[2]), rel=TOLERANCE)


@pytest.mark.slow
def test_a_hundred_kills():
    need("sklearn", *FRAMEWORKS)
    killed = 0
    while killed < 100:
        said, kills = train(steps=6000)
        check(said)
        assert kills > 10
        killed += kills
