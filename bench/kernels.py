"""The kernels against the memory: one pass, the two-operand chain, NumPy, and reading alone.

    python -m bench.kernels

Every contender works on the same 8 inputs (and one output) in turn, round after round, so that a
noisy machine is unkind to all of them alike; the figures are medians. All of them count bytes of
input: ``8 * size / time``. What they are:

- **one pass**: `Kernels.reduce` of the best variant, all 8 inputs at once.
- **chain**: the same kernels on two operands, ``out = x0 + x1; out += x2; ...`` as a reducer does
  that adds each contribution when it arrives.
- **fresh**: that chain with every partial sum in a buffer of its own, ``t1 = x0 + x1; t2 = t1 + x2;
  ...``, as code does that may not overwrite.
- **numpy**: `np.add` in a chain (for bfloat16, which it lacks, the NumPy twin of our kernels).
- **read**: the same variant's loads with nothing but an exclusive or, over the same inputs, either
  in the kernels' order (8 streams at once) or one buffer after the other, whichever is faster. No
  fold can be faster than that; it also has to write.
- **memcpy**: each input copied to the output, bytes of input too.

With ``--check`` the median ratios of fp32 inputs that do not fit in a cache must reach their bars.
"""

from __future__ import annotations

import statistics
import sys
import time
from datetime import datetime  # noqa: TC003 (pydantic reads it)
from pathlib import Path  # noqa: TC003 (typer reads it)
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer

from bench import options, results
from bench.results import SCHEMA, Machine, Record
from reducer import kernels
from reducer.wire.constants import DType, ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable

    from reducer.kernels.plain import Array

INPUTS = 8
ROUNDS = 9
SIZES = "64KiB,256KiB,1MiB,4MiB,16MiB,32MiB"  # per input
OUT_OF_CACHE = 4 << 20  # bytes; 8 such inputs and their output are larger than a 32 MiB cache
BAR_READ = 0.85  # one pass over read, fp32
# One pass over chain, fp32. The chain moves 8 inputs, reads the output 6 times and writes it 7
# times, where one pass moves 8 inputs and writes once; a write costs 1 to 2 reads (a line is
# fetched before its first write). So memory allows at most 22 / 10 = 2.2.
BAR_CHAIN = 1.7

DTYPES: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(np.uint16),
}
NAMES = ",".join(dtype.name.lower() for dtype in DTYPES)


class Row(Record):
    """Input per second, in decimal GB, of every contender."""

    dtype: str
    nbytes: int
    """Of one input."""
    one_pass: float
    chain: float
    fresh: float
    numpy: float
    read: float
    memcpy: float


class KernelsResults(Record):
    """One run of `bench.kernels`."""

    schema_version: int = SCHEMA
    kind: Literal["kernels"] = "kernels"
    time: datetime
    machine: Machine
    command: str
    variant: str
    inputs: int
    rounds: int
    rows: list[Row]
    over_read: float | None
    """One pass over read, the median of fp32 rows out of the cache; None without such rows."""
    over_chain: float | None
    """One pass over chain, likewise."""


def numpy_chain(inputs: list[Array], out: Array, dtype: DType) -> None:
    if dtype is DType.BFLOAT16:
        kernels.select("numpy").reduce(inputs, out, dtype, ReduceOp.SUM)
        return
    np.add(inputs[0], inputs[1], out=out)
    for source in inputs[2:]:
        np.add(out, source, out=out)


def contenders(inputs: list[Array], out: Array, dtype: DType) -> list[Callable[[], None]]:
    """Return what is timed: one pass, both chains, NumPy, both ways to read, memcpy."""
    best = kernels.select()
    partial_sums = [np.ones_like(out) for _ in inputs[1:]]

    def one_pass() -> None:
        best.reduce(inputs, out, dtype, ReduceOp.SUM)

    def chain() -> None:
        best.reduce(inputs[:2], out, dtype, ReduceOp.SUM)
        for source in inputs[2:]:
            best.reduce([out, source], out, dtype, ReduceOp.SUM)

    def fresh() -> None:
        total = inputs[0]
        for source, result in zip(inputs[1:], partial_sums, strict=True):
            best.reduce([total, source], result, dtype, ReduceOp.SUM)
            total = result

    def by_numpy() -> None:
        numpy_chain(inputs, out, dtype)

    def read_streams() -> None:
        best.read_bytes(inputs)  # type: ignore[attr-defined]

    def read_in_turn() -> None:
        for source in inputs:
            best.read_bytes([source])  # type: ignore[attr-defined]

    def memcpy() -> None:
        for source in inputs:
            np.copyto(out, source)

    return [one_pass, chain, fresh, by_numpy, read_streams, read_in_turn, memcpy]


