"""Whether a rolling restart of the pool costs a call, at any pace.

    python -m torture.rolling --reducers 2,3 --paces 0.5,5,50,500 --gaps 3,10 --times 10

bench/README.md says what is done, and defines every option and figure.
"""

import itertools
import signal
import sys
import time
from typing import Annotated, Any

import typer

from harness.pool import Pool
from lab import Lab
from torture.fault_job import Job, Told

WORKERS = 3
ELEMENTS = 10_000
# Calls at full speed before the restarts: what ranks agree on then, they agree on seldom.
WARM = 300
PATIENCE_S = 60.0
SETTLE_S = 3.0  # and one call after that all reducers are to be in use
SIGNALS = {"TERM": signal.SIGTERM, "KILL": signal.SIGKILL}


def main(
    reducers: Annotated[str, typer.Option(help="Numbers of reducers.")] = "2,3",
    paces: Annotated[str, typer.Option(help="Calls a second.")] = "0.5,5,50,500",
    gaps: Annotated[str, typer.Option(help="Seconds from one restart to the next.")] = "3,10",
    signals: Annotated[str, typer.Option(help="TERM, KILL or both.")] = "TERM,KILL",
    times: Annotated[int, typer.Option(min=1, help="How often each case is run.")] = 1,
) -> None:
    """Restart pools, one reducer after the other, and print what that cost."""
    print(
        f"{'reducers':>8} {'pace':>6} {'gap':>5} {'signal':>6} {'calls':>7} errors wrong all used"
    )
    failed = 0
    cases = itertools.product(
        map(int, reducers.split(",")),
        map(float, gaps.split(",")),
        map(float, paces.split(",")),
        signals.split(","),
        range(times),
    )
    for count, gap_s, pace, name, _ in cases:
        said = roll(count, gap_s, pace, SIGNALS[name])
        errors = sum(len(one["errors"]) for one in said)
        wrong = sum(one["wrong"] for one in said)
        used = all(all(one["in_use"]) for one in said)
        failed += bool(errors or wrong or not used)
        print(
            f"{count:8} {pace:6g} {gap_s:5g} {name:>6} {said[0]['calls']:7} {errors:6} {wrong:5} "
            f"{'yes' if used else 'no':>8}",
            flush=True,
        )
        for line in sorted({text for one in said for text in one["errors"]}):
            print(f"    {line}")
    sys.exit(failed > 0)


def roll(count: int, gap_s: float, pace: float, number: signal.Signals) -> list[dict[str, Any]]:
    """Restart each reducer of a pool once while ranks make calls; return what they have seen."""
    with Lab.loopback(WORKERS + count) as lab:
        pool = Pool(lab.hosts[WORKERS:])
        try:
            with Job(lab, lab.hosts[:WORKERS], pool.addresses) as job:
                job.begin(ELEMENTS, pace=pace, warm=WARM)
                job.wait_for_steps(WARM, PATIENCE_S)
                for reducer in range(count):
                    time.sleep(gap_s)
                    pool.end(reducer, number)
                    pool.start(reducer)
                time.sleep(SETTLE_S + 1 / pace)
                goes_on = job.wait_for_steps(job.done + 1, PATIENCE_S)
                return [_seen(told, goes_on, count) for told in job.told]
        finally:
            pool.stop()


def _seen(told: Told, goes_on: bool, count: int) -> dict[str, Any]:
    failure = told.failure
    return {
        "calls": len(told.steps),
        "errors": [f"call {failure.number}: {failure.error}: {failure.text}"] if failure else [],
        "wrong": sum(step.wrong > 0 for step in told.steps),
        "in_use": [goes_on, *(step.in_use == count for step in told.steps[-1:])],
    }


if __name__ == "__main__":
    typer.run(main)
