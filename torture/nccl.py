"""Whether reducers that are killed cost NCCL's collective network a call, or a bit.

    python -m torture.nccl --calls 100000 --kills 100

Nodes do what NCCL's proxy does, in one job after another, until there were so many calls and kills.
A reducer is killed as soon as the one killed before is there again and has been used for a while.
"""

import random
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Annotated

import typer

from harness.collective import Calls, Nodes, build, write_inputs
from harness.pool import Pool
from lab import Lab

JOB_CALLS = 20_000  # of one job
PATIENCE_S = 90.0
SETTLE_S = 2.5  # until ranks use a reducer again that has returned


def main(
    *,
    calls: Annotated[int, typer.Option(help="At least so many, in all.")] = 100_000,
    kills: Annotated[int, typer.Option(help="At least so many, in all.")] = 100,
    ranks: Annotated[int, typer.Option(help="Nodes.")] = 3,
    reducers: Annotated[int, typer.Option(min=2, help="In the pool.")] = 3,
    most_bytes: Annotated[int, typer.Option(help="Of a call.")] = 512 << 10,
    in_python: Annotated[bool, typer.Option(help="Whether nodes are a Python's threads.")] = False,
    seed: Annotated[int, typer.Option(help="Of calls and of kills.")] = 1,
) -> None:
    """Kill reducers while nodes make calls; exit 1 if one failed or was wrong."""
    made = killed = failed = 0
    with tempfile.TemporaryDirectory() as name, Lab.loopback(reducers) as lab:
        folder, pool = Path(name), Pool(lab.hosts)
        built = build(folder)
        write_inputs(folder, ranks, 2 * most_bytes)
        settings = {"REDUCTION_SERVERS": ",".join(pool.addresses)}
        try:
            while (made < calls or killed < kills) and not failed:
                plan = Calls(min(JOB_CALLS, calls), most_bytes, seed=seed + made)
                killer = Killer(pool, random.Random(seed + killed))  # noqa: S311 (no secret)
                with Nodes(built, folder, ranks, plan, settings, in_python=in_python) as nodes:
                    killer.start()
                    nodes.run(PATIENCE_S)
                    killed += killer.end()
                outcomes = [one for node in nodes.nodes for one in node.outcomes]
                good = [one.done == plan.calls and not one.wrong for one in outcomes]
                failed += len(good) != ranks or not all(good)
                made += plan.calls
                wrong = sum(one.wrong for one in outcomes)
                print(f"{made} calls, {killed} kills, {wrong} wrong", flush=True)
                if failed:
                    print("\n".join(nodes.said))
        finally:
            pool.stop()
    sys.exit(failed > 0)


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
