"""What NCCL's collective network carries, beside the client's own all-reduces.

    python -m bench.nccl --workers 4 --mbit 1000

Both keep 8 requests of 4 MiB in flight, copy what they send from one place and compare all that
comes. README.md defines every option and figure.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from json import loads
from pathlib import Path
from typing import Annotated

import typer

from bench import options
from bench.nccl_rank import AHEAD
from harness import ROOT, pool
from harness.collective import Calls, Nodes, Outcome, build, environments, write_inputs
from lab import Host

DTYPE = 7  # float32, as NCCL numbers them
PATIENCE_S = 300.0
MB, GB = 1e6, 1e9


def main(
    *,
    workers: options.Workers = 4,
    reducers: options.Reducers = 4,
    mbit: options.Mbit = 1000.0,
    unshaped: options.Unshaped = False,
    calls: Annotated[int, typer.Option(help="Of each rank and round.")] = 200,
    nbytes: Annotated[int, typer.Option(help="Of a call.")] = 4 << 20,
    rounds: options.Rounds = 3,
    json: options.Json = None,
) -> None:
    """Print the payload rate of a rank, and its processor time."""
    run = options.begin("bench.nccl")
    with (
        options.command("bench.nccl"),
        tempfile.TemporaryDirectory() as name,
        options.lab(workers + reducers, None if unshaped else mbit) as lab,
    ):
        hosts, folder = lab.hosts[:workers], Path(name)
        link = None if unshaped else lab.payload_rate()
        servers = [reducer.address for reducer in pool.start(lab.hosts[workers:])]
        built = build(folder)
        write_inputs(folder, workers, 2 * nbytes, [DTYPE])
        settings = {"REDUCTION_SERVERS": ",".join(servers)}
        plan = Calls(calls, nbytes, ahead=AHEAD, fixed=True, dtype=DTYPE)
        found: dict[str, list[Outcome]] = {"client": [], "plug-in": [], "plug-in in Python": []}
        for number in range(rounds):
            job = {**settings, "REDUCTION_JOB": f"bench-{number}"}
            found["client"] += client(folder, hosts, plan, job)
            for way, in_python in (("plug-in", False), ("plug-in in Python", True)):
                with Nodes(
                    built, folder, workers, plan, settings, in_python=in_python, hosts=hosts
                ) as nodes:
                    nodes.run(PATIENCE_S)
                found[way] += [one for node in nodes.nodes for one in node.outcomes]
    rates = {
        way: statistics.median(calls * nbytes / one.seconds for one in outcomes)
        for way, outcomes in found.items()
    }
    rows: list[dict[str, str | float]] = []
    print(f"{'':>18} {'MB/s':>8} {'of link':>8} {'CPU s/GB':>9}")
    for way, rate in rates.items():
        cpu = statistics.median(one.cpu_s / (calls * nbytes / GB) for one in found[way])
        share = "" if link is None else f"{rate / link:.3f}"
        print(f"{way:>18} {rate / MB:8.0f} {share:>8} {cpu:9.3f}")
        of_link = {} if link is None else {"link": rate / link}
        rows.append({"way": way, "mb_s": rate / MB, "cpu": cpu, **of_link})
    options.write_table(run, rows, json)
    sys.exit(any(one.wrong or one.error for ways in found.values() for one in ways))


def client(
    folder: Path, hosts: Sequence[Host], plan: Calls, settings: dict[str, str]
) -> list[Outcome]:
    """Make the calls by `Client.all_reduce`; return what came of them at each rank."""
    started = []
    for rank, host in enumerate(hosts):
        told = [folder, rank, plan.calls, plan.most_bytes]
        command = [sys.executable, "-m", "bench.nccl_rank", *map(str, told)]
        identity = {"RANK": str(rank), "WORLD_SIZE": str(len(hosts))}
        environment = {**environments(), **settings, **identity}
        started.append(host.start(command, environment, subprocess.PIPE, cwd=ROOT))
    told_lines = [process.communicate()[0].splitlines()[-1] for process in started]
    return [Outcome(plan.calls, 0, *loads(line)) for line in told_lines]


if __name__ == "__main__":
    typer.run(main)
