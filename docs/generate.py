"""Write the files of this folder that are generated: ``python docs/generate.py``.

`PAGES` names each file and the function that returns its text; a test holds that the files are what
these functions return. The settings come from the code, tables and the picture of gains from what
`bench.figures` has written (measured.py), the pictures of losses from what `bench.sites --curves`
has, the table of versions from what `tests.versions` has, sizes of pools from what `reducer plan`
prints, the first page of the site from the README's first screen. `facts` writes into
other files of the project what they repeat of the code and of each other, as facts.toml says.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
import shlex
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize
from typer.testing import CliRunner

from reducer import cli
from reducer.config import ReducerConfig
from reducer.planning.network_model import payload_share, ring_factor
from reducer.planning.plan import PlannedJob, plan
from reducer.wire.constants import DType
from worker_client.config import AUTO, InitSettings, WorkerConfig
from worker_client.protocol.flow_control import MOST_BYTES, window_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pydantic.fields import FieldInfo
    from pydantic_settings import BaseSettings

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))  # for tests, which run this file by its path

import measured  # noqa: E402 (as above)

_SETTINGS = """\
# Settings

For those who set anything at a worker or a reducer.

Four of each table are needed often; defaults and measurements choose the rest.

[docs/generate.py](generate.py) writes this page from the docstrings of `WorkerConfig`
(`worker_client/config.py`) and `ReducerConfig` (`reducer/config.py`). The [glossary](glossary.md)
explains words such as chunk, link and round.

Arguments of `worker_client.init()` and options of `reducer serve` beat the environment, which beats
the file of `reducer serve --config`, which beats the defaults. A setting without an argument or
option is set by its variable, or in that file. Sizes take units such as `256KiB` or `16MB`,
durations such as `5ms`, `300s` or `2min`; a bare number is bytes, or seconds. An unknown
`REDUCTION_` variable is an error at a worker and at `reducer serve`, and the message suggests the
name that may have been meant.

## Workers

`worker_client.init()` also takes `rank` and `world_size`; by default they are the process group's,
or the launcher's.

{workers}

## Reducers

The variables also hold for a reducer that a rank hosts. `reducer serve` also takes `--log-level`
(`info` by default), `--log-format` (`text` by default, or `json`) and `--stop-at-eof`.

