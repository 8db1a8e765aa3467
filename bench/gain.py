"""What `worker-client doctor --gain` predicts of a training, beside what the lab measures.

    python -m bench.gain --models small-cnn,many-small --mbit 1000

Every rank is a process on a host of its own in `lab`. It runs the command with a training of
simulated compute (`bench.ddp_models`), which measures steps and links, and then trains in each of
the ways. README.md defines every option and figure.
"""

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from bench import options
from bench.ddp import seconds
from bench.ddp_models import ARCHITECTURES
from bench.gain_rank import ways
from harness.ranks import training
from lab import Lab

MODELS = "small-cnn,resnet50,small-gpt,many-small"
HEADING = f"{'model':12} {'Mbit/s':>6} {'way':>20} {'predicted':>10} {'measured':>10} {'error':>7}"


def main(  # noqa: PLR0917 (options have names on the command line)
    models: Annotated[str, typer.Option(help=f"Of {', '.join(ARCHITECTURES)}.")] = MODELS,
    workers: options.Workers = 4,
    reducers: options.Reducers = 4,
    mbit: Annotated[str, typer.Option(help="Rates of every link, Mbit/s each way.")] = "100,1000",
    compute: Annotated[str, typer.Option(help="Forward and backward time.")] = "200ms",
    every: Annotated[int, typer.Option(min=1, help="Of DiLoCo's steps.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="That each way is measured for.")] = 3,
    within: Annotated[float, typer.Option(help="Error from which on the exit code is 1.")] = 0.1,
) -> None:
    """Predict and measure trainings, and print the errors."""
    names = models.split(",")
    if unknown := set(names) - set(ARCHITECTURES):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: of {', '.join(ARCHITECTURES)}")
    run = options.begin("bench.gain")
    print(f"# {run.command}\n{HEADING}\n{'ms':>51} {'ms':>10} {'%':>7}")
    worst = 0.0
    for rate in options.counts(mbit):
        for model in names:
            given = {"compute_s": seconds(compute), "every": every, "steps": steps}
            with options.command("bench.gain"), options.lab(workers + reducers, rate) as lab:
                for way, predicted_s, measured_s in measure(lab, workers, model, given):
                    error = predicted_s / measured_s - 1
                    worst = max(worst, abs(error))
                    figures = f"{1e3 * predicted_s:>10.1f} {1e3 * measured_s:>10.1f}"
                    line = f"{model:12} {rate:>6} {way:>20} {figures} {100 * error:>+7.1f}"
                    print(line, flush=True)
    print(f"# largest error {worst:.1%}")
    sys.exit(int(worst > within))


def measure(
    lab: Lab, workers: int, model: str, given: dict[str, Any]
) -> Iterator[tuple[str, float, float]]:
    """Train on a lab's hosts; yield each way, and the predicted and measured seconds of a step."""
    chosen = ways(len(lab.hosts) - workers)
    predicted: dict[str, Any] = {}
    measured: list[list[float]] = [[] for _ in chosen]
    arguments = {"model": model, "ways": chosen, **given}
    with training(lab, workers, "bench.gain_rank", arguments) as ranks:
        while ranks.running:
            said = ranks.hear()
            if said is None:
                continue
            if said["event"] == "predicted":
                predicted = said
            else:
                measured[said["way"]].append(said["step_s"])
    by_way = {tuple(one[at] for at in _WAY): one["step_s"] for one in predicted["ways"]}
    yield "gloo", by_way["gloo", 0, ""], predicted["measured"]["now_s"]
    for way, found in zip(chosen, measured, strict=True):
        name = "embedded" if not way["reducers"] else f"{way['kind']}-{way['reducers']}"
        yield f"{name} {way['wire']}", by_way[tuple(way[at] for at in _WAY)], max(found)


_WAY = ("kind", "reducers", "wire")


if __name__ == "__main__":
    typer.run(main)
