"""What was measured, as pages say it: blocks of performance.md and the README for generate.py.

Figures are files of docs/figures, which `bench.figures` writes. Under each table stand the commit,
the date and the command of every file that it was made of. Ratios are speeds, ours over another's:
the median of the rounds and, in brackets, the lowest and the highest.
"""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FILES = Path(__file__).parent / "figures"
SIZES = ("4 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "64 MiB")
LARGE = "64 MiB"
Row: TypeAlias = "dict[str, Any]"

PAGE = """\
# Performance

For those who ask what a pool gains, and at what cost.

All was measured on one machine: 2 cores of an AMD EPYC (Zen 5, virtual), 24 GiB. Its hosts are
network namespaces behind shaped links (`lab/`), so 2 cores carry all workers, reducers and links.
Figures are medians of alternated rounds in one run with Gloo, in brackets the lowest and the
highest round. Times of such a machine differ by a fifth from run to run, ratios much less. Every
element of each first result was compared with an oracle. None was wrong.

[docs/generate.py](generate.py) makes this page of the files in `docs/figures`: each figure has its
commit, date and command beside it. As root, `python -m bench.figures` measures them again. What was
tried, and what did not help, is in a [notebook](../bench/notebook.md).

## In short

{short}

![Speeds of an all-reduce relative to Gloo's and Open MPI's, by size](gain.svg)

Reducers bring network cards and processors of their own: this compares equal numbers of workers. A
ring of two moves no more bytes than a pool, so two workers gain at small sizes alone. A pool of
fewer reducers than workers leaves cards idle, which reducers in ranks use (mixed). All cards have
one rate here; `reducer plan` predicts times for cards of your own.

## All-reduces

Sums of fp32. "Payload" is what iperf3 carries over the same link. Four workers, 1 Gbit/s:

{four}

Eight workers, 400 Mbit/s:

{eight}

**The burst.** The shaper lets a link that has rested pass 256 KiB at once. So up to that size a
share of the payload may be above 1. The mean of a series has no burst in it.

**MPI** is Open MPI over TCP: at each size the fastest of the algorithm that it chooses, its ring
and its segmented ring. Its ranks poll where ours sleep, which wins at 4 KiB.

## Processors

Without links, over loopback, processors are the limit. A pool takes less of each worker than a
ring does, and more in all. Seconds of a processor are for each GB of a rank's buffers.

{processors}

## 16 and 8 bits on the wire

What they do to a training is in [slow links](slow-links.md).

{wire}

## Averages among volunteers

{volunteers}

[hivemind](https://github.com/learning-at-home/hivemind) averages among volunteers, who come and go.
Its peers look for each other before each averaging (matchmaking), where the ranks of a job know
each other. libp2p, in a process of its own, encrypts all that peers send, and cannot be told not
to; of ours only a pool with [keys](security.md#what-it-costs) does that. Times are from when all
peers have their group to the last one's result, of one tensor of fp32 and 4 hosts; a pool has 4
more. At 1 Gbit/s hivemind needs more of processors than the machine's two cores have, which carry
all hosts; at 100 Mbit/s links are the limit of most.

## Trainings, rings, nodes, plans, keys

{others}

A pool of n reducers has the cards of n further workers. Rings with as many are of workers whose
links are twice as fast, or of twice as many workers. `reducer plan` knows rates and sizes alone.
[Keys](security.md#what-it-costs) encrypt each byte once and decrypt it once.

## Long distances

CUBIC, which most kernels use, takes each lost packet for a full link. So on long ways with loss set
`net.ipv4.tcp_congestion_control=bbr` at ranks and reducers. Where that cannot be, streams help
(`REDUCTION_STREAMS`). The [notebook](../bench/notebook.md) has what was measured.

## What was not measured

- Any other machine or network: no cloud, no switch, no link above 1 Gbit/s, at most 16 workers.
- NCCL. Its plug-in ran in a harness alone, and two ranks that share a GPU are no NCCL job.
- A GPU's copies to host memory and back, which every CUDA tensor takes.
- UCC, oneCCL, BytePS and Horovod's own rings.
- PCCL: what PyPI calls `pccl` is a placeholder, version 0.0.0, without any code.
"""


class Figure:
    """A file of docs/figures; one that was not measured yet has no rows."""

    def __init__(self, name: str) -> None:
        self.name = name
        path = FILES / f"{name}.json"
        self._found = json.loads(path.read_text()) if path.is_file() else {}
        self.rows: list[Row] = self._found.get("rows", [])

    def row(self, **known: Any) -> Row:
        """Return the first row with these values; an empty one if there is none."""
        alike = (row for row in self.rows if all(row.get(key) == known[key] for key in known))
        return next(alike, {})

    @property
    def source(self) -> str:
        """Commit and date, and what was unusual."""
        if not self._found:
            return f"Not measured yet: `python -m bench.figures {self.name}`"
        note = f", {self._found['note']}" if "note" in self._found else ""
        return f"Commit {self._found['commit'][:8]}, {self._found['date']}{note}"

    @property
    def command(self) -> str:
        """The command, as code; empty for a figure that was not measured yet."""
        return f"`{self._found['command']}`" if self._found else ""


def sources(*figures: Figure) -> str:
    """Return the line under a table: commit, date and command of each figure."""
    said: dict[str, list[str]] = {}
    for figure in figures:
        said.setdefault(figure.source, []).append(figure.command)
    return " ".join(
        ": ".join(filter(None, [source, "; ".join(commands)])) + "."
        for source, commands in said.items()
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table, without the columns and rows in which nothing was measured."""
    rows = [row for row in rows if any(row[1:])]
    kept = [at for at in range(len(heads)) if not at or any(row[at] for row in rows)]
    head, *lines = ("| " + " | ".join(row[at] for at in kept) + " |" for row in (heads, *rows))
    return [head, "|" + "---|" * len(kept), *lines] if rows else []


def number(value: float | None) -> str:
    """Return a figure with three digits, and a whole one as it is."""
    if value is None:
        return ""
    if isinstance(value, int) or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def share(value: float | None) -> str:
    """Return a share of what links carry."""
    return "" if value is None else f"{value:.3f}"


def speed(values: list[float] | None, *, spread: bool = True) -> str:
    """Return how many times as fast ours is, with the spread of the rounds where that is known."""
    if not values:
        return ""
    middle, *ends = values
    if not spread or not ends:
        return number(middle)
    return f"{number(middle)} ({number(ends[0])} to {number(ends[1])})"


def ms(row: Row, key: str = "us") -> str:
    """Return a row's microseconds as milliseconds."""
    if key not in row:
        return ""
    value = row[key] / 1000
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def all_processes(ours: Row, gloo: Row) -> float | None:
    """Return processor time of all workers and reducers over that of all of Gloo's ranks."""
    if "cpu" not in ours or "cpu" not in gloo or (ours["reducers"] and "reducers_cpu" not in ours):
        return None
    used = ours["workers"] * ours["cpu"] + ours.get("reducers_cpu", 0.0)
    return float(used / (gloo["workers"] * gloo["cpu"]))


def short() -> list[str]:
    """Say what a buffer of 64 MiB gains, and what it costs."""
    four, eight, two, mixed, wire = map(Figure, ("pool-4", "pool-8", "pool-2", "mixed", "wire-4"))
    rows = []
    for where, figure, way in (
        ("4 workers, 4 reducers, 1 Gbit/s", four, "pool-4"),
        ("8 workers, 8 reducers, 400 Mbit/s", eight, "pool-8"),
        ("2 workers, 2 reducers, 1 Gbit/s", two, "pool-2"),
        ("4 workers, 2 reducers, 1 Gbit/s", mixed, "pool-2"),
        ("4 workers, 2 reducers and one in every rank (mixed), 1 Gbit/s", mixed, "mixed-2"),
        ("4 workers, a reducer in every rank (embedded), 1 Gbit/s", four, "embedded"),
        ("4 workers, 4 reducers, 1 Gbit/s, `int8` on the wire", wire, "pool-4-int8"),
    ):
        found, gloo = figure.row(way=way, size=LARGE), figure.row(way="gloo", size=LARGE)
        cost = number(all_processes(found, gloo))
        rows.append([where, speed(found.get("gloo")), share(found.get("limit")), cost])
    heads = ["64 MiB", "times Gloo's speed", "of what the links allow"]
    heads += ["processor time of all, times Gloo's"]
    return [*table(heads, rows), "", sources(four, eight, two, mixed, wire)]


def all_reduces(name: str) -> list[str]:
    """Return the table of a pool's all-reduces, by size, and of embedded ones beside it."""
    figure = Figure(name)
    rows = []
    for size in SIZES:
        ours, embedded = figure.row(way=name, size=size), figure.row(way="embedded", size=size)
        rows.append(
            [
                size,
                ms(ours),
                ms(ours, "mean_us"),
                share(ours.get("payload")),
                speed(ours.get("gloo")),
                speed(ours.get("mpi")),
                ms(embedded),
                share(embedded.get("limit")),
                speed(embedded.get("gloo")),
            ]
        )
    heads = ["size", "pool, ms", "mean, ms", "of payload", "times Gloo's speed", "times MPI's"]
    heads += ["embedded, ms", "of a ring's optimum", "times Gloo's speed"]
    return [*table(heads, rows), "", sources(figure)]


def processors() -> list[str]:
    """Return the table of speeds without links, and of processor time with and without them."""
    names = {(4, ""): "loopback-4", (2, ""): "loopback-2", (4, ", 1 Gbit/s"): "pool-4"}
    figures = {key: Figure(name) for key, name in names.items()}
    rows = []
    for (n, links), figure in figures.items():
        for size in SIZES if (n, links) == (4, "") else ("1 MiB", LARGE):
            gloo = figure.row(way="gloo", size=size)
            ours = figure.row(way=f"pool-{n}", size=size)
            embedded = figure.row(way="embedded", size=size)
            speeds = ("", "") if links else (speed(ours.get("gloo")), speed(embedded.get("gloo")))
            used = [gloo.get("cpu"), embedded.get("cpu"), ours.get("cpu"), ours.get("reducers_cpu")]
            used.append(all_processes(ours, gloo))
            rows.append([f"{n} workers{links}, {size}", *speeds, *map(number, used)])
    heads = ["", "pool, times Gloo's speed", "embedded", "Gloo's rank, s/GB", "embedded rank"]
    heads += ["pool's worker", "its reducers together", "pool's processes, times Gloo's"]
    return [*table(heads, rows), "", sources(*figures.values())]


def wire() -> list[str]:
    """Return the table of fewer bits on the wire."""
    figures = {4: Figure("wire-4"), 8: Figure("wire-8")}
    rows = []
    for n, figure in figures.items():
        for title, suffix in (("fp32", ""), ("bf16", "-bf16"), ("int8", "-int8")):
            row = figure.row(way=f"pool-{n}{suffix}", size=LARGE)
            shares = [speed(row.get("gloo")), share(row.get("limit"))]
            used = map(number, (row.get("cpu"), row.get("reducers_cpu")))
            rows.append([f"{n} workers, {title}", ms(row), *shares, *used])
        gloo = figure.row(way="gloo", size=LARGE)
        rows.append([f"{n} workers, Gloo's fp32", ms(gloo), "", "", number(gloo.get("cpu")), ""])
    heads = ["64 MiB of fp32", "ms", "times Gloo's speed", "of what the links allow"]
    heads += ["worker, s/GB", "reducers together"]
    return [*table(heads, rows), "", sources(*figures.values())]


def volunteers() -> list[str]:
    """Return the table of averages by hivemind and ours."""
    figure = Figure("hivemind-1000")
    compressions = ("NoCompression", "Float16Compression", "Uniform8BitQuantization")
    ways = {"hivemind": dict(zip(("fp32", "fp16", "8 bits"), compressions, strict=True))}
    for name, way in (("embedded", "embedded"), ("pool of 4", "pool-4")):
        ways[f"ours, {name}"] = {"fp32": way, "bf16": f"{way}-bf16", "int8": f"{way}-int8"}
    rows = []
    for name, wires in ways.items():
        for wire_dtype, way in wires.items():
            cells = [f"{name}, {wire_dtype}"]
            row = figure.row(way=way)
            spread = [row.get(key) for key in ("ms", "lowest", "highest")] if row else None
            cells += [speed(spread), number(row.get("matched_ms")), share(row.get("limit"))]
            rows.append([*cells, number(row.get("cpu"))])
    heads = ["64 MiB", "1 Gbit/s, ms", "with matchmaking", "of what the links allow"]
    return [*table([*heads, "a host, s/GB"], rows), "", sources(figure)]


def others() -> list[str]:
    """Return the table of what takes one line, with commit, date and command in it."""
    rows: list[tuple[str, Callable[..., str], Sequence[str]]] = [
        ("DDP, 4 workers, 4 reducers, 1 Gbit/s, 102 MB of gradients", _trained, ["ddp"]),
        ("64 MiB, rings with as many cards", _cards, ["cards-pool", "cards-ring", "pool-8"]),
        ("2, 4, 8, 16 workers, as many reducers, 100 Mbit/s, 16 MiB", _shares, ["scaling-16"]),
        ("the same, 64 MiB", _shares, ["scaling-64"]),
        ("2 nodes of 4 ranks, 16 MiB, `REDUCTION_HIERARCHY=auto`", _by_nodes, ["nodes"]),
        ("1,000 tensors of 4 KiB, fused, 1 Gbit/s", _fused, ["small-1000"]),
        ("the same, 400 Mbit/s", _fused, ["small-400"]),
        ("`reducer plan`, of what is above on shaped links, from 256 KiB on", planned, ["plan"]),
        ("without keys, with keys", _keyed, ["keys"]),
        ("NCCL's plug-in in a harness, 4 nodes, 1 Gbit/s", _plugged, ["nccl"]),
    ]
    made = []
    for what, said, names in rows:
        figures = [Figure(name) for name in names]
        made.append([what, said(*figures), sources(*figures)])
    return table(["", "measured", "by"], made)


def _trained(figure: Figure) -> str:
    (row,) = figure.rows
    return (
        f"{number(row['samples'])} samples/s, Gloo's {number(row['gloo_samples'])}: "
        f"{speed(row['gloo'])} times as many; exposed communication {number(row['exposed'])} of "
        "what no backward pass could hide"
    )


def _cards(pool: Figure, ring: Figure, eight: Figure) -> str:
    said = {
        "4 workers and 4 reducers, 400 Mbit/s": pool.row(way="pool-4"),
        "Gloo's 4 ranks, 400 Mbit/s": pool.row(way="gloo"),
        "800 Mbit/s": ring.row(way="gloo"),
        "8 ranks, 400 Mbit/s": eight.row(way="gloo", size=LARGE),
    }
    return "; ".join(f"{what}: {ms(row)} ms" for what, row in said.items() if row)


def _shares(figure: Figure) -> str:
    found = (figure.row(workers=n).get("payload") for n in (2, 4, 8, 16))
    return "of payload " + ", ".join(share(one) or "-" for one in found)


def _by_nodes(figure: Figure) -> str:
    flat, by_nodes = figure.rows
    return (
        f"{number(flat['s'] / by_nodes['s'])} times as fast as flat; a node's card sends "
        f"{number(by_nodes['sent'])} of the buffer, and flat {number(flat['sent'])}"
    )


def _fused(figure: Figure) -> str:
    one, each, fused = (
        figure.row(way=way)["ms"]
        for way in ("all bytes as one tensor", "one after the other", "threshold 67108864")
    )
    return (
        f"{number(each / fused)} times as fast as one after the other; {number(fused / one)} of "
        "the time of all bytes as one tensor"
    )


def planned(figure: Figure) -> str:
    """Return how far `reducer plan` is off what was measured."""
    said = []
    for what, key in (("`--simulate`", "error"), ("the formula", "formula_error")):
        errors = sorted(100 * row[key] for row in figure.rows)
        middle = statistics.median(map(abs, errors))
        said.append(f"{what} {errors[0]:+.1f} to {errors[-1]:+.1f} %, half within {middle:.1f}")
    return f"an error of {'; of '.join(said)}"


def _keyed(figure: Figure) -> str:
    parts = []
    for row in figure.rows:
        if keyed := figure.row(way=f"{row['way']}-keys", size=row["size"]):
            parts.append(f"{row['size']} {ms(row)}, {ms(keyed)} ms")
            for key, what in (("cpu", "a worker"), ("reducers_cpu", "all reducers")):
                if row["size"] == LARGE and key in row:
                    parts[-1] += f", {what} {number(row[key])}, {number(keyed[key])} s/GB"
    return "; ".join(parts)


def _plugged(figure: Figure) -> str:
    return "; ".join(
        f"{row['way']}: {share(row['link'])} of the link, {number(row['cpu'])} s/GB of a node"
        for row in figure.rows
    )


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def sites() -> list[str]:
    """Return the table of DiLoCo beside DDP."""
    figure = Figure("sites")
    (every, outer) = (figure.row(way=way) for way in ("ddp", "diloco"))
    loss, less = outer["loss"] / every["loss"] - 1, every["sent"] / outer["sent"]
    rows = [
        ["DDP, fp32", f"{every['loss']:.4f}", f"{every['sent'] / 1e6:.1f}"],
        [
            "DiLoCo, int8",
            f"{outer['loss']:.4f} ({_percent(loss)})",
            f"{outer['sent'] / 1e6:.2f} (1/{less:.0f})",
        ],
    ]
    return [*table(["", "loss", "sent by a site, MB"], rows), "", sources(figure)]


def readme() -> list[str]:
    """Return the README's table: what to set for what one has, and what it gained."""
    (trained,) = Figure("ddp").rows
    text = (
        "Speeds of sums of 64 MiB, times Gloo's, 4 workers at 1 Gbit/s (n=8: 400 Mbit/s). All on "
        "one machine of 2 cores, whose hosts are network namespaces behind shaped links; no other "
        "network was measured. A pool gains as it adds network cards. Training a ResNet-50-sized "
        f"model there, with 4 reducers, gains {speed(trained['gloo'], spread=False)} in "
        "samples/s. [Performance](docs/performance.md) has more."
    )
    heads = ["you have", "you set", "measured here", "read"]
    rows = [*_without_a_pool(), *_with_a_pool()]
    return [*table(heads, rows), "", *textwrap.wrap(text, 100, break_on_hyphens=False)]


def _without_a_pool() -> list[list[str]]:
    exact, rounded = (
        Figure("hivemind-1000").row(way=way)["ms"] for way in ("embedded", "embedded-int8")
    )
    embedded = f"{_gain('pool-4', 'embedded')} times, {_gain('pool-4', 'embedded', '64 KiB')} at"
    sites, slow_links = Figure("sites"), "[slow links](docs/slow-links.md)"
    ddp, diloco = sites.row(way="ddp"), sites.row(way="diloco")
    bytes_less, loss = ddp["sent"] / diloco["sent"], diloco["loss"] / ddp["loss"] - 1
    return [
        [
            "no spare machine",
            "nothing: each rank hosts a reducer (*embedded*)",
            f"{embedded} 64 KiB; the same bits in every run, errors that name ranks",
            "[failures](docs/failures.md)",
        ],
        [
            "none, and a slow link: waits take up to two thirds of the time",
            "`REDUCTION_WIRE_DTYPE=int8`",
            f"{number(exact / rounded)} times as fast as fp32",
            slow_links,
        ],
        [
            "a link slower yet: they take more",
            "`OuterOptimizer` (DiLoCo), with or without a pool",
            f"1/{bytes_less:.0f} of the bytes, loss {_percent(loss)}: 2 sites, 1 reducer",
            slow_links,
        ],
        [
            "two machines, alike or not",
            "`worker-client join -- train.py`",
            "finds the other, splits batches by speed, sets int8 if the link asks for it",
            "[at home](docs/launchers.md#two-machines-at-home)",
        ],
    ]


def _with_a_pool() -> list[list[str]]:
    flat, by_nodes = Figure("nodes").rows
    pools = f"{_gain('pool-4', 'pool-4')} times (n=4), {_gain('pool-8', 'pool-8')} (n=8)"
    return [
        [
            "a spare machine for each worker",
            "`REDUCTION_SERVERS`",
            f"{pools}; with int8 {_gain('wire-4', 'pool-4-int8')} (n=4)",
            "[deployment](docs/deployment.md)",
        ],
        [
            "fewer of them",
            "also `REDUCTION_EMBEDDED=1`",
            f"{_gain('mixed', 'mixed-2')} times, 2 for 4 workers",
            "[performance](docs/performance.md)",
        ],
        [
            "several ranks on each node",
            "`REDUCTION_HIERARCHY=auto`",
            f"{number(flat['s'] / by_nodes['s'])} times as fast as flat, 2 nodes of 4",
            "[frameworks](docs/frameworks.md)",
        ],
    ]


def _gain(name: str, way: str, size: str = LARGE) -> str:
    return speed(Figure(name).row(way=way, size=size).get("gloo"), spread=False)


def speeds(name: str) -> list[tuple[str, float, float]]:
    """Return size, times Gloo's speed and times MPI's of each row of a pool that has both."""
    rows = (Figure(name).row(way=name, size=size) for size in SIZES)
    return [(row["size"], row["gloo"][0], row["mpi"][0]) for row in rows if "mpi" in row]


def performance() -> str:
    """Return performance.md."""
    blocks = {
        "short": short(),
        "four": all_reduces("pool-4"),
        "eight": all_reduces("pool-8"),
        "processors": processors(),
        "wire": wire(),
        "volunteers": volunteers(),
        "others": others(),
    }
    return PAGE.format(**{name: "\n".join(lines) for name, lines in blocks.items()})


# By the name of its two comments, which stand on one page.
BLOCKS: dict[str, Callable[[], list[str]]] = {"gains": readme, "sites": sites}
