"""Whether anything grows in processes that all-reduce very often, with mixed sizes.

    python -m torture.soak --count 100000

Sizes are drawn log-uniformly from 4 bytes to `--largest`, the same at every rank. bench/README.md
defines every option and figure.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import typer

from bench import options, report
from bench.contenders import Contender
from bench.contest import ITEM, Contest, hosts_needed
from bench.results import Sample, Soak, Trend
from harness import HarnessError
from harness.oracle import PERIOD
from lab import LabUnavailable

MIB = 1 << 20
SLACK = 1 * MIB  # what an allocator may take and keep without anybody leaking
SLACK_SHARE = 0.01


def main(  # noqa: PLR0917 (options have names on the command line)
    count: Annotated[int, typer.Option(min=1, help="All-reduces.")] = 100_000,
    workers: Annotated[int, typer.Option(min=1, help="Ranks.")] = 2,
    reducers: Annotated[int, typer.Option(min=1, help="Reducers.")] = 2,
    embedded: Annotated[
        bool, typer.Option("--embedded", help="No reducers: ranks host them.")
    ] = False,
    largest: Annotated[str, typer.Option(help="Largest size, at most 3 MiB.")] = "2MiB",
    samples: Annotated[int, typer.Option(min=4, help="Looks at memory, files, threads.")] = 200,
    check_every: Annotated[int, typer.Option(min=1, help="Compare the result of each n-th.")] = 100,
    check: Annotated[bool, typer.Option("--check", help="Fail if memory grows.")] = False,
    json: Annotated[Path | None, typer.Option(help="File for the results.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a picture (PNG).")] = None,
) -> None:
    """Soak ours on loopback, and say whether memory is flat."""
    most = options.sizes(largest)[0] // ITEM
    if most > PERIOD:
        raise typer.BadParameter(f"the largest size is at most {ITEM * PERIOD} bytes")
    contender = Contender("embedded") if embedded else Contender("pool", reducers)
    plan = Plan(_batches(count, samples), most, min(check_every, count))
    found = options.begin_all_reduces("soak", None, [workers], 1, room="torture")
    try:
        with (
            options.lab(hosts_needed(workers, [contender]), None) as lab,
            Contest(lab, workers, [contender]) as contest,
        ):
            if contest.skipped:
                sys.exit(f"torture.soak: {contest.skipped[contender.name]}")
            soak = Soak(
                workers=workers,
                reducers=contender.reducers,
                all_reduces=0,
                nbytes=0,
                seconds=0.0,
                wrong=0,
                checked=0,
                samples=[],
                trends=[],
            )
            found.soak = soak
            run(contest, contender.name, soak, plan)
    except (HarnessError, LabUnavailable) as error:
        sys.exit(f"torture.soak: {error}")
    soak.trends = trends(soak.samples)
    print(f"# {report.conditions(found.settings)}")
    print(report.soak_text(soak))
    grows = not all(trend.flat for trend in soak.trends)
    sys.exit(options.finish(found, json, plot) or int(check and grows))


@dataclass(frozen=True)
class Plan:
    """What is done.

    Attributes:
        batches: all-reduces between two looks at the processes.
        largest: most elements of an all-reduce.
        check_every: compare the result of each n-th.
    """

    batches: Sequence[int]
    largest: int
    check_every: int


def run(contest: Contest, name: str, soak: Soak, plan: Plan) -> None:
    """All-reduce in batches, look at all processes before the first and after each.

    Raises:
        HarnessError: a rank failed.
    """
    pids = contest.pids(name)
    start = time.monotonic()
    soak.samples += _look(pids, 0, 0.0)
    for batch in plan.batches:
        replies = contest.ask(
            name,
            "mix",
            count=batch,
            first=soak.all_reduces,
            largest=plan.largest,
            check_every=plan.check_every,
        )
        soak.all_reduces += batch
        soak.nbytes += replies[0]["nbytes"]
        soak.wrong += sum(reply["wrong"] for reply in replies)
        soak.checked += sum(reply["checked"] for reply in replies)
        soak.seconds = time.monotonic() - start
        soak.samples += _look(pids, soak.all_reduces, soak.seconds)


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """Fit a line to every process's memory in the second half.

    Memory is flat if the line rises by less than 1 MiB and 1 % of it in that half: allocators
    take memory for the largest needs when these first come together, which may be late.
    """
    found = []
    for process in dict.fromkeys(sample.process for sample in samples):
        own = [sample for sample in samples if sample.process == process]
        half = own[len(own) // 2 :]
        done = np.array([sample.done for sample in half], float)
        slope = float(np.polyfit(done, [sample.rss for sample in half], 1)[0])
        growth = slope * float(done[-1] - done[0])
        found.append(
            Trend(
                process=process,
                start_rss=half[0].rss,
                end_rss=half[-1].rss,
                bytes_per_1000=1000 * slope,
                growth=growth,
                flat=growth < SLACK + SLACK_SHARE * half[0].rss,
                files=(half[0].files, half[-1].files),
                threads=(half[0].threads, half[-1].threads),
            )
        )
    return found


def _batches(count: int, samples: int) -> list[int]:
    edges = np.linspace(0, count, min(count, samples) + 1).astype(int)
    return [int(size) for size in np.diff(edges)]


def _look(pids: dict[str, int], done: int, seconds: float) -> list[Sample]:
    found = []
    for name, pid in pids.items():
        process = psutil.Process(pid)
        with process.oneshot():
            sample = Sample(
                process=name,
                done=done,
                seconds=seconds,
                rss=process.memory_info().rss,
                files=process.num_fds(),
                threads=process.num_threads(),
            )
        found.append(sample)
    return found


if __name__ == "__main__":
    typer.run(main)