def measure(dtype: DType, size: int, rounds: int = ROUNDS) -> Row:
    """Run the contenders in turn over the same memory, which has been written to before."""
    elements = DTYPES[dtype]
    rng = np.random.default_rng(0)
    values: Array = rng.standard_normal(size // elements.itemsize).astype(np.float32)
    if dtype is DType.BFLOAT16:
        values = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    inputs = [values.astype(elements) for _ in range(INPUTS)]
    timed = contenders(inputs, np.ones_like(inputs[0]), dtype)
    calls = max(1, (8 << 20) // (INPUTS * size))  # so that a timing lasts long enough to be one
    times: list[list[float]] = [[] for _ in timed]
    for _ in range(rounds):
        for contender, record in zip(timed, times, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                contender()
            record.append((time.perf_counter() - start) / calls)
    speeds = [INPUTS * size / statistics.median(record) / 1e9 for record in times]
    one_pass, chain, fresh, by_numpy, read_streams, read_in_turn, memcpy = speeds
    read = max(read_streams, read_in_turn)
    return Row(
        dtype=dtype.name.lower(),
        nbytes=size,
        one_pass=one_pass,
        chain=chain,
        fresh=fresh,
        numpy=by_numpy,
        read=read,
        memcpy=memcpy,
    )


def table(found: KernelsResults) -> str:
    """Return the figures as text, and the ratios of one pass to each contender."""
    lines = [
        f"# {INPUTS} inputs, variant {found.variant}, GB/s of input, median of {found.rounds}",
        (
            f"{'dtype':>9} {'KiB each':>9} {'one pass':>9} {'chain':>7} {'fresh':>7} {'numpy':>7}"
            f" {'read':>7} {'memcpy':>7} {'/ chain':>9} {'/ fresh':>8} {'/ numpy':>8} {'/ read':>7}"
        ),
    ]
    lines += [
        f"{row.dtype:>9} {row.nbytes >> 10:>9} {row.one_pass:>9.1f} {row.chain:>7.1f}"
        f" {row.fresh:>7.1f} {row.numpy:>7.1f} {row.read:>7.1f} {row.memcpy:>7.1f}"
        f" {row.one_pass / row.chain:>8.2f}x {row.one_pass / row.fresh:>7.2f}x"
        f" {row.one_pass / row.numpy:>7.2f}x {row.one_pass / row.read:>7.2f}"
        for row in found.rows
    ]
    if found.over_read and found.over_chain:
        lines.append(
            f"# fp32 out of the cache: {found.over_read:.2f} of read (bar {BAR_READ}), "
            f"{found.over_chain:.2f} x chain (bar {BAR_CHAIN})"
        )
    return "\n".join(lines)


def collect(rows: list[Row], rounds: int) -> KernelsResults:
    """Return the rows with what one has to know of them."""
    large = [row for row in rows if row.dtype == "float32" and row.nbytes >= OUT_OF_CACHE]
    over_read = [row.one_pass / row.read for row in large]
    over_chain = [row.one_pass / row.chain for row in large]
    return KernelsResults(
        time=results.now(),
        machine=results.machine(),
        command=results.command("bench.kernels"),
        variant=kernels.select().name,
        inputs=INPUTS,
        rounds=rounds,
        rows=rows,
        over_read=statistics.median(over_read) if large else None,
        over_chain=statistics.median(over_chain) if large else None,
    )


def draw(found: KernelsResults, path: Path) -> None:
    """Draw GB/s over the size of an input, one panel per dtype."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (slow to load)

    dtypes = list(dict.fromkeys(row.dtype for row in found.rows))
    figure = Figure(figsize=(4 * len(dtypes), 4), layout="constrained")
    panels = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for panel, dtype in zip(panels, dtypes, strict=True):
        of_dtype = [row for row in found.rows if row.dtype == dtype]
        for name in ("read", "one_pass", "memcpy", "chain", "fresh", "numpy"):
            panel.plot(
                [row.nbytes / 2**20 for row in of_dtype],
                [getattr(row, name) for row in of_dtype],
                marker=".",
                linewidth=3 if name == "one_pass" else 1,
                label=name.replace("_", " "),
            )
        panel.set_xscale("log", base=2)
        panel.set_title(dtype)
        panel.set_xlabel("MiB per input")
    panels[0].set_ylabel("GB/s of input")
    panels[0].legend()
    figure.suptitle(f"Sum of {INPUTS} inputs, variant {found.variant}")
    figure.savefig(path, dpi=120)


def main(  # noqa: PLR0917 (options have names on the command line)
    sizes: Annotated[str, typer.Option(help="Bytes per input.")] = SIZES,
    dtypes: Annotated[str, typer.Option(help="Of float32, float16 and bfloat16.")] = NAMES,
    rounds: Annotated[int, typer.Option(min=1, help="How often each has its turn.")] = ROUNDS,
    json: Annotated[Path | None, typer.Option(help="File for the results.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a picture (PNG).")] = None,
    check: Annotated[bool, typer.Option("--check", help="Fail below the bars.")] = False,
) -> None:
    """Compare sums of 8 inputs in one run, alternating, and print medians."""
    if kernels.select().name == "numpy":
        sys.exit("bench.kernels: the compiled kernels are not built, and nothing else is measured")
    unknown = set(dtypes.split(",")) - set(NAMES.split(","))
    if unknown:
        raise typer.BadParameter(f"{unknown.pop()!r} is none of {NAMES}")
    chosen = [dtype for dtype in DTYPES if dtype.name.lower() in dtypes.split(",")]
    lengths = options.sizes(sizes)
    rows = [measure(dtype, nbytes, rounds) for dtype in chosen for nbytes in lengths]
    found = collect(rows, rounds)
    print(table(found))
    if json:
        json.write_text(found.model_dump_json(indent=1) + "\n")
    if plot:
        draw(found, plot)
    sys.exit(int(check and not _reached(found)))


def _reached(found: KernelsResults) -> bool:
    if found.over_read is None or found.over_chain is None:
        return False
    return found.over_read >= BAR_READ and found.over_chain >= BAR_CHAIN


if __name__ == "__main__":
    typer.run(main)
