"""What `reducer plan --simulate` says, beside what the lab measures, or has measured.

    python -m bench.simulated --workers 2,4,8,16 --mbit 100
    python -m bench.simulated --figures

The simulation knows links, the shapers' burst and queue, and what messages cost processors.
README.md defines every option and figure.
"""

import json as standard_json
import statistics
import sys
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import typer
from pydantic import TypeAdapter

from bench import options
from bench.contenders import Contender
from bench.figures import FILES
from lab.network import BURST_BYTES
from reducer.planning.network_model import Topology
from reducer.planning.simulated_job import MessageCosts
from reducer.planning.simulation import SimulationScenario, simulate

PORT_BYTES = 8 << 20  # that a shaper of the lab lets wait
DELAY_S = 50e-6  # from one host of the lab to another, as far as the kernel takes
FIGURES = (
    *("pool-2", "pool-4", "pool-8", "mixed", "cards-pool", "cards-ring"),
    *("scaling-16", "scaling-64"),
)
HEADING = (
    f"{'n':>3} {'k':>3} {'topology':>9} {'size':>9} {'Mbit/s':>6} {'measured':>9} "
    f"{'simulated':>9} {'error':>7} {'formula':>7}"
)


class Measured(NamedTuple):
    """One all-reduce, measured."""

    workers: int
    reducers: int
    topology: Topology
    nbytes: int
    mbit: float
    seconds: float

    def scenario(self, costs: MessageCosts) -> SimulationScenario:
        """Return the same, to be simulated."""
        gbps = self.mbit / 1000
        job = (self.workers, self.reducers, self.topology, self.nbytes, gbps, gbps)
        return SimulationScenario(
            *job, DELAY_S, port_buffer_bytes=PORT_BYTES, burst_bytes=BURST_BYTES, costs=costs
        )


def main(  # noqa: PLR0917 (options have names on the command line)
    workers: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4,8,16",
    size: Annotated[str, typer.Option(help="Bytes per rank.")] = "256KiB,4MiB,64MiB",
    mbit: options.Mbit = 100.0,
    rounds: options.Rounds = 3,
    figures: Annotated[
        bool, typer.Option("--figures", help="Measure nothing: take what docs/figures has.")
    ] = False,
    costs: Annotated[str, typer.Option(help="Of messages, as `reducer plan` has it.")] = "{}",
    within: Annotated[float, typer.Option(help="Error from which on the exit code is 1.")] = 0.05,
    json: options.Json = None,
) -> None:
    """Simulate and measure all-reduces, and print the errors."""
    of_messages = TypeAdapter(MessageCosts).validate_json(costs)
    run = options.begin("bench.simulated")
    rows = known() if figures else measured(workers, size, mbit, rounds)
    print(f"{HEADING}\n{'ms':>44} {'ms':>9} {'%':>7} {'%':>7}")
    table: list[dict[str, str | float]] = []
    for row in rows:
        outcome = simulate(row.scenario(of_messages))
        error, formula = (s / row.seconds - 1 for s in (outcome.seconds, outcome.formula_s))
        print(
            f"{row.workers:>3} {row.reducers:>3} {row.topology:>9} {row.nbytes:>9} {row.mbit:>6g} "
            f"{1e3 * row.seconds:>9.2f} {1e3 * outcome.seconds:>9.2f} {100 * error:>+7.1f} "
            f"{100 * formula:>+7.1f}",
            flush=True,
        )
        found = {"simulated_s": outcome.seconds, "error": error, "formula_error": formula}
        table.append({**row._asdict(), **found})
    options.write_table(run, table, json)
    errors = [abs(float(row["error"])) for row in table]
    worst = max(errors)
    print(f"# errors: median {statistics.median(errors):.1%}, largest {worst:.1%}")
    sys.exit(int(worst > within))


def measured(workers: str, size: str, mbit: float, rounds: int) -> Iterator[Measured]:
    """Measure pools of n and of n/2 reducers, and embedded ones, in the lab."""
    for n in options.counts(workers):
        contenders = [Contender("pool", k) for k in sorted({n, n // 2})] + [Contender("embedded")]
        with options.command("bench.simulated"), options.contest(n, contenders, mbit) as contest:
            for nbytes in options.sizes(size):
                for row in contest.measure(nbytes, rounds=rounds):
                    kind: Topology = "embedded" if row.contender == "embedded" else "pool"
                    yield Measured(n, row.reducers, kind, nbytes, mbit, row.time_us / 1e6)
            if contest.skipped:
                sys.exit(f"bench.simulated: not measured: {contest.skipped}")


def known() -> Iterator[Measured]:
    """Return what documents say of shaped links, but for sizes at which processors decide."""
    for name in FIGURES:
        figure = standard_json.loads((FILES / f"{name}.json").read_text())
        words = figure["command"].split()
        mbit = float(words[words.index("--mbit") + 1])
        for row in figure["rows"]:
            topology = row["way"].partition("-")[0]
            number, unit = row["size"].split()
            nbytes = options.sizes(number + unit)[0]
            if topology in {"pool", "embedded", "mixed"} and nbytes >= 256 << 10:
                job = row["workers"], row["reducers"], topology, nbytes
                yield Measured(*job, mbit, row["us"] / 1e6)


if __name__ == "__main__":
    typer.run(main)
