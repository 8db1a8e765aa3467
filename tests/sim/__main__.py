"""Run many seeds: ``python -m tests.sim --seeds 10000``; or one, with its story: ``--seed 7``.

With ``--mutations`` break rules on purpose, and say which seed notices. Of ranks that lose others
and are joined by others, ``python -m tests.sim memberships``; of averagings, ``quorum``.
"""

import argparse
import logging
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from functools import partial

from tests.memberships.mutations import MUTATIONS as MEMBERSHIPS
from tests.memberships.training import Training
from tests.quorum.mutations import MUTATIONS as QUORUM
from tests.quorum.world import World as Averagings
from tests.sim.mutations import MUTATIONS as JOBS
from tests.sim.rules import story_of
from tests.sim.world import GaveUpError, World

SIMULATORS = {
    "jobs": (World, JOBS),
    "memberships": (Training, MEMBERSHIPS),
    "quorum": (Averagings, QUORUM),
}
MOST_GIVEN_UP = 0.002  # of the worlds with rolling restarts, in the mean


def main():
    """Run what the command line asks for; 1 if a seed has failed, or a mutation has survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("simulator", nargs="?", choices=SIMULATORS, default="jobs")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one alone, with its story")
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    world, mutations = SIMULATORS[arguments.simulator]
    if arguments.seed is not None:
        return tell(world(arguments.seed))
    logging.disable()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.mutations:
        return mutate(mutations, arguments.seeds)
    return run_all(world, seeds, arguments.processes)


def tell(world):
    story = story_of(world)
    print("\n".join([*world.describe(), str(world.outcome), story]))
    return bool(story)


def mutate(mutations, worlds):
    """Find the first seed that notices each mutation, among so many that it concerns."""
    survived = 0
    for name in mutations:
        caught = mutations.first_caught(name, worlds)
        survived += caught is None
        seed, story = caught or (None, f"not noticed by {worlds} worlds")
        print(f"{name}: seed {seed}: {story.splitlines()[0][:150]}", flush=True)
    return bool(survived)


def outcome_of(world, seed):
    """Run a seed: what it has shown, and what went wrong."""
    made = world(seed)
    story = story_of(made)
    return seed, made.outcome, story


def run_all(world, seeds, processes):
    begun = time.monotonic()
    total, failures, given_up = Counter(), [], []
    with multiprocessing.Pool(processes) as pool:
        for seed, outcome, story in pool.imap_unordered(partial(outcome_of, world), seeds, 8):
            total += outcome
            if story.startswith(GaveUpError.__name__):
                given_up.append(seed)
            elif story:
                failures.append(seed)
                print(f"seed {seed}:\n{story}", flush=True)
                if len(failures) == 5:
                    break
    print(", ".join(f"{count} {what}" for what, count in total.items()))
    print(
        f"{len(seeds)} seeds, {len(failures)} failed, {time.monotonic() - begun:.0f} s; a step was "
        f"lost after all reducers had died at once: {len(given_up)} {given_up}"
    )
    most = MOST_GIVEN_UP * total["rolling"]
    return bool(failures) or len(given_up) > most + 2 * math.sqrt(most)  # chance brings so many


if __name__ == "__main__":
    sys.exit(main())
