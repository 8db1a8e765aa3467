"""Whether reducers that are killed cost NCCL's collective network a call, or a bit.

    python -m torture.nccl --calls 100000 --kills 100

For each version of the plug-in's tables, nodes do what NCCL's proxy does, in one job after another,
until there were so many calls and this version's part of the kills. Calls have all dtypes and
reductions, as often 4 KiB to 8 KiB as 1 MiB to 2 MiB, 8 of them in flight. A reducer is killed as
soon as the one killed before is there again and has been used for a while.
"""

import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from harness.collective import VERSIONS, Calls, Nodes, build, write_inputs
from harness.pool import Pool
from lab import Lab

JOB_CALLS = 20_000  # of one job
PATIENCE_S = 90.0
SETTLE_S = 2.5  # until ranks use a reducer again that has returned
MARGIN_BYTES = 64 << 10  # of inputs, so that calls begin at different places


def main(
    *,
    calls: Annotated[int, typer.Option(help="At least so many, of each version.")] = 100_000,
    kills: Annotated[int, typer.Option(help="At least so many, of all versions.")] = 100,
    versions: Annotated[str, typer.Option(help="Of the tables.")] = ",".join(map(str, VERSIONS)),
    ranks: Annotated[int, typer.Option(help="Nodes.")] = 3,
    reducers: Annotated[int, typer.Option(min=2, help="In the pool.")] = 3,
    most_bytes: Annotated[int, typer.Option(help="Of a call.")] = 4 << 20,
    in_python: Annotated[bool, typer.Option(help="Whether nodes are a Python's threads.")] = False,
    seed: Annotated[int, typer.Option(help="Of calls and of kills.")] = 1,
) -> None:
    """Kill reducers while nodes make calls; exit 1 if one failed or was wrong."""
    chosen = [int(version) for version in versions.split(",")]
    with tempfile.TemporaryDirectory() as name, Lab.loopback(reducers) as lab:
        pool = Pool(lab.hosts)
        try:
            job = Torture(Path(name), pool, ranks, most_bytes, in_python=in_python)
            good = [
                job.run(version, calls, -(-kills // len(chosen)), seed * 1000 + version)
                for version in chosen
            ]
        finally:
            pool.stop()
    sys.exit(not all(good))


class Torture:
    """Nodes and the reducers that are killed.

    Args:
        folder: for inputs and what is compiled.
        pool: of the reducers.
        ranks, most_bytes, in_python: as `main` has them.
    """

    def __init__(
        self, folder: Path, pool: Pool, ranks: int, most_bytes: int, *, in_python: bool
    ) -> None:
        self._built = build(folder)
        write_inputs(folder, ranks, most_bytes + MARGIN_BYTES)
        self._folder, self._pool, self._ranks = folder, pool, ranks
        self._most_bytes, self._in_python = most_bytes, in_python

    def run(self, version: int, calls: int, kills: int, seed: int) -> bool:
        """Make the calls of a version; return whether each of them ended well and right."""
        made = killed = 0
        since = time.monotonic()
        while made < calls or killed < kills:
            plan = Calls(min(JOB_CALLS, calls), self._most_bytes, version=version, seed=seed + made)
            died, wrong, said = self._job(plan)
            made, killed = made + plan.calls, killed + died
            took = f"{time.monotonic() - since:.0f} s"
            print(f"v{version}: {made} calls, {killed} kills, {wrong} wrong, {took}", flush=True)
            if said:
                print(said)
                return False
        return True

    def _job(self, plan: Calls) -> tuple[int, int, str]:
        """Return how many reducers died, how many results were wrong, and what failed, in words."""
        settings = {
            "REDUCTION_SERVERS": ",".join(self._pool.addresses),
            "REDUCTION_PATIENCE": "10s",  # on a busy machine nodes stand still for seconds
        }
        killer = Killer(self._pool, random.Random(plan.seed))  # noqa: S311 (no secret)
        with Nodes(
            self._built, self._folder, self._ranks, plan, settings, in_python=self._in_python
        ) as nodes:
            killer.start()
            try:
                nodes.run(PATIENCE_S)
            finally:
                killed = killer.end()
        outcomes = [one for node in nodes.nodes for one in node.outcomes]
        good = [(one.done, one.wrong) == (plan.calls, 0) for one in outcomes]
        failed = len(good) != self._ranks or not all(good)
        return killed, sum(one.wrong for one in outcomes), "\n".join(nodes.said) if failed else ""


class Killer(threading.Thread):
    """Kills one reducer after the other, and starts each again."""

    def __init__(self, pool: Pool, choice: random.Random) -> None:
        super().__init__(daemon=True)
        self._pool, self._random = pool, choice
        self._ends = threading.Event()
        self._kills = 0

    def run(self) -> None:
        """Kill until `end`."""
        while not self._ends.wait(SETTLE_S):
            reducer = self._random.randrange(len(self._pool.reducers))
            self._pool.end(reducer, signal.SIGKILL)
            self._kills += 1
            self._pool.start(reducer)

    def end(self) -> int:
        """Let no more be killed, and return how many were."""
        self._ends.set()
        self.join()
        return self._kills


if __name__ == "__main__":
    typer.run(main)
