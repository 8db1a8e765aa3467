"""A pool at a distance: several all-reduces in flight, beside iperf3 with as many streams.

    python -m bench.far --round-trip-ms 200 --loss-percent 1 --congestion bbr

README.md defines every option and figure.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import DEVNULL, PIPE
from typing import Annotated

import typer

from bench import options
from bench.results import Distance
from harness.ranks import training
from lab import Host, LabUnavailable
from worker_client.protocol.joining import auto_streams

PORT = 6000  # of iperf3's first server on a host
LISTEN_S = 1.0
PATIENCE_S = 900.0


def main(  # noqa: PLR0917 (options have names on the command line)
    workers: Annotated[int, typer.Option(min=2, help="Ranks.")] = 2,
    reducers: Annotated[int, typer.Option(min=1, help="Reducers.")] = 2,
    streams: Annotated[
        int, typer.Option(min=0, help="Connections to each reducer; 0: as ranks choose.")
    ] = 0,
    mbit: options.Mbit = 100.0,
    round_trip_ms: options.RoundTripMs = 200.0,
    loss_percent: options.LossPercent = 1.0,
    congestion: options.Congestion = "bbr",
    size: Annotated[str, typer.Option(help="Bytes of an all-reduce.")] = "8MiB",
    in_flight: Annotated[int, typer.Option(min=1, help="All-reduces at once.")] = 6,
    count: Annotated[int, typer.Option(min=2, help="All-reduces in all.")] = 140,
    iperf_s: Annotated[int, typer.Option(min=1, help="How long iperf3 measures.")] = 15,
    break_every_s: Annotated[
        float, typer.Option(min=0, help="Until all connections of a rank are reset; 0: never.")
    ] = 0,
) -> None:
    """All-reduce over a long distance; print the rate, and who was called lost."""
    (nbytes,) = options.sizes(size)
    arguments = {"nbytes": nbytes, "in_flight": in_flight, "count": count}
    os.environ["REDUCTION_STREAMS"] = str(streams or "auto")  # of the ranks, which inherit it
    streams = streams or auto_streams(round_trip_ms / 1000)
    distance = Distance(
        round_trip_ms=round_trip_ms, loss_percent=loss_percent, congestion=congestion
    )
    with options.command("bench.far"), options.lab(workers + reducers, mbit, distance) as lab:
        rates = iperf(lab.hosts[:workers], lab.hosts[workers:], streams, iperf_s)
        with (
            training(lab, workers, "bench.far_rank", arguments) as ranks,
            breaking(lab.hosts[:workers], break_every_s) as broken,
        ):
            said = ranks.hear_all(PATIENCE_S)
            ranks.tell("done")
    ends = [max(one["ends"][at] for one in said) for at in range(count)]
    half = count // 2
    steady = nbytes * (count - half) / (ends[-1] - ends[half - 1]) / 1e6
    whole = nbytes * count / ends[-1] / 1e6
    wrong = sum(one["wrong"] for one in said)
    losses = sum(one["losses"] for one in said)
    reached = sum(rates) / len(rates) / 1e6
    print(
        f"# links of {mbit:g} Mbit/s, {round_trip_ms:g} ms, {loss_percent:g} % lost, TCP "
        f"{congestion}; {workers} ranks, {reducers} reducers, {streams} streams to each, "
        f"{count} all-reduces of {nbytes} bytes, {in_flight} at once"
    )
    if broken:
        print(f"# {len(broken)} times all connections of a rank were reset, {sum(broken)} in all")
    print(f"{'iperf3 MB/s':>12} {'second half':>12} {'all':>8} {'s':>7} {'wrong':>6} {'losses':>7}")
    print(f"{reached:>12.2f} {steady:>12.2f} {whole:>8.2f} {ends[-1]:>7.1f} {wrong:>6} {losses:>7}")
    sys.exit(int(wrong > 0 or losses > 0))


@contextmanager
def breaking(hosts: list[Host], every_s: float) -> Iterator[list[int]]:
    """Reset all of a host's connections to reducers at times, of each in turn; yield how many."""
    stop = threading.Event()
    broken: list[int] = []
    command = ["ss", "-H", "-K", "-t", "state", "established"]

    def run() -> None:
        while not stop.wait(every_s):
            found = hosts[len(broken) % len(hosts)].start(command, stdout=PIPE)
            broken.append(found.communicate()[0].count("\n"))

    thread = threading.Thread(target=run)
    if every_s:
        thread.start()
    try:
        yield broken
    finally:
        stop.set()
        if every_s:
            thread.join()


def iperf(workers: list[Host], reducers: list[Host], streams: int, seconds: int) -> list[float]:
    """Load all links both ways at once; return bytes/s that each worker sends, then receives."""
    for host in reducers:
        for at in range(len(workers)):
            host.start(["iperf3", "-s", "-1", "-p", str(PORT + at)], stdout=DEVNULL)
    time.sleep(LISTEN_S)
    sent, received = [0.0] * len(workers), [0.0] * len(workers)
    clients = []
    for at, worker in enumerate(workers):
        for host in reducers:
            client = ["iperf3", "-c", host.address, "-p", str(PORT + at), "-P", str(streams)]
            client += ["--bidir", "-O", str(seconds), "-t", str(seconds), "-J"]
            clients.append((at, worker.start(client, stdout=PIPE)))
    for at, process in clients:
        end = json.loads(process.communicate()[0] or "{}").get("end", {})
        if "sum_received" not in end:
            raise LabUnavailable("iperf3 failed: install the package iperf3, 3.7 or later")
        sent[at] += end["sum_received"]["bits_per_second"] / 8
        received[at] += end["sum_received_bidir_reverse"]["bits_per_second"] / 8
    return sent + received


if __name__ == "__main__":
    typer.run(main)
