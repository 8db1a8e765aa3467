"""Whether training loses a step or a bit while reducers are killed, and how long it stalls.

    python -m torture.chaos --kills 200 --workers 4 --reducers 3

bench/README.md says what is done, and defines every option and figure.
"""

import signal
import sys
from typing import Annotated

import typer

from bench import options, report
from bench.results import ChaosResults
from lab import Lab
from torture.chaos_run import PLACES, at_failpoints, at_random, figures, train

LONGEST_STALL_S = 3.0


def main(  # noqa: PLR0917 (options have names on the command line)
    kills: Annotated[
        int | None, typer.Option(min=1, help="How often; 200, or once at each failpoint.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Ranks.")] = 4,
    reducers: Annotated[int, typer.Option(min=2, help="Reducers.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of instants, victims and data.")] = 0,
    failpoints: Annotated[
        bool, typer.Option("--failpoints", help="At named places, not at random instants.")
    ] = False,
    drain: Annotated[
        bool, typer.Option("--drain", help="SIGTERM instead of SIGKILL: reducers say goodbye.")
    ] = False,
    json: options.Json = None,
) -> None:
    """Train while reducers die, and say what became of it."""
    if failpoints and drain:
        raise typer.BadParameter("a reducer that is killed at a failpoint says no goodbye")
    if failpoints:
        blows = at_failpoints(kills or len(PLACES), reducers, workers, seed)
    else:
        number = signal.SIGTERM if drain else signal.SIGKILL
        blows = at_random(kills or 200, reducers, seed, number)
    run = options.begin("torture.chaos")
    with options.command("torture.chaos"), Lab.loopback(workers + reducers) as lab:
        disturbed = train(lab, workers, blows, seed=seed)
        undisturbed = train(lab, workers, [], seed=seed, steps=disturbed.least_steps)
    said = figures(disturbed, undisturbed)
    found = ChaosResults(**dict(run), workers=workers, reducers=reducers, **said)
    print(report.chaos_text(found))
    for line in found.errors:
        print(f"# {line}")
    if json:
        found.write(json)
    sys.exit(int(found.lost > 0 or not found.identical or found.stall_s > LONGEST_STALL_S))


if __name__ == "__main__":
    typer.run(main)
