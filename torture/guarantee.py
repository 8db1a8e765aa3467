"""Whether every result is right, or an error with a type in time, whatever happens.

    python -m torture.guarantee --topology pool --results 100000 --faults 300 --seed 1

Real reducers and ranks, over loopback. Ranks make random calls, and each compares every result, bit
for bit, with an oracle in NumPy; meanwhile processes are killed and stopped, connections reset, and
calls refused, interrupted and late. bench/README.md says what is done, and defines every figure.
"""

import itertools
import logging
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench import results as formats
from harness import HarnessError
from lab import LabUnavailable
from torture.guarantee_job import Tally, prepare
from torture.guarantee_topologies import TOPOLOGIES, arrange, lab_of

SEASON = 12  # faults, and then other settings
MARGIN_S = 1.0
MOST_FINDINGS = 50  # later ones say no more
COLUMNS = ["topology", "seconds", "results", "wrong", "errors"]
COLUMNS += ["faults", "troubles", "lives", "findings"]


class Found(formats.Record):
    """What came of one topology; bench/README.md defines the figures of the table."""

    seconds: float
    results: int
    wrong: int
    counts: dict[str, int]
    """Right results, errors by class, and troubles by kind."""
    faults: dict[str, int]
    lives: int
    slowest_join_s: float
    findings: list[dict[str, object]]
    errors: dict[str, list[str]]
    """Some of each class."""


class GuaranteeResults(formats.Run):
    """One run of `torture.guarantee`."""

    kind: Literal["guarantee"] = "guarantee"
    seed: int
    topologies: dict[str, Found]


def main(  # noqa: PLR0917 (typer's)
    topology: Annotated[str, typer.Option(help="Some of those in bench/README.md.")] = ",".join(
        TOPOLOGIES
    ),
    results: Annotated[int, typer.Option(min=1, help="To compare in each.")] = 100_000,
    faults: Annotated[int, typer.Option(min=0, help="To bring in each.")] = 300,
    seed: Annotated[int, typer.Option(help="Of everything that is chosen.")] = 0,
    margin: Annotated[float, typer.Option(help="Seconds that a call may be late.")] = MARGIN_S,
    json: Annotated[Path | None, typer.Option(help="Where to write all figures.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say what is done.")] = False,
) -> None:
    """Bring faults to jobs, compare all results, and print what was found."""
    if verbose:
        logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    names = topology.split(",")
    if unknown := set(names) - set(TOPOLOGIES):
        raise typer.BadParameter(f"{', '.join(unknown)}: none of {', '.join(TOPOLOGIES)}")
    run = formats.begin("torture.guarantee")
    print(line(COLUMNS), flush=True)
    found = {}
    for name in names:
        try:
            one = found[name] = attack(name, results, faults, seed, margin_s=margin)
        except LabUnavailable as error:
            print(f"{name:>12} cannot run here: {error}", flush=True)
            continue
        troubles = sum(n for what, n in one.counts.items() if what.startswith("trouble "))
        row = [name, f"{one.seconds:.0f}", one.results, one.wrong, one.counts.get("error", 0)]
        row += [sum(one.faults.values()), troubles, one.lives, len(one.findings)]
        print(line(row), flush=True)
        for finding in one.findings:
            print(f"    seed {seed}, {finding['kind']}: {finding['detail']}", flush=True)
    if json is not None:
        GuaranteeResults(**dict(run), seed=seed, topologies=found).write(json)
    sys.exit(any(one.findings for one in found.values()))


def line(cells: Sequence[object]) -> str:
    return "".join(f"{cell!s:>{13 if at == 0 else 9}}" for at, cell in enumerate(cells))


def attack(name: str, results: int, faults: int, seed: int, *, margin_s: float = MARGIN_S) -> Found:
    """Bring faults to a topology until as many came, and as many results were compared."""
    begun = time.monotonic()
    tally = Tally()
    rng = random.Random(f"{seed} {name}")  # noqa: S311 (dice, not secrets)
    topology = TOPOLOGIES[name]
    with prepare() as home, lab_of(topology) as lab:
        for season in itertools.count():
            if tally.has(results, faults) or len(tally.findings) >= MOST_FINDINGS:
                break
            folder = Path(home, f"{name}-{season}")
            folder.mkdir()
            seeded = f"{seed} {name} {season}"
            arena = arrange(topology, seeded, tally, rng, lab=lab, folder=folder, margin_s=margin_s)
            try:
                for _ in range(SEASON):
                    if not tally.has(0, faults):
                        arena.suffer()
                arena.go_on(lambda: tally.has(results, 0) or not tally.has(0, faults))
                arena.finish()
            except HarnessError as error:
                tally.findings.append({"kind": "crash", "detail": f"season {season}: {error}"})
            finally:
                arena.close()
    return Found(
        seconds=time.monotonic() - begun,
        results=tally.compared,
        wrong=tally.wrong,
        counts=dict(tally.counts),
        faults=dict(tally.faults),
        lives=tally.lives,
        slowest_join_s=tally.slowest_join_s,
        findings=tally.findings,
        errors=tally.samples,
    )


if __name__ == "__main__":
    typer.run(main)
