"""`reducer plan`: how many reducers a job should have, what they gain, and a job that has them."""

from __future__ import annotations

import json as standard_json
import re
import shlex
from dataclasses import asdict
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from reducer import units
from reducer.commands import terminal
from reducer.commands.terminal import FittedTable
from reducer.errors import ConfigError
from reducer.planning import plan as planning
from reducer.planning.network_model import MTU
from reducer.planning.step_model import AS_GOOD
from reducer.planning.vertex import Machines, custom_job_spec
from reducer.wire.constants import DType

MODEL_BYTES = "1GB"
PIPE_WIDTH = 160  # characters
_COUNT = re.compile(r"(?P<value>\d{1,18}(\.\d{1,18})?)\s*(?P<unit>[kKMBT]?)")
_COUNTS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_DTYPES = {
    "fp32": DType.FLOAT32,
    "fp64": DType.FLOAT64,
    "fp16": DType.FLOAT16,
    "bf16": DType.BFLOAT16,
    "int8": DType.BLOCK8,
    "fp8_e4m3": DType.BLOCK8_E4M3,
}


def plan(  # noqa: PLR0917 (options have names on the command line)
    workers: Annotated[int, typer.Option(help="Machines with workers, a network card each.")],
    worker_gbps: Annotated[float, typer.Option(help="Rate of a worker's card, Gbit/s each way.")],
    reducer_gbps: Annotated[float, typer.Option(help="Rate of a reducer's card.")],
    model_bytes: Annotated[
        str | None, typer.Option(help=f"Size of all gradients, such as 400MB. [{MODEL_BYTES}]")
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Or their number, such as 350M or 1.5B, and --dtype.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="fp32, fp64, fp16, bf16, int8 or fp8_e4m3.", autocompletion=lambda: [*_DTYPES]
        ),
    ] = "fp32",
    backward: Annotated[str, typer.Option(help="Time of the backward pass, such as 200ms.")] = "0",
    forward: Annotated[str, typer.Option(help="Time of the rest of a step.")] = "0",
    round_trip: Annotated[str, typer.Option(help="From a worker to a reducer and back.")] = "200us",
    mtu: Annotated[int, typer.Option(help="Largest packet of the network, bytes.")] = MTU,
    worker_cost: Annotated[
        float | None, typer.Option(help="Of a worker's machine per hour, in any currency.")
    ] = None,
    reducer_cost: Annotated[float | None, typer.Option(help="Of a reducer's.")] = None,
    reducers: Annotated[
        str, typer.Option(help="Sizes of the pool to compare, such as 4,8; the last for --vertex.")
    ] = "",
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate an all-reduce of one bucket, by the rules.")
    ] = False,
    topology: Annotated[
        str, typer.Option(help="pool, mixed or embedded, for --simulate. [the fastest]")
    ] = "",
    port_buffer: Annotated[
        str, typer.Option(help="Buffer of a switch's port, for --simulate; 0: endless.")
    ] = "0",
    costs: Annotated[
        str, typer.Option(help="Of messages, on a processor, as JSON, for --simulate.")
    ] = "{}",
    json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
    vertex: Annotated[
        bool, typer.Option("--vertex", help="Print a Vertex AI CustomJobSpec in their place.")
    ] = False,
    worker_machine: Annotated[str, typer.Option(help="Machine type, for --vertex.")] = "",
    reducer_machine: Annotated[str, typer.Option(help="Likewise.")] = "",
    image: Annotated[str, typer.Option(help="Container image of all, for --vertex.")] = "",
    reducer_image: Annotated[str, typer.Option(help="Of the reducers, if it is another.")] = "",
    accelerator: Annotated[
        str, typer.Option(help="Of a worker's machine, TYPE:COUNT, for --vertex.")
    ] = "",
    train: Annotated[str, typer.Option(help="Script and arguments, for --vertex.")] = "train.py",
    keys: Annotated[str | None, typer.Option(help="Directory of keys, for --vertex.")] = None,
) -> None:
    """Plan a pool of reducers. Nothing is measured and nothing connected to."""
    job = planning.PlannedJob(
        workers=workers,
        worker_gbps=worker_gbps,
        reducer_gbps=reducer_gbps,
        nbytes=gradient_bytes(model_bytes, parameters, dtype),
        backward_s=seconds("backward", backward),
        forward_s=seconds("forward", forward),
        round_trip_s=seconds("round-trip", round_trip),
        mtu=mtu,
        worker_cost=worker_cost,
        reducer_cost=reducer_cost,
    )
    pools = sizes(reducers)
    found = planning.plan(job, pools)
    if simulate and vertex:
        raise ConfigError("--simulate prints times, --vertex a job's specification: give one")
    if simulate:
        # It needs the worker's side, as nothing else of this program does.
        from reducer.commands import simulated  # noqa: PLC0415

        simulated.show(job, found, (topology, port_buffer, costs), json=json)
    elif vertex:
        kind, _, number = accelerator.partition(":")
        machines = Machines(
            workers=workers,
            reducers=pools[-1] if pools else found.reducers_needed,
            worker_machine=_needed("worker-machine", worker_machine),
            reducer_machine=_needed("reducer-machine", reducer_machine),
            worker_image=_needed("image", image),
            reducer_image=reducer_image or image,
            command=("worker-client", "launch", "--", *shlex.split(train)),
            accelerator=kind or None,
            accelerator_count=int(number) if number.isdecimal() else 0,
            keys=keys,
        )
        typer.echo(standard_json.dumps(custom_job_spec(machines), indent=2))
    elif json:
        typer.echo(standard_json.dumps({"job": asdict(job), **asdict(found)}, indent=2))
    else:
        console = terminal.console(PIPE_WIDTH)
        console.print(summary(job, found), highlight=False)
        console.print(table(job, found))
        console.print(verdict(job, found), highlight=False)


