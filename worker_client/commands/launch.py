"""`worker-client launch`: turns this process into what its replica is to run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from reducer.commands import terminal
from reducer.errors import ConfigError
from worker_client import config
from worker_client.launch import LauncherRole, decide, resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from worker_client.launch import LaunchDecision, Resolved


def launch(script: Sequence[str], *, processes: str, dry_run: bool) -> None:
    """Resolve, decide, and become the program; with `dry_run`, say so instead.

    What it turns into has this process's number: signals and exit codes are its own.

    Raises:
        ConfigError: it cannot be run here; the message says what to change.
    """
    environment = config.environment()
    resolved = resolve(environment)
    decision = decide(resolved, environment, script, processes=processes, devices=devices)
    if resolved.role is not LauncherRole.REDUCER:
        find_program(script[0])
        config.load()  # what every rank would refuse is refused here
    if dry_run:
        for line in report(found_out(resolved, decision)):
            typer.echo(line)
        return
    typer.echo(f"worker-client launch: {decision.why}", err=True)
    become(decision, {**environment, **decision.sets})


def found_out(
    resolved: Resolved, decision: LaunchDecision | None = None
) -> list[tuple[str, str, str]]:
    """Return what was found out and what is run: name, value, and in brackets what said so."""
    rows = resolved.described()
    if decision is not None:
        rows += [("runs", shlex.join(decision.argv), decision.why)]
        rows += [("sets", f"{name}={value}", "") for name, value in sorted(decision.sets.items())]
    return [(name, value, because and f"({because})") for name, value, because in rows]


def report(rows: Sequence[tuple[str, str, str]]) -> Iterable[str]:
    """Say, line by line, what was found out, which variable said so, and what is run."""
    columns = terminal.columns()
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(max(len(value) for _, value, _ in rows), 48, columns // 3)
    for name, value, because in rows:
        line = f"{name:<{name_width}}  {value:<{value_width}}  {because}"
        yield terminal.wrapped(line, name_width + 2, columns)


def find_program(program: str) -> None:
    """Refuse a script or program that is not there, before every rank of torchrun does.

    Raises:
        ConfigError: it is not there.
    """
    # Where Python finds a module (`-m`) is Python's to say.
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise ConfigError(
                f"there is no script {program!r} in {Path.cwd()}: write its path behind `--`, "
                "absolute or from this directory"
            )
    elif program != "-m" and shutil.which(program) is None:
        raise ConfigError(
            f"there is no program {program!r}: write the path of one that can be executed, a "
            "script whose name ends in .py, or -m MODULE"
        )


def become(decision: LaunchDecision, environment: dict[str, str]) -> NoReturn:
    """Turn this process into what was decided.

    Raises:
        ConfigError: there is no such program.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(decision.argv[0], decision.argv, environment)  # noqa: S606 (the user's)
    except OSError as error:
        raise ConfigError(f"cannot run {decision.argv[0]!r}: {error.strerror}") from None


def devices() -> int:
    """Count the GPUs that torch sees, as torchrun does; without torch there are no ranks of it."""
    try:
        import torch  # noqa: PLC0415 (takes seconds, and a reducer's machine may not have it)
    except ImportError:
        raise ConfigError(
            'the ranks are started by torchrun, and there is no torch: pip install "reduction-'
            'server[torch]"'
        ) from None
    return torch.cuda.device_count()
