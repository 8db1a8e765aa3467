"""The command: measures or reads a training's step, and predicts it for each way to average.

Under a launcher each rank runs the command with the script, and rank 0 prints.
"""

from __future__ import annotations

import json
import runpy
import sys
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from reducer.commands import plan, terminal
from reducer.errors import ConfigError
from reducer.planning.network_model import MTU, Network, payload_share
from reducer.planning.step_model import Step, TrainingJob, predict, ways
from worker_client import config
from worker_client.client import bootstrap
from worker_client.commands.demo.ranks import free_port
from worker_client.commands.doctor.examine import examine
from worker_client.commands.doctor.greeting import split
from worker_client.commands.doctor.host import examine_host
from worker_client.commands.gain import traces
from worker_client.commands.gain.answer import Answer
from worker_client.commands.launch import find_program

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from worker_client.commands.gain.probe import Measured
    from worker_client.launch import Resolved

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class AskedGain:
    """What the command line says; None is what it does not.

    Attributes:
        workers: machines that are to train.
        gbps: of each machine's card, each way.
        round_trip_s: between two of them.
        pools: sizes of the pool to compare.
        every: of DiLoCo's steps.
        steps: how many of each kind are measured.
        now: whether steps as the script makes them are measured as well.
        fewer: advice on how to measure fewer steps, for a script that makes too few; "" for none.
    """

    workers: int | None
    gbps: float | None
    round_trip_s: float
    pools: tuple[int, ...]
    every: int
    steps: int
    now: bool = True
    fewer: str = ", or give a smaller --steps"


class Costs(NamedTuple):
    """What a rank's processor takes, as of `TrainingJob`."""

    cast_s: dict[str, float]
    outer_s: float
    call_s: float = 0.0