**A file.** `reducer serve --config reducer.toml`, or `REDUCTION_CONFIG`, reads settings from TOML:
their names in small letters, without `REDUCTION_`, are its keys, at the top level. Numbers may be
numbers, `insecure` is `true` or `false`, and `cpus` may be a list; sizes and durations with a unit
are text, as in `memory_limit = "16GiB"`. Paths are from the directory in which `reducer` was
started. A key that is no setting of a reducer and a wrong value are refused, with the name of the
file. The line of settings that a reducer logs at its start names the file as `config`. Only
`reducer serve` reads one: workers, and reducers that ranks host, have their environment alone, and
pass over `REDUCTION_CONFIG`. [An example](deployment.md#settings-in-a-file).

{reducers}
"""


# What groups of settings are about. Which the first one has is a matter of use, not of the code.
_WORKERS = {
    "You will need these four": "servers keys job interface",
    "Where reducers run": "embedded hierarchy encrypt generation",
    "Fewer bits, larger buffers": "wire_dtype fusion_threshold cycle_time",
    "How long to wait": "timeout connect_timeout wait_for_reducers patience heartbeat",
    "What a job does where it would fail": "fallback on_rank_lost join",
    "What to write down": "timeline dump",
    "Rare: measured where nothing is set": "chunk_bytes window_bytes streams batch_shares "
    "port_buffer impl libpython",
}
_REDUCERS = {
    "You will need these four": "bind keys memory_limit http",
    "Threads": "threads io_threads cpus kernel",
    "Limits": "job_memory_limit max_jobs max_jobs_per_key max_rounds max_ranks max_chunk_bytes "
    "max_connections max_connections_per_key handshake_timeout",
    "The rest": "port_buffer drain_timeout insecure impl timeline config",
}


def settings() -> str:
    """Return the page of the settings: tables for workers, and for reducers."""
    arguments = {name: f"`{name}`" for name in InitSettings.__annotations__}
    options = {
        name: f"`--{name.replace('_', '-')}`" for name in inspect.signature(cli.serve).parameters
    }
    return _SETTINGS.format(
        workers=_tables(WorkerConfig, "argument", arguments, _WORKERS),
        reducers=_tables(ReducerConfig, "option", options, _REDUCERS),
    )


def architecture() -> str:
    """Return the page of the architecture, with the floors of both packages drawn anew."""
    written = (DOCS / "architecture.md").read_text()
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    drawn = ["```"]
    for contract in contracts["contracts"]:
        if contract["type"] == "layers":
            (package,) = contract["containers"]
            drawn += [package, "─" * len(package), *_floors(contract["layers"], package), ""]
    drawn[-1] = "```"
    return _filled(written, "rooms", drawn)


def _filled(written: str, name: str, lines: list[str]) -> str:
    """Return a page with other lines between the two comments that have a name."""
    begin, end = f"<!-- {name}: made by docs/generate.py -->", f"<!-- /{name} -->"
    whole = "\n".join((begin, *lines, end))
    return re.sub(rf"(?s){begin}.*{end}", lambda _: whole, written)


def compatibility() -> str:
    """Return the page of versions, with the table of what compatibility.json says of each."""
    columns = ("python", "torch", "numpy", "passed", "failed", "skipped", "date")
    rows = ["| Python | torch | NumPy | passed | failed | skipped | date |", "|---" * 7 + "|"]
    for name, result in json.loads((DOCS / "compatibility.json").read_text()).items():
        cells = [str(result.get(column, "")) for column in columns]
        if "untried" in result:
            cells[:3] = [*name.split(), f"not tried: {result['untried']}"]
        rows.append(f"| {' | '.join(cells)} |")
    return _filled((DOCS / "compatibility.md").read_text(), "versions", rows)


def _floors(layers: list[str], package: str) -> Iterator[str]:
    """Yield the lines of a contract's floors from the top one down, a / behind each room."""
    for number, layer in enumerate(layers, 1):
        words = [f"{word}/" if (ROOT / package / word).is_dir() else word for word in layer.split()]
        yield from textwrap.wrap(
            " ".join(words), 98, initial_indent=f"{number} ", subsequent_indent="  "
        )


_GAIN = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 336" \
font-family="Helvetica, Arial, 'DejaVu Sans', sans-serif" font-size="12">
  <title>Speed of an all-reduce through a pool, relative to Gloo's and Open MPI's, by size</title>
  <rect width="880" height="336" rx="12" fill="#ffffff"/>
  <circle cx="262" cy="318" r="5" fill="#2563a8"/>
  <text x="274" y="322" fill="#1c2430">pool's speed / Gloo's</text>
  <rect x="465" y="313" width="10" height="10" fill="#c2570c"/>
  <text x="482" y="322" fill="#1c2430">pool's speed / Open MPI's</text>
{panels}
</svg>
"""
_PANELS = ((4, "1 Gbit/s"), (8, "400 Mbit/s"))


def gain() -> str:
    """Return the picture of measured speeds beside Gloo's and MPI's."""
    return _GAIN.format(
        panels="\n".join(
            _panel(20 + 430 * at, f"{n} workers, {n} reducers, links of {links}", rows)
            for at, (n, links) in enumerate(_PANELS)
            if (rows := measured.speeds(f"pool-{n}"))
        )
    )


def _panel(left: int, title: str, rows: list[tuple[str, float, float]]) -> str:
    def height(ratio: float) -> float:
        return round(216 - 30 * math.log2(ratio), 1)

    lines = [f'<text x="{left + 8}" y="32" font-size="14" fill="#1c2430">{title}</text>']
    for ratio, said in ((16, "16 x"), (4, "4 x"), (1, "equal"), (0.25, "1/4")):
        y = height(ratio)
        stroke = "#59626f" if ratio == 1 else "#d5d9df"
        lines += [
            f'<path d="M{left + 48} {y}h360" stroke="{stroke}"/>',
            f'<text x="{left + 42}" y="{y + 4}" text-anchor="end" fill="#59626f">{said}</text>',
        ]
    for at, (size, gloo, mpi) in enumerate(rows):
        x = left + 76 + at * 50
        one, two = height(gloo), height(mpi)
        # Labels stand on the far sides of the two marks.
        above, below = (one + 17, two - 9) if one > two else (one - 9, two + 17)
        said, other = measured.number(gloo), measured.number(mpi)
        lines += [
            f'<circle cx="{x}" cy="{one}" r="5" fill="#2563a8"/>',
            f'<text x="{x}" y="{above}" text-anchor="middle" fill="#2563a8">{said}</text>',
            f'<rect x="{x - 5}" y="{two - 5}" width="10" height="10" fill="#c2570c"/>',
            f'<text x="{x}" y="{below}" text-anchor="middle" fill="#c2570c">{other}</text>',
            f'<text x="{x}" y="304" text-anchor="middle" fill="#59626f">{size}</text>',
        ]
    return "\n".join(f"  {line}" for line in lines)


_LOSSES = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 360" \
font-family="Helvetica, Arial, 'DejaVu Sans', sans-serif" font-size="12">
  <title>Loss of a small GPT on text that it has not seen, after each hundred steps</title>
  <rect width="880" height="360" rx="12" fill="#ffffff"/>
{panels}
</svg>
"""
_CURVES = (
    (
        "Gradients in DDP, two ranks",
        {
            "ddp": ("fp32", "#1c2430", ""),
            "ddp-bf16": ("bf16", "#2563a8", "9 6"),
            "ddp-int8": ("int8", "#c2570c", "3 6"),
            "ddp-int8-no-feedback": ("int8 without feedback", "#2f7d4f", "1 5"),
        },
    ),
    (
        "Three sites, of which one is killed",
        {
            "diloco": ("DiLoCo", "#1c2430", ""),
            "streaming": ("two fragments, a delay of 25 steps", "#2563a8", "9 6"),
        },
    ),
)
_HIGHEST, _LOWEST = 3.2, 1.4  # nats a letter


def losses() -> str:
    """Return the picture of losses, from losses.json."""
    panels = json.loads((DOCS / "losses.json").read_text())
    return _LOSSES.format(
        panels="\n".join(
            f"  {line}"
            for at, (title, styles) in enumerate(_CURVES)
            for line in _loss_panel(20 + 430 * at, title, styles, panels[at])
        )
    )


def _loss_panel(
    left: int,
    title: str,
    styles: dict[str, tuple[str, str, str]],
    curves: dict[str, dict[str, float]],
) -> Iterator[str]:
    last = max(int(step) for curve in curves.values() for step in curve)

    def place(step: float, loss: float) -> tuple[float, float]:
        return (
            round(left + 48 + 360 * step / last, 1),
            round(50 + 250 * (_HIGHEST - loss) / (_HIGHEST - _LOWEST), 1),
        )

    yield f'<text x="{left + 8}" y="32" font-size="14" fill="#1c2430">{title}</text>'
    for tenths in range(int(10 * _LOWEST) + 2, int(10 * _HIGHEST) + 1, 4):
        x, y = place(0, tenths / 10)
        yield f'<path d="M{x} {y}h360" stroke="#d5d9df"/>'
        yield f'<text x="{x - 6}" y="{y + 4}" text-anchor="end" fill="#59626f">{tenths / 10}</text>'
    for step in range(0, last + 1, last // 4):
        x, _ = place(step, 0)
        yield f'<text x="{x}" y="318" text-anchor="middle" fill="#59626f">{step}</text>'
    yield f'<text x="{left + 228}" y="342" text-anchor="middle" fill="#59626f">steps</text>'
    for at, (name, (said, colour, dashes)) in enumerate(styles.items()):
        drawn = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
        points = [
            "{:g},{:g}".format(*place(int(step), loss))
            for step, loss in curves[name].items()
            if loss <= _HIGHEST
        ]
        yield f'<polyline points="{" ".join(points)}" {drawn}/>'
        yield f'<path d="M{left + 130} {70 + 20 * at}h36" {drawn}/>'
        yield f'<text x="{left + 174}" y="{74 + 20 * at}" fill="#1c2430">{said}</text>'


_SIZING = """\
# Sizing

For those who are to say how many reducers a job gets, and of which machines.

[docs/generate.py](generate.py) writes this page from what `reducer plan` answers. That is a model
of links. [What was measured](#modelled-and-measured) is much less.

## The rule

The reducers' cards together should carry what the workers' carry together. More gain nothing. With
less, mixed jobs use the workers' own cards besides. What counts is the rate of a card, not the
number of machines: 8 workers of 100 Gbit/s want 25 reducers of 32 Gbit/s.

An all-reduce of 1 GB, in ms; in brackets how much faster than a ring. All cards are alike, but for
the last column, where a quarter as many reducers have four times the rate:

{table}

Many reducers have short shards. A shard of one chunk (256 KiB) takes twice as long as its bytes, as
its result waits for all contributions. So beside hundreds of workers take fewer and faster cards.
DDP's buckets of 64 MiB are smaller than this buffer, but several travel at once and fill the gaps.

```sh
{line_small}
```
```text
{printed_small}
```

```sh
{line_large}
```
```text
{printed_large}
```

## Where a pool stops paying

A pool halves what embedded reducers take, at best. So it pays where a step waits for that. Fewer
bits, or outer steps, leave less to wait for. 16 workers with 350M parameters, 400 ms of backward
pass and 200 ms beside; a step in ms, embedded and with as many reducers:

{bits}

Here a pool gains less than a tenth from so many Gbit/s on: {stops}.
Casts cost processors, which the model leaves out
([how much](performance.md#16-and-8-bits-on-the-wire)). What fewer bits and DiLoCo do to a training
is in [slow links](slow-links.md). One cell of the table is from this:

```sh
{line_bits}
```
```text
{printed_bits}
```

## Queues

With `--simulate` every rank's session is that of production: it cuts a bucket of 64 MiB and sends
chunks as its windows allow, over cards and a switch's ports, which have queues. For each pool it
prints the time beside the formula's, and the longest queues at the switch:

```sh
{line_queues}
```
```text
{printed_queues}
```

The formula has cards that share their rate evenly. The simulation has them send 128 KiB of a
connection in turn, as Linux does, and so one rank's chunk comes later than another's.
With `--port-buffer 16MiB` a port holds no more: what finds no room is sent again a round trip
later, and `lost` is its share. `--costs` is what messages cost a processor, seconds, as JSON:
`worker_message_s`, `worker_byte_s`, `reducer_message_s`, `reducer_byte_s`. `--json` prints all of
it for programs. A pool of fewer reducers than workers is mixed where that is faster;
`--topology pool` simulates it alone. It leaves out TCP's slow start, timeouts and window, failures,
and ZMTP's heartbeats. The reducer's rules are stated again there, and tests compare them with its
engine. With 4,096 links or more the size of chunks is computed, where ranks would measure.

## Memory and cores

A reducer sets aside a window of each rank, and one more. It refuses a job at its start that would
need more than `--memory-limit`. Windows are at most {window_mib} MiB over all reducers, and two
chunks at each at least (`REDUCTION_WINDOW_BYTES`). MiB of each reducer:

{memory}

A core moves a GB in and out in {seconds_gb} s: four workers' fp32 took {seconds} s for each GB of
buffer, of which the pool receives four and sends four. That was measured with links of 1 Gbit/s.
For faster ones it is extrapolated; `--threads` uses more than one core:

{cores}

## Racks

**A model alone: there is no tree of reducers.** A rack's uplink may carry less than its cards do
together (oversubscription). Then what crosses the core decides. Of a flat pool nearly all bytes of
all ranks do; of a ring, one rank's. In a tree a rack's reducers would add first, and one sum of
each rack would cross the core: a {rack}th of the flat pool's bytes in racks of {rack} workers. An
all-reduce of 1 GB, in ms, of {tree_workers} workers of 25 Gbit/s with as many reducers in the same
racks:

{tree}

So a tree would be needed from {needed} on, where a flat pool gains less than a tenth over a ring.
At 1:1 it would take {lost} longer, as reducers send sums to reducers besides.

## Ports of a switch

n ranks send to a reducer through one port of the switch, at once. What the port has no room for is
lost, TCP may wait 0.2 s before it sends that again, and all ranks wait for the chunk. Say what a
port holds, to reducers and to ranks, such as `REDUCTION_PORT_BUFFER=1MiB`, and TCP's windows are
made to fit into it ([the rule](protocol.md#5-who-may-say-what-and-when)).

Take what one port may use while all are busy, as the switch's data sheet says it, not the sum of
all ports. Where several ranks or reducers share a host, each one gets its part of that; where ranks
host reducers, half of it. A port should hold 3.3 KB for each rank, which are two packets: 1 MiB is
enough for 300 ranks. It should also hold what a link carries in a round trip, 128 KB at 10 Gbit/s
and 100 us. A connection's first bytes are not bounded, for up to 0.2 s, or 0.8 s of 1,024 ranks.
A network whose ports hold
all windows, or that pauses senders, needs no setting ([figures](../bench/notebook.md)).

## What your training gains

`reducer plan` knows links. This knows your script as well:

    worker-client doctor --gain --workers 4 --gbps 1 --reducers 2,4 -- train.py --its arguments

After 3 steps of warm-up it has the script make 10 (`--steps`) with nothing exchanged. They show how
long a step computes, and when DDP hands over its buckets. It prints what a step would take with
Gloo, with reducers of the ranks' own and of a pool, in 16 and 8 bits, and with DiLoCo every 50
steps (`--every`), and one sentence that says what to take. Then the script ends: its weights are
good for nothing. Started at every rank, on the machines that are to train, it needs neither
`--workers` nor `--gbps`: it measures the links between ranks, and to the reducers of
`REDUCTION_SERVERS`, and says beside the prediction what a step takes as the script is.

    torchrun --nnodes 4 --node-rank $NODE --nproc-per-node 1 --master-addr node-0 \\
        --master-port 29500 --no-python worker-client doctor --gain -- train.py

A run that was recorded does as well, with `--gbps`: a rank's timeline (`REDUCTION_TIMELINE`,
[observing](observing.md#a-timeline)) or a trace of `torch.profiler.profile(record_shapes=True)` of
DDP over Gloo:

    worker-client doctor --gain --gbps 1 --trace timelines/JOB-rank0.json

`--json` prints all of it for programs. A script wraps one model, and counts as samples the rows of
its first tensor. Buckets stay as the script makes them. What the model leaves out: processors but
for casts, copies from and to devices, other jobs on the links, and what rounding and DiLoCo do to a
training ([slow links](slow-links.md)). `python -m bench.gain` holds it against the lab
([errors](../bench/notebook.md)).

## Modelled and measured

| | measured, in the lab of one machine | asked of simulators | modelled alone |
|---|---|---|---|
| workers | 2 to 16 | to 64 (ns-3), to 1,024 (SimGrid) | more |
| cards, Gbit/s | 0.1 to 1 | 10, 40 and 100 | other rates |
| processors, memory | 2 cores for all hosts | none: they cost nothing | cores beside faster links |
| switches | one, of the kernel | one, ports with buffers (ns-3) | racks, trees |

Beside the lab there is {planned}.
SimGrid agrees with both. So does ns-3 once TCP's windows have grown, except where ports drop
packets ([errors](../bench/notebook.md)).
"""

_GBPS = (1, 10, 25, 100)
_RANKS = (4, 16, 64, 256, 1024)
_SMALL = "--workers 4 --worker-gbps 10 --reducer-gbps 10 --parameters 350M --backward 400ms"
_LARGE = (
    "--workers 1024 --worker-gbps 25 --reducer-gbps 100 --parameters 7B --backward 1500ms "
    "--reducers 0,64,256"
)
_BITS = (
    "--workers 16 --worker-gbps 10 --reducer-gbps 10 --parameters 350M --dtype int8 "
    "--backward 400ms --forward 200ms --reducers 0,16"
)
_QUEUES = "--workers 8 --worker-gbps 100 --reducer-gbps 100 --reducers 2,8 --simulate"
_RACK = 16  # hosts


def sizing() -> str:
    """Return the page of sizes: what `reducer plan` answers for jobs of several sizes."""
    lines = {"small": _SMALL, "large": _LARGE, "bits": _BITS, "queues": _QUEUES}
    shown = {}
    for name, options in lines.items():
        done = CliRunner().invoke(cli.app, shlex.split(f"plan {options}"), env={"COLUMNS": "150"})
        shown[f"line_{name}"] = f"reducer plan {options}"
        shown[f"printed_{name}"] = "\n".join(text.rstrip() for text in done.stdout.splitlines())
    used = measured.Figure("wire-4").row(way="pool-4")
    a_gb_s = used["reducers_cpu"] / used["workers"]
    cores = [a_gb_s * gbps * payload_share() / 8 for gbps in _GBPS]
    bits, stops = _bits()
    racks, needed, lost = _racks(16 * _RACK)
    return _SIZING.format(
        **shown,
        table=_markdown_table(_all_reduces()),
        bits=_markdown_table(bits),
        stops=stops,
        memory=_markdown_table(_memory()),
        window_mib=MOST_BYTES >> 20,
        seconds=measured.number(used["reducers_cpu"]),
        seconds_gb=measured.number(a_gb_s),
        cores=_markdown_table(
            [["card, Gbit/s", *map(str, _GBPS)], ["cores", *map(measured.number, cores)]]
        ),
        rack=_RACK,
        tree_workers=16 * _RACK,
        tree=_markdown_table(racks),
        needed=needed,
        lost=lost,
        planned=measured.planned(measured.Figure("plan")),
    )


def _markdown_table(rows: list[list[str]]) -> str:
    head, *others = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others])


