"""What NCCL's collective network carries, beside the client's own all-reduces, on this machine.

    python -m bench.nccl --ranks 2 --reducers 2 --calls 200 --rounds 5

Both keep 8 requests of 4 MiB in flight, copy what they send from one place and compare all that
comes. The plug-in copies besides, from NCCL's memory to send to that to receive.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bench.nccl_rank import AHEAD
from harness import ROOT
from harness.collective import Calls, Nodes, Outcome, build, environments, write_inputs
from reducer import local_pool

DTYPE = 7  # float32, as NCCL numbers them
MB, GB = 1e6, 1e9


def main(
    ranks: Annotated[int, typer.Option(help="Nodes.")] = 2,
    reducers: Annotated[int, typer.Option(help="In the pool.")] = 2,
    calls: Annotated[int, typer.Option(help="Of each rank and round.")] = 200,
    nbytes: Annotated[int, typer.Option(help="Of a call.")] = 4 << 20,
    rounds: Annotated[int, typer.Option(help="Of each; medians are printed.")] = 3,
) -> None:
    """Print the payload rate of a rank, and its processor time."""
    with tempfile.TemporaryDirectory() as name, local_pool(reducers) as servers:
        folder = Path(name)
        built = build(folder)
        write_inputs(folder, ranks, 2 * nbytes, [DTYPE])
        settings = {"REDUCTION_SERVERS": ",".join(servers)}
        plan = Calls(calls, nbytes, ahead=AHEAD, fixed=True, dtype=DTYPE)
        found: dict[str, list[Outcome]] = {"client": [], "plug-in": [], "plug-in in Python": []}
        for number in range(rounds):
            job = {**settings, "REDUCTION_JOB": f"bench-{number}"}
            found["client"] += client(folder, ranks, plan, job)
            for way, in_python in (("plug-in", False), ("plug-in in Python", True)):
                with Nodes(built, folder, ranks, plan, settings, in_python=in_python) as nodes:
                    nodes.run(300.0)
                found[way] += [one for node in nodes.nodes for one in node.outcomes]
        print(f"{'':>18} {'MB/s':>8} {'CPU s/GB':>9}")
        for way, outcomes in found.items():
            rate = statistics.median(calls * nbytes / one.seconds / MB for one in outcomes)
            cpu = statistics.median(one.cpu_s / (calls * nbytes / GB) for one in outcomes)
            print(f"{way:>18} {rate:8.0f} {cpu:9.3f}")
        sys.exit(any(one.wrong or one.error for ways in found.values() for one in ways))


def client(folder: Path, ranks: int, plan: Calls, settings: dict[str, str]) -> list[Outcome]:
    """Make the calls by `Client.all_reduce`; return what came of them at each rank."""
    started = []
    for rank in range(ranks):
        told = [folder, rank, plan.calls, plan.most_bytes]
        command = [sys.executable, "-m", "bench.nccl_rank", *map(str, told)]
        identity = {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        environment = {**environments(), **settings, **identity}
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        )
    told_lines = [process.communicate()[0].splitlines()[-1] for process in started]
    return [Outcome(plan.calls, 0, *json.loads(line)) for line in told_lines]


if __name__ == "__main__":
    typer.run(main)
