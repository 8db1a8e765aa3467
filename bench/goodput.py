"""How many steps of a training stay, and how soon ranks go on, where others are killed.

    python -m bench.goodput --ranks 8

Beside ours: torchft, and torchrun's restarts. README.md defines every option and figure.
"""

import math
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from json import dumps
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import mean, median
from subprocess import DEVNULL
from typing import Annotated, Any, NamedTuple

import psutil
import typer

from bench import options
from bench.goodput_rank import WAYS, Spec
from harness import HarnessError, pool
from harness.processes import Process
from lab import Lab
from worker_client.commands.demo.ranks import free_port

REDUCERS = 3
PATIENCE_S = 180.0
LIGHTHOUSE = ("--min_replicas=1", "--heartbeat_timeout_ms=1000", "--join_timeout_ms=1000")
COLUMNS = ["calm/s", "step s", "steps/s", "goodput", "of first", "batch"]
COLUMNS += ["kills", "median s", "worst s", "fallen"]


class Done(NamedTuple):
    """A step that a rank has completed, and its share of the batch that all ranks would have.

    Attributes:
        number: steps that its weights have then.
        begun, ended: seconds on the machine's clock.
    """

    pid: int
    rank: int
    number: int
    begun: float
    ended: float
    share: float


class Kill(NamedTuple):
    """When a rank was killed, and who was at work beside it."""

    at: float
    rank: int
    others: frozenset[int]