def summary(job: planning.PlannedJob, found: planning.PoolPlan) -> str:
    """Say how many reducers the workers' cards are worth, and what a ring takes."""
    step = f", a step {_ms(found.ring_step_s)}" if job.backward_s or job.forward_s else ""
    return (
        f"a ring all-reduces {job.nbytes / 1e6:,.6g} MB in {_ms(found.ring_s)}{step}\n"
        f"more than {found.reducers_needed} reducers would gain nothing: {job.workers} x "
        f"{job.worker_gbps:g} Gbit/s / {job.reducer_gbps:g} Gbit/s"
    )


def verdict(job: planning.PlannedJob, found: planning.PoolPlan) -> str:
    """Say in one sentence what to do: the smallest pool that is nearly as fast as the fastest."""
    steps = bool(job.backward_s or job.forward_s)
    gains = {row.reducers: row.step_speedup if steps else row.speedup for row in found.rows}
    best = min(k for k, gain in gains.items() if gain > AS_GOOD * max(gains.values()))
    what = "a step" if steps else "an all-reduce"
    embedded = f"{gains.get(0, 1.0):.2f} times as fast"
    if best == 0 or gains[best] <= 1 / AS_GOOD:
        return f"Take none: with the ranks' own (embedded) {what} is {embedded} as with a ring."
    pool = "1 reducer" if best == 1 else f"{best} reducers"
    return (
        f"Take {pool}: {what} is {gains[best]:.2f} times as fast as with a ring. "
        f"With the ranks' own alone (embedded) it is {embedded}."
    )


def table(job: planning.PlannedJob, found: planning.PoolPlan) -> FittedTable:
    """Return one row for each size of the pool."""
    names = ["reducers", "topology", "owns: each reducer", "each worker", "all-reduce", "ring / it"]
    steps = bool(job.backward_s or job.forward_s)
    costs = job.reducer_cost is not None
    names += ["step", "ring's / it"] if steps else []
    names += ["per hour", "cost of a step"] if costs and job.worker_cost is not None else []
    names += ["hours gained per unit"] if costs else []
    rows = []
    for row in found.rows:
        cells = [str(row.reducers), row.topology, _percent(row.pool_share)]
        cells += [_percent(row.rank_share), _ms(row.all_reduce_s), f"{row.speedup:.2f}x"]
        cells += [_ms(row.step_s), f"{row.step_speedup:.2f}x"] if steps else []
        if costs and job.worker_cost is not None:
            cost, saved = row.cost_per_hour, row.cost_saved
            cells += ["-" if cost is None else f"{cost:,.2f}"]
            cells += ["-" if saved is None else f"{-saved:+.1%}"]
        if costs:
            gained = row.hours_gained_per_cost
            cells.append("-" if gained is None else f"{gained:.4g}")
        rows.append(cells)
    return FittedTable("", names, rows, texts=0)


def gradient_bytes(model_bytes: str | None, parameters: str | None, dtype: str) -> int:
    """Return the size of all gradients, from one of the ways to say it.

    Raises:
        ConfigError: it is said in two ways, or wrongly.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is none of {', '.join(_DTYPES)}")
    if parameters is None:
        if dtype != "fp32":
            raise ConfigError("--dtype goes with --parameters: --model-bytes is what travels")
        text = model_bytes or MODEL_BYTES
        try:
            return int(TypeAdapter(ByteSize).validate_python(text))
        except ValidationError:
            raise ConfigError(f"model-bytes: write a size such as 400MB, got {text!r}") from None
    if model_bytes is not None:
        raise ConfigError("give --model-bytes or --parameters, not both")
    match = _COUNT.fullmatch(parameters.strip())
    if match is None:
        raise ConfigError(f"parameters: write a number such as 350M or 1.5B, got {parameters!r}")
    return _DTYPES[dtype].nbytes(round(float(match["value"]) * _COUNTS[match["unit"]]))


def seconds(name: str, text: str) -> float:
    """Read a duration such as ``200ms``.

    Raises:
        ConfigError: it is none.
    """
    try:
        return units.seconds(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def sizes(text: str) -> list[int]:
    """Read ``4,8``; nothing gives nothing.

    Raises:
        ConfigError: a part is no number.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and len(word) < 10 for word in words):
        raise ConfigError(f"reducers: write numbers such as 4,8, got {text!r}")
    return [int(word) for word in words]


def _needed(name: str, value: str) -> str:
    if not value:
        raise ConfigError(f"--vertex needs --{name}")
    return value


def _ms(value_s: float) -> str:
    return f"{value_s:.3g} s" if value_s >= 1 else f"{value_s * 1e3:.3g} ms"


def _percent(share: float) -> str:
    return f"{share:.2%}" if share else "-"
