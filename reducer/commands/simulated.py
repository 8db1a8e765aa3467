"""`reducer plan --simulate`: what an all-reduce takes by the rules, beside the formula's time."""

from __future__ import annotations

import json as standard_json
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from reducer.commands import terminal
from reducer.commands.terminal import FittedTable
from reducer.errors import ConfigError
from reducer.planning.network_model import Topology
from reducer.planning.simulated_job import MessageCosts
from reducer.planning.simulation import SimulationScenario, simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from reducer.planning.plan import PlannedJob, PoolPlan
    from reducer.planning.simulation import SimulationOutcome

T = TypeVar("T")

PIPE_WIDTH = 160  # characters
_TOPOLOGY: Callable[[str], Topology] = TypeAdapter(Topology).validate_python
_SIZE: Callable[[str], ByteSize] = TypeAdapter(ByteSize).validate_python
_COSTS: Callable[[str], MessageCosts] = TypeAdapter(MessageCosts).validate_json
_NAMES = (
    *("reducers", "topology", "simulated", "formula", "formula / it", "goodput"),
    *("busiest link", "queue to a reducer", "queue to a worker", "lost", "chunks"),
)


def show(
    job: PlannedJob, found: PoolPlan, options: tuple[str, str, str], *, json: bool = False
) -> None:
    """Simulate an all-reduce of one bucket for each size of the pool, and print what it takes.

    Args:
        job: what is planned.
        found: whose rows are simulated.
        options: the topology, empty for that of each row; bytes of a port's buffer; costs.
        json: print figures for programs.

    Raises:
        ConfigError: an option is wrong.
    """
    topology, port_buffer, costs = options
    scenarios = [
        SimulationScenario(
            workers=job.workers,
            reducers=row.reducers,
            topology=_read("topology", _TOPOLOGY, topology) if topology else row.topology,
            nbytes=min(job.nbytes, job.bucket_bytes),
            worker_gbps=job.worker_gbps,
            reducer_gbps=job.reducer_gbps,
            delay_s=job.round_trip_s / 2,
            port_buffer_bytes=_read("port-buffer", _SIZE, port_buffer),
            mtu=job.mtu,
            costs=_read("costs", _COSTS, costs),
        )
        for row in found.rows
    ]
    outcomes = [simulate(scenario) for scenario in scenarios]
    pairs = list(zip(scenarios, outcomes, strict=True))
    if json:
        rows = [{**asdict(one), "costs": one.costs._asdict(), **asdict(out)} for one, out in pairs]
        typer.echo(standard_json.dumps(rows, indent=2))
        return
    console = terminal.console(PIPE_WIDTH)
    one = scenarios[0]
    buffer = f"ports with {_bytes(one.port_buffer_bytes)}" if one.port_buffer_bytes else "any queue"
    console.print(
        f"{one.workers} workers of {one.worker_gbps:g} Gbit/s, reducers of {one.reducer_gbps:g}; "
        f"a bucket of {_bytes(one.nbytes)}; {buffer}",
        highlight=False,
    )
    costly = one.costs != MessageCosts()
    names = [*_NAMES, "worker, s/GB", "all reducers, s/GB"] if costly else _NAMES
    console.print(FittedTable("", names, [_cells(*pair, costly=costly) for pair in pairs], texts=0))


def _cells(scenario: SimulationScenario, outcome: SimulationOutcome, *, costly: bool) -> list[str]:
    cells = [
        str(scenario.reducers),
        scenario.topology,
        f"{1e3 * outcome.seconds:.3g} ms",
        f"{1e3 * outcome.formula_s:.3g} ms",
        f"{outcome.formula_s / outcome.seconds:.2f}",
        f"{outcome.goodput_gbps:.3g} Gbit/s",
        f"{outcome.busiest_gbps:.3g} Gbit/s",
        _bytes(outcome.reducer_port_bytes) if scenario.topology != "embedded" else "-",
        _bytes(outcome.worker_port_bytes),
        f"{outcome.lost_share:.1%}" if outcome.lost_share else "-",
        _bytes(outcome.chunk_bytes),
    ]
    if costly:
        cells += [f"{outcome.worker_cpu_s_per_gb:.3g}", f"{outcome.reducers_cpu_s_per_gb:.3g}"]
    return cells


def _read(name: str, read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except ValidationError as error:
        raise ConfigError(f"{name}: {error.errors()[0]['msg']}, got {text!r}") from None


def _bytes(nbytes: int) -> str:
    return ByteSize(nbytes).human_readable(separator=" ")
