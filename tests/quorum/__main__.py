"""Run many seeds: ``python -m tests.quorum --seeds 10000``; with ``--mutations`` break rules."""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from tests.quorum.mutations import MUTATIONS, first_caught, run
from tests.quorum.world import World


def main():
    """Run what the command line asks for; 1 if a seed has failed, or a mutation has survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.quorum", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    return mutate(seeds) if arguments.mutations else run_all(seeds, arguments.processes)


def mutate(seeds):
    """Find the first seed that notices each mutation."""
    survived = 0
    for name in MUTATIONS:
        caught = first_caught(name, seeds)
        survived += caught is None
        print(name, "not noticed" if caught is None else "caught by seed {}: {}".format(*caught))
    return bool(survived)


def outcomes_of(seed):
    """Simulate one seed; return the outcome of each averaging, and every violation found."""
    world = World(seed)
    story = run(world)
    return seed, Counter({one.name: count for one, count in world.outcomes.items()}), story


def run_all(seeds, processes):
    """Run seeds and print what they have shown."""
    begun = time.monotonic()
    total = Counter()
    failed = 0
    with multiprocessing.Pool(processes) as pool:
        for seed, outcomes, story in pool.imap_unordered(outcomes_of, seeds, chunksize=8):
            total += outcomes
            if story:
                failed += 1
                print(f"seed {seed}: {story}", flush=True)
    print(", ".join(f"{count} {name.lower().replace('_', ' ')}" for name, count in total.items()))
    print(f"{len(seeds)} seeds, {failed} failed, {time.monotonic() - begun:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
