"""Run seeds, one by one or many at a time."""

import traceback

from tests.engine.twins import IMPLEMENTATIONS
from tests.sim.world import World


def implementation_of(seed):
    """Every other seed runs with the other implementation."""
    return IMPLEMENTATIONS[seed % len(IMPLEMENTATIONS)]


def run(seed, implementation=None):
    """Run a seed: its outcome, or the story of what went wrong."""
    world = World(seed, implementation or implementation_of(seed))
    try:
        return seed, world.run(), ""
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the seed's outcome)
        trace = traceback.format_exc()[-1500:]
        return seed, None, "\n".join([repr(error), *world.trace[-20:], *world.describe(), trace])
