"""How surely a rank is named that the others wait for, and how surely nobody else: a table.

    python -m tests.engine.stragglers

Ranks make steps in virtual time. Two reducers hear when each rank contributes: at slightly
different times, and the second one does not know the job for as long as the first.
"""

import random
from typing import NamedTuple

from reducer.engine.lateness import Lateness, Watch
from reducer.wire.messages import Straggler

LOOK_S, LOOKS = 0.5, 10  # between looks: so many in a step at most
LEAST_S, LEAST_STEPS = 600.0, 400
HEARD_S = 0.002  # reducers hear a contribution after up to so long
LATER_S = 1.7  # the next reducer looks so much later for the first time
RANKS = range(2, 9)
STEPS_S = (0.1, 0.2, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
RUNS = 20
STRAGGLER = 1


class Look(NamedTuple):
    """Whom each of the reducers names at one time."""

    at: float
    told: tuple[Straggler | None, ...]


def late(share, varies=0.01):
    """Return how long ranks compute, in steps, where one is late by a share of each."""
    return lambda rng, rank: 1 - share * (rank != STRAGGLER) + rng.gauss(0, varies)


def exponential(rng, rank):
    """Return how long any rank computes, in steps."""
    del rank
    return rng.expovariate(1.0)


def gaussian(rng, rank):
    """Return how long any rank computes, in steps."""
    del rank
    return max(0.01, rng.gauss(1.0, 0.2))


def run(world_size, step_s, compute, seed=0, reducers=2):
    """Make steps for 10 minutes, or 400 of them; return what was to be seen all the time."""
    rng = random.Random(f"{world_size} {step_s} {seed}")
    known = [(Lateness(world_size), Watch()) for _ in range(reducers)]
    now = looked = 100.0
    looks = []
    end = now + max(LEAST_S, LEAST_STEPS * step_s)
    sequence = 0
    while now < end:
        took = [max(0.0, step_s * compute(rng, rank)) for rank in range(world_size)]
        first, second = sorted(range(world_size), key=took.__getitem__)[-2:]
        ends = now + took[second]
        while looked < ends:
            looked += max(LOOK_S, step_s / LOOKS)
            for number, (lateness, watch) in enumerate(known):
                if looked - 100.0 >= number * LATER_S:
                    watch.look(lateness, world_size, looked)
            looks.append(Look(looked - 100.0, tuple(watch.straggler for _, watch in known)))
        for lateness, _ in known:
            before, after = sorted(rng.uniform(0, HEARD_S) for _ in range(2))
            alone_us = round(1e6 * (now + took[first] + before))
            lateness.hear(first, sequence, alone_us, 0)
            last_us = max(alone_us, round(1e6 * (ends + after)))
            lateness.hear(second, sequence, last_us, alone_us)
            # The other one's window was full until then: now the last chunk waits for that rank.
            lateness.hear(first, sequence, last_us + rng.randrange(1, 1000), last_us)
        sequence, now = sequence + 1, ends + HEARD_S
    return looks


def main():
    """Print the table."""
    head = " ranks   step   named  after  differ   median  share | accused of"
    print(f"{head}, {RUNS} runs: exponential, gaussian")  # noqa: T201
    for world_size in RANKS:
        for step_s in STEPS_S:
            looks = run(world_size, step_s, late(0.9))
            named = [one.told for one in looks if all(it and it.rank == 1 for it in one.told)]
            first = next(one.at for one in looks if all(one.told))
            ranks = [{it and it.rank for it in one.told} for one in looks]
            differ = sum(len(one) > 1 for one in ranks) / len(looks)
            errors = [it.median_s / (0.9 * step_s) - 1 for one in named for it in one if it]
            shares = [it.share for one in named for it in one if it]
            accused = [
                sum(
                    any(any(one.told) for one in run(world_size, step_s, compute, seed, 1))
                    for seed in range(RUNS)
                )
                for compute in (exponential, gaussian)
            ]
            print(  # noqa: T201
                f"{world_size:6} {step_s:4} s {len(named) / len(looks):7.1%} {first:4.0f} s"
                f" {differ:7.1%} {min(errors):+6.0%}{max(errors):+3.0%}"
                f" {min(shares):6.0%} | {accused[0]} {accused[1]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
