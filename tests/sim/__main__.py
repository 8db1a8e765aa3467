"""Run many seeds: ``python -m tests.sim --seeds 10000``; or one, with its story: ``--seed 7``.

With ``--mutations`` break rules on purpose, and say which seed notices.
"""

import argparse
import logging
import math
import multiprocessing
import os
import sys
import time

from tests.sim import mutations
from tests.sim.runner import implementation_of, run
from tests.sim.world import GaveUpError, Outcome, World

MOST_GIVEN_UP = 0.002  # of the worlds with rolling restarts, in the mean


def main():
    """Run what the command line asks for; 1 if a seed has failed, or a mutation has survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one alone, with its story")
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return tell(arguments.seed)
    logging.disable()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    return mutate(seeds) if arguments.mutations else run_all(seeds, arguments.processes)


def tell(seed):
    """Run a seed and tell its story."""
    world = World(seed, implementation_of(seed))
    reducers = f"{world.pool} + {len(world.hosts)} reducers of {world.lanes} lanes"
    print(world.faults, f"{world.world_size} ranks, {reducers}, {world.calls} calls")
    try:
        print(world.run())
    finally:
        print("\n".join([*world.trace, *world.describe()]))
    return 0


def mutate(seeds):
    """Find the first seed that notices each mutation."""
    survived = 0
    for name in mutations.MUTATIONS:
        caught = mutations.first_caught(name, seeds, lambda seed: run(seed, "plain")[2])
        if caught is None:
            survived += 1
            print(f"{name}: not noticed within {len(seeds)} seeds")
        else:
            seed, story = caught
            print(f"{name}: caught by seed {seed}: {story.splitlines()[0]}")
    return bool(survived)


def run_all(seeds, processes):
    """Run seeds and print what they have shown."""
    begun = time.monotonic()
    total, failures, given_up = Outcome(), [], []
    with multiprocessing.Pool(processes) as pool:
        for seed, outcome, story in pool.imap_unordered(run, seeds, chunksize=8):
            if story.startswith(GaveUpError.__name__):
                given_up.append(seed)
            elif outcome is None:
                failures.append(seed)
                print(f"seed {seed}:\n{story}", flush=True)
                if len(failures) == 5:
                    break
            else:
                total.add(outcome)
    print(total)
    print(
        f"{len(seeds)} seeds, {len(failures)} failed, {time.monotonic() - begun:.0f} s; a step was "
        f"lost after all reducers had died at once: {len(given_up)} {given_up}"
    )
    most = MOST_GIVEN_UP * (total.rolling + len(given_up))
    return bool(failures) or len(given_up) > most + 2 * math.sqrt(most)  # chance brings so many


if __name__ == "__main__":
    sys.exit(main())