def asked(
    workers: int | None,
    gbps: float | None,
    round_trip: str,
    reducers: str,
    *,
    every: int,
    steps: int,
) -> AskedGain:
    """Read what the command line says.

    Raises:
        ConfigError: one of it is wrong.
    """
    for name, value, least in (("workers", workers, 2), ("every", every, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{name} must be {least} at least, got {value}")
    if gbps is not None and not 1e-3 <= gbps <= 1e6:
        raise ConfigError(f"gbps must be from 0.001 to 1000000, got {gbps}")
    pools = tuple(plan.sizes(reducers))
    return AskedGain(workers, gbps, plan.seconds("round-trip", round_trip), pools, every, steps)


def say(script: Sequence[str], trace: Path | None, asked: AskedGain, *, as_json: bool) -> None:
    """Print the answer.

    Raises:
        ConfigError: there is none; the message says what to do.
    """
    if bool(script) == (trace is not None):
        raise ConfigError(
            "--gain needs a training: give a script (worker-client doctor --gain -- train.py) or "
            "what a run has recorded (--trace FILE), and not both"
        )
    answer = of_script(script, asked, as_json=as_json) if trace is None else of_trace(trace, asked)
    if answer is None:
        return
    if as_json:
        typer.echo(json.dumps(answer.facts(), indent=2))
        return
    console = terminal.console(plan.PIPE_WIDTH)
    for line in answer.lines():
        console.print(line, highlight=False)
    console.print(answer.table())
    console.print(answer.advice(), highlight=False)


def of_script(script: Sequence[str], asked: AskedGain, *, as_json: bool) -> Answer | None:
    """Run a script until its steps are measured; return the answer at rank 0, and None at others.

    Raises:
        ConfigError: it has not made enough steps, or the links are known to nobody.
    """
    resolved = config.launch()
    ranks = resolved.world_size or 1
    local = resolved.local_world_size or 1
    if ranks == local and (asked.workers is None or asked.gbps is None):
        raise ConfigError(
            f"{'one rank' if ranks == 1 else 'ranks of one host'} cannot measure a network: say by "
            "--workers how many machines are to train and by --gbps what a card of theirs carries, "
            "or start the same command on each of them, by torchrun --no-python or as your "
            "launcher starts a rank"
        )
    find_program(script[0])
    if len(script) < 2 if script[0] == "-m" else not script[0].endswith(".py"):
        raise ConfigError(f"{script[0]!r} is no script of Python: give train.py, or -m MODULE")
    reducers = [split(address)[0] for address in config.load().servers]
    told = bool(config.environment().get("GLOO_SOCKET_IFNAME"))
    for problem in examine_host(resolved, reducers, told=told):
        if problem.certain:  # else ranks on other hosts would wait for this one's Gloo
            raise ConfigError(f"{problem.message}: {problem.advice}")
    from worker_client.commands.gain.probe import Probe  # noqa: PLC0415 (loads torch)

    answers: list[Answer | None] = []

    def finish(measured: Measured) -> None:
        answers.append(_answer(measured, asked, resolved))

    probe = Probe(asked.steps, now=ranks > 1 and asked.now, finish=finish)
    if resolved.world_size is None:  # nobody has started it: it is a job of its own
        config.be_alone(free_port())
    with ExitStack() as stack:
        stack.enter_context(probe.watching())
        if as_json:  # what the script prints is no part of the object
            stack.enter_context(redirect_stdout(sys.stderr))
        _run(script)
    if not answers:
        if probe.stopped:
            advice = "wrap the model before the first step"
        else:
            advice = (
                f"have it train for longer{asked.fewer}. A script that starts ranks itself is to "
                "be started as one rank"
            )
        raise ConfigError(f"{' '.join(script)} {probe.seen}: {advice}")
    return answers[0]


def of_trace(path: Path, asked: AskedGain) -> Answer:
    """Return the answer for a training that has been recorded.

    Raises:
        ConfigError: it cannot be read, or the links are known to nobody.
    """
    recorded = traces.read(path)
    workers = asked.workers or recorded.ranks
    if asked.gbps is None or workers is None:
        raise ConfigError(
            "a recorded run does not say what links carry: give --gbps, and --workers if they are "
            "others than then"
        )
    from worker_client.commands.gain import links  # noqa: PLC0415 (loads torch)

    costs = Costs(links.cast_s(), links.outer_s())
    job = TrainingJob(recorded.step, workers, workers, _network(asked), asked.every, *costs)
    return _predicted(job, asked, recorded.now_s if workers == recorded.ranks else None)


def _run(script: Sequence[str]) -> None:
    """Run a script in this process until it ends by itself, or is to end."""
    from worker_client.commands.gain.probe import Enough  # noqa: PLC0415 (loads torch)

    program, *arguments = script
    try:
        if program == "-m":
            sys.argv = arguments
            sys.path.insert(0, "")
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [program, *arguments]
            sys.path.insert(0, str(Path(program).parent.resolve()))
            runpy.run_path(program, run_name="__main__")
    except Enough:
        pass
    except SystemExit as ended:
        if ended.code:
            raise


def _answer(measured: Measured, asked: AskedGain, resolved: Resolved) -> Answer | None:
    """Bring together what all ranks have measured, and measure the links between them."""
    import torch.distributed as dist  # noqa: PLC0415 (takes seconds)

    from worker_client.commands.gain import links  # noqa: PLC0415 (loads torch)

    group = dist.new_group(backend="gloo")  # whatever the script's is
    costs = Costs(links.cast_s(), links.outer_s(), links.call_s(group))
    ranks, local = dist.get_world_size(), resolved.local_world_size or 1
    speeds = _speeds(measured.step, group)
    nodes = asked.workers or ranks // local
    measured, costs = slowest(measured, costs, group)
    network = _network(asked) if asked.gbps else _measured_network(group)
    if dist.get_rank() > 0:
        return None
    step = measured.step
    if step.samples is not None:
        step = replace(step, samples=step.samples * nodes * local // ranks)
    job = TrainingJob(step, nodes * local, nodes, network, asked.every, *costs)
    now_s = measured.now_s if nodes * local == ranks else None
    return replace(_predicted(job, asked, now_s), speeds=speeds, attached=measured.attached)


def _speeds(step: Step, group: dist.ProcessGroup) -> tuple[float, ...]:
    """Return how many samples, or steps, each rank computes in a second; all ranks call it."""
    import torch  # noqa: PLC0415 (takes seconds)
    import torch.distributed as dist  # noqa: PLC0415

    said = torch.zeros(group.size(), dtype=torch.float64)
    said[group.rank()] = (step.samples or 1) / step.compute_s
    dist.all_reduce(said, group=group)
    return tuple(said.tolist())


def slowest(measured: Measured, costs: Costs, group: dist.ProcessGroup) -> tuple[Measured, Costs]:
    """Return what has everything take as long as at the slowest rank, and all ranks' samples.

    All ranks call it. All have the same buckets, which DDP sees to.
    """
    import torch  # noqa: PLC0415 (takes seconds)
    import torch.distributed as dist  # noqa: PLC0415

    step, names = measured.step, [*costs.cast_s]
    said = torch.tensor(
        [
            *(step.compute_s, step.backward_s or 0.0, measured.now_s or 0.0),
            *(costs.outer_s, costs.call_s, *costs.cast_s.values()),
            *(bucket.ready_s for bucket in step.buckets),
        ],
        dtype=torch.float64,
    )
    samples = torch.tensor(step.samples or 0)
    dist.all_reduce(said, dist.ReduceOp.MAX, group)
    dist.all_reduce(samples, group=group)
    compute_s, backward_s, now_s, outer_s, call_s, *others = said.tolist()
    cast_s = dict(zip(names, others, strict=False))
    ready_s = others[len(names) :]
    buckets = [
        bucket._replace(ready_s=at) for bucket, at in zip(step.buckets, ready_s, strict=True)
    ]
    found = Step(compute_s, tuple(buckets), backward_s, int(samples) or None)
    return measured._replace(step=found, now_s=now_s or None), Costs(cast_s, outer_s, call_s)


def _network(asked: AskedGain) -> Network:
    assert asked.gbps is not None, "otherwise links are measured"
    rate = asked.gbps * payload_share(MTU) * 1e9 / 8
    return Network(rate, rate, asked.round_trip_s)


def _measured_network(group: dist.ProcessGroup) -> Network:
    """Measure the ranks' links, and those to the reducers of REDUCTION_SERVERS."""
    from worker_client.commands.gain import links  # noqa: PLC0415 (loads torch)

    rate, trip_s = links.ring_rate(group), links.round_trip_s(group)
    network = Network(rate, rate, trip_s)
    servers = config.load().servers
    if not servers or group.rank() > 0:
        return network
    connect = partial(bootstrap.connect_alone, connect_timeout=CONNECT_TIMEOUT_S)
    found = [examine(address, connect, servers) for address in servers]
    for one in found:
        if one.problem is not None:
            raise ConfigError(
                f"reducer {one.address}: {one.problem.message}: {one.problem.advice}, or leave "
                "REDUCTION_SERVERS out"
            )
    rates = [one.bytes_per_s for one in found if one.bytes_per_s is not None]
    return network._replace(reducer_rate=min(rates))


def _predicted(job: TrainingJob, asked: AskedGain, now_s: float | None) -> Answer:
    servers = len(config.load().servers)
    pools = asked.pools or ((servers,) if servers else tuple({max(1, job.nodes // 2), job.nodes}))
    found = [predict(job, way) for way in ways(sorted({*pools} - {0}))]
    return Answer(job, tuple(found), now_s, measured_links=asked.gbps is None)