def _all_reduces() -> list[list[str]]:
    rows = [["workers", "Gbit/s", "a ring", "embedded", "half as many reducers"]]
    rows[0] += ["as many", "a quarter, 4 x the rate"]
    for workers in _RANKS:
        for gbps in _GBPS:
            found = plan(PlannedJob(workers, gbps, gbps, 10**9), (0, workers // 2, workers))
            fast = plan(PlannedJob(workers, gbps, 4 * gbps, 10**9), (workers // 4,))
            rows.append([str(workers), str(gbps), f"{1e3 * found.ring_s:,.0f}"])
            rows[-1] += [
                f"{1e3 * row.all_reduce_s:,.0f} ({row.speedup:.2f})"
                for row in (*found.rows, *fast.rows)
            ]
    return rows


def _bits() -> tuple[list[list[str]], str]:
    """Return steps by what travels, and from which rate on a pool gains less than a tenth.

    In DiLoCo one step of 50 exchanges all parameters, while nobody computes.
    """
    every, compute_s = 50, {"backward_s": 0.4, "forward_s": 0.2}
    ways = ("fp32", "bf16", "int8", f"DiLoCo, int8, every {every} steps")
    rows, stopped = [["Gbit/s", *ways]], dict.fromkeys(ways, "")
    for gbps in (0.1, *_GBPS):
        steps_s: list[list[float]] = []
        for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.BLOCK8):
            job = PlannedJob(16, gbps, gbps, dtype.nbytes(350 * 10**6), **compute_s)
            found = plan(job, (0, 16)).rows
            steps_s.append([row.step_s for row in found])
        outer_s = [row.all_reduce_s / every for row in found]
        steps_s.append([sum(compute_s.values()) + each_s for each_s in outer_s])
        rows.append([f"{gbps:g}"])
        for way, (embedded_s, pool_s) in zip(ways, steps_s, strict=True):
            rows[-1].append(f"{1e3 * embedded_s:,.0f} to {1e3 * pool_s:,.0f}")
            if embedded_s < 1.1 * pool_s:
                stopped[way] = stopped[way] or f"{gbps:g}"
    said = [f"{rate} with {way.partition(',')[0]}" for way, rate in stopped.items()]
    return rows, ", ".join(said)


def _memory() -> list[list[str]]:
    rows = [["workers", *map(str, _RANKS)]]
    for what, part in (("a quarter as many reducers", 4), ("as many", 1)):
        windows = [(n + 1) * window_limit(0, 0, max(1, n // part)) for n in _RANKS]
        rows.append([what, *(f"{nbytes / (1 << 20):,.0f}" for nbytes in windows)])
    return rows


def _racks(workers: int) -> tuple[list[list[str]], str, str]:
    """Return times of 1 GB by the link that is busy longest, of a card or of a rack, each way.

    A rack's uplink carries what its cards do, over the oversubscription; a ring's racks have no
    reducers. Of a flat pool spread over the racks, contributions and results cross it, but for
    those within a rack. In a tree every reducer adds a part for its rack, and again a part of that
    for all racks: one sum of each rack crosses for every other rack's part, and its result.

    Returns:
        Rows; the oversubscription from which on a flat pool gains less than a tenth; what a tree
        costs without any.
    """
    nbytes, rate = 10**9, 25e9 / 8 * payload_share()
    others = 1 - _RACK / workers  # of the racks
    ring = ring_factor(workers)
    rows, needed = [["oversubscription", "a ring", "flat pool", "tree"]], ""
    by_card, across = (ring, 1.0, 1 + 2 / _RACK), (ring, 2 * _RACK * others, 2 * others)
    for over in (1, 1.5, 2, 4, _RACK):
        uplinks = [cards / over for cards in (_RACK, 2 * _RACK, 2 * _RACK)]
        times = [
            nbytes / rate * max(card, crosses / uplink)
            for card, crosses, uplink in zip(by_card, across, uplinks, strict=True)
        ]
        rows.append([f"{over:g}:1", *(f"{1e3 * seconds:,.0f}" for seconds in times)])
        if times[0] < 1.1 * times[1]:
            needed = needed or f"{over:g}:1"
    return rows, needed, f"{by_card[2] / by_card[1] - 1:.1%}"


def with_figures(name: str) -> str:
    """Return a page with the blocks of measured.py that it has, anew."""
    written = (DOCS / name).read_text()
    for block, lines in measured.BLOCKS.items():
        written = _filled(written, block, lines())
    return written


def index() -> str:
    """Return the site's first page, which begins as the README does."""
    readme = with_figures("../README.md")
    screen = readme.partition("\n## Quick start\n")[0].partition("\n")[2].strip()
    screen = re.sub(r"<!-- .* -->\n?", "", screen).strip()  # it is one block here
    screen = re.sub(r"\]\((?!docs/|https?:)", "](../", screen).replace("](docs/", "](")
    return _filled((DOCS / "index.md").read_text(), "README", screen.splitlines())


PAGES: dict[str, Callable[[], str]] = {
    "../README.md": lambda: with_figures("../README.md"),
    "architecture.md": architecture,
    "compatibility.md": compatibility,
    "gain.svg": gain,
    "index.md": index,
    "losses.svg": losses,
    "performance.md": measured.performance,
    "settings.md": settings,
    "sizing.md": sizing,
    "slow-links.md": lambda: with_figures("slow-links.md"),
}


def _tables(
    config: type[BaseSettings], kind: str, given: dict[str, str], groups: dict[str, str]
) -> str:
    parts = []
    for title, names in groups.items():
        rows = [f"| variable | {kind} | default | meaning |", "|---|---|---|---|"]
        for name in names.split():
            field = config.model_fields[name]
            variable = f"`REDUCTION_{name.upper()}`"
            meaning = _markdown(field.description or "")
            rows.append(f"| {variable} | {given.get(name, '')} | {_default(field)} | {meaning} |")
        parts.append(f"### {title}\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _default(field: FieldInfo) -> str:
    """Return a default as one would write it, or "not set"."""
    value = field.default
    if value == 0 and AUTO in field.metadata:
        return "`auto`"
    if value is None or value in ((), ""):
        return "not set"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable().replace('.0', '')}`"
    if isinstance(value, float):
        return f"`{value:g}s`" if value >= 1 or not value else f"`{value * 1000:g}ms`"
    return f"`{int(value) if isinstance(value, bool) else value}`"


def _markdown(docstring: str) -> str:
    """Return a docstring as one line of Markdown, with links to the pages that it names."""
    text = " ".join(docstring.split()).replace("``", "`").replace("|", r"\|")
    text = re.sub(r"\b([A-Z]+_[A-Z_]+)(=\w+)?", r"`\1\2`", text)
    text = re.sub(r"\(docs/(\w+)(\.md[#\w-]*)\)", r"([\1](\1\2))", text)
    return re.sub(r"\(CONTRIBUTING(\.md[#\w-]*)\)", r"([contributing](../CONTRIBUTING\1))", text)


UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "s of ms": 1000}
NUMBER = r"\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?"
TEXT = r"\w(?:[\w.:@-]*\w)?"
Fact = int | float | str


def facts(values: Mapping[str, Fact] | None = None) -> dict[Path, str]:
    """Return the text of each file that repeats a fact of facts.toml, with all facts as they are.

    Args:
        values: facts that are to be others, by name.

    Raises:
        LookupError: no file has some words of facts.toml, or a file has none of its words.
    """
    texts: dict[Path, str] = {}
    for name, fact in tomllib.loads((DOCS / "facts.toml").read_text()).items():
        value = (values or {}).get(name, _value(fact))
        for patterns, words in fact.items():
            if patterns in {"is", "unit", "plus"}:
                continue
            sentences = [words] if isinstance(words, str) else words
            said = set()
            for pattern in patterns.split():
                for path in ROOT.glob(pattern):
                    texts.setdefault(path, path.read_text())
                    for sentence in sentences:
                        if _pattern(sentence, value).search(texts[path]):
                            said |= {pattern, sentence}
                            texts[path] = _repeated(sentence, value, texts[path])
            if missing := {*patterns.split(), *sentences} - said:
                raise LookupError(
                    f"{patterns}: nothing is found of {sorted(missing)}: mend docs/facts.toml"
                )
    return texts


def _value(fact: dict[str, Any]) -> Fact:
    """Return what a fact is where it is said first."""
    source = fact["is"]
    value: Any
    if isinstance(source, str):
        module, _, path = source.partition(":")
        value = importlib.import_module(module)
        for part in path.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
    else:
        file, said = source
        value = _pattern(said, "").findall((ROOT / file).read_text())[-1][1]
    if "unit" in fact:
        value = value / UNITS[fact["unit"]]
    if "plus" in fact:
        value = int(value) + fact["plus"]
    return value if isinstance(value, str) or value % 1 else int(value)


def _pattern(said: str, value: Fact) -> re.Pattern[str]:
    """Return what finds words of facts.toml: what is before the fact, the fact, what is after."""
    begin = "^" * said.startswith("^")
    escaped = re.escape(said.removeprefix("^")).replace(r"\ ", r"\s+").replace(r"\*", r"\S*?")
    before, _, after = escaped.partition(r"\{\}")
    token = TEXT if isinstance(value, str) else NUMBER
    return re.compile(rf"({begin}{before})({token})(?!\d)({after})", re.MULTILINE)


def _repeated(said: str, value: Fact, text: str) -> str:
    def fill(found: re.Match[str]) -> str:
        filled = f"{value:,}" if "," in found[2] else f"{value}"
        return f"{found[1]}{filled}{found[3]}"

    return _pattern(said, value).sub(fill, text)


if __name__ == "__main__":
    for path, text in facts().items():
        if path.read_text() != text:  # what `make` would compile or install again is left alone
            path.write_text(text)
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
