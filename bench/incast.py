"""What n windows do to the port of the switch that they meet at, in ns-3.

    python -m bench.incast --workers 16,64 --reducers 1 --buffers 256KiB,1MiB,4MiB,16MiB

All ranks send to a reducer at once, through one port, which drops what it has no room for; so do
all reducers to a rank. Rows are ways to choose windows and chunks. README.md defines every option
and figure.
"""

import sys
from typing import Annotated

import typer

from bench import options
from bench.opinions import Scenario, SimulatorMissing, ask_ns3, rules

WAYS = ("rule", "bounded", "small", "paced")
SMALLEST_CHUNK = 1 << 10  # bytes; below, messages have one packet
# Of a port: packets' headers take a twentieth of it, and chunks' headers some of it.
FILLED = 0.9


def scenario_of(way: str, scenario: Scenario) -> Scenario:
    """Return the scenario with the windows and chunks of a way.

    ``rule`` is the project's. ``bounded`` bounds the windows that meet at a port to its buffer,
    where one chunk for each of them is the least. ``small`` makes chunks small enough for two.
    ``paced`` is the project's, and no connection sends faster than its part of the busiest link.
    """
    meeting = max(scenario.workers, scenario.owners)
    part = int(FILLED * scenario.port_buffer_bytes) // meeting
    chunk = rules(scenario).chunk_bytes
    if way == "bounded":
        return scenario.model_copy(update={"window_bytes": max(chunk, part)})
    if way == "small":
        while chunk > SMALLEST_CHUNK and 2 * chunk > part:
            chunk //= 2
        forced = {"chunk_bytes": chunk, "window_bytes": max(chunk, part)}
        return scenario.model_copy(update=forced)
    return scenario.model_copy(update={"paced": way == "paced"})


def main(  # noqa: PLR0917 (options have names on the command line)
    workers: Annotated[str, typer.Option(help="Numbers of ranks.")] = "16,64",
    reducers: Annotated[
        str, typer.Option(help="Sizes of the pool; n: as many as ranks; 0: ranks host them.")
    ] = "1,n",
    buffers: Annotated[
        str, typer.Option(help="Bytes that a port holds.")
    ] = "256KiB,1MiB,4MiB,16MiB",
    size: Annotated[
        str, typer.Option(help="Bytes that a reducer takes from all ranks together.")
    ] = "64MiB",
    ways: Annotated[str, typer.Option(help="Of rule, bounded, small and paced.")] = ",".join(WAYS),
    gbps: Annotated[float, typer.Option(help="Rate of every link, Gbit/s each way.")] = 10.0,
    delay_us: Annotated[float, typer.Option(help="From a host to another one.")] = 25.0,
    congestion: Annotated[str, typer.Option(help="TcpCubic or TcpLinuxReno.")] = "TcpCubic",
    rounds: Annotated[int, typer.Option(min=2, help="All-reduces; the first is left out.")] = 2,
    json: options.Json = None,
) -> None:
    """Simulate all-reduces over a grid, and print what is left of the links."""
    run = options.begin("bench.incast")
    rows: list[dict[str, str | float]] = []
    print(
        f"{'n':>4} {'k':>4} {'buffer':>7} {'way':>8} {'chunk':>7} {'window':>7} {'ms':>9} "
        f"{'goodput':>7} {'drops':>8} {'of all':>7} {'timeouts':>8} {'recoveries':>10} {'queue':>7}"
    )
    print(f"{'KiB':>17} {'':>8} {'KiB':>7} {'KiB':>7} {'':>27} {'%':>13} {'':>19} {'KiB':>7}")
    for n in options.counts(workers):
        for k in [n if word == "n" else int(word) for word in reducers.split(",")]:
            for held in options.sizes(buffers):
                plain = Scenario(
                    workers=n,
                    reducers=k,
                    topology="pool" if k else "embedded",
                    nbytes=options.sizes(size)[0] // n * (k or n),
                    worker_gbps=gbps,
                    reducer_gbps=gbps,
                    delay_s=delay_us * 1e-6,
                    port_buffer_bytes=held,
                )
                for way in ways.split(","):
                    rows.append(measure(way, scenario_of(way, plain), rounds, congestion))
    options.write_table(run, rows, json)


def measure(way: str, scenario: Scenario, rounds: int, congestion: str) -> dict[str, str | float]:
    """Simulate one row, and print it."""
    ruled = rules(scenario)
    try:
        said = ask_ns3(scenario, rounds, congestion)
    except SimulatorMissing as missing:
        sys.exit(f"bench.incast: {missing}")
    found = said.found
    print(
        f"{scenario.workers:>4} {scenario.owners:>4} {scenario.port_buffer_bytes >> 10:>7} "
        f"{way:>8} {ruled.chunk_bytes / 1024:>7g} {ruled.window_bytes / 1024:>7.0f} "
        f"{1e3 * said.seconds:>9.2f} {said.goodput:>7.3f} {found['drops']:>8.0f} "
        f"{100 * found['drops'] / found['packets']:>7.2f} {found['timeouts']:>8.0f} "
        f"{found['recoveries']:>10.0f} {found['longest_queue'] / 1024:>7.0f}",
        flush=True,
    )
    return {"way": way, **scenario.model_dump(), **ruled._asdict(), "seconds": said.seconds,
            "goodput": said.goodput, **found}  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