class Training:
    """The processes of one training, with the steps and ends that they have reported.

    Attributes:
        steps: of all ranks, as they came.
        kills: of ranks.
        fallen: ranks that ended by themselves, but for torchrun's.
    """

    def __init__(self, way: str, spec: Spec, lab: Lab, stack: ExitStack) -> None:
        self.steps: list[Done] = []
        self.kills: list[Kill] = []
        self.fallen = 0
        self._way, self._spec, self._host = way, spec, lab.hosts[0]
        self._processes: dict[int, Process] = {}  # by number of those at the start
        self._reducers: pool.Pool | None = None
        self._common: dict[str, str] = {}
        if way == "ours":
            self._reducers = pool.Pool(lab.hosts[1:])
            stack.callback(self._reducers.stop)
            self._common["REDUCTION_SERVERS"] = ",".join(self._reducers.addresses)
            self._common["REDUCTION_JOB"] = f"goodput-{secrets.token_hex(4)}"
            self._common["REDUCTION_ON_RANK_LOST"] = "continue"
        elif way == "torchrun":  # else ranks find addresses of those before, and fail again
            self._common["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        else:
            address = f"{self._host.address}:{free_port()}"
            program = Path(sys.executable).with_name("torchft_lighthouse")
            self._host.start([f"{program}", *LIGHTHOUSE, f"--bind={address}"], stderr=DEVNULL)
            self._common["TORCHFT_LIGHTHOUSE"] = f"http://{address}"
        stack.callback(self._end)
        for rank in range(1 if way == "torchrun" else spec.ranks):
            self._start(rank, {"RANK": str(rank), "WORLD_SIZE": str(spec.ranks)})

    def _start(self, rank: int, settings: dict[str, str]) -> None:
        launcher: list[str] = []
        if self._way == "torchrun":
            launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=100000"]
            launcher.append(f"--nproc-per-node={self._spec.ranks}")
        self._processes[rank] = Process(
            self._host,
            *(*launcher, "-m", "bench.goodput_rank", self._way, dumps(self._spec)),
            hear=self._hear,
            environment=self._common | settings,
        )

    def _hear(self, said: dict[str, Any] | None) -> None:
        if said is not None:
            self.steps.append(Done(**said))

    def _end(self) -> None:
        for process in self._processes.values():
            if self._way == "torchrun":
                process.signal(signal.SIGTERM)  # its ranks end with it
                process.wait()
            process.end()

    def at_work(self) -> dict[int, Done]:
        """Return the latest step of each process that has completed one and lives."""
        latest = {step.pid: step for step in list(self.steps)}
        return {pid: step for pid, step in latest.items() if psutil.pid_exists(pid)}

    def kill_rank(self, chance: random.Random) -> None:
        """Kill one of the ranks that are at work, if others are."""
        there = self.at_work()
        if len(there) > 1:
            victim = chance.choice(list(there))
            others = frozenset(step.rank for pid, step in there.items() if pid != victim)
            self.kills.append(Kill(time.monotonic(), there[victim].rank, others))
            os.kill(victim, signal.SIGKILL)

    def kill_reducer(self, chance: random.Random) -> None:
        """Kill a reducer, if there are some, and start it again."""
        if self._reducers is not None:
            victim = chance.randrange(REDUCERS)
            self._reducers.end(victim, signal.SIGKILL)
            self._reducers.launch(victim)

    def until(self, done: Callable[[], bool] = lambda: True, at: float = 0.0) -> None:
        """Wait for an instant and for something; a launcher, it starts again what ends."""
        give_up = max(time.monotonic(), at) + PATIENCE_S
        while time.monotonic() < at or not done():
            for rank, process in list(self._processes.items()):
                if process.ended is not None:
                    self._replace(rank, process)
            if time.monotonic() > give_up:
                words = self._processes[0].last_words(20)
                raise HarnessError(f"{self._way}: no step for {PATIENCE_S:.0f} s; rank 0: {words}")
            time.sleep(0.01)

    def _replace(self, rank: int, process: Process) -> None:
        if process.ended != -signal.SIGKILL:
            self.fallen += 1
            print(f"# {self._way}, rank {rank} ended: {process.last_words(20)}", flush=True)
        process.end()
        if self._way == "torchrun":
            raise HarnessError("torchrun has ended")
        self._start(rank, {"REDUCTION_JOIN": "1"} if self._way == "ours" else {"RANK": str(rank)})


def train(
    way: str, spec: Spec, seconds: float, chance: random.Random, every_s: Sequence[float] = (0, 0)
) -> tuple[Training, list[Done], list[float]]:
    """Train for a time from when all ranks are there, beside kills of ranks and of reducers.

    Returns:
        The training, which has ended, and what `kept` and `recoveries` return.
    """
    with Lab.loopback(1 + REDUCERS) as lab, ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        training = Training(way, spec._replace(checkpoint=f"{folder}/it"), lab, stack)
        training.until(
            lambda: sum(step.share == 1 for step in training.at_work().values()) == spec.ranks
        )
        begin = time.monotonic()
        end = begin + seconds
        kinds = zip(every_s, (training.kill_rank, training.kill_reducer), strict=True)
        due = [
            (begin + number * every, kill)
            for every, kill in kinds
            for number in range(1, math.ceil(seconds / every) if every else 0)
        ]
        for at, kill in sorted(due, key=itemgetter(0)):
            training.until(at=at)
            kill(chance)
        training.until(lambda: any(step.begun > end for step in list(training.steps)))
    steps, kills = training.steps, training.kills
    return training, kept(steps, begin, end), recoveries(steps, kills, end)


def kept(steps: Iterable[Done], begin: float, end: float) -> list[Done]:
    """Return the steps of a time whose updates stay in the weights, one for each number.

    Of a step that was made again the last time counts; what is made first after the end says from
    where on steps were lost.
    """
    in_order = sorted(steps, key=attrgetter("ended"))
    lost_from = next(step.number for step in in_order if step.begun > end)
    last = {step.number: step for step in in_order if step.ended <= end}
    return [step for step in last.values() if step.number < lost_from and step.ended > begin]


def recoveries(steps: Iterable[Done], kills: Sequence[Kill], end: float) -> list[float]:
    """Return the seconds from each kill until all others have completed a step begun after it.

    A rank that is killed meanwhile is not waited for. A recovery that has not ended by `end` counts
    until then.
    """
    of_rank: dict[int, list[Done]] = {}
    for step in sorted(steps, key=attrgetter("ended")):
        of_rank.setdefault(step.rank, []).append(step)
    found = []
    for kill in kills:
        latest = kill.at
        for rank in kill.others:
            again = (step.ended for step in of_rank[rank] if step.begun >= kill.at)
            ended = min(end, next(again, end))
            if not any(one.rank == rank and kill.at < one.at < ended for one in kills):
                latest = max(latest, ended)
        found.append(latest - kill.at)
    return found


def main(  # noqa: PLR0917 (options have names on the command line)
    ranks: Annotated[int, typer.Option(min=2, help="Ranks.")] = 8,
    ways: Annotated[str, typer.Option(help="What is compared.")] = "ours,torchft,torchrun",
    seconds: Annotated[float, typer.Option(min=1, help="Of a training with kills.")] = 60.0,
    calm_s: Annotated[float, typer.Option(min=1, help="Of one without.")] = 20.0,
    rank_every_s: Annotated[float, typer.Option(min=0, help="From one killed rank on.")] = 5.0,
    reducer_every_s: Annotated[float, typer.Option(min=0, help="The same, reducers.")] = 7.0,
    compute_s: Annotated[float, typer.Option(help="Of a step, simulated.")] = 0.2,
    leaves: Annotated[int, typer.Option(min=1, help="Of a rank in a step.")] = 4,
    checkpoint_steps: Annotated[int, typer.Option(min=1, help="Between checkpoints.")] = 50,
    json: options.Json = None,
) -> None:
    """Train by each way without kills and with them, and print what stays."""
    chosen = ways.split(",")
    if not set(chosen) <= set(WAYS):
        raise typer.BadParameter(f"ways are {', '.join(WAYS)}, not {ways}")
    spec = Spec(ranks, compute_s, leaves, checkpoint_steps)
    run = options.begin("bench.goodput")
    rows: list[dict[str, str | float]] = []
    print(f"{'way':>14}" + "".join(f"{name:>10}" for name in COLUMNS), flush=True)
    for way in chosen:
        chance = random.Random(0)  # noqa: S311 (the same victims for all)
        with options.command("bench.goodput"):
            calm, made, _ = train(way, spec, calm_s, chance)
            rate = len(made) / calm_s
            training, made, waits = train(
                way, spec, seconds, chance, (rank_every_s, reducer_every_s)
            )
        first = float(rows[0]["calm/s"]) if rows else rate
        found = (
            *(rate, median(step.ended - step.begun for step in calm.steps), len(made) / seconds),
            *(len(made) / seconds / rate, len(made) / seconds / first),
            *(mean(step.share for step in made) if made else math.nan, len(waits)),
            *(median(waits or [math.nan]), max(waits, default=math.nan), training.fallen),
        )
        rows.append({"way": way, **dict(zip(COLUMNS, found, strict=True))})
        print(f"{way:>14}" + "".join(f"{figure:>10.3g}" for figure in found), flush=True)
    options.write_table(run, rows, json)


if __name__ == "__main__":
    typer.run(main)
