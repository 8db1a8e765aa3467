"""What members that say nothing cost a job beside them, at one reducer.

    python -m hostile.idle --members 4096 --rounds 9

The reducer tells each of them five times a second that it lives. A job of small buffers is measured
alone, while another reducer on the same core has so many members, and beside them, in turn. Ranks
are on other cores than reducers, as they are on other machines. README.md defines every figure.
"""

import os
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Annotated

import typer

from bench import options
from harness import HarnessError
from hostile import company
from hostile.intruder import Worker
from reducer.wire.constants import LONGEST_PEER_TIMEOUT_MS, MessageType

RANKS = 64  # of a job that says nothing
ROOM = ("--max-connections", "10000", "--memory-limit", "64GiB")  # nothing is held
SETTLE_S = 2.0  # after members have come, and after they have gone
ALONE, ELSEWHERE, BESIDE = "alone", "at another reducer", "beside"


def main(
    members: Annotated[int, typer.Option(help="That say nothing, 64 to a job.")] = 4096,
    ranks: Annotated[int, typer.Option(help="Of the job that is measured.")] = 2,
    size: Annotated[str, typer.Option(help="Of its buffers.")] = "4KiB",
    count: Annotated[int, typer.Option(help="All-reduces per measurement.")] = 3000,
    rounds: options.Rounds = 9,
) -> None:
    """Measure, and print medians over rounds."""
    (nbytes,) = options.sizes(size)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    run = options.begin("hostile.idle")
    found: dict[str, list[tuple[float, float]]] = {ALONE: [], ELSEWHERE: [], BESIDE: []}
    own, *others = sorted(os.sched_getaffinity(0))
    with options.command("hostile.idle"), ExitStack() as stack:
        os.sched_setaffinity(0, {own})  # what is started then has it
        reducer = stack.enter_context(company.reducer(*ROOM))
        other = stack.enter_context(company.reducer(*ROOM))
        os.sched_setaffinity(0, others)
        job = stack.enter_context(company.job(reducer.address, "measured", ranks, nbytes))
        job.median(count)
        for _ in range(rounds):
            found[ALONE].append((job.median(count), job.p99))
            for where, address in ((ELSEWHERE, other.address), (BESIDE, reducer.address)):
                with _idle(address, members):
                    found[where].append((job.median(count), job.p99))
    print(f"# {run.command}\n{'':20}{'median':>9}{'p99':>9}  us, medians of {rounds} rounds")
    alone = medians(found[ALONE])
    for name, rows in found.items():
        row = medians(rows)
        figures = "".join(f"{1e6 * value:9.1f}" for value in row)
        ratios = "".join(f"{value / usual:6.2f}" for value, usual in zip(row, alone, strict=True))
        print(f"{name:20}{figures}  of alone{ratios}")


def medians(rows: list[tuple[float, float]]) -> list[float]:
    """Return the median of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


@contextmanager
def _idle(address: str, count: int) -> Iterator[None]:
    """Join so many members; what the reducer tells them waits in their sockets."""
    with ExitStack() as stack:
        for at in range(count):
            job, rank = divmod(at, RANKS)
            worker = Worker(
                address,
                f"idle-{job}",
                rank,
                world_size=RANKS,
                window=1 << 20,
                patience_ms=LONGEST_PEER_TIMEOUT_MS,
            )
            stack.enter_context(closing(worker))
            header, _ = worker.hear()
            if header.type != MessageType.WELCOME:
                raise HarnessError(f"member {at} was not admitted")
        time.sleep(SETTLE_S)
        yield
    time.sleep(SETTLE_S)


if __name__ == "__main__":
    typer.run(main)
