"""Sites that are far from each other: a small GPT by DDP, by DiLoCo, and without any network.

    python -m bench.sites --steps 2000 --kinds ddp,diloco
    python -m bench.sites --mbit 100 --round-trip-ms 100 --kinds alone,diloco,streaming

Each site is a host of the lab with one rank of an example, and one more has a reducer. Printed are
the loss on text that no site has seen, a step's time, what of it was spent in outer steps, waiting
or adding, and what a site's network card has sent, headers and all: medians of all turns.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from bench import pool
from bench.crew import CrewError
from bench.hierarchy_rank import DEVICE
from bench.results import ROOT
from lab import Lab, LabUnavailable
from worker_client.commands.demo.ranks import free_port

if TYPE_CHECKING:
    from lab.lab import Host

# What each kind is: the example, and its options.
KINDS = {
    "ddp": ("gpt_text.py",),
    "alone": ("diloco_gpt.py", "--alone"),
    "diloco": ("diloco_gpt.py", "--fragments", "1", "--delay", "0"),
    "streaming": ("diloco_gpt.py", "--fragments", "2", "--delay", "25"),
}
PATIENCE_S = 3000.0
_SAID = re.compile(
    r"loss (?P<loss>[\d.]+), weights (?P<weights>\w+), .*reduced, (?P<seconds>[\d.]+) s"
    r"(, (?P<outer>[\d.]+) s in outer)?"
)


class Turn(NamedTuple):
    """One training.

    Attributes:
        loss: on held-back text, in nats a letter.
        step_s: seconds of a step, in the mean.
        outer_s: those of them in `OuterOptimizer.step`, in which the site does not train; of the
            slowest site, as the others wait for it as well.
        sent: bytes that a site's card has sent; of the site with most.
    """

    loss: float
    step_s: float
    outer_s: float
    sent: int


def main(  # noqa: PLR0917 (options have names on the command line)
    sites: Annotated[int, typer.Option(min=2, help="Hosts with a rank each.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Each site's own.")] = 500,
    kinds: Annotated[str, typer.Option(help=f"Of {', '.join(KINDS)}.")] = ",".join(KINDS),
    wire: Annotated[str, typer.Option(help="none, bf16 or int8.")] = "int8",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each, with seeds 0, 1, ...")] = 1,
    mbit: Annotated[float | None, typer.Option(help="Of every link; else unshaped.")] = None,
    round_trip_ms: Annotated[float, typer.Option(help="Between any two hosts.")] = 0.0,
) -> None:
    """Compare ways to train at several sites."""
    chosen = kinds.split(",")
    if unknown := set(chosen) - set(KINDS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: of {', '.join(KINDS)}")
    print(f"# {sites} sites, {steps} steps, {mbit or 'any'} Mbit/s, {round_trip_ms:g} ms, {wire}")
    turns = defaultdict[str, list[Turn]](list)
    try:
        with Lab(sites + 1, mbit, round_trip_ms=round_trip_ms) as lab:
            (reducer,) = pool.start(lab.hosts[sites:])
            for seed in range(rounds):
                for kind in chosen:
                    environment = {
                        "REDUCTION_SERVERS": reducer.address,
                        "REDUCTION_JOB": f"{kind}-{seed}",
                        "REDUCTION_WIRE_DTYPE": "none" if kind == "ddp" else wire,
                    }
                    arguments = [*KINDS[kind], "--steps", str(steps), "--seed", str(seed)]
                    turns[kind].append(train(lab.hosts[:sites], arguments, steps, environment))
            reducer.stop()
    except (CrewError, LabUnavailable) as error:
        sys.exit(f"bench.sites: {error}")
    print(f"{'':10}{'loss':>9}{'step ms':>9}{'outer ms':>10}{'sent MB':>9}")
    for kind, made in turns.items():
        loss, step_s, outer_s, used = map(statistics.median, zip(*made, strict=True))
        print(f"{kind:10}{loss:9.4f}{1000 * step_s:9.2f}{1000 * outer_s:10.3f}{used / 1e6:9.2f}")


def train(hosts: list[Host], arguments: list[str], steps: int, environment: dict[str, str]) -> Turn:
    """Run an example at all hosts.

    Raises:
        CrewError: a rank failed, or the ranks have not ended with the same weights.
    """
    common = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": DEVICE,
        **environment,
    }
    before = [sent(host) for host in hosts]
    example, *others = arguments
    processes = [
        host.start(
            [sys.executable, str(ROOT / "examples" / example), *others],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, host in enumerate(hosts)
    ]
    said = []
    for rank, process in enumerate(processes):
        output, errors = process.communicate(timeout=PATIENCE_S)
        found = _SAID.search(output)
        if process.returncode or found is None:
            raise CrewError(f"rank {rank} failed: {errors.strip()[-2000:]}")
        said.append(found)
    if len({found["weights"] for found in said}) > 1:
        raise CrewError("the sites have not ended with the same weights")
    seconds = max(float(found["seconds"]) for found in said)
    used = [sent(host) - then for host, then in zip(hosts, before, strict=True)]
    outer_s = min(float(found["outer"] or 0) for found in said)
    return Turn(float(said[0]["loss"]), seconds / steps, outer_s / steps, max(used))


def sent(host: Host) -> int:
    """Return how many bytes a host's card has sent."""
    path = f"/sys/class/net/{DEVICE}/statistics/tx_bytes"
    process = host.start(["cat", path], stdout=subprocess.PIPE)
    return int(process.communicate()[0])


if __name__ == "__main__":
    typer.run(main)
