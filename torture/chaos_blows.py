"""What `torture.chaos` does to reducers: which is ended when, how, and whether it comes back."""

import random
import signal
from dataclasses import dataclass

PLACES = (
    "reducer.received",
    "reducer.placed",
    "reducer.before_sum",
    "reducer.after_sum",
    "reducer.between_results",
    "reducer.after_results",
    "reducer.welcome",
    "reducer.tick",
)
MOST_PASSES = 100  # of a failpoint before the one that kills
REST_S = 0.5  # at most, from when all reducers are in use to the next blow


@dataclass(frozen=True)
class Blow:
    """What happens to a reducer.

    Attributes:
        reducer: which.
        rest_s: how long everything has been well before.
        number: the signal that ends it, SIGKILL or SIGTERM.
        failpoint: instead of a random instant, as of REDUCTION_FAILPOINTS.
        comes_back: whether it is started again.
    """

    reducer: int
    rest_s: float = 0.0
    number: signal.Signals = signal.SIGKILL
    failpoint: str = ""
    comes_back: bool = True


def at_random(count: int, reducers: int, seed: int, number: signal.Signals) -> list[Blow]:
    """Return blows at random instants to random reducers."""
    chance = random.Random(seed)  # noqa: S311 (to be repeated)
    return [
        Blow(chance.randrange(reducers), chance.uniform(0, REST_S), number) for _ in range(count)
    ]


def at_failpoints(count: int, reducers: int, workers: int, seed: int) -> list[Blow]:
    """Return blows at every failpoint of a reducer in turn, each at a random pass."""
    chance = random.Random(seed)  # noqa: S311 (to be repeated)
    blows = []
    for turn in range(count):
        place = PLACES[turn % len(PLACES)]
        # Every worker is welcomed once.
        passes = chance.randint(1, workers if place == "reducer.welcome" else MOST_PASSES)
        victim = chance.randrange(reducers)
        blows.append(Blow(victim, failpoint=f"{place}=kill@{passes}"))
    return blows
