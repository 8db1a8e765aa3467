"""Several ranks on each node: all-reduces by nodes, and flat ones, side by side in one run.

    python -m bench.hierarchy --nodes 2 --local 4 --mbit 100

A node is a host of the lab with several ranks, whose network card they share. Both kinds use the
same processes, links and reducers, in turn. Printed are medians: of the time until all ranks have
the result, and of what a node's card sent and received, headers and all, in sizes of the buffer.
"""

import statistics
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from bench import options
from bench.hierarchy_rank import MODES
from harness import HarnessError, pool
from harness.ranks import Ranks
from lab import Lab, LabUnavailable

PATIENCE_S = 500.0


@dataclass(frozen=True)
class Row:
    """Medians of one kind of all-reduce.

    Attributes:
        mode: ``flat`` or ``hierarchical``.
        seconds: until all ranks have the result.
        sent: bytes that a node's card sent, in sizes of the buffer; of the node with most.
        received: likewise.
        wrong: elements of all results that were wrong.
    """

    mode: str
    seconds: float
    sent: float
    received: float
    wrong: int


def main(  # noqa: PLR0917 (options have names on the command line)
    nodes: Annotated[int, typer.Option(min=2, help="Hosts with ranks.")] = 2,
    local: Annotated[int, typer.Option(min=2, help="Ranks on each of them.")] = 4,
    reducers: Annotated[int, typer.Option(min=1, help="Reducers, on hosts of their own.")] = 2,
    mbit: Annotated[float, typer.Option(help="Rate of every link, Mbit/s each way.")] = 100.0,
    size: Annotated[str, typer.Option(help="Bytes of the buffer.")] = "16MiB",
    rounds: Annotated[int, typer.Option(min=1, help="How often each has its turn.")] = 5,
) -> None:
    """Compare all-reduces by nodes with flat ones."""
    (nbytes,) = options.sizes(size)
    print(
        f"# {nodes} nodes of {local} ranks, {reducers} reducers, {mbit:g} Mbit/s, "
        f"{nbytes} bytes of fp32, {rounds} rounds"
    )
    try:
        rows = measure(
            nodes=nodes, local=local, reducers=reducers, mbit=mbit, nbytes=nbytes, rounds=rounds
        )
    except (HarnessError, LabUnavailable) as error:
        sys.exit(f"bench.hierarchy: {error}")
    print(f"{'':14}{'seconds':>9}{'sent/S':>9}{'received/S':>12}{'wrong':>7}")
    for row in rows:
        print(f"{row.mode:14}{row.seconds:9.3f}{row.sent:9.3f}{row.received:12.3f}{row.wrong:7d}")
    flat, hierarchical = rows
    print(f"{flat.seconds / hierarchical.seconds:.2f}x as fast")
    sys.exit(int(any(row.wrong for row in rows)))


def measure(
    *, nodes: int, local: int, reducers: int, mbit: float, nbytes: int, rounds: int
) -> list[Row]:
    """Return the medians, flat first.

    Raises:
        HarnessError: a rank failed; what it said is in the message.
        LabUnavailable: there can be no hosts with links of their own.
    """
    with Lab(nodes + reducers, mbit) as lab:
        started = pool.start(lab.hosts[nodes:])
        servers = [reducer.address for reducer in started]
        hosts = [lab.hosts[rank // local] for rank in range(nodes * local)]
        arguments = {"nbytes": nbytes, "rounds": rounds}
        patience = {"REDUCTION_CONNECT_TIMEOUT": "60s"}
        said: list[list[dict[str, Any]]] = [[] for _ in hosts]
        with Ranks(
            "bench.hierarchy_rank",
            hosts,
            arguments,
            servers,
            patience,
            per_rank=lambda rank: place(rank, local),
        ) as ranks:
            while ranks.running:
                running = ranks.running
                if (line := ranks.hear(PATIENCE_S)) is not None:
                    said[line["rank"]].append(line)
                elif ranks.running == running:
                    raise ranks.stalled(f"the ranks said nothing for {PATIENCE_S:g} s")
        for reducer in started:
            reducer.stop()
    rows = []
    for mode in MODES:
        # Every node's card is read by all of its ranks alike: its first rank's figures count.
        found = [[line for line in lines if line["mode"] == mode] for lines in said]
        cards = found[::local]
        rows.append(
            Row(
                mode,
                statistics.median(line["seconds"] for line in found[0]),
                max(statistics.median(line["sent"] for line in lines) for lines in cards) / nbytes,
                max(statistics.median(line["received"] for line in lines) for lines in cards)
                / nbytes,
                sum(line["wrong"] for lines in found for line in lines),
            )
        )
    return rows


def place(rank: int, local: int) -> dict[str, str]:
    """Return what a launcher tells a rank about itself."""
    return {
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
    }


if __name__ == "__main__":
    typer.run(main)
