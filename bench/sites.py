"""A small GPT by DDP, by DiLoCo at sites that are far from each other, and without any network.

    python -m bench.sites --steps 2000 --kinds ddp,diloco
    python -m bench.sites --mbit 100 --round-trip-ms 100 --kinds alone,diloco,streaming

Each site is a host of the lab with one rank of an example, and others have a reducer each. Printed
are the loss on text that no site has seen, a step's time, what of it was spent in outer steps,
waiting or adding, and what a site's network card has sent, headers and all: medians of all turns.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from json import dump
from typing import Annotated, NamedTuple

import typer

from bench import options
from bench.hierarchy_rank import DEVICE
from harness import ROOT, HarnessError, pool
from lab import Lab, LabUnavailable
from lab.lab import Host
from worker_client.commands.demo.ranks import free_port


class Kind(NamedTuple):
    """One way to train: an example with options, and what gradients travel as; None: an option."""

    arguments: tuple[str, ...]
    wire: str | None


KINDS = {
    "ddp": Kind(("gpt_text.py",), "none"),
    "ddp-bf16": Kind(("gpt_text.py",), "bf16"),
    "ddp-int8": Kind(("gpt_text.py",), "int8"),
    "ddp-int8-no-feedback": Kind(("gpt_text.py", "--no-feedback"), "int8"),
    "alone": Kind(("diloco_gpt.py", "--alone"), None),
    "diloco": Kind(("diloco_gpt.py", "--fragments", "1", "--delay", "0"), None),
    "streaming": Kind(("diloco_gpt.py", "--fragments", "2", "--delay", "25"), None),
}
USUAL = "ddp,alone,diloco,streaming"
POINTS = 20  # of a curve
PATIENCE_S = 3000.0
_SAID = re.compile(
    r"loss (?P<loss>[\d.]+), weights (?P<weights>\w+), .*reduced, (?P<seconds>[\d.]+) s"
    r"(, (?P<outer>[\d.]+) s in outer)?"
)
_REPORTED = re.compile(r"step (\d+): loss ([\d.]+)\n")


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
    curve: dict[int, float]


def main(  # noqa: PLR0917 (options have names on the command line)
    sites: Annotated[int, typer.Option(min=2, help="Hosts with a rank each.")] = 2,
    reducers: Annotated[int, typer.Option(min=1, help="Hosts with a reducer each.")] = 1,
    steps: Annotated[int, typer.Option(min=POINTS, help="Each site's own.")] = 500,
    kinds: Annotated[str, typer.Option(help=f"Of {', '.join(KINDS)}.")] = USUAL,
    wire: Annotated[str, typer.Option(help="none, bf16, int8 or fp8_e4m3; not of DDP.")] = "int8",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each, with seeds 0, 1, ...")] = 1,
    mbit: Annotated[float | None, typer.Option(help="Of every link; else unshaped.")] = None,
    round_trip_ms: Annotated[float, typer.Option(help="Between any two hosts.")] = 0.0,
    site_dies: Annotated[
        int | None, typer.Option(help="The step after which the last site is killed.")
    ] = None,
    reducer_dies: Annotated[
        int | None, typer.Option(help="The step after which the last reducer is killed.")
    ] = None,
    curves: Annotated[
        typer.FileTextWrite | None, typer.Option(help="JSON: seed 0's loss, step by step.")
    ] = None,
    json: options.Json = None,
) -> None:
    """Compare ways to train at several sites."""
    chosen = _chosen(kinds, reducers, site_dies, reducer_dies)
    print(f"# {sites} sites, {steps} steps, {mbit or 'any'} Mbit/s, {round_trip_ms:g} ms, {wire}")
    report = ["--report", str(steps // POINTS if curves or site_dies or reducer_dies else 0)]
    run = options.begin("bench.sites")
    turns = defaultdict[str, list[Turn]](list)
    try:
        with Lab(sites + reducers, mbit, round_trip_ms=round_trip_ms) as lab:
            for seed in range(rounds):
                for kind in chosen:
                    running = pool.start(lab.hosts[sites:])
                    arguments, own_wire = KINDS[kind]
                    environment = {
                        "REDUCTION_SERVERS": ",".join(reducer.address for reducer in running),
                        "REDUCTION_WIRE_DTYPE": own_wire or wire,
                        **({"REDUCTION_ON_RANK_LOST": "continue"} if site_dies else {}),
                    }
                    settings = ["--steps", str(steps), "--seed", str(seed), *report]
                    training = Training(lab.hosts[:sites], [*arguments, *settings], environment)
                    for step in training.reports():
                        if site_dies and step >= site_dies:
                            training.kill_last()
                        if reducer_dies and step >= reducer_dies:
                            running[-1].process.kill()
                    turns[kind].append(training.end(steps))
                    for reducer in running:
                        reducer.stop()
    except (HarnessError, LabUnavailable) as error:
        sys.exit(f"bench.sites: {error}")
    print(f"{'':22}{'loss':>9}{'step ms':>9}{'outer ms':>10}{'sent MB':>9}")
    rows: list[dict[str, str | float]] = []
    for kind, made in turns.items():
        *figures, _ = zip(*made, strict=True)
        loss, step_s, outer_s, used = map(statistics.median, figures)
        print(f"{kind:22}{loss:9.4f}{1000 * step_s:9.2f}{1000 * outer_s:10.3f}{used / 1e6:9.2f}")
        rows.append({"way": kind, "loss": loss, "step_s": step_s, "outer_s": outer_s, "sent": used})
    options.write_table(run, rows, json)
    if curves:
        dump({kind: made[0].curve for kind, made in turns.items()}, curves, indent=1)


def _chosen(
    kinds: str, reducers: int, site_dies: int | None, reducer_dies: int | None
) -> list[str]:
    chosen = kinds.split(",")
    if unknown := set(chosen) - set(KINDS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: of {', '.join(KINDS)}")
    if (site_dies or reducer_dies) and any(kind.startswith("ddp") for kind in chosen):
        raise typer.BadParameter("DDP does not go on without a rank: leave its kinds out")
    if reducer_dies and reducers < 2:
        raise typer.BadParameter(
            "--reducer-dies needs a second reducer to go on with: add --reducers 2"
        )
    return chosen


class Training:
    """A run of an example at all hosts, a rank each, in an environment beside a launcher's."""

    def __init__(
        self, hosts: list[Host], arguments: list[str], environment: Mapping[str, str]
    ) -> None:
        common = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "REDUCTION_JOB": "sites",
            **environment,
        }
        self._hosts = hosts
        self._before = [sent(host) for host in hosts]
        self._curve: dict[int, float] = {}
        self._said = ""
        self._errors = [tempfile.TemporaryFile("w+") for _ in hosts]  # noqa: SIM115 (closed by `end`)
        self._lost: set[int] = set()
        example, *others = arguments
        self._processes = [
            host.start(
                [sys.executable, str(ROOT / "examples" / example), *others],
                env={**common, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=errors,  # a pipe that nobody reads would stop a rank that says much
            )
            for rank, (host, errors) in enumerate(zip(hosts, self._errors, strict=True))
        ]

    def reports(self) -> Iterator[int]:
        """Yield the steps after which rank 0 has said its loss, until it ends."""
        output = self._processes[0].stdout
        assert output
        for line in output:
            self._said += line
            if found := _REPORTED.fullmatch(line):
                step, loss = int(found[1]), float(found[2])
                self._curve[step] = loss
                yield step

    def kill_last(self) -> None:
        """Kill the last rank, which is not waited for any more."""
        self._processes[-1].kill()
        self._lost.add(len(self._processes) - 1)

    def end(self, steps: int) -> Turn:
        """Wait for all ranks, and return the figures of this training.

        Raises:
            HarnessError: a rank failed, or the ranks have not ended with the same weights.
        """
        said = []
        for rank, process in enumerate(self._processes):
            output, _ = process.communicate(timeout=PATIENCE_S)
            with self._errors[rank] as file:
                file.seek(0)
                errors = file.read()
            if rank in self._lost:
                continue
            found = _SAID.search(output if rank else self._said)
            if process.returncode or found is None:
                raise HarnessError(f"rank {rank} failed: {errors.strip()[-2000:]}")
            said.append(found)
        if len({found["weights"] for found in said}) > 1:
            raise HarnessError("the sites have not ended with the same weights")
        seconds = max(float(found["seconds"]) for found in said)
        used = [sent(host) - then for host, then in zip(self._hosts, self._before, strict=True)]
        outer_s = min(float(found["outer"] or 0) for found in said)
        loss = float(said[0]["loss"])
        return Turn(loss, seconds / steps, outer_s / steps, max(used), self._curve)


def sent(host: Host) -> int:
    path = f"/sys/class/net/{DEVICE}/statistics/tx_bytes"
    process = host.start(["cat", path], stdout=subprocess.PIPE)
    return int(process.communicate()[0])


if __name__ == "__main__":
    typer.run(main)
