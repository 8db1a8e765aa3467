"""Whether a training with leaves ends with the same weights, whoever dies and joins meanwhile.

    python -m torture.leaves --losses 200 --kills 100

bench/README.md says what is done.
"""

import random
import secrets
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import typer

from bench import options
from harness import pool
from harness.processes import Process
from lab import Lab

PATIENCE_S = 120.0
BETWEEN_S = (0.1, 0.6)  # two deaths


@dataclass
class Life:
    """One training: ranks, reducers, and what they have said.

    Attributes:
        ranks: all that were ever started, by order of their start.
        steps: of each, the latest that it has begun.
        ends: fingerprints of those that have made all steps.
    """

    lab: Lab
    servers: list[str]
    arguments: list[str]
    job: str = field(default_factory=lambda: f"leaves-{secrets.token_hex(4)}")
    ranks: list[Process] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)

    def start(self, **settings: str) -> int:
        """Start a rank, which joins if it gets no number of its own; return its place."""
        place = len(self.ranks)
        more = [] if "RANK" in settings else ["join"]
        environment = {
            "REDUCTION_SERVERS": ",".join(self.servers),
            "REDUCTION_JOB": self.job,
            "REDUCTION_ON_RANK_LOST": "continue",
            **settings,
        }
        self.ranks.append(
            Process(
                self.lab.hosts[0],
                "-m",
                "torture.leaves_rank",
                *self.arguments,
                *more,
                hear=partial(self._hear, place),
                environment=environment,
            )
        )
        return place

    def _hear(self, place: int, said: dict[str, Any] | None) -> None:
        if said is not None and "step" in said:
            self.steps[place] = said["step"]
        elif said is not None:
            self.ends[place] = said["fingerprint"]

    def at_work(self) -> list[int]:
        """Return the ranks that make steps."""
        return [
            place
            for place, rank in enumerate(self.ranks)
            if place in self.steps and place not in self.ends and rank.ended is None
        ]

    def end(self) -> None:
        """Kill all ranks."""
        for rank in self.ranks:
            rank.end()

    def until(self, done: Any) -> None:
        """Wait, and say who is where if that lasts too long."""
        until = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > until:
                for place, rank in enumerate(self.ranks):
                    rank.abort()
                    print(f"# rank {place}, step {self.steps.get(place)}: {rank.last_words(30)}")
                raise SystemExit(f"torture.leaves: nothing went on for {PATIENCE_S:.0f} s")
            time.sleep(0.005)


def live(
    lab: Lab, chance: random.Random, ranks: int, arguments: list[str], events: list[str]
) -> set[str]:
    """Train beside deaths, which are taken out of `events`; return the fingerprints."""
    with ExitStack() as stack:
        reducers = pool.start(lab.hosts[1:])
        stack.callback(end_all, reducers)
        life = Life(lab, [reducer.address for reducer in reducers], arguments)
        stack.callback(life.end)
        for rank in range(ranks):
            life.start(RANK=str(rank), WORLD_SIZE=str(ranks))
        life.until(lambda: len(life.at_work()) == ranks or life.ends)
        while events and not life.ends:
            time.sleep(chance.uniform(*BETWEEN_S))
            if events[-1] == "rank":
                victim = chance.choice(life.at_work() or [0])
                life.ranks[victim].signal(signal.SIGKILL)
                newcomer = life.start()
                life.until(lambda: newcomer in life.steps or life.ends)  # noqa: B023
                if life.ends:
                    break
            else:
                at = chance.randrange(len(reducers))
                port = int(reducers[at].address.rpartition(":")[2])
                reducers[at].close()
                reducers[at] = pool.Reducer(lab.hosts[1 + at], port=port).await_ready()
            events.pop()
        life.until(lambda: not life.at_work())
        return set(life.ends.values())


def end_all(reducers: list[pool.Reducer]) -> None:
    """Kill reducers: those that are there by then."""
    for reducer in reducers:
        reducer.close()


def main(  # noqa: PLR0917 (options have names on the command line)
    losses: Annotated[int, typer.Option(min=0, help="Ranks that die; one joins for each.")] = 200,
    kills: Annotated[int, typer.Option(min=0, help="Reducers that die.")] = 100,
    ranks: Annotated[int, typer.Option(min=3, help="Ranks.")] = 5,
    reducers: Annotated[int, typer.Option(min=1, help="Reducers.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Of one training.")] = 600,
    leaves: Annotated[int, typer.Option(min=1, help="Of a step.")] = 24,
    seed: Annotated[int, typer.Option(min=0, help="Of instants and victims.")] = 0,
) -> None:
    """Train again and again until all have died, and compare the weights with calm ones."""
    chance = random.Random(seed)  # noqa: S311 (to be repeated)
    arguments = [str(steps), str(leaves)]
    events = ["rank"] * losses + ["reducer"] * kills
    chance.shuffle(events)
    found, lives = set(), 0
    with options.command("torture.leaves"), Lab.loopback(1 + reducers) as lab:
        right = live(lab, chance, ranks, arguments, [])
        print(f"# calm: weights {', '.join(right)}", flush=True)
        while events:
            lives += 1
            left = len(events)
            ends = live(lab, chance, ranks, arguments, events)
            found |= ends
            died = f"{left - len(events)} died, {len(events)} left"
            print(f"# training {lives}: {died}, weights {', '.join(sorted(ends))}", flush=True)
    same = found == right and len(right) == 1
    print(f"{losses} ranks and {kills} reducers died in {lives} trainings of {steps} steps")
    print(f"weights {'as without any' if same else f'DIFFER: {found} and {right}'}")
    sys.exit(int(not same))


if __name__ == "__main__":
    typer.run(main)
