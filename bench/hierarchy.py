"""Several ranks on each node: all-reduces by nodes, and flat ones, side by side in one run.

    python -m bench.hierarchy --nodes 2 --local 4 --mbit 100

A node is a host of the lab with several ranks, whose network card they share. Both kinds use the
same processes, links and reducers, in turn. Printed are medians: of the time until all ranks have
the result, and of what a node's card sent and received, headers and all, in sizes of the buffer.
"""

import statistics
import sys
from typing import Annotated, Any

import typer

from bench import options
from bench.hierarchy_rank import MODES
from harness import pool
from harness.ranks import Ranks
from lab import Lab

PATIENCE_S = 500.0


def main(  # noqa: PLR0917 (options have names on the command line)
    nodes: Annotated[int, typer.Option(min=2, help="Hosts with ranks.")] = 2,
    local: Annotated[int, typer.Option(min=2, help="Ranks on each of them.")] = 4,
    reducers: Annotated[int, typer.Option(min=1, help="Reducers, on hosts of their own.")] = 2,
    mbit: options.Mbit = 100.0,
    size: Annotated[str, typer.Option(help="Bytes of the buffer.")] = "16MiB",
    rounds: options.Rounds = 5,
    json: options.Json = None,
) -> None:
    """Compare all-reduces by nodes with flat ones."""
    (nbytes,) = options.sizes(size)
    print(
        f"# {nodes} nodes of {local} ranks, {reducers} reducers, {mbit:g} Mbit/s, "
        f"{nbytes} bytes of fp32, {rounds} rounds"
    )
    run = options.begin("bench.hierarchy")
    given = {"nbytes": nbytes, "rounds": rounds}
    where = [rank // local for rank in range(nodes * local)]
    with (
        options.command("bench.hierarchy"),
        Lab(nodes + reducers, mbit) as lab,
        Ranks(
            "bench.hierarchy_rank",
            [lab.hosts[node] for node in where],
            given,
            [reducer.address for reducer in pool.start(lab.hosts[nodes:])],
            {"REDUCTION_CONNECT_TIMEOUT": "60s"},
            per_rank=lambda rank: {  # as a launcher says
                "LOCAL_RANK": str(rank % local),
                "LOCAL_WORLD_SIZE": str(local),
                "GROUP_RANK": str(rank // local),
            },
        ) as ranks,
    ):
        found = {one["rank"]: one["calls"] for one in ranks.hear_all(PATIENCE_S)}
        ranks.tell("done")
    said = [found[rank] for rank in range(len(where))]
    print(f"{'':14}{'seconds':>9}{'sent/S':>9}{'received/S':>12}{'wrong':>7}")
    rows = {mode: figures(said, mode, local, nbytes) for mode in MODES}
    for mode, (seconds, sent, received, wrong) in rows.items():
        print(f"{mode:14}{seconds:9.3f}{sent:9.3f}{received:12.3f}{wrong:7.0f}")
    print(f"{rows['flat'][0] / rows['hierarchical'][0]:.2f}x as fast")
    table: list[dict[str, str | float]] = [
        {"way": mode, "s": seconds, "sent": sent, "received": received}
        for mode, (seconds, sent, received, _) in rows.items()
    ]
    options.write_table(run, table, json)
    sys.exit(int(any(row[-1] for row in rows.values())))


def figures(
    said: list[list[dict[str, Any]]], mode: str, local: int, nbytes: int
) -> tuple[float, float, float, float]:
    """Return medians of one kind of all-reduce, and how many elements were wrong.

    They are of the seconds until all ranks have the result, and of what a node's card has sent and
    received, in sizes of the buffer; of the node with most.
    """
    found = [[line for line in lines if line["mode"] == mode] for lines in said]
    # Every node's card is read by all of its ranks alike: its first rank's figures count.
    sent, received = (
        max(statistics.median(line[what] for line in lines) for lines in found[::local]) / nbytes
        for what in ("sent", "received")
    )
    seconds = statistics.median(line["seconds"] for line in found[0])
    return seconds, sent, received, sum(line["wrong"] for lines in found for line in lines)


if __name__ == "__main__":
    typer.run(main)
