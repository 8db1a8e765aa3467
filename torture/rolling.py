"""Whether a rolling restart of the pool costs a call, at any pace.

    python -m torture.rolling --reducers 2,3 --paces 0.5,5,50,500 --gaps 3,10 --times 10

Real reducers and ranks, over loopback. Each reducer of a pool ends, by SIGTERM or SIGKILL, and is
started again at once, one after the other, with a gap in between, while ranks make calls at some
pace. A line for each case: calls, errors, wrong results, and whether all reducers are used in the
end. bench/README.md defines every option and figure.
"""

import itertools
import signal
import sys
import time
from typing import Annotated, Any

import typer

from bench import options
from harness.pool import Pool
from harness.ranks import Ranks

WORKERS = 3
WARM = (
    300  # calls at full speed before the restarts: what ranks agree on then, they agree on seldom
)
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
    with options.lab(WORKERS + count, None) as lab:
        hosts = lab.hosts[:WORKERS]
        pool = Pool(lab.hosts[WORKERS:])
        try:
            arguments = {"pace": pace, "warm": WARM}
            job = {"REDUCTION_JOB": "rolling"}
            with Ranks("torture.rolling_rank", hosts, arguments, pool.addresses, job) as ranks:
                ranks.hear_all(PATIENCE_S)  # they are warm
                for reducer in range(count):
                    time.sleep(gap_s)
                    pool.end(reducer, number)
                    pool.start(reducer)
                time.sleep(SETTLE_S + 1 / pace)
                ranks.tell("stop")
                return ranks.hear_all(PATIENCE_S)
        finally:
            pool.stop()


if __name__ == "__main__":
    typer.run(main)
