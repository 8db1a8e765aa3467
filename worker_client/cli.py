"""The `worker-client` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from reducer.errors import ReductionError

app = typer.Typer(
    help="Gradient all-reduce through reducers, for PyTorch DDP.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Gradient all-reduce through reducers, for PyTorch DDP."""


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
    from worker_client.demo.run import demo as run_demo  # noqa: PLC0415 (loads NumPy)

    raise typer.Exit(run_demo(workers=workers, reducers=reducers, epochs=epochs, plot_to=plot))


def main() -> None:
    """Run the command; our own errors become one sentence and exit code 2."""
    try:
        app()
    except ReductionError as error:
        typer.secho(f"worker-client: {error}", err=True, fg=typer.colors.RED)
        sys.exit(2)
