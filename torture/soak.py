"""Whether anything grows in processes that all-reduce very often, with mixed sizes.

    python -m torture.soak --count 100000

Sizes are drawn log-uniformly from 4 bytes to `--largest`, the same at every rank. bench/README.md
defines every option and figure.
"""

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import psutil
import typer

from bench import options, report
from bench.contenders import Contender
from bench.contest import ITEM, Contest
from bench.results import Sample, Soak, Trend
from harness.oracle import PERIOD

MIB = 1 << 20
SLACK = 1 * MIB  # what an allocator may take and keep without anybody leaking
SLACK_SHARE = 0.01


def main(  # noqa: PLR0917 (options have names on the command line)
    count: Annotated[int, typer.Option(min=1, help="All-reduces.")] = 100_000,
    workers: Annotated[int, typer.Option(min=1, help="Ranks.")] = 2,
    reducers: Annotated[int, typer.Option(min=1, help="Reducers.")] = 2,
    embedded: options.Embedded = False,
    largest: Annotated[str, typer.Option(help="Largest size, at most 3 MiB.")] = "2MiB",
    samples: Annotated[int, typer.Option(min=4, help="Looks at memory, files, threads.")] = 200,
    check_every: Annotated[int, typer.Option(min=1, help="Compare the result of each n-th.")] = 100,
    check: Annotated[bool, typer.Option("--check", help="Fail if memory grows.")] = False,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Soak ours on loopback, and say whether memory is flat."""
    most = options.sizes(largest)[0] // ITEM
    if most > PERIOD:
        raise typer.BadParameter(f"the largest size is at most {ITEM * PERIOD} bytes")
    contender = Contender("embedded") if embedded else Contender("pool", reducers)
    found = options.begin_all_reduces("soak", None, [workers], 1, room="torture")
    soak = found.soak = Soak(workers=workers, reducers=contender.reducers)
    batches, check_every = _batches(count, samples), min(check_every, count)
    with options.command("torture.soak"), options.contest(workers, [contender], None) as contest:
        if contest.skipped:
            sys.exit(f"torture.soak: {contest.skipped[contender.name]}")
        run(contest, contender.name, soak, batches, largest=most, check_every=check_every)
    soak.trends = trends(soak.samples)
    print(f"# {report.conditions(found.settings)}")
    print(report.soak_text(soak))
    grows = not all(trend.flat for trend in soak.trends)
    sys.exit(options.finish(found, json, plot) or int(check and grows))


def run(contest: Contest, name: str, soak: Soak, batches: list[int], **arguments: int) -> None:
    """All-reduce in batches, look at all processes before the first and after each."""
    pids = contest.pids(name)
    start = time.monotonic()
    soak.samples += _look(pids, 0, 0.0)
    for batch in batches:
        replies = contest.ask(name, "mix", count=batch, first=soak.all_reduces, **arguments)
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
            counts = {"files": process.num_fds(), "threads": process.num_threads()}
            rss = process.memory_info().rss
        found.append(Sample(process=name, done=done, seconds=seconds, rss=rss, **counts))
    return found


if __name__ == "__main__":
    typer.run(main)
