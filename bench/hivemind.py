"""Averages by hivemind, whose peers find each other before each one, beside ours.

    python -m bench.hivemind --workers 4 --mbit 1000

README.md defines every option and figure.
"""

import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from json import dumps
from typing import TypeAlias

import psutil
import typer

from bench import options, theory
from bench.contenders import Contender
from bench.contest import Contest, hosts_needed
from harness import ROOT, HarnessError, pool
from harness.ranks import Ranks

PYTHON = ROOT / ".venv-hivemind" / "bin" / "python"
PATIENCE_S = 400.0
HEADS = ("ms", "lowest", "highest", "limit", "cpu", "matched_ms", "error")
# hivemind's names, and what of ours sends as many bits.
LIKE = {"NoCompression": "", "Float16Compression": "bf16", "Uniform8BitQuantization": "int8"}
Figures: TypeAlias = "dict[str, float]"


def main(
    workers: options.Workers = 4,
    mbit: options.Mbit = 1000.0,
    size: options.Sizes = "64MiB",
    rounds: options.Rounds = 5,
    json: options.Json = None,
) -> None:
    """Compare averages in one run, alternating, and print medians."""
    (nbytes,) = options.sizes(size)
    run, told = options.begin("bench.hivemind"), {"nbytes": nbytes, "compressions": [*LIKE]}
    ours = [Contender("embedded", wire_dtype=wire) for wire in LIKE.values()]
    ours += [Contender("pool", workers, wire) for wire in LIKE.values()]
    turns, wrong = defaultdict[str, list[Figures]](list), 0
    with (
        options.command("bench.hivemind"),
        options.lab(hosts_needed(workers, ours), mbit) as lab,
        ExitStack() as stack,
    ):
        if not PYTHON.exists():
            raise HarnessError("hivemind is not installed: make .venv-hivemind/ready")
        contest = Contest(lab, workers, ours)
        contest.start(stack)
        peers = Ranks("bench.hivemind_rank", lab.hosts[:workers], told, [], python=PYTHON)
        pids = meet(stack.enter_context(peers))
        for _ in range(rounds):
            for row in contest.measure(nbytes, rounds=1):
                cpu = row.worker_cpu_s_per_gb + (row.reducer_cpu_s_per_gb or 0.0) / workers
                turns[row.contender].append({"ms": row.time_us / 1e3, "cpu": cpu})
                wrong += row.wrong
            if contest.skipped:
                raise HarnessError(f"not all of ours can be measured: {contest.skipped}")
            for compression in LIKE:
                turns[compression].append(turn(peers, compression, pids, nbytes))
        peers.tell("done")
        while peers.running:
            peers.hear(PATIENCE_S)
    limits = [1e3 * nbytes / theory.limit(one, workers, contest.payload_rates[0]) for one in ours]
    limits += limits[: len(LIKE)]  # hivemind's peers reduce all, as embedded ranks do
    print(f"# {workers} hosts, {mbit:g} Mbit/s, {nbytes} bytes of fp32; medians of {rounds} turns")
    options.write_table(run, table(turns, limits), json)
    sys.exit(int(wrong > 0))


def meet(peers: Ranks) -> list[int]:
    """Tell all peers where the first one is; return their process ids when they can average."""
    first = peers.hear(PATIENCE_S)
    if first is None:
        raise peers.stalled("hivemind's first peer did not start")
    peers.tell(dumps(first["addresses"]))
    return [said["pid"] for said in peers.hear_all(PATIENCE_S)]


def turn(peers: Ranks, compression: str, pids: list[int], nbytes: int) -> Figures:
    """Let all peers find a group and then average; return ms, and a host's seconds for each GB."""
    stages, used = [], []
    peers.tell(compression)
    for _ in ("ready", "with a group", "with the average"):
        said = peers.hear_all(PATIENCE_S)
        used.append(sum(map(used_s, pids)))
        if said[0]:
            ended, begun = max(one["ended"] for one in said), min(one["begun"] for one in said)
            stages.append(1e3 * (ended - begun))
        peers.tell("go on")
    error = max(one["error"] for one in peers.hear_all(PATIENCE_S))
    cpu = (used[2] - used[1]) / len(pids) / (nbytes / 1e9)
    return {"ms": stages[1], "matched_ms": sum(stages), "cpu": cpu, "error": error}


def used_s(pid: int) -> float:
    """Return the processor seconds of a peer: its process, DHT and averagers, and its p2pd."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(pool.cpu_seconds(process.pid) for process in family)


def table(turns: dict[str, list[Figures]], limits: list[float]) -> list[dict[str, str | float]]:
    """Print and return a row for each way: medians, and the fastest and the slowest turn."""
    print(f"{'':24}" + "".join(f"{head:>11}" for head in HEADS))
    rows: list[dict[str, str | float]] = []
    for (way, made), limit in zip(turns.items(), limits, strict=True):
        found = {key: statistics.median(one[key] for one in made) for key in made[0]}
        times = [one["ms"] for one in made]
        found |= {"lowest": min(times), "highest": max(times), "limit": limit / found["ms"]}
        print(f"{way:24}" + "".join(f"{found[head]:11.5g}" for head in HEADS if head in found))
        rows.append({"way": way, **found})
    return rows


if __name__ == "__main__":
    typer.run(main)
