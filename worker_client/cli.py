"""The `worker-client` command."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from reducer import __version__
from reducer.errors import ConfigError, ReductionError

app = typer.Typer(
    help="Gradient all-reduce through reducers, for PyTorch DDP.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"worker-client {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Gradient all-reduce through reducers, for PyTorch DDP."""
    del version  # said before any command is looked for


@app.command()
def demo(
    workers: Annotated[int, typer.Option(help="DDP processes.")] = 4,
    reducers: Annotated[
        int, typer.Option(help="Reducer processes started for them; 0: every worker hosts one.")
    ] = 2,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 8,
    plot: Annotated[Path, typer.Option(help="Where to draw the loss curves (PNG).")] = Path(
        "demo-loss.png"
    ),
) -> None:
    """Train on handwritten digits through reducers and through Gloo, and compare."""
    from worker_client.commands.demo.run import demo as run_demo  # noqa: PLC0415 (loads NumPy)

    raise typer.Exit(run_demo(workers=workers, reducers=reducers, epochs=epochs, plot_to=plot))


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- train.py ARGS", help="A script, -m MODULE, or a program."),
    ] = None,
    nproc_per_node: Annotated[
        str, typer.Option(help="Ranks on this node; auto: one for each GPU, at least one.")
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what was found out and would be run.")
    ] = False,
) -> None:
    """Run a training script under any launcher; in a reducer's replica, serve."""
    from worker_client.commands.launch import launch as run  # noqa: PLC0415 (loads pydantic)

    run(script or [], processes=nproc_per_node, dry_run=dry_run)


@app.command(context_settings={"allow_interspersed_args": False})
def join(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[HOST[:PORT]] -- train.py ARGS", help="HOST: the first one."),
    ] = None,
    secret: Annotated[str, typer.Option(help="What the first machine has printed.")] = "",
    machines: Annotated[int, typer.Option(min=2, help="How many, the same at each.")] = 2,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Of the first machine, there; else 29600.")
    ] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this machine, if not one for each GPU.")
    ] = None,
) -> None:
    """Train one model on unlike machines: start it on one, then what that prints on the others."""
    from worker_client.commands.join import run as its  # noqa: PLC0415 (loads pydantic)

    its.join(words or [], secret=secret, machines=machines, port=port, processes=nproc_per_node)


@app.command(context_settings={"allow_interspersed_args": False})
def doctor(  # noqa: PLR0917 (options have names on the command line)
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- train.py ARGS", help="With --gain: a script, or -m MODULE."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    dump: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Compare the files that REDUCTION_DUMP had ranks write."),
    ] = None,
    pickled: Annotated[
        bool,
        typer.Option("--pickle", help="With --dump: write the files for torchfrtrace as well."),
    ] = False,
    gain: Annotated[
        bool,
        typer.Option("--gain", help="Measure a training, and predict other ways to average."),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --gain: a timeline or profiler's trace, to read."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="With --gain: machines, if not those that it runs on.")
    ] = None,
    gbps: Annotated[
        float | None, typer.Option(help="With --gain: of each card, if it is not to be measured.")
    ] = None,
    reducers: Annotated[str, typer.Option(help="With --gain: sizes of the pool, as 2,4.")] = "",
    round_trip: Annotated[str, typer.Option(help="With --gbps: between machines.")] = "200us",
    every: Annotated[int, typer.Option(help="With --gain: of DiLoCo's steps.")] = 50,
    steps: Annotated[int, typer.Option(min=1, help="With --gain: how many to measure.")] = 10,
) -> None:
    """Say what was detected and why, and examine every reducer; exit 1 if something is wrong."""
    if gain:
        from worker_client.commands.gain import run as its  # noqa: PLC0415 (loads NumPy)

        asked = its.asked(workers, gbps, round_trip, reducers, every=every, steps=steps)
        its.say(script or [], trace, asked, as_json=as_json)
        return
    if script or trace is not None:
        raise ConfigError("a script and --trace go with --gain: worker-client doctor --gain ...")
    from worker_client.commands.doctor import run  # noqa: PLC0415 (loads NumPy)

    if dump is not None:
        raise typer.Exit(run.doctor_dumps(dump, as_json=as_json, pickled=pickled))
    raise typer.Exit(run.doctor(as_json=as_json))


@app.command(context_settings={"allow_interspersed_args": False})
def conform(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND ARGS", help="Starts one rank; without it, you do."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="How many ranks the job has.")] = 2,
    show: Annotated[bool, typer.Option("--show", help="Show what the command prints.")] = False,
) -> None:
    """Hold a client to the specification of the protocol, case by case; exit 1 if one fails."""
    from worker_client.commands import conform as its  # noqa: PLC0415 (loads NumPy)

    passed = its.conform(command or [], ranks=ranks, quiet=not show, say=typer.echo)
    raise typer.Exit(0 if passed else 1)


@app.command()
def nccl(
    check: Annotated[
        bool, typer.Option("--check", help="Say what NCCL will do here; exit 1 if it cannot.")
    ] = False,
) -> None:
    """Print what to set so that NCCL uses reducers: eval "$(worker-client nccl)"."""
    from worker_client.commands import nccl as its  # noqa: PLC0415 (loads pydantic)

    raise typer.Exit(its.nccl(check=check))


timeline = typer.Typer(help="Files of what happened when, which Perfetto opens.")
app.add_typer(timeline, name="timeline", no_args_is_help=True)


@timeline.command()
def merge(
    files: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Timelines, or directories of them.")
    ],
    output: Annotated[Path, typer.Option(help="What to write.")] = Path("timeline.json"),
) -> None:
    """Join timelines of ranks and reducers on one clock; say how exact that is."""
    from reducer.commands import terminal  # noqa: PLC0415 (loads rich)
    from reducer.wire.messages import printable  # noqa: PLC0415 (so that launching is quick)
    from worker_client.commands import timeline as its  # noqa: PLC0415 (loads NumPy)

    clocks, left_out = its.merge(files, output)
    for line in (*left_out, *map(its.described, clocks)):
        typer.echo(terminal.wrapped(printable(line), 4))
    typer.echo(terminal.wrapped(f"{output}: open it at ui.perfetto.dev or in chrome://tracing", 4))


@timeline.command()
def report(
    files: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Timelines, or directories of them.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The page; a PNG of its pictures goes beside it.")
    ] = Path("report.html"),
) -> None:
    """Show on one page where a job's time went: by rank, size and reducer, and who was late."""
    from reducer.commands import terminal  # noqa: PLC0415 (loads rich)
    from worker_client.commands import timeline_report as its  # noqa: PLC0415 (loads NumPy)

    for line in its.report(files, output):
        typer.echo(terminal.wrapped(line, 4))
    typer.echo(terminal.wrapped(f"{output}: open it in a browser", 4))


def _tell_torchrun(message: str) -> None:
    """Have torchrun end with what is wrong: else its own traceback is all that is seen last."""
    from worker_client.config import environment  # noqa: PLC0415 (loads pydantic)

    if file := environment().get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": message, "timestamp": int(time.time())}
        with suppress(OSError):  # it was said already, above
            Path(file).write_text(json.dumps(said))


def main() -> None:
    """Run the command; our own errors become sentences, and exit code 2 if a setting is wrong."""
    try:
        app()
    except ReductionError as error:
        from reducer.commands import terminal  # noqa: PLC0415 (loads rich)

        for line in f"worker-client: {error}".splitlines():
            text = terminal.wrapped(line, 4, terminal.columns(sys.stderr))
            typer.secho(text, err=True, fg=typer.colors.RED)
        _tell_torchrun(f"worker-client: {error}")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
