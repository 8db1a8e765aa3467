"""What n windows do to the port of the switch that they meet at, in ns-3.

    python -m bench.incast --workers 16,64 --reducers 1 --buffers 256KiB,1MiB,4MiB,16MiB

All ranks send to a reducer at once, through one port, which drops what it has no room for; so do
all reducers to a rank. Rows are ways to choose windows and chunks. README.md defines every option
and figure.
"""

import itertools
import sys
from typing import Annotated

import typer

from bench import options, results
from bench.opinions import FILLED, Scenario, SimulatorMissingError, ask_ns3, rules

SMALLEST_CHUNK = 1 << 10  # bytes; below, messages have one packet
HEADING = (
    f"{'n':>4} {'k':>4} {'buffer':>8} {'way':>8} {'chunk':>6} {'window':>7} {'ms':>9} "
    f"{'goodput':>7} {'first':>6} {'drops':>8} {'of all':>7} {'timeouts':>8} {'recoveries':>10} "
    f"{'queue':>7}\n"
    f"{'KiB':>18} {'KiB':>15} {'KiB':>7} {'%':>41} {'KiB':>27}"
)


def scenario_of(way: str, scenario: Scenario) -> Scenario:
    """Return the scenario with the windows and chunks of a way.

    ``rule`` is the project's. ``bounded`` bounds the windows that meet at a port to its buffer,
    where one chunk for each of them is the least. ``small`` makes chunks small enough for two.
    ``paced`` is the project's, and no connection sends faster than its part of the busiest link.
    ``clamped`` is the project's, and TCP's windows that meet at a port are bounded to its buffer.
    """
    part = int(FILLED * scenario.port_buffer_bytes) // max(scenario.workers, scenario.owners)
    chunk = rules(scenario).chunk_bytes
    if way == "bounded":
        return scenario.model_copy(update={"window_bytes": max(chunk, part)})
    if way == "small":
        while chunk > SMALLEST_CHUNK and 2 * chunk > part:
            chunk //= 2
        forced = {"chunk_bytes": chunk, "window_bytes": max(chunk, part)}
        return scenario.model_copy(update=forced)
    return scenario.model_copy(update={"paced": way == "paced", "clamped": way == "clamped"})


def main(  # noqa: PLR0917 (options have names on the command line)
    workers: Annotated[str, typer.Option(help="Numbers of ranks.")] = "16,64",
    reducers: Annotated[
        str, typer.Option(help="Sizes of the pool; n: as many as ranks; 0: ranks host them.")
    ] = "1,n",
    buffers: Annotated[str, typer.Option(help="Bytes of a port.")] = "256KiB,1MiB,4MiB,16MiB",
    size: Annotated[str, typer.Option(help="Bytes that all ranks send a reducer.")] = "64MiB",
    chunk: Annotated[str, typer.Option(help="Bytes; without it the project's rule.")] = "",
    ways: Annotated[str, typer.Option(help="See README.md.")] = "rule,bounded,small,paced,clamped",
    gbps: Annotated[float, typer.Option(help="Rate of every link, Gbit/s each way.")] = 10.0,
    delay_us: Annotated[float, typer.Option(help="From a host to another one.")] = 25.0,
    congestion: Annotated[str, typer.Option(help="TcpCubic or TcpLinuxReno.")] = "TcpCubic",
    rounds: Annotated[int, typer.Option(min=2, help="All-reduces; the last is timed.")] = 2,
    json: options.Json = None,
) -> None:
    """Simulate all-reduces over a grid, and print what is left of the links."""
    run = results.begin("bench.incast")
    rows: list[dict[str, str | float]] = []
    print(HEADING)
    for n, word, held in itertools.product(
        options.counts(workers), reducers.split(","), options.sizes(buffers)
    ):
        k = n if word == "n" else int(word)
        plain = Scenario(
            workers=n,
            reducers=k,
            topology="pool" if k else "embedded",
            nbytes=options.sizes(size)[0] // n * (k or n),
            worker_gbps=gbps,
            reducer_gbps=gbps,
            delay_s=delay_us * 1e-6,
            port_buffer_bytes=held,
            chunk_bytes=options.sizes(chunk)[0] if chunk else 0,
        )
        asked = [(way, scenario_of(way, plain)) for way in ways.split(",")]
        rows += [measure(way, scenario, rounds, congestion) for way, scenario in asked]
    options.write_table(run, rows, json)


def measure(way: str, scenario: Scenario, rounds: int, congestion: str) -> dict[str, str | float]:
    """Simulate one row, and print it."""
    ruled = rules(scenario)
    try:
        said = ask_ns3(scenario, rounds, congestion)
    except SimulatorMissingError as missing:
        sys.exit(f"bench.incast: {missing}")
    found = said.found
    first = said.goodput * said.seconds / found["first_s"] if said.goodput else 0.0
    print(
        f"{scenario.workers:>4} {scenario.owners:>4} {scenario.port_buffer_bytes >> 10:>8} "
        f"{way:>8} {ruled.chunk_bytes / 1024:>6g} {ruled.window_bytes / 1024:>7.0f} "
        f"{1e3 * said.seconds:>9.2f} {said.goodput:>7.3f} {first:>6.3f} {found['drops']:>8} "
        f"{found['drops'] / found['packets']:>7.2%} {found['timeouts']:>8} "
        f"{found['recoveries']:>10} {found['longest_queue'] / 1024:>7.0f}",
        flush=True,
    )
    asked = {"way": way, **scenario.model_dump(), **ruled._asdict()}
    return {**asked, "seconds": said.seconds, "goodput": said.goodput, **found}


if __name__ == "__main__":
    typer.run(main)
