"""Where a reducer's processor time goes: seconds for each GB, by what it does.

    sudo .venv/bin/python -m bench.cores --workers 4 --reducers 4 --mbit 1000

The kernel samples all stacks of the pool's processes by `perf` while they sum. README.md defines
every option and figure.
"""

import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from bench import options
from bench.contenders import Contender
from harness import HarnessError

HERTZ = 997
START_S = 60.0
# What a stack is of: the first part of which it has a function. In the lab the sender's call, or
# an interrupt, also does the TCP of the host that receives.
PARTS = {
    "sum": r" (?:(?:b?f|i|u)\d+|block8\w*)_(?:sum|mean|product|min|max)",  # reducer/kernels
    "packets": r" (?:net_rx_action|net_tx_action|irq_exit_rcu|ip_queue_xmit)",
    "in": r" (?:tcp|sock)_recvmsg",
    "out": r" (?:tcp|sock)_sendmsg",
    "wait": r" (?:do_epoll_wait|do_epoll_ctl|do_sys_poll|schedule)",
}
REST = "rest"


def main(  # noqa: PLR0917 (options have names on the command line)
    workers: options.Workers = 4,
    reducers: options.Reducers = 4,
    mbit: options.Mbit = 1000.0,
    unshaped: options.Unshaped = False,
    size: options.Sizes = "64MiB",
    rounds: options.Rounds = 11,
    json: options.Json = None,
) -> None:
    """Measure one size, and print seconds of all reducers together, and shares of them."""
    (nbytes,) = options.sizes(size)
    run, pool = options.begin("bench.cores"), Contender("pool", reducers)
    rate = None if unshaped else mbit
    with (
        options.command("bench.cores"),
        tempfile.TemporaryDirectory() as folder,
        options.contest(workers, [pool], rate) as contest,
    ):
        named = contest.pids(pool.name).items()
        pids = [pid for name, pid in named if name.startswith("reducer")]
        stacks = Path(folder) / "stacks"
        with sampled(pids, stacks):
            (row,) = contest.measure(nbytes, rounds=rounds)
        shares = parts(stacks)
    if row.wrong or row.reducer_cpu_s_per_gb is None:
        raise SystemExit("bench.cores: the sums are wrong")
    moved = 2 * workers  # each rank's bytes come in, and go out
    print(f"# {workers} workers, {reducers} reducers, {nbytes} bytes, {row.time_us / 1e3:.4g} ms")
    print(f"{'':10}{'share':>8}{'s/GB':>8}{'of moved':>10}")
    rows: list[dict[str, str | float]] = []
    for part, share in [("all", 1.0), *shares.items()]:
        spent = share * row.reducer_cpu_s_per_gb
        print(f"{part:10}{share:8.3f}{spent:8.3f}{spent / moved:10.4f}")
        rows.append({"part": part, "share": share, "s_per_gb": spent})
    options.write_table(run, rows, json)


@contextmanager
def sampled(pids: list[int], into: Path) -> Iterator[None]:
    """Sample these processes meanwhile, and write their stacks to a file.

    Raises:
        HarnessError: `perf` is missing, or may not sample.
    """
    perf = shutil.which("perf")
    if perf is None:
        raise HarnessError("perf is missing: apt-get install linux-perf")
    data = into.with_suffix(".data")
    of = ["--pid", ",".join(map(str, pids)), "--output", str(data)]
    recording = subprocess.Popen(
        [perf, "record", "--freq", str(HERTZ), "-g", *of], stderr=subprocess.PIPE, text=True
    )
    try:
        yield
    finally:
        recording.send_signal(signal.SIGINT)
        _, said = recording.communicate(timeout=START_S)
    script = [perf, "script", "--input", str(data), "--fields", "ip,sym", "--no-inline"]
    with into.open("w") as file:
        ended = subprocess.run(script, stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise HarnessError(f"perf has recorded nothing: {said.strip() or ended.stderr.strip()}")


def parts(stacks: Path) -> dict[str, float]:
    """Return the share of samples of each part, of a file with a blank line after each stack."""
    found = Counter(map(part, stacks.read_text().strip().split("\n\n")))
    return {name: found[name] / found.total() for name in (*PARTS, REST)}


def part(stack: str) -> str:
    """Return what a stack is of: a line for each function, the innermost first."""
    return next((name for name, mark in PARTS.items() if re.search(mark, stack)), REST)


if __name__ == "__main__":
    typer.run(main)
